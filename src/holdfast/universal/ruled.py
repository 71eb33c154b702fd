"""Rules and runs: the rules that a run is cut by, and whether rules make of its parts what it says that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..state.assembly import Assembled, Ruled, assemble
from ..state.atoms import Atom
from ..state.boxes import Box
from ..state.inferring import AXIS, Held, inferred
from ..state.matching import StoredTensor
from ..state.rules import Rules
from ..store.manifest import Manifest
from ..store.reader import RunReader
from .source import Contents, Stored


def infer(reader: RunReader, manifest: Manifest) -> str:
    """The text of a rule file that makes the tensors of a commit of what its ranks stored."""
    ranks = _rank_of_unit(manifest)
    atoms = []
    for described in reader.atoms(manifest).values():
        held = [Held(ranks[f["unit"]], Box.from_json(f["global"])) for f in described["fragments"]]
        atoms.append((_atom(described), held))
    return inferred(atoms, len(manifest.streams))


def check(rules: Rules, reader: RunReader, manifest: Manifest) -> tuple[Assembled, list[str]]:
    """What ``rules`` make of what the ranks of a commit stored, and the tensors that lie otherwise than it records."""
    ranks, world = _rank_of_unit(manifest), len(manifest.streams)
    recorded, rows = {}, list[StoredTensor]()
    for described in reader.atoms(manifest).values():
        atom, boxes = _atom(described), dict[int, Box]()
        for fragment in described["fragments"]:
            box = Box.from_json(fragment["global"])
            at = {AXIS: (ranks[fragment["unit"]], world)}
            boxes[len(rows)] = box
            rows.append(StoredTensor(len(rows), atom.name, box.shape, atom.dtype, atom.slot, at))
        recorded[atom.key] = atom, boxes
    found = assemble(rules, rows)
    return found, [
        key for key, (atom, boxes) in recorded.items() if not _lies(found.atoms.get(key), atom, boxes)
    ]


def add_to(contents: Contents, found: Assembled) -> None:
    """What rules made, as the atoms of a source; what they lost is said in its progress. Raises ``Damaged`` if they are
    not whole."""
    for ruled in found.atoms.values():
        contents.add(Stored(ruled.atom, ruled.pieces, ruled.copies, ruled.average))
    contents.aliases |= found.aliases
    averaged = [key for key, ruled in found.atoms.items() if ruled.average]
    lost = {name: some for name, some in (("averaged", averaged), ("dropped", list(found.dropped))) if some}
    if lost:
        contents.progress.setdefault("extra", {}).update(lost)


def _lies(ruled: Ruled | None, atom: Atom, boxes: Mapping[int, Box]) -> bool:
    """Whether an atom that rules made has these boxes of these parts."""
    if ruled is None or ruled.atom != atom:
        return False
    full = {part: box for part, box in boxes.items() if box.elements}
    return {piece.part: piece.box for piece in ruled.pieces if piece.box.elements} == full


def _rank_of_unit(manifest: Manifest) -> dict[str, int]:
    return {unit: rank for rank, stream in enumerate(manifest.streams) for unit in manifest.files_of(stream)}


def _atom(described: Mapping[str, Any]) -> Atom:
    return Atom(described["name"], described["slot"], tuple(described["shape"]), described["dtype"])
