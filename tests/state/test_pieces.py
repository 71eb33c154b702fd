"""Whatever the layout, the pieces say where each element lies: an array laid out by NumPy alone is the oracle."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.state.layout.fragments import Fragment, Fragments, dense, flat, flat_boxes, joined, row_major
from holdfast.state.layout.regions import Region

SHAPES = st.lists(st.integers(0, 17), max_size=4).map(tuple)


def gathered(pieces, parts, shape):
    """The tensor of ``shape`` that ``pieces`` say lies in ``parts``; -1 where they say nothing."""
    result = np.full(shape, -1, dtype=np.int64)
    for box, part, offset, strides in pieces:
        assert (result[box.slices] == -1).all()
        index = np.indices(box.shape, sparse=True)
        places = offset + sum(i * stride for i, stride in zip(index, strides, strict=True))
        result[box.slices] = parts[part][np.broadcast_to(places, box.shape)]
    return result


def numbered(shape):
    return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)


@st.composite
def shape_and_box(draw):
    shape = draw(SHAPES)
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, Region(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def flat_partition(draw):
    """A shape and the ends of the flat ranges that 1 to 9 ranks hold of it."""
    shape = draw(SHAPES)
    n, world = int(np.prod(shape, dtype=np.int64)), draw(st.integers(1, 9))
    inner = sorted(draw(st.integers(0, n)) for _ in range(world - 1))
    return shape, [0, *inner, n]


@given(flat_partition())
def test_flat_ranges_are_at_most_two_boxes_per_axis_but_one_and_hold_each_element_once(case):
    shape, ends = case
    tensor = numbered(shape)
    parts, pieces = [], []
    for rank, (start, stop) in enumerate(pairwise(ends)):
        boxes = flat_boxes(shape, start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        parts.append(np.concatenate([np.full(3, -7), tensor.reshape(-1)[start:stop]]))  # 3 of something else
        pieces += flat(shape, start, stop, part=rank, offset=3)
    assert (gathered(pieces, parts, shape) == tensor).all()
    table = Fragments.of(pieces, len(shape))
    assert list(table) == pieces and table.overlap() is None


@given(shape_and_box(), st.randoms())
def test_what_lies_in_a_box_is_found_there(case, chance):
    shape, box = case
    tensor = numbered(shape)
    n = tensor.size
    middle = chance.randint(0, n)
    pieces = Fragments.of([*flat(shape, 0, middle, 0), *flat(shape, middle, n, 1)], len(shape))
    parts = [tensor.reshape(-1)[:middle], tensor.reshape(-1)[middle:]]
    found = pieces.within(box)
    assert found.elements.sum() == box.elements
    inside = gathered(found.moved([-s for s in box.start]), parts, box.shape)
    assert (inside == tensor[box.slices]).all()


@given(SHAPES, st.randoms())
def test_axes_can_be_permuted_lifted_and_sliced(shape, chance):
    tensor = numbered(shape)
    pieces = Fragments.of([dense(Region.whole(shape), 0)], len(shape))
    axes = list(range(len(shape)))
    chance.shuffle(axes)
    parts = [tensor.reshape(-1)]
    permuted = gathered(pieces.permuted(axes), parts, tuple(shape[a] for a in axes))
    assert (permuted == tensor.transpose(axes)).all()
    lifted = pieces.lifted(2)
    assert (gathered(lifted, parts, (3, *shape))[2] == tensor).all()
    assert (gathered(lifted.sliced(2), parts, shape) == tensor).all()
    if shape and shape[0]:
        assert (gathered(pieces.sliced(shape[0] - 1), parts, shape[1:]) == tensor[-1]).all()


@given(SHAPES, st.randoms())
def test_flat_partitions_of_local_tensors_are_pieces_of_the_whole(shape, chance):
    """Two ranks hold rows in turn, by blocks of any heights; each flat tensor is cut in two again."""
    if not shape:
        return
    tensor = numbered(shape)
    ends = [0, *sorted(chance.randint(0, shape[0]) for _ in range(5)), shape[0]]
    found, parts = [], []
    for rank in range(2):
        cut, rows, local_row = [], [], 0
        for start, stop in list(pairwise(ends))[rank::2]:
            whole = Region((start, *[0] * (len(shape) - 1)), (stop, *shape[1:]))
            local = whole.moved((local_row - start, *[0] * (len(shape) - 1)))
            cut.append((whole, local))
            rows.append(tensor[start:stop])
            local_row += stop - start
        local = np.concatenate(rows)
        middle = chance.randint(0, local.size)
        pieces = [
            *flat(local.shape, 0, middle, len(parts)),
            *flat(local.shape, middle, local.size, len(parts) + 1),
        ]
        parts += [local.reshape(-1)[:middle], local.reshape(-1)[middle:]]
        found.append(Fragments.of(pieces, len(shape)).through(cut))
    whole = joined(found, len(shape))
    assert (gathered(whole, parts, shape) == tensor).all()
    assert whole.overlap() is None


@given(st.randoms(), st.integers(0, 3))
def test_boxes_that_meet_are_found_and_only_those(chance, rank):
    boxes = []
    for _ in range(chance.randint(0, 12)):
        start = [chance.randint(0, 6) for _ in range(rank)]
        boxes.append(Region(tuple(start), tuple(a + chance.randint(0, 3) for a in start)))
    meeting = {
        (a, b)
        for i, a in enumerate(boxes)
        for b in boxes[i + 1 :]
        if a.elements and b.elements and a.intersect(b)
    }
    found = Fragments.of([Fragment(box, 0, 0, row_major(box.shape)) for box in boxes], rank).overlap()
    assert (found is None) == (not meeting)
    if found is not None:
        assert found in meeting or (found[1], found[0]) in meeting


def test_a_pinwheel_which_no_cut_goes_through_has_no_overlap():
    boxes = [((0, 0), (2, 1)), ((0, 1), (1, 3)), ((1, 2), (3, 3)), ((2, 0), (3, 2)), ((1, 1), (2, 2))]
    pieces = [dense(Region(*box), 0) for box in boxes]
    assert Fragments.of(pieces, 2).overlap() is None
    assert Fragments.of([*pieces, dense(Region((1, 1), (2, 3)), 0)], 2).overlap() is not None


@pytest.mark.parametrize("rank", [0, 2])
def test_no_pieces_are_pieces_too(rank):
    none = Fragments.of([], rank)
    assert list(none) == [] and none.overlap() is None and len(joined([], rank)) == 0
    assert len(none.within(Region((0,) * rank, (1,) * rank))) == 0
