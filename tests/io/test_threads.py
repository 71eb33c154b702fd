"""Files transfer all bytes or fail with a name, whatever the system calls return."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import warnings

import pytest

from holdfast.errors import Damaged, DiskFailed, DiskFull
from holdfast.io import threads
from holdfast.io.buffers import Buffer
from holdfast.io.threads import BufferedIOWarning, open_file
from holdfast.quantities import PAGE

SIZES = [0, 1, 4095, 4096, 4097, 104729]


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request, tmp_path):
    with open_file(tmp_path / "file", write=True, create=True, direct=request.param) as file:
        yield file


@pytest.fixture
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(threads, "_warned_directories", set())


def filled(nbytes, seed=0):
    buffer = Buffer(max(PAGE, -(-nbytes // PAGE) * PAGE), "test")
    buffer.view[:] = random.Random(seed).randbytes(buffer.nbytes)
    return buffer


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_read(file, nbytes):
    buffer = filled(nbytes)
    view = buffer.view if file.direct else buffer.view[:nbytes]
    file.write(view, PAGE)
    copy = Buffer(buffer.nbytes, "test")
    file.read(copy.view[: len(view)], PAGE)
    assert copy.view[: len(view)] == view


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("most", [1, 511, 4096, 5000, 12289])
def test_short_transfers_are_continued(file, monkeypatch, verb, most):
    """Direct I/O goes on from a whole page; a file system that gives less than one each time has failed."""
    buffer = filled(9 * PAGE)
    file.write(buffer.view, 0)
    original = {"read": os.preadv, "write": os.pwritev}[verb]
    offsets = []

    def short(fd, buffers, offset):
        offsets.append(offset)
        return original(fd, [buffers[0][:most]], offset) if not file.direct else min(
            original(fd, buffers, offset), most
        )  # fmt: skip

    monkeypatch.setattr(os, {"read": "preadv", "write": "pwritev"}[verb], short)
    target = Buffer(9 * PAGE, "test") if verb == "read" else filled(9 * PAGE, seed=1)
    if file.direct and most < PAGE:
        with pytest.raises(DiskFailed, match=f"short {verb}: .* at offset 0: wanted 36864 bytes"):
            getattr(file, verb)(target.view, 0)
        return
    getattr(file, verb)(target.view, 0)
    monkeypatch.undo()
    stored = Buffer(9 * PAGE, "test")
    file.read(stored.view, 0)
    assert stored.view == target.view
    assert not file.direct or all(offset % PAGE == 0 for offset in offsets)


def test_the_end_of_the_file_is_an_error_with_both_lengths(file):
    file.write(filled(PAGE).view, 0)
    with pytest.raises(DiskFailed, match=r"file at offset 0: wanted 8192 bytes, got 4096; the file has 4096"):
        file.read(filled(2 * PAGE).view, 0)
    with pytest.raises(DiskFailed, match="wanted 4096 bytes, got 0"):
        file.read(filled(PAGE).view, 10 * PAGE)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_interrupted_call_is_made_again(file, monkeypatch, verb):
    file.write(filled(PAGE).view, 0)
    failing(monkeypatch, verb, InterruptedError(errno.EINTR, "interrupted"), times=3)
    getattr(file, verb)(filled(PAGE).view, 0)


def failing(monkeypatch, verb, error, times):
    """Let the next ``times`` calls of ``verb`` fail with ``error``."""
    name = {"read": "preadv", "write": "pwritev"}[verb]
    original = getattr(os, name)
    left = [times]

    def call(*arguments):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return original(*arguments)

    monkeypatch.setattr(os, name, call)


def test_a_failed_read_is_tried_once_more(file, monkeypatch):
    buffer = filled(PAGE)
    file.write(buffer.view, 0)
    failing(monkeypatch, "read", OSError(errno.EIO, "Input/output error"), times=1)
    copy = Buffer(PAGE, "test")
    file.read(copy.view, 0)
    assert copy.view == buffer.view


@pytest.mark.parametrize(("verb", "times"), [("read", 2), ("write", 1)])
def test_a_failing_device_is_named_with_file_offset_and_way_out(file, monkeypatch, verb, times):
    file.write(filled(2 * PAGE).view, 0)
    failing(monkeypatch, verb, OSError(errno.EIO, "Input/output error"), times)
    with pytest.raises(
        DiskFailed, match=f"{verb} failed: .*file at offset 4096, 4096 bytes: Input/output error"
    ):
        getattr(file, verb)(filled(PAGE).view, PAGE)


def test_a_full_disk_is_named_with_directory_bytes_needed_and_free(file, monkeypatch, tmp_path):
    failing(monkeypatch, "write", OSError(errno.ENOSPC, "No space left on device"), times=1)
    with pytest.raises(DiskFull, match=rf"no space left in {tmp_path}: 8192 bytes .* \d+ \(.*\) are free"):
        file.write(filled(2 * PAGE).view, 0)


def test_direct_transfers_need_whole_pages(tmp_path):
    with open_file(tmp_path / "file", write=True, create=True) as file:
        if not file.direct:
            pytest.skip("the file system of the tests has no direct I/O")
        for view, offset in [(filled(PAGE).view[:100], 0), (filled(PAGE).view, 1)]:
            with pytest.raises(ValueError, match="multiples of 4096"):
                file.write(view, offset)
        with pytest.raises(ValueError, match="memory aligned"):
            file.write(memoryview(bytearray(3 * PAGE))[40 : 40 + PAGE], 0)


def test_direct_io_refused_at_open_falls_back_with_one_warning_per_directory(
    tmp_path, monkeypatch, fresh_warnings
):
    original = os.open

    def refuse(path, flags, *rest):
        if flags & threads.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(BufferedIOWarning, match=rf"{tmp_path} does not take direct I/O"):
        first = open_file(tmp_path / "a", write=True, create=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = open_file(tmp_path / "b", write=True, create=True)
    assert not first.direct and not second.direct
    first.write(memoryview(b"odd"), 1)
    first.close()
    second.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_direct_io_refused_at_the_first_transfer_falls_back_too(tmp_path, monkeypatch, fresh_warnings, verb):
    buffer = filled(PAGE)
    with open_file(tmp_path / "file", write=True, create=True) as file:
        if not file.direct:
            pytest.skip("the file system of the tests has no direct I/O")
        file.write(buffer.view, 0)
        failing(monkeypatch, verb, OSError(errno.EINVAL, "Invalid argument"), times=1)
        with pytest.warns(BufferedIOWarning):
            getattr(file, verb)(buffer.view, 0)
        assert not file.direct


def test_a_missing_file_and_a_forbidden_one_say_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "absent", write=False)
    with pytest.raises(Damaged, match=f"{tmp_path} is a directory, and no regular file"):
        open_file(tmp_path, write=True)


def test_closing_twice_is_harmless(file):
    file.close()
    file.close()


@pytest.mark.root
def test_a_truly_full_file_system(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting is refused here: {done.stderr.strip()}")
    try:
        with open_file(mount / "file", write=True, create=True, direct=False) as file:
            with pytest.raises(
                DiskFull, match=rf"no space left in {mount}: 65536 bytes .* 0 \(0 B\) are free"
            ):
                file.write(filled(32 * PAGE).view, 0)
            file.write(filled(4 * PAGE).view, 0)
    finally:
        subprocess.run(["umount", mount], check=True)
