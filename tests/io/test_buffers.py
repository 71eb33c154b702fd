"""The pool hands out page-aligned memory and keeps what is given back."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.io.buffers import BufferPool
from holdfast.quantities import PAGE


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 104729])
def test_a_buffer_is_aligned_and_rounded_up_to_pages(nbytes):
    buffer = BufferPool().take(nbytes, "state")
    assert buffer.nbytes == max(PAGE, -(-nbytes // PAGE) * PAGE) == len(buffer.view)
    assert ctypes.addressof(ctypes.c_char.from_buffer(buffer.view)) % PAGE == 0
    buffer.view[:] = bytes(buffer.nbytes)


def test_a_buffer_given_back_is_taken_again():
    pool = BufferPool()
    first = pool.take(100, "state")
    pool.give(first)
    assert pool.idle_bytes == PAGE
    assert pool.take(4000, "gradients") is first
    assert first.kind == "gradients"


def test_buffers_of_one_kind_differ_by_little():
    """Tiles of a block are not quite of one size; a buffer for each size would keep all of them in memory."""
    pool = BufferPool()
    first = pool.take(64 * PAGE, "state")
    pool.give(first)
    assert pool.take(61 * PAGE, "state") is first
    assert first.nbytes == len(first.view) == 61 * PAGE
    pool.give(first)
    assert (pool.in_use_bytes, pool.idle_bytes) == (0, 64 * PAGE)
    assert pool.take(64 * PAGE, "state") is first and len(first.view) == 64 * PAGE
    pool.give(first)
    assert pool.take(61 * PAGE, "gradients") is not first


def test_other_sizes_do_not_stay_idle():
    pool = BufferPool()
    small = [pool.take(PAGE, "state") for _ in range(3)]
    for buffer in small:
        pool.give(buffer)
    large = pool.take(8 * PAGE, "state")
    assert (pool.in_use_bytes, pool.idle_bytes) == (8 * PAGE, 0)
    pool.give(large)
    pool.take(PAGE, "gradients")
    assert pool.idle_bytes == 8 * PAGE


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
def test_any_takes_and_gives_add_up(moves):
    pool, held = BufferPool(), []
    for take, nbytes, kind in moves:
        if take:
            held.append(pool.take(nbytes, kind))
            assert held[-1].nbytes == max(PAGE, -(-nbytes // PAGE) * PAGE) and held[-1].kind == kind
            assert not any(held[-1] is other for other in held[:-1])
        elif held:
            pool.give(held.pop(nbytes % len(held)))
        assert pool.in_use_bytes == sum(buffer.nbytes for buffer in held)
        assert pool.in_use_bytes + pool.idle_bytes <= sum(pool.most_by_kind.values())
    pool.close()
    assert pool.idle_bytes == 0


def test_the_most_that_was_in_use_is_known_by_what_for():
    pool = BufferPool()
    a, b = pool.take(4096, "a"), pool.take(8192, "a")
    pool.give(a)
    pool.give(b)
    pool.take(4096, "b")  # the very same memory
    pool.take(4096, "a")
    assert pool.most_by_kind == {"a": 12288, "b": 4096}


def test_a_dropped_buffer_is_not_handed_out_again_and_holds_no_memory():
    pool = BufferPool()
    buffer = pool.take(4096, "a")
    seen = memoryview(buffer.view)
    seen[:] = b"x" * 4096
    pool.drop(buffer)
    assert (pool.in_use_bytes, pool.idle_bytes) == (0, 0)
    assert bytes(seen[:4]) == bytes(4)  # somebody still looks at it
    assert pool.take(4096, "b") is not buffer
    with pytest.raises(ValueError, match="not in use"):
        pool.drop(buffer)


def test_idle_memory_is_handed_back_when_it_is_asked_for():
    pool = BufferPool()
    used, idle = pool.take(4096, "a"), pool.take(8192, "a")
    seen = memoryview(idle.view)
    seen[:1] = used.view[:1] = b"x"
    pool.give(idle)
    pool.free_idle()
    assert (pool.in_use_bytes, pool.idle_bytes) == (4096, 0)
    assert (bytes(seen[:1]), bytes(used.view[:1])) == (bytes(1), b"x")
    assert pool.take(8192, "a") is not idle


# Pinned memory


class Pins:
    def __init__(self):
        self.held, self.count = [], 0

    def pin(self, view):
        self.held.append(len(view))
        self.count += 1
        return lambda: self.held.remove(len(view))


def test_memory_of_some_kinds_is_pinned_once_and_kept_apart():
    pins = Pins()
    pool = BufferPool(pins.pin, ["parameters"])
    plain = pool.take(5000, "state")
    pool.give(plain)
    pinned = pool.take(5000, "parameters")
    assert pinned is not plain and pins.held == [2 * PAGE] and pool.pinned_bytes == 2 * PAGE
    pool.give(pinned)
    assert pool.take(5000, "state") is plain and pool.take(5000, "parameters") is pinned
    assert pins.count == 1


def test_idle_memory_that_is_handed_back_is_not_pinned():
    pins = Pins()
    pool = BufferPool(pins.pin, ["parameters"])
    pool.take(PAGE, "parameters")
    for kind in ("parameters", "state"):
        pool.give(pool.take(2 * PAGE, kind))
    pool.free_idle()
    assert pins.held == [PAGE] and pool.pinned_bytes == PAGE and pool.idle_bytes == 0


@pytest.mark.parametrize("end", ["dropped", "idle", "in use"])
def test_nothing_is_pinned_when_a_pool_is_closed(end):
    pins = Pins()
    pool = BufferPool(pins.pin, ["parameters"])
    buffer = pool.take(PAGE, "parameters")
    if end != "in use":
        (pool.drop if end == "dropped" else pool.give)(buffer)
    assert pool.pinned_bytes == (0 if end == "dropped" else PAGE)
    pool.close()
    assert pins.held == [] and pool.pinned_bytes == 0


def test_memory_that_could_not_be_pinned_is_not_counted_and_taken_again():
    pool = BufferPool(lambda view: None, ["parameters"])
    buffer = pool.take(PAGE, "parameters")
    pool.give(buffer)
    assert pool.pinned_bytes == 0
    assert pool.take(PAGE, "parameters") is buffer
    pool.drop(buffer)
    pool.close()
    assert pool.pinned_bytes == 0
