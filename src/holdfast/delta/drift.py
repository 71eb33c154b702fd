"""Drift: whether two processes hold the same state, by the digests of all its tensors, owner after owner."""

from __future__ import annotations

import torch
import xxhash

from ..state.live import BUFFERS, Held, LiveState
from ..state.plain import host_bytes

Digests = dict[str, dict[str, str]]
"""The xxh3_128 of each tensor, by owner and key."""


def owners(state: LiveState) -> list[str]:
    return [*(p.name for p in state.stored), BUFFERS]


def digests(state: LiveState, owner: str) -> dict[str, str]:
    """Of all tensors of ``owner``."""
    return {key: digest(tensor) for key, (_, tensor) in _held(state, owner).items()}


def take(state: LiveState, left: list[str], most_bytes: int) -> Digests:
    """The digests of the first of ``left``, which are taken off it: about ``most_bytes`` of tensors, one owner at
    least."""
    found: Digests = {}
    nbytes = 0
    while left and (not found or nbytes < most_bytes):
        owner = left.pop(0)
        nbytes += sum(atom.nbytes for atom, _ in _held(state, owner).values())
        found[owner] = digests(state, owner)
    return found


def different(state: LiveState, there: Digests) -> list[str]:
    """The keys of the tensors that are not as ``there``."""
    keys = []
    for owner, theirs in there.items():
        ours = digests(state, owner)
        keys += [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    return keys


def _held(state: LiveState, owner: str) -> Held:
    return state.buffers() if owner == BUFFERS else state.owned(state.parameter(owner))


def digest(tensor: torch.Tensor) -> str:
    """The xxh3_128 of all its bytes, in C order."""
    return xxhash.xxh3_128_hexdigest(host_bytes(tensor).data)
