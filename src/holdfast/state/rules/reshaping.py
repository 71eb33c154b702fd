"""The operations of a rule that bring joined tensors to canonical form.

The order is fixed, whatever the order in the file: padding is removed, a stack is taken apart, tensors are joined,
permuted, split, transposed, stacked. No data moves: each operation only changes where the elements are found. A state
that is one scalar for a whole tensor, as ``step`` is, belongs to each of the tensors that a split makes, and must be
the same in those that are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from ..layout.regions import Region
from ..layout.sharding import Names, Replicate, Shard, TensorLayout
from .expressions import Value
from .layouts import along, interleaved, spans
from .rule_language import Permute, Rule
from .rule_matching import PARAM, Row

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
