"""Sources: stored training states, whoever wrote them, as atoms whose elements lie in parts.

A reader of a format says what there is, exactly; what is wanted of it is planned and read in one way for all
(``universal.load``). Nothing of a source is executed, and of what it claims nothing is allocated before it was checked
against the sizes of its files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..state.atoms import DTYPE_BYTES, Atom
from ..state.pieces import Pieces


@dataclass(frozen=True)
class Part:
    """One stored array: ``nbytes`` bytes of the file ``path`` from ``offset`` on, of elements of ``dtype`` (a name of
    safetensors). ``crc32`` is what its writer says that its bytes have, where it says so."""

    path: str
    offset: int
    nbytes: int
    dtype: str
    crc32: int | None = None

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Stored:
    """An atom, and where its elements lie: ``pieces`` cover it once. ``copies`` are others that have to be equal (or,
    with ``average``, of which and the first the mean is the value)."""

    atom: Atom
    pieces: Pieces
    copies: tuple[Pieces, ...] = ()
    average: bool = False


class Source(Protocol):
    """A stored training state. ``atoms`` are by key, ``progress`` what is known of the rest (step, schedule,
    hyper-parameters by group), as JSON, ``aliases`` names of tensors that are others' under another name."""

    path: str
    format: str
    atoms: Mapping[str, Stored]
    parts: Sequence[Part]
    progress: dict[str, Any]
    aliases: Mapping[str, str]

    def read(self, part: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a part from ``offset`` on. Raises ``Damaged``, also where the format has a
        checksum over them that does not agree. Called from several threads."""
        ...


@dataclass
class Contents:
    """What the reader of a format found: all of a source but the reading."""

    path: str
    format: str
    atoms: dict[str, Stored] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
