"""The pool hands out page-aligned memory and never holds more than its budget."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import PoolExhausted
from holdfast.io.buffers import BufferPool
from holdfast.units import PAGE


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 104729])
def test_a_buffer_is_aligned_and_rounded_up_to_pages(nbytes):
    buffer = BufferPool().take(nbytes, "state")
    assert buffer.nbytes == max(PAGE, -(-nbytes // PAGE) * PAGE) == len(buffer.view)
    assert ctypes.addressof(ctypes.c_char.from_buffer(buffer.view)) % PAGE == 0
    buffer.view[:] = bytes(buffer.nbytes)


def test_a_buffer_given_back_is_taken_again():
    pool = BufferPool(PAGE)
    first = pool.take(100, "state")
    pool.give(first)
    assert pool.idle_bytes == PAGE
    assert pool.take(4000, "gradients") is first
    assert first.kind == "gradients"


def test_idle_buffers_of_other_sizes_make_room_before_the_budget_is_exceeded():
    pool = BufferPool(4 * PAGE)
    for buffer in [pool.take(PAGE, "a"), pool.take(PAGE, "a"), pool.take(2 * PAGE, "b")]:
        pool.give(buffer)
    assert pool.idle_bytes == 4 * PAGE
    pool.take(3 * PAGE, "c")
    assert pool.in_use_bytes + pool.idle_bytes <= 4 * PAGE
    assert pool.peak_by_kind == {"a": 2 * PAGE, "b": 2 * PAGE, "c": 3 * PAGE}


def test_what_does_not_fit_is_refused_with_the_uses_and_the_smallest_budget():
    pool = BufferPool(2 * PAGE)
    pool.take(PAGE, "state")
    with pytest.raises(PoolExhausted, match=r"8.0 KiB for 'gradients' .*state 4.0 KiB.* 12288 bytes"):
        pool.take(PAGE + 1, "gradients")


def test_a_buffer_cannot_be_given_back_twice():
    pool = BufferPool()
    buffer = pool.take(1, "state")
    pool.give(buffer)
    with pytest.raises(ValueError, match="not in use"):
        pool.give(buffer)


def test_memory_goes_back_to_the_system_even_if_a_view_of_it_lives_on():
    pool = BufferPool()
    buffer = pool.take(PAGE, "state")
    held = buffer.view[:1]
    held[0] = 7
    pool.give(buffer)
    pool.close()
    assert pool.idle_bytes == 0
    assert held[0] == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE), st.sampled_from("abc")), max_size=60))
def test_any_takes_and_gives_stay_within_the_budget_and_add_up(moves):
    pool, held = BufferPool(8 * PAGE), []
    for take, nbytes, kind in moves:
        if take:
            size = max(PAGE, -(-nbytes // PAGE) * PAGE)
            used = sum(buffer.nbytes for buffer in held)
            if used + size > 8 * PAGE:
                with pytest.raises(PoolExhausted):
                    pool.take(nbytes, kind)
            else:
                held.append(pool.take(nbytes, kind))
                assert held[-1].nbytes == size and held[-1].kind == kind
                assert not any(held[-1] is other for other in held[:-1])
        elif held:
            pool.give(held.pop(nbytes % len(held)))
        assert pool.in_use_bytes == sum(buffer.nbytes for buffer in held)
        assert pool.in_use_bytes + pool.idle_bytes <= 8 * PAGE
        assert all(peak <= 8 * PAGE for peak in pool.peak_by_kind.values())
    pool.close()
    assert pool.idle_bytes == 0
