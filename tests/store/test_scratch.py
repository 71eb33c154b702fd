"""Scratch files give back what this process wrote, verified, and keep nothing."""

from __future__ import annotations

import random

import pytest

from holdfast.errors import ChunkCorrupt
from holdfast.io.buffers import Buffer
from holdfast.quantities import MiB

HOW = {"kind": "params", "phase": "forward", "priority": 1}


def filled(nbytes, seed=0):
    buffer = Buffer(nbytes, "test")
    buffer.view[:] = random.Random(seed).randbytes(nbytes)
    return buffer.view


@pytest.mark.parametrize("nbytes", [4096, 4 * MiB, 4 * MiB + 4096, 9 * MiB])
def test_what_is_written_is_read(run, nbytes):
    scratch = run.store.scratch("params", 4096 + nbytes)
    data = filled(nbytes)
    scratch.write(4096, data, **HOW).result(30)
    copy = filled(nbytes, seed=1)
    scratch.read(4096, copy, **HOW).result(30)
    assert copy == data


def test_a_part_is_read_by_the_pieces_that_were_written(run):
    scratch = run.store.scratch("params", 9 * MiB)
    data = filled(9 * MiB)
    scratch.write(0, data, **HOW).result(30)
    part = filled(4 * MiB, seed=1)
    scratch.read(4 * MiB, part, **HOW).result(30)
    assert part == data[4 * MiB : 8 * MiB]
    with pytest.raises(ValueError, match="not written as such"):
        scratch.read(4096, part, **HOW)


def test_changed_bytes_are_found(run):
    scratch = run.store.scratch("params", 4096)
    scratch.write(0, filled(4096), **HOW).result(30)
    with open(run.store.root / "scratch/params.bin", "r+b") as file:
        file.write(b"\x01\x02\x03")
    with pytest.raises(ChunkCorrupt, match=r"scratch/params\.bin offset 0, 4096 bytes"):
        scratch.read(0, filled(4096), **HOW).result(30)


def test_only_whole_pages_inside_the_file(run):
    scratch = run.store.scratch("params", 8192)
    for offset, nbytes in [(1, 4096), (0, 100), (8192, 4096), (4096, 8192)]:
        with pytest.raises(ValueError, match="not whole pages in it"):
            scratch.write(offset, filled(8192)[:nbytes], **HOW)


def test_nothing_of_an_earlier_process_is_left(tmp_path):
    from tiny_run import TinyRun

    root = tmp_path / "run"
    with TinyRun(root) as run:
        run.store.scratch("params", 4096).write(0, filled(4096), **HOW).result(30)
        (root / "scratch/inputs-7.bin").write_bytes(b"x")
    assert not (root / "scratch/params.bin").exists()
    with TinyRun(root) as run:
        assert not (root / "scratch/inputs-7.bin").exists()
        scratch = run.store.scratch("params", 4096)
        with pytest.raises(ValueError, match="not written"):
            scratch.read(0, filled(4096), **HOW)


def test_a_scratch_file_that_is_given_up_is_gone_before_the_store_is_closed(run):
    scratch = run.store.scratch("inputs-0", 4096)
    run.store.remove_scratch(scratch)
    assert list((run.store.root / "scratch").iterdir()) == []
