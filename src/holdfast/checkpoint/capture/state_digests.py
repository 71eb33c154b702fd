"""The comparison of two processes that should hold the same state, by the digests of all tensors, owner after owner.

An owner is a parameter with everything that belongs to it, or all buffers together. A few owners are compared at each
step, so that the whole state is compared within a bounded time. Called by a replica and its trainer, by ranks that hold
the same regions, for buffers that may have changed, and by drills.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
import xxhash

from ...state.live_state import BUFFERS, Held, LiveState
from ...state.plain_tensors import host_bytes

Digests = dict[str, dict[str, str]]
"""The xxh3_128 of each tensor, by owner and key."""


def owners(state: LiveState) -> list[str]:
    return [*(p.name for p in state.stored), BUFFERS]


def digests(state: LiveState, owner: str) -> dict[str, str]:
    """Return the digests of all tensors of ``owner``, by key."""
    return {key: digest(tensor) for key, (_, tensor) in _held(state, owner).items()}


def all_digests(state: LiveState) -> dict[str, str]:
    """Return the digests of all tensors that this process stores, by key."""
    return {key: found for owner in owners(state) for key, found in digests(state, owner).items()}


def digest_of(state: LiveState, names: Iterable[str]) -> str:
    """Return the xxh3_128 of the parameters ``names`` with their optimizer state, whatever memory order they have."""
    found = {key: each for name in names for key, each in digests(state, name).items()}
    return xxhash.xxh3_128_hexdigest(json.dumps(found, sort_keys=True).encode())


def take(state: LiveState, left: list[str], most_bytes: int) -> Digests:
    """Remove the first owners from ``left`` and return their digests.

    Takes about ``most_bytes`` of tensors, and at least one owner.
    """
    found: Digests = {}
    nbytes = 0
    while left and (not found or nbytes < most_bytes):
        owner = left.pop(0)
        nbytes += sum(atom.nbytes for atom, _ in _held(state, owner).values())
        found[owner] = digests(state, owner)
    return found


def different(state: LiveState, there: Digests) -> list[str]:
    """Return the keys of the tensors that differ from ``there``."""
    keys = []
    for owner, theirs in there.items():
        ours = digests(state, owner)
        keys += [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    return keys


def _held(state: LiveState, owner: str) -> Held:
    return state.buffers() if owner == BUFFERS else state.owned(state.parameter(owner))


def digest(tensor: torch.Tensor) -> str:
    """Return the xxh3_128 of all bytes of ``tensor``, in C order."""
    return xxhash.xxh3_128_hexdigest(host_bytes(tensor).data)
