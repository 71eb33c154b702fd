"""The buffers of a model that share memory, which forward passes can separate.

Buffers that overlap only with one another are noted at each step. So a resume can arrange the model's buffers, which it
finds as the model is made, as they were after the last step. Called by the training thread.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from .layout.overlaps import Key, OverlappingMemory, Shared, described, placed
from .live_state import LiveState
from .plain_tensors import is_plain

BUFFER = ("buffer",)


def joined_buffers(state: LiveState, names: Collection[str]) -> Shared:
    """Return which of the buffers ``names`` overlap in memory, and how, as JSON."""
    buffers = {atom.name: tensor for atom, tensor in state.present_buffers().values() if atom.name in names}
    return described({(name, *BUFFER): buffer for name, buffer in buffers.items() if is_plain(buffer)})


def buffers_within(shared: Shared) -> set[str]:
    """Return the names of the buffers that overlap only with one another."""
    return {key[0] for group in _only_buffers(shared) for key, *_ in group}


@torch.no_grad()
def arrange_buffers(state: LiveState, shared: Shared) -> None:
    """Give buffers that overlap only with one another memory of their own, except where they overlap in ``shared``."""
    state.made_joined |= buffers_within(state.shared())
    wanted = [[each for each in group if each[0][0] in state.made_joined] for group in _only_buffers(shared)]
    if placed(wanted) == placed(joined_buffers(state, state.made_joined)):
        return
    places, held = state.buffer_places(), state.memory()
    made: dict[Key, torch.Tensor] = {
        (name, *BUFFER): held[name, *BUFFER].clone() for name in state.made_joined
    }
    for group in (group for group in wanted if len(group) > 1):
        memory = OverlappingMemory.empty(group, held)
        for key, offset, strides in group:
            view = memory.view(offset, strides, held[tuple(key)])
            assert view is not None
            made[tuple(key)] = view
    for (name, *_), buffer in made.items():
        module, own = places[name]
        module._buffers[own] = buffer


def _only_buffers(shared: Shared) -> Shared:
    return [group for group in shared if all(tuple(key[1:]) == BUFFER for key, *_ in group)]
