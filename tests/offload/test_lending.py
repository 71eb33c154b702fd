"""Lent memory goes back when nobody holds it, and an arena never gives a byte twice."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.io.buffers import BufferPool
from holdfast.offload.memory.block_states import ALIGN
from holdfast.offload.memory.transfer_pool import Arena, TransferPool, forms_of, packed_bytes, unpacked

KIBI = 1024


def test_what_is_lent_is_there_until_the_last_view_of_it_is_gone():
    lending = TransferPool(BufferPool(), 0)
    (held,) = lending.lender("inputs")([torch.zeros(3, 5)])
    address, part = held.data_ptr(), held[1:]
    del held
    other, _ = lending.lend(60, "inputs")
    addresses = {address, other.data_ptr()}
    assert len(addresses) == 2
    del part, other
    again = [lending.lend(60, "inputs")[0] for _ in range(2)]
    assert {tensor.data_ptr() for tensor in again} == addresses


@pytest.mark.slow
def test_a_tensor_that_goes_while_memory_is_being_lent_blocks_nobody(monkeypatch):
    """A collection in the middle of it finds some more."""
    pool = BufferPool()
    lending = TransferPool(pool, 0)
    circle = [lending.lend(60, "inputs")[0]]
    circle.append(circle)
    del circle
    take = pool.take
    monkeypatch.setattr(pool, "take", lambda *a: (gc.collect(), take(*a))[1])
    lending.lend(60, "inputs")
    lending.lend(60, "inputs")
    assert pool.in_use_bytes == 4096


def test_copies_have_the_strides_of_what_they_are_of():
    """Or, where there are gaps, those of a clone."""
    tensors = [torch.randn(3, 5).t(), torch.randn(4, 6)[:, ::2], torch.randn(0, 2), torch.randn(())]
    lent = TransferPool(BufferPool(), 0).lender("inputs")(tensors)
    for copy, tensor in zip(lent, tensors, strict=True):
        assert (copy.shape, copy.stride()) == (tensor.shape, tensor.clone().stride())
        assert copy.data_ptr() % ALIGN == 0
    forms = forms_of(tensors)
    flat = torch.zeros(packed_bytes(forms), dtype=torch.uint8)
    for copy, tensor in zip(unpacked(flat, forms), tensors, strict=True):
        copy.copy_(tensor)
    assert all(torch.equal(c, t) for c, t in zip(unpacked(flat, forms), tensors, strict=True))


def test_kept_inputs_and_the_gradients_after_them_take_one_arena():
    """Inputs of four blocks; then gradients from the last block on, each where inputs were; then inputs again."""
    pool = BufferPool()
    lending = TransferPool(pool, 32 * KIBI)
    arena = pool.in_use_bytes
    inputs = [[lending.lend(4 * KIBI, "kept inputs")[0] for _ in range(2)] for _ in range(4)]
    grads = []
    while inputs:
        inputs.pop()
        grads.append(lending.lend(8 * KIBI, "kept inputs", from_top=True)[0])
    assert pool.in_use_bytes == arena
    while grads:
        grads.pop()
        inputs.append([lending.lend(4 * KIBI, "kept inputs")[0] for _ in range(2)])
    assert pool.in_use_bytes == arena
    assert lending.lend(1, "kept inputs")[0].numel() == 1 and pool.in_use_bytes == arena + 4096


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["low", "top", "give"]), st.integers(0, 9 * ALIGN)), max_size=80))
def test_no_byte_of_an_arena_is_taken_twice_and_none_is_lost(moves):
    size = 32 * ALIGN
    arena, taken = Arena(size), {}
    for move, number in moves:
        if move == "give" and taken:
            offset = sorted(taken)[number % len(taken)]
            arena.give(offset)
            del taken[offset]
            continue
        length = -(-max(number, 1) // ALIGN) * ALIGN
        used = [False] * (size // ALIGN)
        for start, part in taken.items():
            for index in range(start // ALIGN, (start + part) // ALIGN):
                assert not used[index]
                used[index] = True
        count = length // ALIGN
        fits = [i for i in range(len(used) - count + 1) if not any(used[i : i + count])]
        offset = arena.take(number, from_top=move == "top")
        if not fits:
            assert offset is None
            continue
        assert offset == fits[-1 if move == "top" else 0] * ALIGN
        taken[offset] = length
    for offset in taken:
        arena.give(offset)
    assert arena.take(size) == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097])
def test_bytes_for_io_are_those_of_the_tensor(nbytes):
    flat, view = TransferPool(BufferPool(), 0).lend(nbytes, "inputs")
    view[:] = bytes([7]) * len(view)
    assert len(view) == flat.numel() == max(nbytes, 1) and int(flat.min()) == 7


class Pins:
    """Counts what is pinned, and how often."""

    def __init__(self):
        self.times = 0

    def __call__(self, memory):
        self.times += 1
        return lambda: None


def test_lent_sizes_are_few():
    """Forty lengths of micro-batches, each lent and given back; none up to the planned size takes more than that."""
    pins, page = Pins(), 4096
    pool = BufferPool(pins, ("inputs",))
    lending = TransferPool(pool, 0, in_classes=True, planned_bytes=40 * page)
    for length in range(1, 41):
        flat, view = lending.lend(length * page, "inputs")
        assert len(view) == length * page
        assert pool.in_use_bytes <= min(40, 1.125 * length + 1) * page
        del flat, view
        lending.lend(1, "inputs")  # takes what came back first
    assert pins.times < 30


def test_idle_pinned_memory_makes_room():
    """Sizes that nobody asks for any more do not add up."""
    page = 4096
    pool = BufferPool(Pins(), ("inputs",), pinned_limit=8 * page)
    for pages in (4, 5, 3, 6):
        pool.give(pool.take(pages * page, "inputs"))
        assert pool.pinned_bytes <= 8 * page
    held = [pool.take(6 * page, "inputs") for _ in range(2)]
    assert pool.pinned_bytes == 12 * page  # what is in use is never taken away
    for buffer in held:
        pool.give(buffer)
    pool.close()
