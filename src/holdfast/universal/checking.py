"""Checking: what a source holds more than once has to be the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import Damaged
from .load import read_flat
from .source import Source, Stored

CHUNK = 1 << 22
"""Elements compared at once."""


def refuse_unequal(source: Source, wanted: Iterable[Stored]) -> None:
    """Raise ``Damaged`` if copies of one of those that are ``wanted`` differ and should be equal. Those that were found
    equal before are not looked at again."""
    left = [stored for stored in wanted if stored.atom.key not in source.compared]
    for error in unequal_copies(source, left):
        raise error
    source.compared.update(stored.atom.key for stored in left)


def unequal_copies(source: Source, among: Iterable[Stored]) -> Iterator[Damaged]:
    """An error for each atom of which copies differ that should be equal."""
    for stored in among:
        key = stored.atom.key
        first = Stored(stored.atom, stored.pieces)
        for copy in () if stored.average else stored.copies:
            if not _equal(source, first, Stored(stored.atom, copy)):
                paths = sorted(
                    {source.parts[n].path for pieces in (stored.pieces, copy) for n in pieces.part.tolist()}
                )
                yield Damaged(
                    f"the copies of {key} differ, in {' and '.join(paths[:2])}", path=paths[-1], atoms=(key,)
                )
                break


def _equal(source: Source, one: Stored, other: Stored) -> bool:
    elements = one.atom.elements
    return all(
        read_flat(source, one, start, min(start + CHUNK, elements)).tobytes()
        == read_flat(source, other, start, min(start + CHUNK, elements)).tobytes()
        for start in range(0, elements, CHUNK)
    )
