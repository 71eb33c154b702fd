"""A run whose nodes have a directory each, read from all of these directories by one process.

Small files (manifests, indexes, timeline records) are the same on every node, so the first directory that has one
serves. Payload and log segments are read where ``share_places`` finds them: in the directory of the node that wrote
them, or as the copy at its partner. Nothing is written: what changes a run of nodes does so in each directory.
Called by readers of runs, through ``remote_disk``. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from holdfast.errors import BadInput, Damaged, RunMismatch
from holdfast.store.disk import AnyDisk, Disk, ReadOnly
from holdfast.store.drive_links import data_paths
from holdfast.store.format.manifest import CommitRef, Manifest, Timeline, is_ours, timeline_of_name
from holdfast.store.format.payload_files import read_shares
from holdfast.store.log.segments import segments, streams
from holdfast.store.share_places import (
    OWN,
    Holdings,
    Place,
    Places,
    copied_files,
    copies_disk,
    payload_places,
    segment_places,
    streams_of_segments,
)

STREAMS = "streams"
"""The key, in the ``writer`` of a timeline's record, of the streams that the directory hosts."""
NOBODY = -1
"""The place of a reader that is on no node."""


class JoinedNodes(ReadOnly, Disk):
    """The directories of all nodes of one run, read as one run directory.

    Raises ``RunMismatch`` if they hold parts of two runs.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        super().__init__(directories[0])
        self._disks: list[Disk] = [Disk(each) for each in directories]
        self._copies: list[Disk] = [copies_disk(each) for each in directories]
        records = [timeline_records(disk) for disk in self._disks]
        keys = {
            str(each): {number: record.key for number, record in found.items()}
            for each, found in zip(directories, records, strict=True)
        }
        refuse_two_runs(keys, "Name the directories of one run's nodes.")
        holdings = [holdings_of(disk, each.values()) for disk, each in zip(self._disks, records, strict=True)]
        self._segments = segment_places(holdings, NOBODY)
        self._places: Places = payload_places(self._manifests(), holdings, NOBODY) | self._segments

    def _manifests(self) -> list[Manifest]:
        """Return the commits of all directories that can be read, newest first."""
        found: dict[CommitRef, Manifest] = {}
        for disk in self._disks:
            for ref in filter(None, map(CommitRef.of_name, disk.listdir("commits"))):
                with suppress(Damaged, FileNotFoundError):
                    if ref not in found:
                        found[ref] = read_shares(disk, Manifest.decode(disk.read_bytes(ref.path), ref.path))
        return [found[ref] for ref in sorted(found, reverse=True)]

    def listdir(self, path: str) -> list[str]:
        """Return the sorted names in ``path`` of all directories; of logs, those of records that are somewhere."""
        if path == "journal":
            return streams_of_segments(self._segments)
        if path.startswith("journal/"):
            return sorted(each.rpartition("/")[2] for each in self._segments if each.startswith(f"{path}/"))
        return sorted({name for disk in self._disks for name in disk.listdir(path)})

    def exists(self, path: str) -> bool:
        if path in self._places:
            return bool(self._places[path])
        return any(disk.exists(path) for disk in self._disks)

    def size(self, path: str) -> int:
        """Return the bytes of ``path``. Raises ``FileNotFoundError`` if it is in no directory."""
        disk, there = self._found(path)
        return disk.size(there)

    def open(self, path: str, *, write: bool = True, direct: bool = True) -> Any:
        """Open ``path`` for reading where it is. Raises ``FileNotFoundError`` if it is in no directory."""
        disk, there = self._found(path)
        return disk.open(there, write=False, direct=direct)

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a small file. Raises as ``Disk.read_bytes``."""
        disk, there = self._found(path)
        return disk.read_bytes(there)

    def data_end(self, path: str) -> int:
        return self.size(path)

    def is_locked(self, path: str) -> bool:
        return any(disk.is_locked(path) for disk in self._disks)

    def _found(self, path: str) -> tuple[Disk, str]:
        """Return the disk that has ``path``, and its path there. Raises ``FileNotFoundError`` if none has it."""
        if path in self._places:
            place = next(iter(self._places[path]), None)
            if place is None:
                raise FileNotFoundError(f"{path} is in no node's directory")
            return self._disk_of(place), place.path
        disk = next((disk for disk in self._disks if disk.exists(path)), None)
        if disk is None:
            raise FileNotFoundError(f"{path} is in no node's directory")
        return disk, path

    def _disk_of(self, place: Place) -> Disk:
        return (self._disks if place.tier == OWN else self._copies)[place.node]

    def _refuse(self) -> NoReturn:
        names = ", ".join(str(disk.root) for disk in self._disks)
        raise BadInput(
            f"{names} are the directories of one run's nodes, and are read together, not written. Train with nodes=,"
            " and give each node its own."
        )


def holdings_of(disk: AnyDisk, records: Iterable[Timeline]) -> Holdings:
    """Return what the directory of a node holds. ``records`` are those of the timelines there."""
    hosted = {record.key: record.writer.get(STREAMS, []) for record in records}
    own: dict[str, int] = {}
    paths = [*data_paths(disk)]
    paths += [ref.path for stream in streams(disk) for ref in segments(disk, stream)]
    for path in paths:
        with suppress(FileNotFoundError, Damaged):
            own[path] = disk.size(path)
    return Holdings(hosted, own, copied_files(copies_disk(disk.root)), disk.exists("journal"))


def is_node(directory: Path) -> bool:
    """Return whether ``directory`` is that of one node, of a run whose nodes have a directory each."""
    records = timeline_records(Disk(directory))
    return bool(records) and STREAMS in records[max(records)].writer


def timeline_records(disk: AnyDisk) -> dict[int, Timeline]:
    """Return the timeline records of a directory that can be read, by number."""
    return dict(_timelines(disk))


def _timelines(disk: AnyDisk) -> Iterator[tuple[int, Timeline]]:
    for name in disk.listdir("timelines"):
        if is_ours("timelines", name) and (number := timeline_of_name(name)) is not None:
            path = f"timelines/{name}"
            with suppress(Damaged, FileNotFoundError):
                yield number, Timeline.decode(disk.read_bytes(path), path)


def refuse_two_runs(keys: Mapping[str, Mapping[int, str]], way_out: str) -> None:
    """Raise ``RunMismatch`` if two directories mean different timelines by one number.

    Args:
        keys: The keys of each directory's timelines, by number, under the name that the error has for the directory.
        way_out: What the error advises.
    """
    known: dict[int, tuple[str, str]] = {}
    for directory, found in keys.items():
        for number, key in found.items():
            other, other_key = known.setdefault(number, (directory, key))
            if key != other_key:
                raise RunMismatch(
                    f"{other} and {directory} hold two runs, or two parts of one that went on by themselves: they mean"
                    f" different timelines by {number}. {way_out}"
                )
