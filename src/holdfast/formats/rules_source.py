"""The application of rules to runs, to sources and to folders: inferring them, checking them, and reading through them.

No data moves: rules only say where elements are found. ``infer`` writes the rules of a run, whose sharding is exactly
known, for a person to edit: parameters of repeated layers that are sharded alike share a rule, and the axis ``rank``
tells apart what several ranks hold. ``check`` compares what rules build from what the ranks of a run stored with what
the run recorded. ``UnderRules`` is a source under rules, ``RuledFolder`` a folder whose files do not record their
layout, with the file of rules in it. Called by ``holdfast rules``, ``convert``, ``sources`` and ``readers``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import BadInput, RuleError
from ..state.layout.regions import FLAT, Region
from ..state.rules.assembly import Assembled, Ruled, assemble
from ..state.rules.layouts import along
from ..state.rules.rule_language import VERSION, Rules, numbers_of
from ..state.rules.rule_matching import PARAM, StoredTensor
from ..state.tensor_entries import TensorEntry
from ..store.format.manifest import Manifest
from ..store.format.payload_files import regions
from ..store.reader import RunReader
from .load import read_bytes
from .readers.safetensors_files import parts_of
from .source import DerivedSource, ReadFiles, Source, SourceTensor, StoredArray, places_of
from .torch_archive.archives import Archive, Plain, check_inside
from .torch_archive.pickles import PickledObject, Tensor, is_distributed

RULES, CONFIG = "rules.toml", "config.json"
SAFETENSORS = ".safetensors"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", SAFETENSORS)
"""Suffixes of files that may hold tensors; the rules must mention each such file."""
OF_MODEL = ("param", "buffer")
"""Slots of tensors that may have aliases."""


def infer(reader: RunReader, manifest: Manifest) -> str:
    """Return the text of a rule file that builds the tensors of a commit from what its ranks stored."""
    stored = reader.atoms(manifest)
    _refuse_stretches(stored)
    held = regions(manifest, stored)
    atoms = [
        (TensorEntry.from_json(each), [HeldRegion(rank, box) for rank, box in held[key]])
        for key, each in stored.items()
    ]
    return inferred(atoms, len(manifest.streams))


def check(rules: Rules, reader: RunReader, manifest: Manifest) -> tuple[Assembled, list[str]]:
    """Apply ``rules`` to what the ranks of a commit stored; return the result and the keys that differ from
    the commit.
    """
    stored, world = reader.atoms(manifest), len(manifest.streams)
    _refuse_stretches(stored)
    held = regions(manifest, stored)
    recorded, rows = {}, list[StoredTensor]()
    for key, described in stored.items():
        atom, boxes = TensorEntry.from_json(described), dict[int, Region]()
        for rank, box in held[key]:
            at = {AXIS: (rank, world)}
            boxes[len(rows)] = box
            rows.append(StoredTensor(len(rows), atom.name, box.shape, atom.dtype, atom.slot, at))
        recorded[atom.key] = atom, boxes
    found = assemble(rules, rows)
    return found, [
        key for key, (atom, boxes) in recorded.items() if not _lies(found.atoms.get(key), atom, boxes)
    ]


def _refuse_stretches(stored: Mapping[str, dict[str, Any]]) -> None:
    for key, described in stored.items():
        if any(FLAT in fragment for fragment in described["fragments"]):
            raise RuleError(
                f"the ranks stored stretches of the flattened {key}, as ZeRO and FSDP1 cut it, and rules have one box"
                " of each rank. They are not needed: resume(source=) and `holdfast convert` read the run as it is."
            )


def add_to(contents: Source, found: Assembled) -> None:
    """Add the tensors that rules built to ``contents``, and note averaged and dropped ones in its progress.

    Raises ``Damaged`` if a tensor is not covered exactly once.
    """
    for ruled in found.atoms.values():
        contents.add(SourceTensor(ruled.atom, ruled.pieces, ruled.copies, ruled.average))
    contents.aliases |= found.aliases
    averaged = [key for key, ruled in found.atoms.items() if ruled.average]
    lost = {name: some for name, some in (("averaged", averaged), ("dropped", list(found.dropped))) if some}
    if lost:
        contents.progress.setdefault("extra", {}).update(lost)


class UnderRules(DerivedSource):
    """The tensors of ``source`` after ``rules`` renamed, joined, split or permuted them.

    Nothing is copied: the parts are the tensors of the source, read on demand.
    """

    def __init__(self, source: Source, rules: Rules) -> None:
        """Apply the rules. Raises ``RuleError`` if they do not fit."""
        super().__init__(source)
        self._stored: list[SourceTensor] = []
        self._copies: list[list[int]] = [[] for _ in source.atoms]
        for stored in source.atoms.values():
            self._add_stored(stored)
        rows = [_row(number, stored.atom, stored.atom.name) for number, stored in enumerate(self._stored)]
        for number, stored in enumerate(source.atoms.values()):
            if not stored.average:
                copies = (replace(stored, pieces=pieces, copies=()) for pieces in stored.copies)
                self._copies[number] = [self._add_stored(copy) for copy in copies]
        add_to(self, assemble(rules, rows))
        self.atoms = {key: self._with_copies(stored) for key, stored in self.atoms.items()}
        self._rename_aliases(rules, source)
        self._rename_in_progress()

    def _add_stored(self, stored: SourceTensor) -> int:
        """Add a part for ``stored`` and return its number."""
        self._stored.append(stored)
        return self.add_part(StoredArray(self.path, 0, stored.atom.nbytes, stored.atom.dtype))

    def _with_copies(self, stored: SourceTensor) -> SourceTensor:
        """Return ``stored`` with copies that are built from the source's copies in the same way."""
        if stored.average:
            return stored
        found = [*stored.every]
        for pieces in stored.every:
            used = {part: self._copies[part] for part in set(pieces.part.tolist()) if self._copies[part]}
            for number in range(max(map(len, used.values()), default=0)):
                other = np.arange(len(self.parts))
                for part, copies in used.items():
                    other[part] = copies[min(number, len(copies) - 1)]
                found.append(replace(pieces, part=other[pieces.part]))
        return replace(stored, copies=tuple(found[1:]))

    def _rename_aliases(self, rules: Rules, source: Source) -> None:
        """Rename aliases as ``rules`` would rename the tensor and its alias, if both were stored.

        An alias without a rule is dropped, and so is an alias of a tensor that is built of several.
        """
        names = {stored.atom.name for stored in self.atoms.values()}
        held = {
            stored.atom.name: stored.atom for stored in source.atoms.values() if stored.atom.slot in OF_MODEL
        }
        for alias, name in source.aliases.items():
            try:
                found = assemble(rules, [_row(n, held[name], each) for n, each in enumerate((name, alias))])
            except (RuleError, KeyError):
                continue
            news = {n: ruled.atom.name for ruled in found.atoms.values() for n in ruled.pieces.part.tolist()}
            pairs = found.aliases or ({news[1]: news[0]} if len(found.atoms) == len(news) == 2 else {})
            self.aliases |= {new: of for new, of in pairs.items() if of in names and new not in names}

    def _rename_in_progress(self) -> None:
        """Replace names in the progress by the names of the tensors that they became."""
        made: dict[str, dict[str, None]] = {}
        for stored in self.atoms.values():
            for part in set(stored.pieces.part.tolist()):
                made.setdefault(self._stored[part].atom.name, {})[stored.atom.name] = None

        def renamed(groups: list[list[str]]) -> list[list[str]]:
            return [
                list(dict.fromkeys(new for name in names for new in made.get(name, ()))) for names in groups
            ]

        if "group_parameters" in self.progress:
            self.progress["group_parameters"] = renamed(self.progress["group_parameters"])
        if "replay" in self.progress:  # by a Checkpointer: groups by optimizer; strides become unknown
            parameters = [renamed(groups) for groups in self.progress["replay"]["parameters"]]
            self.progress["replay"] = {**self.progress["replay"], "parameters": parameters, "strides": {}}
        if "values" in self.progress:
            values = self.progress["values"].items()
            self.progress["values"] = {new: slots for name, slots in values for new in made.get(name, ())}

    def read(self, part: int, offset: int, into: memoryview) -> None:
        read_bytes(self._source, self._stored[part], offset, into)

    def made_of(self, part: int) -> Iterable[SourceTensor]:
        return [self._stored[part]]

    def identity(self) -> list[Any]:
        return [self.progress, places_of(self._stored), self._source.identity()]


def is_ruled(path: Path) -> bool:
    return (path / RULES).is_file()


class RuledFolder(ReadFiles):
    """The folder ``path``, whose files do not record their layout, described by the ``rules.toml`` in it.

    Its ``[[files]]`` tell by file name where on the mesh the writing rank was; its rules tell what the tensors are.
    Rules may use the numbers of a ``config.json`` beside it. Names are those in the files; names of nested dictionaries
    are joined by dots.
    """

    def __init__(self, path: Path) -> None:
        """Apply the rules. Raises ``RuleError`` if they do not fit the files, ``Damaged`` if files are damaged."""
        super().__init__(str(path), "rules")
        config = path / CONFIG
        try:
            values = numbers_of(config.read_text()) if config.is_file() else {}
            text = (path / RULES).read_text()
        except ValueError as error:
            raise BadInput(f"{path}: its {RULES} or {CONFIG} cannot be read: {error}") from None
        rules = Rules.parse(text, str(path / RULES), values)
        self._rest: dict[str, dict[str, Any]] = {}
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        places = [rules.place_of_file(file.relative_to(path).as_posix()) for file in files]
        rows = [row for file, at in zip(files, places, strict=True) for row in self._rows(file, at)]
        if self._rest:
            self.progress["extra"] = {"files": self._rest}
        add_to(self, assemble(rules, rows))

    def _rows(self, path: Path, at: Mapping[str, tuple[int, int]]) -> Iterator[StoredTensor]:
        if path.suffix == SAFETENSORS:
            tensors, header = parts_of(path)
            self.passed_over |= header.passed_over
            for entry, part in tensors:
                yield StoredTensor(self.add_part(part), entry.key, entry.shape, entry.dtype, at=at)
            return
        archive, rest = Archive(path), dict[str, Any]()
        plain = Plain(archive)
        for name, value in _leaves(archive.content, ""):
            if isinstance(value, Tensor):
                part = archive.part_in(self, value.storage)
                check_inside(name, value, self.parts[part])
                yield StoredTensor(
                    part,
                    name,
                    value.shape,
                    value.storage.dtype,
                    at=at,
                    offset=value.offset,
                    strides=value.strides,
                )
            else:
                rest[name] = plain(value, name)
        if rest:
            self._rest[path.relative_to(self.path).as_posix()] = rest


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and other values of a pickle, each with its path from the top."""
    if is_distributed(value):
        raise BadInput(
            f"{name} is a distributed tensor, which says itself how it is divided, and rules would say it a second"
            f" time. Remove {RULES}: the files of accelerate and verl are read without."
        )
    items: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, PickledObject):
        items = value.fields | value.items | dict(enumerate(value.args))
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = dict(enumerate(value))
    if items is None:
        yield name, value
        return
    for key, inner in items.items():
        yield from _leaves(inner, f"{name}.{key}" if name else str(key))


def _row(number: int, atom: TensorEntry, name: str) -> StoredTensor:
    return StoredTensor(number, name, atom.shape, atom.dtype, atom.slot)


def _lies(ruled: Ruled | None, atom: TensorEntry, boxes: Mapping[int, Region]) -> bool:
    """Return whether ``ruled`` matches ``atom`` and consists of exactly the regions in ``boxes``, by part."""
    if ruled is None or ruled.atom != atom:
        return False
    full = {part: box for part, box in boxes.items() if box.elements}
    return {piece.part: piece.box for piece in ruled.pieces if piece.box.elements} == full


AXIS = "rank"
HEAD = f"""# How the parts of a run make its tensors. Rules are tried in order; the first that matches holds.
version = {VERSION}
"""


class HeldRegion(NamedTuple):
    """The region of a tensor that a rank stored."""

    rank: int
    box: Region


def inferred(atoms: Iterable[tuple[TensorEntry, Sequence[HeldRegion]]], world: int) -> str:
    """Return the text of a rule file for ``atoms`` that ``world`` ranks stored under their names.

    >>> halves = [HeldRegion(0, Region((0, 0), (3, 4))), HeldRegion(1, Region((3, 0), (5, 4)))]
    >>> print(inferred([(TensorEntry("h.0.w", "param", (5, 4), "F32"), halves)], 2).partition("version = 1")[2].strip())
    # 1 tensor: h.0.w [5, 4]
    [[rule]]
    match = 'h\\.(\\d+)\\.w'
    shard = "rank"
    dim = 0
    widths = [3, 2]
    """
    by_pattern: dict[str, list[tuple[TensorEntry, str]]] = {}
    for atom, held in atoms:
        by_pattern.setdefault(_pattern(atom.name), []).append((atom, _cut(atom.shape, held, world)))
    return HEAD + "".join(rule for pattern, cuts in by_pattern.items() for rule in _rules(pattern, cuts))


def _rules(pattern: str, cuts: list[tuple[TensorEntry, str]]) -> list[str]:
    """Return one rule if all matching tensors are sharded alike.

    Otherwise return one for each group of slots that are, and otherwise one for each name too.
    """
    slots = {atom.slot for atom, _ in cuts}
    telling = [(atom, cut) for atom, cut in cuts if atom.shape or atom.slot == PARAM] or cuts
    if len({cut for _, cut in telling}) == 1:
        return [_rule(pattern, telling[0][1], cuts)]
    by_slot = {slot: {cut for atom, cut in cuts if atom.slot == slot} for slot in sorted(slots)}
    if all(len(found) == 1 for found in by_slot.values()):
        alike: dict[str, list[str]] = {}
        for slot, [cut] in by_slot.items():
            alike.setdefault(cut, []).append(slot)
        return [
            _rule(pattern, cut, [(atom, c) for atom, c in cuts if atom.slot in some], some)
            for cut, some in alike.items()
        ]
    by_name: dict[str, list[tuple[TensorEntry, str]]] = {}
    for atom, cut in cuts:
        by_name.setdefault(re.escape(atom.name), []).append((atom, cut))
    return [rule for name, some in by_name.items() for rule in _rules(name, some)]


def _rule(pattern: str, cut: str, cuts: Sequence[tuple[TensorEntry, str]], slots: Sequence[str] = ()) -> str:
    shapes = {atom.name: list(atom.shape) for atom, _ in reversed(cuts) if atom.slot == PARAM or atom.shape}
    names = list(dict.fromkeys(atom.name for atom, _ in cuts))
    note = f"{len(names)} tensor{'s' * (len(names) > 1)}: {names[0]} {shapes.get(names[0], [])}"
    more = f", to {names[-1]}" if len(names) > 1 else ""
    only = f"slots = {_quoted('|'.join(map(re.escape, slots)))}\n" if slots else ""
    return f"\n# {json.dumps(note + more)[1:-1]}\n[[rule]]\nmatch = {_quoted(pattern)}\n{only}{cut}"


def _pattern(name: str) -> str:
    """Return a regex for the names that differ only in the numbers of layers."""
    return r"\.".join(r"(\d+)" if part.isdecimal() else re.escape(part) for part in name.split("."))


def _cut(shape: tuple[int, ...], held: Sequence[HeldRegion], world: int) -> str:
    """Return the lines that say which rank has which region."""
    boxes = {one.rank: one.box for one in held}
    whole = Region.whole(shape)
    if list(boxes.values()) == [whole]:
        return f'unique = "{AXIS}"\n' if world > 1 else ""
    for dim in range(len(shape)):
        widths, at = [0] * world, 0
        for rank in sorted(boxes):
            start, stop = boxes[rank].start[dim], boxes[rank].stop[dim]
            if start != at or boxes[rank] != along(shape, dim, (start, stop)):
                break
            widths[rank], at = stop - start, stop
        else:
            return f'shard = "{AXIS}"\ndim = {dim}\nwidths = {widths}\n'
    at_each = [boxes[rank].to_json() if rank in boxes else [] for rank in range(world)]
    return f'boxes = "{AXIS}"\nat = {json.dumps(at_each)}\n'


def _quoted(text: str) -> str:
    """Return ``text`` as TOML, without escapes if possible."""
    plain = text.isprintable() and "'" not in text
    return f"'{text}'" if plain else json.dumps(text)
