"""The division of verification: ranks that see the same files on one machine check each part once between them.

A part that one rank has read lies in the page cache that all ranks of the machine read from, so one check serves all.
Another machine may have another disk and other memory, even for the same files: its ranks check for themselves.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..distributed import BOOT
from .source import Source


class Need(NamedTuple):
    """The parts of a source that one rank will read: ``parts`` has one bit for each of ``count`` parts, compressed.

    Ranks with equal ``place`` see the same files on one machine; None means that the place is unknown.
    """

    place: tuple[str, int, int] | None
    count: int
    parts: bytes

    @classmethod
    def of(cls, source: Source, path: Path | None, parts: Iterable[int]) -> Need:
        """Build the need of ``parts``, for a source that lies at ``path`` (None: on no disk)."""
        bits = np.zeros(len(source.parts), dtype=bool)
        bits[list(parts)] = True
        return cls(
            None if path is None else _place_of(path),
            len(bits),
            zlib.compress(np.packbits(bits).tobytes(), 1),
        )


def divided(needs: Sequence[Need], rank: int, source: Source) -> tuple[list[int], list[int]]:
    """Return the parts that ``rank`` checks, and all parts that are checked on its machine.

    Parts are dealt out by size, so that ranks check about equally many bytes.
    """
    mine = needs[rank]
    near = [
        number
        for number, need in enumerate(needs)
        if number == rank or (need.place is not None and need[:2] == mine[:2])
    ]
    bits = np.zeros(-(-mine.count // 8), np.uint8)
    for number in near:
        bits |= np.frombuffer(zlib.decompress(needs[number].parts), np.uint8)
    parts = np.flatnonzero(np.unpackbits(bits, count=mine.count))
    sizes = np.array([source.parts[part].nbytes for part in parts.tolist()], dtype=np.int64)
    parts = parts[np.argsort(-sizes, kind="stable")]
    return np.sort(parts[near.index(rank) :: len(near)]).tolist(), parts.tolist()


def _place_of(path: Path) -> tuple[str, int, int] | None:
    try:
        status = os.stat(path)
        return BOOT.read_text(), status.st_dev, status.st_ino
    except OSError:  # no Linux, or nothing there
        return None
