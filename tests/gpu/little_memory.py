"""A replica beside a trainer that leaves it little memory of the device.

It is run by itself, because it fills the device: ``pytest -m gpu tests/gpu/little_memory.py``.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from holdfast.checkpointer import Checkpointer
from holdfast.events import read_events
from holdfast.quantities import GiB, MiB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

WIDTH, LAYERS = 3200, 24
"""Square layers: 246 million parameters, 0.9 GiB; with Adam's state 2.7."""


class Script:
    def __init__(self) -> None:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, i: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)).cuda()
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def checkpointer(self, root, **options) -> Checkpointer:
        return Checkpointer(root, model=self.model, optimizer=self.optimizer, **options)

    def state(self) -> list[torch.Tensor]:
        held = self.optimizer.state_dict()["state"].values()
        return [t.cpu() for t in [*self.model.parameters(), *(t for slots in held for t in slots.values())]]


def fill_device(rest: int) -> torch.Tensor:
    """Take the memory of the device but for ``rest`` bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.empty(torch.cuda.mem_get_info()[0] - rest, dtype=torch.uint8, device="cuda")


def wait_for(checkpointer: Checkpointer, step: int) -> None:
    end = time.monotonic() + 60
    while checkpointer.replica_step < step:
        assert time.monotonic() < end, (checkpointer.replica_step, step)
        time.sleep(0.02)


def drifts(root) -> list[str]:
    return [str(event) for event in read_events(root / "events.jsonl") if event["event"] == "drift"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("filled", ["before", "in the middle"])
def test_its_state_goes_to_the_host_with_the_same_bits(tmp_path, filled):
    script = Script()
    for i in range(2):  # the trainer has what it needs
        script.step(i)
    taken = fill_device(6 * GiB) if filled == "before" else None
    with script.checkpointer(tmp_path, replica=True, base_every=1000) as checkpointer:
        checkpointer.resume()
        for i in range(2, 5):
            script.step(i)
            checkpointer.step()
            wait_for(checkpointer, checkpointer.steps_done)
            if i == 2 and filled == "in the middle":
                taken = fill_device(512 * MiB)
        checkpointer.wait()
        if filled == "before":  # the state would have taken more than is left
            assert torch.cuda.mem_get_info()[0] > 2.5 * GiB
    state = script.state()
    del taken
    found = drifts(tmp_path)
    assert len(found) == (filled != "before") and all("no memory" in event for event in found)
    again = Script()
    with again.checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume() == 3
    assert all(map(torch.equal, again.state(), state))
