"""Reading block inputs back from the SSD."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

from holdfast.io.buffers import BufferPool
from holdfast.offload.memory.transfer_pool import TransferPool
from holdfast.offload.ops import input_ops
from holdfast.quantities import PAGE


def test_memory_is_not_lent_again_while_a_page_of_filler_is_read_into_it():
    lender, reading, target = TransferPool(BufferPool(), 0), Future(), []

    def read(offset, view, **told):
        target.append(view)
        return reading

    boundary = SimpleNamespace(forms=[], host=None)
    run = SimpleNamespace(
        device=SimpleNamespace(unified=False),
        residency=SimpleNamespace(lend=lender.lend),
        input_scratch=SimpleNamespace(slot=lambda place, nbytes: (SimpleNamespace(read=read), 0)),
    )
    key = SimpleNamespace(kind="load_input", phase="backward", block=1, micro_batch=0)
    op = SimpleNamespace(key=key, lane="ssd_read", priority=0)
    step = SimpleNamespace(micro_batches=[SimpleNamespace(boundaries={1: boundary})])
    assert input_ops.load(run, op, step) is reading and boundary.host == []

    def lent_again():
        _, view = lender.lend(PAGE, "inputs")
        view[:1] = b"x"
        found = target[0][:1] == b"x"
        view[:1] = target[0][:1] = b"."
        return found

    assert not lent_again()
    reading.set_result(None)
    assert lent_again()
