"""Every optimizer of ``torch.optim`` out of core has the bits of a plain loop."""

from __future__ import annotations

import pytest
import torch

import holdfast
import torch_optimizers
from holdfast.optim import Joined
from training import batches, decoder, differing, state_of, stored

BLOCKS = 6
WAYS = [{"fused": True}, {"foreach": True}, {"foreach": False, "fused": False}]
TOLD = [(kind, options) for kind, choices in torch_optimizers.OPTIONS.items() for options in choices]


def joined(model):
    """One optimizer for each parameter, of all kinds in turn; of those that can be fused some are and some are not."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    members = []
    for kind, options in TOLD:
        of = matrices.pop() if kind == "Muon" or not rest else rest.pop()
        apart = {} if kind == "Muon" else {"foreach": bool(len(members) % 2)}
        before = sum(type(each).__name__ == kind for each in members)
        way = WAYS[before % len(WAYS)] if kind in torch_optimizers.FUSED else apart
        if way.get("foreach") and isinstance(
            options.get("lr"), torch.Tensor
        ):  # torch takes it on accelerators alone
            way = WAYS[0]
        members.append(torch_optimizers.make(kind, {**options, **way}, [of]))
    return Joined(*members, torch.optim.AdamW([*matrices, *rest], fused=True))


@pytest.mark.slow
def test_every_optimizer_of_torch_has_the_bits_of_a_plain_loop(tmp_path):
    """All in one model, and after a resume. RAdam changes its mind after five steps."""
    model = decoder(blocks=BLOCKS)
    optimizer = joined(model)
    for step in range(6):
        for batch in batches(step, 2):
            (model(**batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for start, until in ((0, 2), (2, 6)):
        out = decoder(blocks=BLOCKS)
        with holdfast.offload(out, joined(out), tmp_path, precision="fp32") as engine:
            for step in range(start, until):
                engine.step(batches(step, 2))
    assert differing(stored(tmp_path), state_of(model, optimizer)) == []
