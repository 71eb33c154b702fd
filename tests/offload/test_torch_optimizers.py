"""Every optimizer of ``torch.optim`` out of core has the bits of a plain loop, or is refused by name."""

from __future__ import annotations

import pytest
import torch

import holdfast
import torch_optimizers
from holdfast.errors import OptimizerNotSupported
from holdfast.optim import Joined
from training import batches, decoder, differing, state_of, stored

BLOCKS = 6
TOLD = [(kind, options) for kind, choices in torch_optimizers.OPTIONS.items() for options in choices]


def joined(model):
    """One optimizer for each parameter, of all kinds in turn; as the engine computes, fused where there is that."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    members = []
    for kind, options in TOLD:
        of = matrices.pop() if kind == "Muon" or not rest else rest.pop()
        way = (
            {"fused": True}
            if kind in torch_optimizers.FUSED
            else {}
            if kind == "Muon"
            else {"foreach": False}
        )
        members.append(torch_optimizers.make(kind, {**options, **way}, [of]))
    return Joined(*members, torch.optim.AdamW([*matrices, *rest], fused=True))


def test_every_optimizer_of_torch_has_the_bits_of_a_plain_loop(tmp_path):
    """All in one model, and after a resume."""
    model = decoder(blocks=BLOCKS)
    optimizer = joined(model)
    for step in range(4):
        for batch in batches(step, 2):
            (model(**batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for until in (2, 4):
        out = decoder(blocks=BLOCKS)
        with holdfast.offload(out, joined(out), tmp_path, precision="fp32") as engine:
            for step in range(until - 2, until):
                engine.step(batches(step, 2))
    assert differing(stored(tmp_path), state_of(model, optimizer)) == []


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_other_optimizers_of_torch_are_refused_by_name(tmp_path, kind):
    model = decoder(blocks=1)
    with pytest.raises(OptimizerNotSupported, match=kind):
        holdfast.offload(model, getattr(torch.optim, kind)(model.parameters()), tmp_path, precision="fp32")
