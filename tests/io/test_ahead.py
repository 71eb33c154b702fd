"""Files are read ahead while something else is done: the newest first, no more than is allowed, whatever they are."""

from __future__ import annotations

import os
import time

import pytest

from holdfast.io import ahead


@pytest.fixture
def read(monkeypatch):
    """The names of files and the bytes that were read of them, as it goes on."""
    found, real = [], os.preadv

    def preadv(fd, buffers, offset):
        count = real(fd, buffers, offset)
        if count:
            found.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), count))
        return count

    monkeypatch.setattr(ahead.os, "preadv", preadv)
    return found


@pytest.fixture
def folder(tmp_path):
    """Three files, of which ``new`` was written last."""
    for age, (name, size) in enumerate({"new": 10, "tag/older": 4097, "oldest": 1}.items()):
        path = tmp_path / "folder" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"x" * size)
        os.utime(path, (1000 - age, 1000 - age))
    return tmp_path / "folder"


def after(path, most_bytes, enough, read):
    with ahead.reading_ahead(path, most_bytes):
        end = time.monotonic() + 20
        while not enough() and time.monotonic() < end:
            time.sleep(0.001)
    return read


def test_all_files_are_read_the_newest_first(folder, read):
    assert after(folder, 1 << 30, lambda: len(read) == 3, read) == [
        ("new", 10),
        ("older", 4097),
        ("oldest", 1),
    ]


def test_one_file_is_read_a_window_at_a_time(folder, read, monkeypatch):
    monkeypatch.setattr(ahead, "BUFFER", 100)
    found = after(folder / "tag/older", 1 << 30, lambda: sum(n for _, n in read) == 4097, read)
    assert found == [("older", 1600), ("older", 1600), ("older", 897)]


def test_no_more_is_read_than_is_allowed(folder, read, monkeypatch):
    monkeypatch.setattr(ahead, "BUFFER", 100)
    with ahead.reading_ahead(folder, 1700):
        time.sleep(0.2)
    assert read == [("new", 10), ("older", 1600), ("older", 1600)]


def test_it_ends_with_the_block(folder, read, monkeypatch):
    monkeypatch.setattr(ahead, "BUFFERS", 1)
    monkeypatch.setattr(ahead, "BUFFER", 1)
    after(folder, 1 << 30, lambda: len(read) > 5, read)
    count = len(read)
    time.sleep(0.05)
    assert len(read) == count < 4108


def test_what_is_not_there_or_cannot_be_read_is_left(folder, read, monkeypatch):
    with ahead.reading_ahead(folder / "none@3", 1 << 30):
        pass
    real = open

    def refusing(path, *options):
        if str(path).endswith("new"):
            raise PermissionError
        return real(path, *options)

    monkeypatch.setattr(ahead, "open", refusing, raising=False)
    assert after(folder, 1 << 30, lambda: len(read) == 2, read) == [("older", 4097), ("oldest", 1)]
