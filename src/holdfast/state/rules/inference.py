"""The inference of rules for a state whose sharding is exactly known, for a person to edit.

Parameters of repeated layers that are sharded alike share a rule. The axis ``rank`` tells apart what several ranks
hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..layout.regions import Region
from ..tensor_entries import TensorEntry
from .layouts import along
from .rule_language import VERSION
from .rule_matching import PARAM

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
