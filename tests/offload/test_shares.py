"""How tensors are divided over ranks: once, in a row, at places where kernels give the same bits."""

from __future__ import annotations

from math import lcm, prod

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.offload.memory.parameter_shards import GRAIN, divided

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40000)),
    st.tuples(st.integers(0, 700), st.sampled_from([0, 1, 3, 24, 64, 768, 4096, 11008])),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([64, 4096])),
)


@settings(max_examples=300, deadline=None)
@given(tensors=st.lists(st.tuples(SHAPES, st.booleans()), max_size=8), world_size=st.integers(1, 9))
def test_every_element_has_one_owner_and_cuts_are_rows_of_whole_grains(tensors, world_size):
    by_rank = divided(tensors, world_size)
    row = [part for parts in by_rank for part in parts]
    assert len(by_rank) == world_size and [part.index for part in row] == sorted(part.index for part in row)
    for index, (shape, cut) in enumerate(tensors):
        mine = [part for part in row if part.index == index]
        assert [mine[0].start, *(p.stop for p in mine)] == [*(p.start for p in mine), prod(shape)], shape
        assert len(mine) == 1 or cut
        for part in mine[1:]:
            assert part.start % lcm(prod(shape[1:]), GRAIN) == 0


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4000), st.sampled_from([64, 768, 4096])), min_size=1, max_size=8),
    world_size=st.integers(1, 9),
)
def test_shares_are_as_equal_as_cuts_allow(rows, world_size):
    sizes = [
        sum(part.stop - part.start for part in parts)
        for parts in divided([(shape, True) for shape in rows], world_size)
    ]
    grain = max(lcm(width, GRAIN) for _, width in rows)
    assert max(abs(size - sum(sizes) / world_size) for size in sizes) <= grain


def test_what_may_not_be_cut_stays_whole():
    assert divided([((4, 4096), False), ((4, 4096), False)], 2) == [[(0, 0, 16384)], [(1, 0, 16384)]]
    assert sorted(map(len, divided([((8, 4096), False)], 3))) == [0, 0, 1]
