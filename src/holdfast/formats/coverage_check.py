"""The check that a source which holds a tensor more than once holds equal copies.

Ranks that store the same tensor should have stored the same bits; if not, one of them is wrong and nothing tells which.
So the tensor is refused by name before any of it is used. Called by ``restore``, ``convert`` and ``sources``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import Damaged
from .load import read_flat
from .source import Source, SourceTensor

CHUNK = 1 << 22
"""The number of elements that are compared at once."""


def refuse_unequal(source: Source, wanted: Iterable[SourceTensor]) -> None:
    """Raise ``Damaged`` if a tensor of ``wanted`` has copies that should be equal and differ.

    Tensors that an earlier call found equal are not compared again.
    """
    left = [stored for stored in wanted if stored.atom.key not in source.compared]
    for error in unequal_copies(source, left):
        raise error
    source.compared.update(stored.atom.key for stored in left)


def unequal_copies(source: Source, among: Iterable[SourceTensor]) -> Iterator[Damaged]:
    """Yield an error for each tensor entry whose copies should be equal and differ."""
    for stored in among:
        key = stored.atom.key
        first = SourceTensor(stored.atom, stored.pieces)
        for copy in () if stored.average else stored.copies:
            if not _equal(source, first, SourceTensor(stored.atom, copy)):
                paths = sorted(
                    {source.parts[n].path for pieces in (stored.pieces, copy) for n in pieces.part.tolist()}
                )
                yield Damaged(
                    f"the copies of {key} differ, in {' and '.join(paths[:2])}", path=paths[-1], atoms=(key,)
                )
                break


def _equal(source: Source, one: SourceTensor, other: SourceTensor) -> bool:
    elements = one.atom.elements
    return all(
        read_flat(source, one, start, min(start + CHUNK, elements)).tobytes()
        == read_flat(source, other, start, min(start + CHUNK, elements)).tobytes()
        for start in range(0, elements, CHUNK)
    )
