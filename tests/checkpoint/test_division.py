"""Stretches of flattened parameters, as live DeepSpeed engines hold them, in the units of a base."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.checkpoint.snapshot.snapshot_chunks import divided, owned_by
from holdfast.state.capture import Captured, CapturedParameter
from holdfast.state.layout.regions import FlatRange, Region
from holdfast.state.live_state import LiveState

WHOLE = torch.arange(12.0).reshape(3, 4)


def holding(first: int, stop: int) -> LiveState:
    """The state of a rank that holds the elements ``first`` to ``stop`` of ``WHOLE``, and nothing of its values yet."""
    stretch = FlatRange((3, 4), first, stop)
    part = nn.Parameter(torch.full(stretch.shape, -1.0))
    captured = Captured((CapturedParameter(("w",), part, 0, True, stretch),), {}, {})
    return LiveState(nn.Module(), [torch.optim.SGD([part], lr=1.0)], captures=[captured])


def test_stretch_is_stored_as_boxes():
    state = holding(3, 9)
    state.load_part("w", "param", WHOLE, Region.whole((3, 4)))
    owned = owned_by(state)
    [unit], index = divided(owned, state)
    atom, tensors = index["atoms"]["w/param"], unit.tensors_of(owned)
    assert atom["shape"] == [3, 4]
    assert [fragment["flat"] for fragment in atom["fragments"]] == [[3, 4], [4, 8], [8, 9]]
    for fragment in atom["fragments"]:
        assert torch.equal(tensors[fragment["key"]], WHOLE[Region.from_json(fragment["global"]).slices])


def test_stretch_takes_its_part_of_another():
    state = holding(5, 12)
    state.load_part("w", "param", WHOLE.flatten()[3:9], FlatRange((3, 4), 3, 9))
    assert state.parameter("w").parameter.tolist() == [5, 6, 7, 8, -1, -1, -1]
    assert holding(0, 0).lacks("w") and not state.lacks("w")
