"""What is no regular file, or has no content, in the place of a file of a run: found as damage, in no time."""

from __future__ import annotations

import os
import shutil
import socket

import pytest
import torch

from holdfast.checkpointer import Checkpointer
from holdfast.cli.inspect import verify
from holdfast.errors import Damaged, DiskFailed, ManifestCorrupt
from holdfast.regular_files import read_regular
from holdfast.store.disk import Disk
from holdfast.store.log.segments import segments, trim
from holdfast.store.run_store import LocalStore

PLACES = ("commits", "timelines", "index", "data", "journal/rank-00000")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = tmp_path_factory.mktemp("runs") / "run"
    with Checkpointer(root, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            checkpointer.step()
    return root


def replaced(run, folder, place, kind):
    """A copy of the run, in which the files of ``place`` are of another kind; and one of those."""
    copy = folder / "run"
    shutil.copytree(run, copy)
    for path in (copy / place).iterdir():
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.touch()
            os.truncate(path, 200 << 30)
    return copy, path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["fifo", "directory"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_damage(run, tmp_path, place, kind, capsys):
    copy, path = replaced(run, tmp_path, place, kind)
    try:
        good = verify(str(copy), as_json=False)
    except Damaged:
        good = False
    assert not good or place == "timelines"  # of which the manifest says the same
    with LocalStore.open(copy):  # a writer's opening waits for nothing either
        assert path.exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", PLACES)
def test_a_giant_without_content_is_not_read(run, tmp_path, place):
    copy, path = replaced(run, tmp_path, place, "sparse")
    with LocalStore.open(copy) as store:
        assert store.commits()
    if place.startswith("journal"):
        assert path.stat().st_size == 0  # the space behind the last record was given back


def test_a_socket_is_no_file(tmp_path):
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(str(tmp_path / "s"))
        with pytest.raises(Damaged, match="is a socket, and no regular file"):
            Disk(tmp_path).open("s")


def test_small_files_are_read_to_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ManifestCorrupt, match="has 5 bytes, and none of its kind has more than 4"):
        read_regular(tmp_path / "a", 4)


def test_a_write_into_a_fifo_does_not_wait(tmp_path):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(DiskFailed, match=r"cannot write .*a: "):
        Disk(tmp_path).write_bytes("a", b"text")


def test_a_header_without_content_ends_the_segment(run, tmp_path):
    """Its first page says how long it is; nothing that long is taken from memory before it is there."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    disk = Disk(copy)
    [ref] = segments(disk, "rank-00000")
    with open(copy / ref.path, "r+b") as file:
        file.write(b'{\n "bytes": 8589934592,\n'.ljust(4096))
        file.truncate(16 << 30)
    assert trim(disk, "rank-00000") == []
    assert (copy / ref.path).stat().st_size < 1 << 20
