"""Small tensors that belong neither to the model nor to its optimizer: they are stored in the progress, by value."""

from __future__ import annotations

from typing import Any

from ..quantities import KiB
from ..state.encoding import tensor_json
from .entry_keys import EXTRA
from .load import read_flat
from .source import Source, SourceTensor

SMALL_BYTES = 16 * KiB


def add_or_tell(source: Source, key: str, stored: SourceTensor, values: dict[str, Any]) -> None:
    """Add ``stored`` to ``source`` as a tensor entry, or to ``values`` by ``key`` if it is small and extra.

    Raises ``Damaged`` if its fragments do not cover it exactly once.
    """
    if stored.atom.slot == EXTRA and stored.atom.nbytes <= SMALL_BYTES:
        source.check_cover(stored)
        values[key] = _value_of(source, stored)
    else:
        source.add(stored)


def _value_of(source: Source, stored: SourceTensor) -> dict[str, Any]:
    """Return the value of a stored tensor as JSON."""
    data = read_flat(source, stored, 0, stored.atom.elements).tobytes()
    return tensor_json(stored.atom.dtype, stored.atom.shape, data)
