"""The 8-bit optimizer states of bitsandbytes, as torch.save and the Trainer keep them, are continued bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

bitsandbytes = pytest.importorskip("bitsandbytes")

from formats.test_saved import exact  # noqa: E402
from holdfast.checkpointer import Checkpointer  # noqa: E402
from holdfast.formats.foreign_formats import open_source  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:beginning from .* it has no random numbers")


def made(seed, steps):
    """Two matrices with 8 bits of state an element, vectors with 32, in groups."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=0.01 * seed)
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model, optimizer, steps):
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_training_goes_on_from_states_of_8_bits(tmp_path):
    there, here = made(1, 2), made(2, 1)
    torch.save(
        {"model": there[0].state_dict(), "optimizer": there[1].state_dict(), "step": 2}, tmp_path / "a.pt"
    )
    slots = {each.atom.slot for each in open_source(tmp_path / "a.pt").atoms.values()}
    assert {"state1", "absmax1", "qmap1", "state2", "absmax2", "qmap2"} < slots
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        assert checkpointer.resume(source=tmp_path / "a.pt") == 2
    for _ in range(2):
        assert [exact(part.state_dict()) for part in here] == [exact(part.state_dict()) for part in there]
        for parts in (here, there):
            go_on(*parts, 2)
