"""Small tensors that are neither the model's nor its optimizer's: they belong to the progress, by value."""

from __future__ import annotations

from typing import Any

from ..state.encoding import tensor_json
from ..units import KiB
from .keys import EXTRA
from .load import read_flat
from .source import Source, Stored

SMALL_BYTES = 16 * KiB


def is_small(stored: Stored) -> bool:
    """Whether a tensor is one of these."""
    return stored.atom.slot == EXTRA and stored.atom.nbytes <= SMALL_BYTES


def value_of(source: Source, stored: Stored) -> dict[str, Any]:
    """Its value as JSON."""
    data = read_flat(source, stored, 0, stored.atom.elements).tobytes()
    return tensor_json(stored.atom.dtype, stored.atom.shape, data)
