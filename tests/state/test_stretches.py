"""Stretches of flattened tensors are the boxes that NumPy finds their elements in."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ModelNotSupported
from holdfast.state.layout.regions import FlatRange, Region, copy_common, is_nothing, refuse_gaps

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def stretches(draw, shape=None):
    shape = draw(SHAPES) if shape is None else shape
    first, stop = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return FlatRange(shape, first, stop)


@given(stretches())
def test_the_boxes_of_a_stretch_are_its_elements_in_order(stretch):
    whole = torch.arange(prod(stretch.whole)).view(stretch.whole)
    held = whole.reshape(-1)[stretch.first : stretch.stop].clone()
    views = stretch.views(held)
    assert [box for box, _ in views] == stretch.boxes
    assert len(views) <= max(1, 2 * len(stretch.whole) - 1)
    for (box, view), (first, stop) in zip(views, stretch.ranges, strict=True):
        assert torch.equal(view, whole[box.slices])
        assert view.reshape(-1).tolist() == [*range(first, stop)]
    for _, view in views:
        view.fill_(-1)
    assert (held == -1).all()  # they are its memory
    assert stretch.ranges[-1][1] == stretch.stop if stretch.boxes else is_nothing(stretch)


@given(st.data())
def test_what_two_regions_have_in_common_is_copied_and_no_more(data):
    here = data.draw(stretches())
    there = data.draw(st.sampled_from([data.draw(stretches(here.whole)), Region.whole(here.whole)]))
    whole = torch.arange(1, prod(here.whole) + 1)
    common = torch.zeros_like(whole)
    low, high = max(_span(here)[0], _span(there)[0]), min(_span(here)[1], _span(there)[1])
    common[low : max(low, high)] = whole[low : max(low, high)]
    for into, out_of in ((here, there), (there, here)):
        held = torch.zeros(into.shape, dtype=torch.int64)
        copy_common(held, into, _part(whole, out_of), out_of)
        assert torch.equal(held, _part(common, into))


def _part(whole, region):
    return whole[slice(*_span(region))].view(region.shape)


def _span(region):
    return (region.first, region.stop) if isinstance(region, FlatRange) else (0, region.elements)


@given(stretches(), st.data())
def test_ranges_in_any_order_are_one_stretch_again(stretch, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, stretch.elements), max_size=3)))
    ends = [0, *cuts, stretch.elements]
    rows = [stretch.rows(range(a, b)) for a, b in pairwise(ends)]
    ranges = data.draw(st.permutations([row.to_json() for row in rows]))
    assert FlatRange.joined(stretch.whole, ranges) == stretch


def test_ranges_with_a_gap_are_no_stretch():
    with pytest.raises(ValueError, match="do not follow each other"):
        FlatRange.joined((3, 4), [(0, 3), (4, 6)])


GAPS = {
    "a gap": [(0, 4), (5, 12)],
    "twice": [(0, 6), (5, 12)],
    "not the end": [(0, 6), (6, 11)],
    "not the beginning": [(1, 6), (6, 12)],
    "nothing": [],
}


@pytest.mark.parametrize("held", GAPS.values(), ids=GAPS)
def test_stretches_of_all_ranks_that_are_not_the_whole_are_refused(held):
    ranks = [{"w": FlatRange((3, 4), *each)} for each in held]
    with pytest.raises(ModelNotSupported, match=r"of w, \[3, 4\] here, and together that is not each"):
        refuse_gaps(ranks, {"w": FlatRange((3, 4), 0, 0)})


def test_stretches_of_other_shapes_or_beside_whole_ones_are_refused():
    here = FlatRange((3, 4), 0, 6)
    for other in (FlatRange((4, 3), 6, 12), Region.whole((3, 4))):
        with pytest.raises(ModelNotSupported):
            refuse_gaps([{"w": here}, {"w": other}], {"w": here})


def test_copies_of_stretches_and_ranks_of_nothing_are_taken():
    ranks = [{"w": FlatRange((3, 4), *each)} for each in [(0, 6), (6, 12)] * 2]
    refuse_gaps([*ranks, {}], {"w": FlatRange((3, 4), 0, 0), "other": Region.whole((2,))})
