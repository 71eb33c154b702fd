"""The reading of tensors from a source: long runs, several threads, bounded memory.

A target is a region of a tensor entry and the array to fill with it. Fragments of the region are divided into runs:
spans of one part of at most ``WINDOW`` bytes. A run may contain holes of at most ``GAP`` bytes, which are read and
dropped. Runs are read in the order in which they lie in the files.

Ranks that store the same tensor should have stored the same bits; if not, one of them is wrong and nothing tells which.
So a tensor whose copies differ is refused by name before any of it is used (``refuse_unequal``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from ..errors import Damaged
from ..quantities import KiB, MiB
from ..state.layout.fragments import Fragment, Fragments, joined, row_major
from ..state.layout.regions import Region, flat_boxes
from .source import Source, SourceTensor

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
WINDOW, GAP = 32 * MiB, 64 * KiB
THREADS = 4


class ReadTarget(NamedTuple):
    """The region ``box`` of ``stored`` and the ``array`` to fill with it.

    The array has the region's shape and opaque elements of the entry's item size.
    """

    stored: SourceTensor
    box: Region
    array: np.ndarray


class ReadRange(NamedTuple):
    """A range of elements of one part, some of which fill the region ``box`` of a target's array.

    The range is ``start`` to ``start + count``; the elements used lie at ``strides`` from the first one.
    """

    part: int
    start: int
    count: int
    target: int
    box: Region
    strides: tuple[int, ...]


def read_all(source: Source, targets: list[ReadTarget]) -> None:
    """Fill the arrays of ``targets``, with several threads.

    Raises ``Damaged`` if the source is damaged or does not cover a target. Some arrays may be partly filled then.
    """

    in_threads(partial(_read, source, run, targets[run.target].array) for run in plan(source, targets))


def check_all(source: Source, parts: Iterable[int]) -> None:
    """Verify those of ``parts`` that are not verified yet, several at once.

    Raises ``Damaged`` for the first that fails.
    """
    in_threads(checks(source, parts))


def checks(source: Source, parts: Iterable[int]) -> Iterator[Callable[[], int]]:
    """Yield jobs for ``in_threads`` that verify those of ``parts`` that are not verified yet."""

    def check(part: int) -> int:
        source.check(part)
        source.checked.add(part)
        return 0

    return (partial(check, part) for part in parts if part not in source.checked)


def read(source: Source, targets: list[ReadTarget]) -> None:
    """Fill the arrays of ``targets`` in the calling thread; otherwise as ``read_all``."""
    for run in plan(source, targets):
        _read(source, run, targets[run.target].array)


def read_bytes(source: Source, stored: SourceTensor, offset: int, into: memoryview) -> None:
    """Fill ``into`` with the bytes of a tensor entry from ``offset`` on, in C order."""
    size = stored.atom.itemsize
    values = read_flat(source, stored, offset // size, (offset + len(into)) // size)
    np.frombuffer(into, dtype=np.uint8)[:] = values.view(np.uint8)


def read_flat(source: Source, stored: SourceTensor, start: int, stop: int) -> np.ndarray:
    """Return elements ``start`` to ``stop`` of a tensor entry in C order, as opaque elements of its item size.

    Where copies are to be averaged, the elements are their mean.
    """
    if stored.average:
        return _mean_of(source, stored, start, stop)
    result = np.empty(stop - start, dtype=f"V{stored.atom.itemsize}")
    targets, at = [], 0
    for box in flat_boxes(stored.atom.shape, start, stop):
        targets.append(ReadTarget(stored, box, result[at : at + box.elements].reshape(box.shape)))
        at += box.elements
    read(source, targets)
    return result


def _mean_of(source: Source, stored: SourceTensor, start: int, stop: int) -> np.ndarray:
    each = [SourceTensor(stored.atom, pieces) for pieces in stored.every]
    return array_of(mean([tensor_of(read_flat(source, one, start, stop), stored.atom.dtype) for one in each]))


def tensor_of(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Return the bytes of ``values``, which has one axis, as a tensor of ``dtype``. Shares memory with ``values``."""
    import torch  # imported here so that commands start without torch

    from ..state.plain_tensors import FROM_NAME

    return torch.from_numpy(values.view(np.uint8)).view(FROM_NAME[dtype])


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of a host ``tensor`` in C order as opaque ones, as in a ``ReadTarget``. Shares its memory."""
    from ..state.plain_tensors import flat_bytes

    flat = flat_bytes(tensor).numpy().view(f"V{tensor.element_size()}")
    return flat.reshape(tensor.shape)


def converted(values: np.ndarray, dtype: str, wanted: str) -> np.ndarray:
    """Convert ``values`` from ``dtype`` to ``wanted`` and return the bytes."""
    if dtype == wanted:
        return values.view(np.uint8)
    from ..state.plain_tensors import FROM_NAME

    return array_of(tensor_of(values, dtype).to(FROM_NAME[wanted])).view(np.uint8)


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors, computed in float64 and rounded once."""
    import torch

    wide = torch.complex128 if values[0].is_complex() else torch.float64
    return torch.stack([value.to(wide) for value in values]).mean(0).to(values[0].dtype)


def in_threads(jobs: Iterable[Callable[[], T]], report: Callable[[T], object] = lambda made: None) -> None:
    """Run ``jobs`` in a few threads, started in order, and pass each result to ``report``.

    The first error stops the rest.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(THREADS, "load") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > 2 * THREADS:
                    report(waiting.popleft().result())
            while waiting:
                report(waiting.popleft().result())
        finally:
            for future in waiting:
                future.cancel()


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """The runs that fill some targets, in the order in which they lie in the files.

    Entry ``i`` is fragment ``index[i]`` of target ``target[i]``, and ``spans`` are those of ``pieces``. There may be
    millions of runs, so each is built when it is iterated.
    """

    pieces: list[Fragments]
    spans: list[np.ndarray]
    target: np.ndarray
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.target)

    def __iter__(self) -> Iterator[ReadRange]:
        for target, index in zip(self.target.tolist(), self.index.tolist(), strict=True):
            piece = self.pieces[target].piece(index)
            count = int(self.spans[target][index])
            yield ReadRange(piece.part, piece.offset, count, target, piece.box, piece.strides)


def plan(source: Source, targets: Iterable[ReadTarget]) -> ReadPlan:
    """Plan the runs that fill ``targets``. Raises ``Damaged`` if the source does not cover a target."""
    found: list[Fragments] = []
    itemsizes: list[int] = []
    for stored, box, _ in targets:
        pieces = stored.pieces.within(box)
        if (elements := int(pieces.elements.sum())) != box.elements:
            raise Damaged(
                f"{source.path}: of the region {box.to_json()} of {stored.atom.key} {list(stored.atom.shape)},"
                f" {elements} of {box.elements} elements are stored",
                path=source.path,
            )
        itemsizes.append(stored.atom.itemsize)
        found.append(_readable_ones(pieces.moved([-start for start in box.start]), itemsizes[-1]))
    counts = [len(pieces) for pieces in found]
    target = np.repeat(np.arange(len(found)), counts)
    index = np.concatenate([np.arange(count) for count in counts]) if counts else target
    if not len(target):
        return ReadPlan(found, [], target, index)
    part = np.concatenate([pieces.part for pieces in found])
    start = np.concatenate([pieces.offset * size for pieces, size in zip(found, itemsizes, strict=True)])
    used, place = np.unique(part, return_inverse=True)
    where = [source.parts[number] for number in used.tolist()]
    files = {path: number for number, path in enumerate(sorted({each.path for each in where}))}
    file = np.array([files[each.path] for each in where])
    offset = np.array([each.offset for each in where])
    order = np.lexsort((offset[place] + start, file[place]))
    return ReadPlan(found, [pieces.spans for pieces in found], target[order], index[order])


def _readable_ones(pieces: Fragments, itemsize: int) -> Fragments:
    """Split ``pieces`` into fragments that one read can fetch. Most are contiguous and short, and stay unchanged."""
    spans = pieces.spans
    easy = (spans == pieces.elements) & (spans * itemsize <= WINDOW)
    if easy.all():
        return pieces
    others = (pieces.piece(number) for number in np.flatnonzero(~easy).tolist())
    cut = Fragments.of((part for piece in others for part in _readable(piece, itemsize)), pieces.rank)
    return joined([pieces.only(easy), cut], pieces.rank)


def _readable(piece: Fragment, itemsize: int) -> Iterator[Fragment]:
    """Split ``piece`` into fragments with short spans and small holes."""
    axes = [axis for axis, n in enumerate(piece.box.shape) if n > 1]
    axes.sort(key=lambda axis: piece.strides[axis])
    inner, widest_hole = 1, 0
    for axis in axes:
        widest_hole = max(widest_hole, piece.strides[axis] - inner)
        inner += (piece.box.shape[axis] - 1) * piece.strides[axis]
    if not axes or (widest_hole * itemsize <= GAP and inner * itemsize <= WINDOW):
        yield piece
        return
    outer = axes[-1]
    stride = piece.strides[outer]
    row = inner - (piece.box.shape[outer] - 1) * stride
    rows = 1 if widest_hole * itemsize > GAP else max(1, (WINDOW // itemsize - row) // stride + 1)
    for first in range(piece.box.start[outer], piece.box.stop[outer], rows):
        yield from _readable(_between(piece, outer, first, first + rows), itemsize)


def _between(piece: Fragment, axis: int, start: int, stop: int) -> Fragment:
    """Return rows ``start`` to ``stop`` of ``piece`` along ``axis``, as far as they exist."""
    low, high = list(piece.box.start), list(piece.box.stop)
    offset = piece.offset + (start - low[axis]) * piece.strides[axis]
    low[axis], high[axis] = start, min(stop, high[axis])
    return piece._replace(box=Region(tuple(low), tuple(high)), offset=offset)


def _read(source: Source, run: ReadRange, array: np.ndarray) -> None:
    region = array[(*run.box.slices, ...)]  # a view, also of a scalar
    first = run.start * array.itemsize
    if run.strides == row_major(run.box.shape) and region.flags.c_contiguous:
        source.read(run.part, first, region.reshape(-1).view(np.uint8).data)
        return
    read = np.empty(run.count, dtype=array.dtype)
    source.read(run.part, first, read.view(np.uint8).data)
    strides = tuple(stride * array.itemsize for stride in run.strides)
    region[...] = np.lib.stride_tricks.as_strided(read, run.box.shape, strides)


CHUNK = 1 << 22
"""The number of elements that are compared at once."""


def refuse_unequal(source: Source, wanted: Iterable[SourceTensor]) -> None:
    """Raise ``Damaged`` if a tensor of ``wanted`` has copies that should be equal and differ.

    Tensors that an earlier call found equal are not compared again.
    """
    left = [stored for stored in wanted if stored.atom.key not in source.compared]
    for error in unequal_copies(source, left):
        raise error
    source.compared.update(stored.atom.key for stored in left)


def unequal_copies(source: Source, among: Iterable[SourceTensor]) -> Iterator[Damaged]:
    """Yield an error for each tensor entry whose copies should be equal and differ."""
    for stored in among:
        key = stored.atom.key
        first = SourceTensor(stored.atom, stored.pieces)
        for copy in () if stored.average else stored.copies:
            if not _equal(source, first, SourceTensor(stored.atom, copy)):
                paths = sorted(
                    {source.parts[n].path for pieces in (stored.pieces, copy) for n in pieces.part.tolist()}
                )
                yield Damaged(
                    f"the copies of {key} differ, in {' and '.join(paths[:2])}", path=paths[-1], atoms=(key,)
                )
                break


def _equal(source: Source, one: SourceTensor, other: SourceTensor) -> bool:
    elements = one.atom.elements
    return all(
        read_flat(source, one, start, min(start + CHUNK, elements)).tobytes()
        == read_flat(source, other, start, min(start + CHUNK, elements)).tobytes()
        for start in range(0, elements, CHUNK)
    )
