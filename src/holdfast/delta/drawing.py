"""Drawing: the random numbers that an update takes from the global generators, which a replay of it takes again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..accelerators import current_kind, random_states
from ..state.encoding import decode, encode
from ..state.progress import restore_random_state


def generators() -> list[Any]:
    """The states of all global generators now, as they compare fastest."""
    of_devices = [state for states in random_states().values() for state in states]
    return [random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), *of_devices]


def drawn_since(before: list[Any]) -> Any:
    """As JSON the ``before``, if anything was drawn since; else None."""
    python, numpy, *torchs = before
    now = generators()
    if now[0] == python and _alike(now[1], numpy) and all(map(torch.equal, now[2:], torchs)):
        return None
    version, words, gauss = python
    packed = (version, np.array(words, dtype=np.uint32), gauss)
    of_devices = {current_kind() or "cuda": torchs[1:]}
    return encode({"python": packed, "numpy": numpy, "torch": torchs[0], **of_devices})


def draw_again(drawn: Any) -> None:
    """The generators give what they gave after ``drawn_since`` had its ``before``; None: they are left as they are."""
    if drawn is not None:
        restore_random_state(decode(drawn))


def _alike(one: Any, other: Any) -> bool:
    return one[2:] == other[2:] and np.array_equal(one[1], other[1])
