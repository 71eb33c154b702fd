"""The application of rules to the tensors that ranks stored, to get tensor entries and their fragments.

1. Tensors are taken out of flat partitions.
2. The parts of one tensor are joined as they were divided, the innermost division first.
3. The tensor gets its canonical form (``state/rules/reshaping.py``).

Parts that several ranks hold identically become copies, for the reader to compare.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import RuleError
from ..layout.fragments import Fragments, joined
from ..layout.regions import Region
from ..layout.sharding import Average, Replicate, Sharding, TensorLayout, Unique, unflattened
from ..tensor_entries import DTYPE_BYTES, TensorEntry
from .expressions import Template
from .layouts import flat_shares
from .reshaping import FREE, Place, place_of, reshaped
from .rule_language import Rule, Rules, Tensors
from .rule_matching import PARAM, Matcher, Row, StoredTensor, explained


@dataclass(frozen=True, eq=False)
class Ruled:
    """A tensor entry, and where its elements are.

    The ``copies`` must equal ``pieces``, or, with ``average``, the mean of all is the value. ``rule`` is the number
    of the rule, from 1.
    """

    atom: TensorEntry
    pieces: Fragments
    copies: tuple[Fragments, ...]
    average: bool
    rule: int


@dataclass
class Assembled:
    """The result of applying rules.

    Attributes:
        ambiguous: Names that several rules match, of which the first was applied.
        unused: Rules that were never applied.
        dropped: Names that a rule leaves out.
    """

    atoms: dict[str, Ruled] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    ambiguous: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unused: tuple[int, ...] = ()
    dropped: tuple[str, ...] = ()


class _Made(NamedTuple):
    """A tensor made of rows of the rule ``number``."""

    number: int
    name: str
    slot: str
    laid: TensorLayout
    row: Row


def assemble(rules: Rules, stored: Iterable[StoredTensor]) -> Assembled:
    """Apply ``rules`` to the ``stored`` tensors.

    Raises ``RuleError`` if a tensor is matched by no rule, or if the tensors do not make whole ones.

    >>> rules = Rules.parse("version = 1\\n[[rule]]\\nmatch = '.*'\\nshard = 'tp'\\ndim = 0")
    >>> rows = [StoredTensor(n, "w", (3, 4), "F32", at={"tp": (n, 2)}) for n in range(2)]
    >>> assemble(rules, rows).atoms["w/param"].atom.shape
    (6, 4)
    """
    matcher = Matcher(rules)
    rows = matcher.matched(map(Row.of, stored))
    flat = [row for row in rows if _rule(rules, row).tensors]
    rows = [row for row in rows if not _rule(rules, row).tensors]
    rows += matcher.matched(_from_flat(rules, flat), from_flat=True)
    dropped = sorted({row.name for row in rows if _rule(rules, row).drop})
    unused = set(range(1, len(rules.rules) + 1)) - matcher.used
    found = Assembled({}, {}, matcher.ambiguous, tuple(sorted(unused)), tuple(dropped))
    made = list(_all_made(rules, [row for row in rows if not _rule(rules, row).drop]))
    for one in made:
        if _rule(rules, one.row).alias_of is None:
            _add(found, rules, one)
    for one in made:
        if _rule(rules, one.row).alias_of is not None:
            _add_alias(found, rules, one)
    return found


def _rule(rules: Rules, row: Row) -> Rule:
    return rules.rules[row.number - 1]


def _from_flat(rules: Rules, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the tensors of flat partitions, as ranks would have held them without that division."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        axes = _tensors(rules, row).axes
        elsewhere = tuple(sorted((axis, at) for axis, at in row.at.items() if axis not in axes))
        groups.setdefault((row.number, row.name, row.slot, elsewhere), []).append(row)
    for group in groups.values():
        with explained(_rule(rules, group[0]), group):
            yield from _unpacked(_rule(rules, group[0]), _tensors(rules, group[0]), group)


def _tensors(rules: Rules, row: Row) -> Tensors:
    tensors = _rule(rules, row).tensors
    assert tensors is not None
    return tensors


def _unpacked(rule: Rule, flat: Tensors, group: Sequence[Row]) -> Iterator[Row]:
    first = group[0]
    grouped, world = _by_index(group, flat.axes)
    parts = {index: _leaf(rows) for index, rows in grouped.items()}
    shapes = [tuple(size.value(first.names) for size in shape) for shape in flat.shapes]
    shares, full = flat_shares(
        [Region.whole(shape).elements for shape in shapes], world, buckets=flat.buckets,
        align=world if flat.align is None else flat.align.value(first.names),
        tensor_align=flat.tensor_align.value(first.names),
    )  # fmt: skip
    for rank in range(world):
        need = max((s.offset + s.stop - s.start for s in shares if s.rank == rank), default=0)
        held = parts[rank].shape if rank in parts else (0,)
        if len(held) != 1 or not need <= held[0] <= full:
            raise ValueError(f"the part at {rank} of {world} is {list(held)}; its share of these tensors has {need}"
                             f" elements, and {full} with padding")  # fmt: skip
    pieces: list[list[Fragments]] = [[] for _ in shapes]
    for share in shares:
        [held] = parts[share.rank].copies
        pieces[share.tensor].append(
            unflattened(held, shapes[share.tensor], share.start, share.stop, share.offset)
        )
    at = {axis: where for axis, where in first.at.items() if axis not in flat.axes}
    slot = first.slot if rule.slot is None else rule.slot.text(first.names)
    for name, shape, found in zip(flat.names, shapes, pieces, strict=True):
        yield Row(
            name.text(first.names),
            slot,
            at,
            TensorLayout(shape, first.laid.dtype, (joined(found, len(shape)),)),
        )


def _all_made(rules: Rules, rows: Sequence[Row]) -> Iterator[_Made]:
    """Yield, for each rule, the tensors that its rows make."""
    groups: dict[tuple[int, Hashable, str], list[Row]] = {}
    for row in rows:
        rule = _rule(rules, row)
        with explained(rule, [row]):
            slot = row.slot if rule.slot is None else rule.slot.text(row.names)
        named = sorted(_names(rule.rename, rule.alias_of) - FREE)
        key = row.name if rule.rename is None else tuple((name, row.names.get(name)) for name in named)
        groups.setdefault((row.number, key, slot), []).append(row)
    for (_, _, slot), group in groups.items():
        rule, first = _rule(rules, group[0]), group[0]
        with explained(rule, group):
            places: dict[Place, list[Row]] = {}
            for row in group:
                places.setdefault(place_of(rule, row.names), []).append(row)
            held = {place: _together(some, _levels(rules, rule, some)) for place, some in places.items()}
            for name, laid in reshaped(rule, held, first):
                yield _Made(first.number, name, slot, laid, first)


def _names(*templates: Template | None) -> frozenset[str]:
    return frozenset[str]().union(*(template.names for template in templates if template is not None))


def _levels(rules: Rules, rule: Rule, rows: Sequence[Row]) -> list[Sharding]:
    """Return the divisions that rows are parts by, the outermost first.

    They are those of the rule, then the defaults of other axes. Axes that tell whole tensors apart are left out.
    """
    apart = _names(
        rule.rename, rule.slot, rule.alias_of, rule.stacked.index if rule.stacked else None,
        rule.join.part if rule.join else None,
    )  # fmt: skip
    said = {axis for cut in rule.cuts for axis in cut.axes}
    levels = list(rule.cuts)
    for axis in dict.fromkeys(axis for row in rows for axis, (_, count) in row.at.items() if count > 1):
        if axis in said or axis in apart:
            continue
        if axis not in rules.axes:
            raise ValueError(f"has parts along the axis {axis!r}, and nothing says what that does to it: name it in the"
                             " rule, or under [axes]")  # fmt: skip
        levels.append(rules.axes[axis])
    return levels


def _together(rows: Sequence[Row], levels: Sequence[Sharding]) -> TensorLayout:
    """Return the tensor that ``rows`` are parts of.

    A scalar for a whole tensor is the same wherever the tensor was divided.
    """
    if not levels:
        return _leaf(rows)
    cut, *rest = levels
    grouped, count = _by_index(rows, cut.axes)
    parts = {index: _together(some, rest) for index, some in grouped.items()}
    scalar = rows[0].slot != PARAM and not any(laid.shape for laid in parts.values())
    if scalar and not isinstance(cut, Unique | Average):
        cut = Replicate(cut.axes, some=True)
    try:
        return cut.join(parts, count, rows[0].names)
    except ValueError as error:
        raise ValueError(f"{cut}: {error}") from None


def _by_index(rows: Sequence[Row], axes: Sequence[str]) -> tuple[dict[int, list[Row]], int]:
    """Group rows by their index on ``axes``, and return the groups and the length of the axes together.

    The last axis runs fastest.
    """
    count, found = 1, dict[int, list[Row]]()
    lengths = {}
    for axis in axes:
        counts = {row.at.get(axis, (0, 1))[1] for row in rows}
        if len(counts) > 1:
            raise ValueError(f"the axis {axis} is said to be {' and '.join(map(str, sorted(counts)))} long")
        [lengths[axis]] = counts
        count *= lengths[axis]
    for row in rows:
        index = 0
        for axis in axes:
            index = index * lengths[axis] + row.at.get(axis, (0, 1))[0]
        found.setdefault(index, []).append(row)
    return found, count


def _leaf(rows: Sequence[Row]) -> TensorLayout:
    if len(rows) > 1:
        names = ", ".join(dict.fromkeys(row.name for row in rows))
        raise ValueError(f"{len(rows)} stored tensors ({names}) are at one place of it, where one can be")
    return rows[0].laid


def _add(found: Assembled, rules: Rules, made: _Made) -> None:
    rule = _rule(rules, made.row)
    atom = TensorEntry(made.name, made.slot, made.laid.shape, _dtype(rule, made))
    if atom.key in found.atoms:
        raise RuleError(
            f"{rule.label}: {made.row.name} would be {atom.key}, which rule {found.atoms[atom.key].rule} has made of"
            " another already. Give one of them another name, or say that it is an alias_of the other."
        )
    first, *others = made.laid.copies
    found.atoms[atom.key] = Ruled(atom, first, tuple(others), made.laid.averaged, made.number)


def _add_alias(found: Assembled, rules: Rules, made: _Made) -> None:
    """Add a tensor that is also stored under another name as a copy, to be compared."""
    rule = _rule(rules, made.row)
    assert rule.alias_of is not None
    with explained(rule, [made.row]):
        target = rule.alias_of.text(made.row.names)
        known = found.atoms.get(f"{target}/{made.slot}")
        if known is None or known.average:
            what = "is averaged, so it has no copies" if known else "is made by no rule"
            raise ValueError(f"is an alias of {target}/{made.slot}, which {what}")
        if (known.atom.shape, known.atom.dtype) != (
            made.laid.shape,
            _dtype(rule, made),
        ) or made.laid.averaged:
            raise ValueError(
                f"{made.laid.dtype} {list(made.laid.shape)} is an alias of {target}, which is {known.atom.dtype}"
                f" {list(known.atom.shape)}"
            )
    copies = (*known.copies, *made.laid.copies)
    found.atoms[known.atom.key] = Ruled(known.atom, known.pieces, copies, False, known.rule)
    if made.name != target:
        found.aliases[made.name] = target


def _dtype(rule: Rule, made: _Made) -> str:
    if rule.dtype is None:
        return made.laid.dtype
    if DTYPE_BYTES[rule.dtype] != DTYPE_BYTES[made.laid.dtype]:
        raise RuleError(
            f"{rule.label}: {made.row.name} has elements of {made.laid.dtype}, which are no {rule.dtype}: those have"
            f" {DTYPE_BYTES[rule.dtype]} bytes"
        )
    return rule.dtype
