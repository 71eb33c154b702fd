"""Rules and runs: the rules that a run is cut by, and whether rules make of its parts what it says that they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..state.assembly import Assembled, Ruled, assemble
from ..state.atoms import Atom
from ..state.boxes import Box
from ..state.inferring import AXIS, Held, inferred
from ..state.matching import StoredTensor
from ..state.rules import Rules
from ..store.manifest import Manifest
from ..store.reader import RunReader
from ..store.reading import regions
from .load import read_flat
from .source import Made, Part, Source, Stored, places_of


def infer(reader: RunReader, manifest: Manifest) -> str:
    """The text of a rule file that makes the tensors of a commit of what its ranks stored."""
    stored = reader.atoms(manifest)
    held = regions(manifest, stored)
    atoms = [(_atom(each), [Held(rank, box) for rank, box in held[key]]) for key, each in stored.items()]
    return inferred(atoms, len(manifest.streams))


def check(rules: Rules, reader: RunReader, manifest: Manifest) -> tuple[Assembled, list[str]]:
    """What ``rules`` make of what the ranks of a commit stored, and the tensors that lie otherwise than it records."""
    stored, world = reader.atoms(manifest), len(manifest.streams)
    held = regions(manifest, stored)
    recorded, rows = {}, list[StoredTensor]()
    for key, described in stored.items():
        atom, boxes = _atom(described), dict[int, Box]()
        for rank, box in held[key]:
            at = {AXIS: (rank, world)}
            boxes[len(rows)] = box
            rows.append(StoredTensor(len(rows), atom.name, box.shape, atom.dtype, atom.slot, at))
        recorded[atom.key] = atom, boxes
    found = assemble(rules, rows)
    return found, [
        key for key, (atom, boxes) in recorded.items() if not _lies(found.atoms.get(key), atom, boxes)
    ]


def add_to(contents: Source, found: Assembled) -> None:
    """What rules made, as the atoms of a source; what they lost is said in its progress. Raises ``Damaged`` if they are
    not whole."""
    for ruled in found.atoms.values():
        contents.add(Stored(ruled.atom, ruled.pieces, ruled.copies, ruled.average))
    contents.aliases |= found.aliases
    averaged = [key for key, ruled in found.atoms.items() if ruled.average]
    lost = {name: some for name, some in (("averaged", averaged), ("dropped", list(found.dropped))) if some}
    if lost:
        contents.progress.setdefault("extra", {}).update(lost)


class UnderRules(Made):
    """What ``rules`` make of the whole tensors of ``source``: other names, joined, split, permuted. Nothing is copied:
    its parts are the tensors of the source, read as they are asked for."""

    def __init__(self, source: Source, rules: Rules) -> None:
        """Raises ``RuleError`` if the rules do not fit."""
        super().__init__(source)
        self._stored = list(source.atoms.values())
        for stored in self._stored:
            self.add_part(Part(source.path, 0, stored.atom.nbytes, stored.atom.dtype))
        rows = [
            StoredTensor(number, stored.atom.name, stored.atom.shape, stored.atom.dtype, stored.atom.slot)
            for number, stored in enumerate(self._stored)
        ]
        add_to(self, assemble(rules, rows))
        self._rename_in_progress()

    def _rename_in_progress(self) -> None:
        """What is said by name is said of the tensors that those became."""
        made: dict[str, dict[str, None]] = {}
        for stored in self.atoms.values():
            for part in set(stored.pieces.part.tolist()):
                made.setdefault(self._stored[part].atom.name, {})[stored.atom.name] = None
        if "group_parameters" in self.progress:
            groups = [
                [new for name in names for new in made.get(name, ())]
                for names in self.progress["group_parameters"]
            ]
            self.progress["group_parameters"] = [list(dict.fromkeys(names)) for names in groups]
        if "values" in self.progress:
            values = self.progress["values"].items()
            self.progress["values"] = {new: slots for name, slots in values for new in made.get(name, ())}

    def read(self, part: int, offset: int, into: memoryview) -> None:
        stored, size = self._stored[part], self.parts[part].itemsize
        values = read_flat(self._source, stored, offset // size, (offset + len(into)) // size)
        np.frombuffer(into, dtype=np.uint8)[:] = values.view(np.uint8)

    def made_of(self, part: int) -> Iterable[Stored]:
        return [self._stored[part]]

    def identity(self) -> list[Any]:
        return [self.progress, places_of(self._stored), self._source.identity()]


def _lies(ruled: Ruled | None, atom: Atom, boxes: Mapping[int, Box]) -> bool:
    """Whether an atom that rules made has these boxes of these parts."""
    if ruled is None or ruled.atom != atom:
        return False
    full = {part: box for part, box in boxes.items() if box.elements}
    return {piece.part: piece.box for piece in ruled.pieces if piece.box.elements} == full


def _atom(described: Mapping[str, Any]) -> Atom:
    return Atom(described["name"], described["slot"], tuple(described["shape"]), described["dtype"])
