"""Random numbers that an update draws from the global generators, so that a replay draws the same.

Called by the optimizer hooks, and by ``replay``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ...accelerators import current_kind, random_states
from ...state.encoding import decode, encode
from ...state.progress import restore_random_state


def generators() -> list[Any]:
    """Return the states of all global generators, in the form that compares fastest."""
    of_devices = [state for states in random_states().values() for state in states]
    return [random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), *of_devices]


def drawn_since(before: list[Any]) -> Any:
    """Return the states ``before`` as JSON if anything was drawn since; otherwise None."""
    python, numpy, *torchs = before
    now = generators()
    if now[0] == python and _alike(now[1], numpy) and all(map(torch.equal, now[2:], torchs)):
        return None
    version, words, gauss = python
    packed = (version, np.array(words, dtype=np.uint32), gauss)
    of_devices = {current_kind() or "cuda": torchs[1:]}
    return encode({"python": packed, "numpy": numpy, "torch": torchs[0], **of_devices})


def draw_again(drawn: Any) -> None:
    """Set the generators to the states that ``drawn_since`` returned; None leaves them as they are."""
    if drawn is not None:
        restore_random_state(decode(drawn))


def _alike(one: Any, other: Any) -> bool:
    return one[2:] == other[2:] and np.array_equal(one[1], other[1])
