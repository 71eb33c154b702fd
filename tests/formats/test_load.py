"""Any region of any layout is read as NumPy slices it; long spans in windows, wide holes not at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Damaged
from holdfast.formats import load
from holdfast.formats.load import ReadTarget, plan, read_all
from holdfast.formats.source import Source, SourceTensor, StoredArray
from holdfast.state.layout.fragments import Fragment, Fragments, dense, flat, row_major
from holdfast.state.layout.regions import Region
from holdfast.state.tensor_entries import TensorEntry


class InMemory(Source):
    """A source whose parts are arrays. Counts what is read."""

    def __init__(self, arrays):
        super().__init__("memory", "arrays")
        self.bytes_read = 0
        self.arrays = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        self.parts = [StoredArray(f"file{i % 3}", 0, a.nbytes, "F32") for i, a in enumerate(self.arrays)]

    def read(self, part, offset, into):
        assert 0 <= offset <= offset + len(into) <= self.parts[part].nbytes
        self.bytes_read += len(into)
        into[:] = self.arrays[part][offset : offset + len(into)].data

    def close(self):
        pass


def stored(pieces, shape):
    return SourceTensor(TensorEntry("w", "param", shape, "F32"), Fragments.of(pieces, len(shape)))


def numbered(shape):
    return np.arange(np.prod(shape, dtype=np.int64), dtype=np.int32).reshape(shape)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(load, "WINDOW", 64)
    monkeypatch.setattr(load, "GAP", 16)


@settings(deadline=None)
@given(st.data())
@pytest.mark.slow
def test_any_box_of_any_flat_or_permuted_layout_is_what_numpy_slices(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 17), max_size=4)))
    axes = data.draw(st.permutations(range(len(shape))))
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = Region(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    tensor = numbered(shape)
    middle = data.draw(st.integers(0, tensor.size))
    flat_parts = [tensor.reshape(-1)[:middle], tensor.reshape(-1)[middle:]]
    cases = [
        (InMemory(flat_parts), [*flat(shape, 0, middle, 0), *flat(shape, middle, tensor.size, 1)]),
        (InMemory([tensor.transpose(axes)]), [permuted_piece(shape, axes)]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "WINDOW", data.draw(st.sampled_from([4, 64, load.WINDOW])))
        patch.setattr(load, "GAP", data.draw(st.sampled_from([0, 16, load.GAP])))
        for source, pieces in cases:
            result = np.full(box.shape, -1, dtype=np.int32)
            read_all(source, [ReadTarget(stored(pieces, shape), box, result)])
            assert (result == tensor[box.slices]).all()


def permuted_piece(shape, axes):
    """A tensor of ``shape`` of which the transpose is stored."""
    strides = [0] * len(shape)
    for axis, stride in zip(axes, row_major([shape[a] for a in axes]), strict=True):
        strides[axis] = stride
    return Fragment(Region.whole(shape), 0, 0, tuple(strides))


def test_rows_are_read_in_windows_and_nothing_besides(small_windows):
    tensor = numbered((100, 10))
    source = InMemory([tensor])
    result = np.empty((30, 10), dtype=np.int32)
    target = ReadTarget(
        stored([dense(Region.whole((100, 10)), 0)], (100, 10)), Region((20, 0), (50, 10)), result
    )
    windows = [run.count * tensor.itemsize for run in plan(source, [target])]
    read_all(source, [target])
    assert (result == tensor[20:50]).all()
    assert sum(windows) == source.bytes_read == result.nbytes and max(windows) <= 64


@pytest.mark.parametrize(("columns", "read"), [(4, 1.4), (1, 1)])
def test_narrow_holes_are_read_and_wide_ones_are_not(small_windows, columns, read):
    """Of rows of 6 elements: a hole of 8 bytes is read (two rows in a window: 10 elements for 8), one of 20 is not."""
    tensor = numbered((50, 6))
    source = InMemory([tensor])
    result = np.empty((50, columns), dtype=np.int32)
    whole = stored([dense(Region.whole((50, 6)), 0)], (50, 6))
    read_all(source, [ReadTarget(whole, Region((0, 0), (50, columns)), result)])
    assert (result == tensor[:, :columns]).all()
    assert source.bytes_read == pytest.approx(read * result.nbytes, rel=0.15)


def test_runs_come_in_the_order_of_files_and_places():
    arrays = [numbered((4, 4)) for _ in range(9)]
    source = InMemory(arrays)
    targets = [
        ReadTarget(
            stored([dense(Region.whole((4, 4)), i)], (4, 4)),
            Region((1, 1), (3, 3)),
            np.empty((2, 2), np.int32),
        )
        for i in (5, 2, 8, 0, 1, 7)
    ]
    files = [source.parts[run.part].path for run in plan(source, targets)]
    assert files == sorted(files)


def test_what_is_not_stored_is_said_with_its_place():
    source = InMemory([numbered((2, 4))])
    short = stored([dense(Region((0, 0), (2, 4)), 0)], (3, 4))
    with pytest.raises(Damaged, match=r"\[\[1, 0\], \[3, 4\]\] of w/param \[3, 4\], 4 of 8 elements"):
        read_all(source, [ReadTarget(short, Region((1, 0), (3, 4)), np.empty((2, 4), np.int32))])


def test_what_fails_in_one_thread_ends_the_load():
    class Bad(InMemory):
        def read(self, part, offset, into):
            raise Damaged("of no use")

    tensor = numbered((4, 4))
    whole = stored([dense(Region.whole((4, 4)), 0)], (4, 4))
    with pytest.raises(Damaged, match="of no use"):
        read_all(Bad([tensor]), [ReadTarget(whole, Region.whole((4, 4)), np.empty((4, 4), np.int32))])
