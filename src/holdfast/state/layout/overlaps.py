"""The tensors of a training state that share memory.

A write to one tensor changes the others in the same memory. So they are copied at one step, replayed with the same
overlap, and restored as they were, or else refused by name. Slices of one storage that have no byte in common do not
overlap. A *key* is the name of a parameter or buffer and the way to a tensor that belongs to it: ``("head.weight",
"exp_avg")``.

Forward passes can separate buffers that share memory. Those that overlap only with one another are noted at each step,
so that a resume can arrange the model's buffers, which it finds as the model is made, as they were after the last step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..plain_tensors import is_plain

if TYPE_CHECKING:
    from ..live_state import LiveState

Key = tuple[Any, ...]
Shared = list[list[list[Any]]]
"""Groups of overlapping tensors, as JSON.

Each tensor has its key, its start in bytes from a multiple of ``ALIGN``, and its strides in elements.
"""
ALIGN = 64
PARAMETERS = (("param",),)
BUFFER = ("buffer",)
PLACED = (*PARAMETERS, BUFFER)
"""The ways to tensors of the model itself, which a resume leaves in place."""


class _Span(NamedTuple):
    device: str
    start: int
    stop: int
    number: int


def overlaps(tensors: Mapping[Key, torch.Tensor]) -> list[list[Key]]:
    """Return the groups of keys whose ``tensors`` have bytes in common, each in the given order.

    >>> flat = torch.zeros(6)
    >>> overlaps({("a",): flat[:4], ("b",): flat[4:], ("c",): flat[3:4]})
    [[('a',), ('c',)]]
    """
    keys, held = list(tensors), list(tensors.values())
    found = []
    for cluster in _clusters(held):
        if all(torch.ops.aten.is_non_overlapping_and_dense(held[number]) for number in cluster):
            found.append(cluster)
        else:
            found += _marked({number: held[number] for number in cluster})
    return [[keys[number] for number in sorted(group)] for group in sorted(found, key=min)]


def _clusters(held: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return groups of indices of tensors whose memory ranges, from first to last byte, overlap."""
    # 0 is the address also of tensors without elements, or on meta
    spans = sorted([_span(number, tensor) for number, tensor in enumerate(held) if tensor.data_ptr()])
    clusters: list[list[int]] = []
    device, stop = None, -1
    for span in spans:
        if span.device == device and span.start < stop:
            clusters[-1].append(span.number)
        else:
            clusters.append([span.number])
            device, stop = span.device, -1
        stop = max(stop, span.stop)
    return [cluster for cluster in clusters if len(cluster) > 1]


def _span(number: int, tensor: torch.Tensor) -> _Span:
    start, is_full = tensor.data_ptr(), tensor.is_contiguous()
    nbytes = tensor.nbytes if is_full else _extent(tensor.shape, tensor.stride(), tensor.itemsize)
    return _Span("" if tensor.is_cpu else str(tensor.device), start, start + nbytes, number)


def _extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the first element to the end of the last."""
    return (1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))) * itemsize


def _marked(cluster: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Return the overlapping groups in a ``cluster`` with gaps, by marking the places that each tensor takes."""
    spans = [_span(number, tensor) for number, tensor in cluster.items()]
    first, last = min(span.start for span in spans), max(span.stop for span in spans)
    unit = gcd(*(span.start - first for span in spans), *(tensor.itemsize for tensor in cluster.values()))
    marks = torch.zeros((last - first) // unit, dtype=torch.int32, device="cpu")
    group_of = {number: {number} for number in cluster}
    for position, (number, tensor) in enumerate(cluster.items(), 1):
        width = tensor.itemsize // unit
        sizes = [
            1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        strides = [stride * width for stride in tensor.stride()]
        taken = marks.as_strided((*sizes, width), (*strides, 1), (tensor.data_ptr() - first) // unit)
        for other in taken.unique().tolist() if taken.any() else ():
            if other:
                group_of[number] |= group_of[list(cluster)[other - 1]]
        for member in group_of[number]:
            group_of[member] = group_of[number]
        taken.fill_(position)
    groups = {id(group): sorted(group) for group in group_of.values() if len(group) > 1}
    return list(groups.values())


def described(tensors: Mapping[Key, torch.Tensor]) -> Shared:
    """Return the groups that overlap, with everything needed to make other tensors overlap in the same way."""
    found: Shared = []
    for group in overlaps(tensors):
        base = min(tensors[key].data_ptr() for key in group) // ALIGN * ALIGN
        found.append(
            [[list(key), tensors[key].data_ptr() - base, list(tensors[key].stride())] for key in group]
        )
    return found


def placed(shared: Shared, ways: Sequence[Key] = PLACED) -> dict[frozenset[Key], frozenset[Any]]:
    """Return for each group the relative positions and strides of its tensors whose keys end in one of ``ways``."""
    found = {}
    for group in shared:
        members = [
            (tuple(key), offset, tuple(strides)) for key, offset, strides in group if tuple(key[1:]) in ways
        ]
        if len(members) > 1:
            first = min(offset for _, offset, _ in members)
            lies = frozenset((key, offset - first, strides) for key, offset, strides in members)
            found[frozenset(key for key, _, _ in members)] = lies
    return found


class OverlappingMemory:
    """Memory in which the tensors of one group of ``Shared`` overlap as described."""

    def __init__(self, storage: torch.UntypedStorage, start: int) -> None:
        """Use ``storage``; ``start`` is where in it the offsets of the group begin, in bytes."""
        self._storage, self._start = storage, start
        self._made: dict[Any, torch.Tensor] = {}

    @classmethod
    def empty(cls, group: Sequence[Sequence[Any]], like: Mapping[Key, torch.Tensor]) -> OverlappingMemory:
        """Return new memory for those of the ``group`` that are in ``like``."""
        there = [(like[tuple(key)], offset, strides) for key, offset, strides in group if tuple(key) in like]
        nbytes = max(
            offset + _extent(tensor.shape, strides, tensor.itemsize) for tensor, offset, strides in there
        )
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=there[0][0].device).untyped_storage(), 0)

    @classmethod
    def around(cls, tensor: torch.Tensor, offset: int) -> OverlappingMemory:
        """Return the memory in which ``tensor`` lies at ``offset``."""
        return cls(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize - offset)

    def view(self, offset: int, strides: Sequence[int], like: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor at ``offset``, with the values of ``like``; None if this memory has no room for it.

        Equal tensors at one place are returned as one object.
        """
        if len(strides) != like.dim():
            return None
        start, key = self._start + offset, (offset, tuple(strides), like.shape, like.dtype)
        end = start + _extent(like.shape, strides, like.itemsize)
        fits = start >= 0 and end <= self._storage.nbytes() and start % like.itemsize == 0
        if not fits:
            return None
        if key not in self._made:
            made = torch.empty(0, dtype=like.dtype, device=like.device)
            made.set_(self._storage, start // like.itemsize, like.shape, tuple(strides))
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
            made[once].copy_(like[once])
            self._made[key] = made
        return self._made[key]


def tensors_within(value: Any, key: Key) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield the tensors in lists, tuples and dictionaries, by ``key`` and the way to each."""
    if isinstance(value, torch.Tensor):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            if isinstance(name, str | int):
                yield from tensors_within(item, (*key, name))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from tensors_within(item, (*key, place))


def put_within(value: Any, way: Sequence[Any], tensor: torch.Tensor) -> Any:
    """Return ``value`` with ``tensor`` at the end of the ``way``: the same object, except for tuples."""
    if not way:
        return tensor
    made = put_within(value[way[0]], way[1:], tensor)
    if isinstance(value, tuple):
        return (*value[: way[0]], made, *value[way[0] + 1 :])
    value[way[0]] = made
    return value


def key_names(keys: Iterable[Key]) -> str:
    """Return the names of tensors that overlap, for a person.

    >>> key_names([("a.weight", "param"), ("b.table", "buffer"), ("b.weight", "exp_avg")])
    'a.weight, b.table and b.weight/exp_avg'
    """
    texts = [str(key[0]) if key[1:] in PLACED else "/".join(map(str, key)) for key in keys]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def joined_buffers(state: LiveState, names: Collection[str]) -> Shared:
    """Return which of the buffers ``names`` overlap in memory, and how, as JSON."""
    buffers = {atom.name: tensor for atom, tensor in state.present_buffers().values() if atom.name in names}
    return described({(name, *BUFFER): buffer for name, buffer in buffers.items() if is_plain(buffer)})


def buffers_within(shared: Shared) -> set[str]:
    """Return the names of the buffers that overlap only with one another."""
    return {key[0] for group in _only_buffers(shared) for key, *_ in group}


@torch.no_grad()
def arrange_buffers(state: LiveState, shared: Shared) -> None:
    """Give buffers that overlap only with one another memory of their own, except where they overlap in ``shared``."""
    if not state.buffer_places():
        return
    state.made_joined |= buffers_within(state.shared())
    wanted = [[each for each in group if each[0][0] in state.made_joined] for group in _only_buffers(shared)]
    if placed(wanted) == placed(joined_buffers(state, state.made_joined)):
        return
    places, held = state.buffer_places(), state.memory()
    made: dict[Key, torch.Tensor] = {
        (name, *BUFFER): held[name, *BUFFER].clone() for name in state.made_joined
    }
    for group in (group for group in wanted if len(group) > 1):
        memory = OverlappingMemory.empty(group, held)
        for key, offset, strides in group:
            view = memory.view(offset, strides, held[tuple(key)])
            assert view is not None
            made[tuple(key)] = view
    for (name, *_), buffer in made.items():
        module, own = places[name]
        module._buffers[own] = buffer


def _only_buffers(shared: Shared) -> Shared:
    return [group for group in shared if all(tuple(key[1:]) == BUFFER for key, *_ in group)]
