"""The copies that a node keeps of its partner's shares, in ``partner/`` of its own run directory.

Log records lie in segments of the names and offsets that they have at their writer. Payload files are named by their
content, as in a bucket, and never change:

1. The bytes go to a file with a temporary name, block by block; sync.
2. The file is renamed; the directory is synced.

What no commit of the node's own directory needs any more is removed, after the commit is gone. Called by the thread
that answers the partner's requests, and by ``NodeStore``. Sizes and offsets are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from holdfast import failpoints
from holdfast.store.commit.retention import Need, unneeded_segments
from holdfast.store.disk import TEMPORARY, AnyDisk, Disk, OpenFile
from holdfast.store.log.segments import segments, streams

COPIES = "partner"
"""The directory of a run directory that holds the copies."""
DATA = "data"
_PATH = re.compile(
    r"journal/rank-\d{5}/step-\d{12,}\.t\d{4,}\.log|data/[A-Za-z0-9_][A-Za-z0-9_.\-]*\.[0-9a-f]{32}\.safetensors"
)
_OBJECT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.[0-9a-f]{32}\.safetensors")


def copies_disk(root: str | Path) -> Disk:
    """Return the disk whose root is the directory of copies in the run directory ``root``."""
    return Disk(Path(root) / COPIES)


class PartnerFiles:
    """Writer of copies. Used by one thread at a time."""

    def __init__(self, disk: AnyDisk) -> None:
        self._disk = disk
        self._open: dict[str, tuple[str, OpenFile]] = {}
        """The file that is written in each directory, with its path."""
        self._unnamed: set[str] = set()
        """Files whose names are not durable yet."""

    def write(self, path: str, nbytes: int, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` of a file of ``nbytes``, made if absent. Not durable yet.

        Raises ``ValueError`` for a path that no copy has.
        """
        if not _PATH.fullmatch(path.removesuffix(TEMPORARY)):
            raise ValueError(f"{path!r} is no path of a copy")
        self._file(path, nbytes).write(data, offset)

    def sync(self, path: str) -> None:
        """Make what was written to ``path`` durable, with its name."""
        folder = path.rpartition("/")[0]
        failpoints.reach("before_copy_sync")
        self._disk.sync(self._open[folder][1], why="partner's records")
        if path in self._unnamed:
            self._disk.sync_dir(folder, why="partner's directory")
            self._unnamed.discard(path)
        failpoints.reach("after_copy_sync")

    def finish(self, path: str) -> None:
        """Make the temporary file of ``path`` durable under its name."""
        folder, _, _ = path.rpartition("/")
        self._disk.sync(self._open[folder][1], why="partner's data")
        self._close(folder)
        failpoints.reach("after_copy_written")
        self._disk.rename(path + TEMPORARY, path)
        self._disk.sync_dir(folder, why="partner's data directory")
        self._unnamed.discard(path + TEMPORARY)
        failpoints.reach("after_copy_renamed")

    def has(self, path: str, nbytes: int) -> bool:
        """Return whether the payload file ``path`` is there with its size."""
        return self._disk.exists(path) and self._disk.size(path) == nbytes

    def close(self) -> None:
        """Close all files. A second call does nothing."""
        for folder in list(self._open):
            self._close(folder)

    def _file(self, path: str, nbytes: int) -> OpenFile:
        folder = path.rpartition("/")[0]
        known = self._open.get(folder)
        if known is not None and known[0] == path:
            return known[1]
        self._close(folder)
        if not self._disk.exists(path) or self._disk.size(path) != nbytes:
            self._disk.makedirs(folder)
            self._disk.allocate(path, nbytes)
            self._unnamed.add(path)
        file = self._disk.open(path, direct=False)
        self._open[folder] = path, file
        return file

    def _close(self, folder: str) -> None:
        known = self._open.pop(folder, None)
        if known is not None:
            known[1].close()


def copied_files(disk: AnyDisk) -> dict[str, int]:
    """Return the sizes of all copies by path, without those under way."""
    found = {}
    for name in disk.listdir(DATA):
        if _OBJECT.fullmatch(name):
            found[f"{DATA}/{name}"] = disk.size(f"{DATA}/{name}")
    for stream in streams(disk):
        for ref in segments(disk, stream):
            found[ref.path] = disk.size(ref.path)
    return found


def sweep_copies(disk: AnyDisk, named: Collection[str]) -> None:
    """Remove the copies of payload that no commit names (``named`` by content), and those under way.

    Nobody may be sending.
    """
    for name in disk.listdir(DATA):
        path = f"{DATA}/{name}"
        if _OBJECT.fullmatch(name.removesuffix(TEMPORARY)) and path not in named:
            disk.unlink(path)


def prune_copies(disk: AnyDisk, needed: Collection[Need], timeline: int | None) -> None:
    """Remove the copied segments without a record that is ``needed``, but for the ones that ``timeline`` appends to."""
    for path in list(unneeded_segments(disk, needed, timeline)):
        failpoints.reach("before_segment_unlink")
        disk.unlink(path)
