"""The application of rules to the tensors that ranks stored, to get tensor entries and their fragments.

1. Tensors are taken out of flat partitions.
2. The parts of one tensor are joined as they were divided, the innermost division first.
3. The tensor gets its canonical form (``reshaped``), in a fixed order, whatever the order in the file: padding is
   removed, a stack is taken apart, tensors are joined, permuted, split, transposed, stacked. A state that is one scalar
   for a whole tensor, as ``step`` is, belongs to each of the tensors that a split makes, and must be the same in those
   that are joined.

No data moves: each operation only changes where the elements are found. Parts that several ranks hold identically
become copies, for the reader to compare.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ...errors import RuleError
from ..layout.fragments import Fragments, joined
from ..layout.regions import Region
from ..layout.sharding import Average, Names, Replicate, Shard, Sharding, TensorLayout, Unique, unflattened
from ..tensor_entries import DTYPE_BYTES, TensorEntry
from .expressions import Template, Value
from .layouts import along, flat_shares, interleaved, spans
from .rule_language import Permute, Rule, Rules, Tensors
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


FREE = frozenset({"part", "index"})
"""The parts of a name that are known only when a tensor is taken apart."""
Place = tuple[int, str]
"""The place of a tensor among those that make one: slice of a stack, part of a join."""
Called = tuple[dict[str, Value], TensorLayout]
"""A tensor, and the values that tell it from the others that were one tensor with it."""
K = TypeVar("K")


def reshaped(rule: Rule, held: Mapping[Place, TensorLayout], row: Row) -> Iterator[tuple[str, TensorLayout]]:
    """Yield the tensors that ``held`` make, by canonical name; ``row`` is one of theirs.

    Raises ``ValueError`` where they do not make whole ones.
    """
    found: dict[str, dict[int, TensorLayout]] = {}
    names = row.names
    for index in sorted({index for index, _ in held}):
        parts = {part: _padless(rule, laid, names) for (at, part), laid in held.items() if at == index}
        for more, laid in _taken_apart(rule, parts, names):
            called = row.name if rule.rename is None else rule.rename.text({**names, **more})
            if index in found.setdefault(called, {}):
                raise ValueError(f"makes {called!r} twice: `rename` should use {{part}} or {{index}}")
            found[called][index] = laid
    for called, by_index in found.items():
        yield called, _stacked(rule, by_index, row)


def place_of(rule: Rule, names: Names) -> Place:
    """Return the place of a tensor among those that are joined or stacked."""
    index = 0 if rule.stacked is None else rule.stacked.index.text(names)
    if not str(index).isdecimal():
        raise ValueError(f"is the slice {index!r} of a stack, which is no number")
    return int(index), "" if rule.join is None else rule.join.part.text(names)


def _taken_apart(rule: Rule, parts: Mapping[str, TensorLayout], names: Names) -> Iterator[Called]:
    for index, slices in _unstacked(rule, parts):
        laid = _joined(rule, slices)
        if rule.permute is not None and laid.shape:
            laid = _permuted(rule.permute, laid, names)
        for part, one in _split(rule, laid, names):
            yield {**index, **part}, _transposed(rule, one)


def _padless(rule: Rule, laid: TensorLayout, names: Names) -> TensorLayout:
    for dim, size in rule.pads if laid.shape else ():
        length = _length(laid, dim)
        true = size.value({**names, "size": length})
        if not 0 <= true <= length:
            raise ValueError(f"dim {dim} is {length} long, so {true} cannot be its length without padding")
        box = along(laid.shape, dim, (0, true))
        laid = laid.taken(box.shape, [(box, box)])
    return laid


def _unstacked(
    rule: Rule, parts: Mapping[str, TensorLayout]
) -> Iterator[tuple[dict[str, Value], Mapping[str, TensorLayout]]]:
    dim = rule.unstack
    if dim is None:
        yield {}, parts
        return
    counts = {_length(laid, dim) for laid in parts.values()}
    if len(counts) > 1:
        raise ValueError(f"stacks of {' and '.join(map(str, sorted(counts)))} are joined")
    for index in range(counts.pop()):
        yield {"index": index}, {part: _slice(laid, dim, index) for part, laid in parts.items()}


def _slice(laid: TensorLayout, dim: int, index: int) -> TensorLayout:
    rest = [axis for axis in range(len(laid.shape)) if axis != dim]
    shape = tuple(laid.shape[axis] for axis in rest)
    return laid.changed(shape, lambda pieces: pieces.permuted([dim, *rest]).sliced(index))


def _joined(rule: Rule, parts: Mapping[str, TensorLayout]) -> TensorLayout:
    if rule.join is None:
        return parts[""]
    dim, names, _ = rule.join
    _need_these("joins", parts, names)
    return _one_of(dict(enumerate(parts[name] for name in names)), dim)


def _one_of(parts: Mapping[int, TensorLayout], dim: int) -> TensorLayout:
    """Return the tensors joined along ``dim``, or the common value of scalars for whole tensors."""
    scalars = all(not laid.shape for laid in parts.values())
    cut = Replicate(()) if scalars else Shard((), dim)
    return cut.join(parts, len(parts), {})


def _permuted(permute: Permute, laid: TensorLayout, names: Names) -> TensorLayout:
    length = _length(laid, permute.dim)
    known = {**names, "size": length}
    heads, kv_heads = permute.heads.value(known), permute.kv_heads.value(known)
    each = length // max(1, heads + 2 * kv_heads)
    head_dim = each if permute.head_dim is None else permute.head_dim.value(known)
    if (heads + 2 * kv_heads) * head_dim != length:
        raise ValueError(
            f"dim {permute.dim} is {length} long, which {heads} query heads and twice {kv_heads} key-value heads of"
            f" {head_dim} are not"
        )
    regions = []
    for block, place in interleaved(heads, kv_heads, head_dim):
        pair = along(laid.shape, permute.dim, block), along(laid.shape, permute.dim, place)
        regions.append(pair[::-1] if permute.interleave else pair)
    return laid.taken(laid.shape, regions)


def _split(rule: Rule, laid: TensorLayout, names: Names) -> Iterator[Called]:
    if rule.split is None:
        yield {}, laid
        return
    dim, parts, sizes = rule.split
    if not laid.shape:
        for part in parts:
            yield {"part": part}, laid
        return
    length = _length(laid, dim)
    each = [length // len(parts)] * len(parts)
    if sizes is not None:
        each = [size.value({**names, "size": length}) for size in sizes]
    if sum(each) != length or min(each) < 0:
        raise ValueError(f"dim {dim} is {length} long, and not the sum of {each}")
    for part, span in zip(parts, spans(each)):
        box = along(laid.shape, dim, span)
        yield {"part": part}, laid.taken(box.shape, [(Region.whole(box.shape), box)])


def _transposed(rule: Rule, laid: TensorLayout) -> TensorLayout:
    rank = len(laid.shape)
    if rule.transpose is False or not rank:
        return laid
    axes = (*range(rank - 2), rank - 1, rank - 2) if rule.transpose is True else rule.transpose
    if rank < 2 or len(axes) != rank:
        raise ValueError(f"is transposed, and {list(laid.shape)} has {rank} dims")
    return laid.changed(tuple(laid.shape[axis] for axis in axes), lambda pieces: pieces.permuted(axes))


def _stacked(rule: Rule, slices: Mapping[int, TensorLayout], row: Row) -> TensorLayout:
    if rule.stacked is None:
        return slices[0]
    dim, _, count = rule.stacked
    number = max(slices) + 1 if count is None else count.value(row.names)
    _need_these("stacks", slices, range(number))
    shape = slices[0].shape
    if not shape and row.slot != PARAM:
        return _one_of(slices, 0)
    if dim > len(shape):
        raise ValueError(f"stacks {list(shape)} along dim {dim}")
    axes = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]

    def lifted(laid: TensorLayout) -> TensorLayout:
        shape = (*laid.shape[:dim], 1, *laid.shape[dim:])
        return laid.changed(shape, lambda pieces: pieces.lifted(0).permuted(axes))

    return Shard((), dim).join({at: lifted(laid) for at, laid in slices.items()}, number, {})


def _need_these(verb: str, held: Mapping[K, TensorLayout], wanted: Collection[K]) -> None:
    missing = [name for name in wanted if name not in held]
    odd = [name for name in held if name not in wanted]
    if missing:
        raise ValueError(f"{verb} {len(held)} tensors, and {', '.join(map(str, missing))} is missing")
    if odd:
        raise ValueError(f"{verb} {', '.join(map(str, odd))}, which is none of them")


def _length(laid: TensorLayout, dim: int) -> int:
    if dim >= len(laid.shape):
        raise ValueError(f"{list(laid.shape)} has no dim {dim}")
    return laid.shape[dim]
