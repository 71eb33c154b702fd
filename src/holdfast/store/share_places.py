"""The places of each share of a run on nodes' own disks, and the copies that a node keeps of its partner's shares.

The payload of a rank's share lies in the directory that hosted the rank's stream in the timeline of the commit, which
that directory's own record of the timeline says; a copy of it in ``partner/`` of another node's directory, and perhaps
in the bucket. Every rank computes the same from what all nodes hold, so that all agree without another exchange.

Copies of log records lie in segments of the names and offsets that they have at their writer. Copies of payload are
named by their content, as in a bucket, so a copy that has the name has the bytes:

1. The bytes go to a file with a temporary name, block by block; sync.
2. The file is renamed; the directory is synced.

What no commit of the node's own directory needs any more is removed, after the commit is gone. Called by ``node_run``,
by ``NodeStore``, and by readers of several nodes' directories. Sizes and offsets are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from holdfast import failpoints
from holdfast.store.commit.retention import Need, unneeded_segments
from holdfast.store.disk import TEMPORARY, AnyDisk, Disk, OpenFile
from holdfast.store.format.manifest import FileRef, Manifest, object_path
from holdfast.store.log.segments import segments, streams

OWN, PARTNER, BUCKET = "own disk", "partner", "bucket"
"""The tiers, in the order in which they are read."""
TIERS = (OWN, PARTNER, BUCKET)


@dataclass
class Holdings:
    """The content of one node's directory that other nodes may read."""

    hosted: dict[str, list[str]] = field(default_factory=dict)
    """The streams that the directory hosted, by the key of the timeline."""
    own: dict[str, int] = field(default_factory=dict)
    """Sizes of the payload files and segments of the node's own ranks, by path."""
    copies: dict[str, int] = field(default_factory=dict)
    """Sizes of the copies for the partner, by path in ``partner/``."""
    has_log: bool = False
    """True if there is a directory of logs, which a run that records its steps has."""


class Place(NamedTuple):
    """A file that holds the bytes of a path of the run: at the node of this place, in this tier, under ``path``."""

    node: int
    tier: str
    path: str
    nbytes: int


Places = dict[str, list[Place]]
"""The places of each path of the run, the best first."""


def payload_places(
    line: Sequence[Manifest],
    holdings: Sequence[Holdings],
    reader: int,
    bucket: Mapping[str, int] | None = None,
) -> Places:
    """Return the places of the payload that the commits of ``line``, newest first, name.

    Two commits of different timelines may mean different bytes by one path, where a rank has moved to another node.
    The newest one counts, and the older one fails its checksums.

    Args:
        line: The commits.
        holdings: The content of each node's directory.
        reader: The place of the node that reads. Its own files come first.
        bucket: Sizes of the payload in the bucket, by path.
    """
    found: Places = {}
    for manifest in line:
        for stream in manifest.streams:
            for ref in manifest.files_of(stream).values():
                if ref.path not in found:
                    places = _places_of(ref, manifest, stream, line, holdings, bucket or {})
                    found[ref.path] = sorted(places, key=lambda place: _order(place, reader))
    return found


def _places_of(
    ref: FileRef,
    manifest: Manifest,
    stream: str,
    line: Sequence[Manifest],
    holdings: Sequence[Holdings],
    bucket: Mapping[str, int],
) -> list[Place]:
    keys = {manifest.key} | {  # a file of frozen parameters is named again in later timelines
        older.key
        for older in line
        if stream in older.streams and ref.path in {file.path for file in older.files_of(stream).values()}
    }
    name, found = object_path(ref), []
    for node, held in enumerate(holdings):
        hosts = any(stream in held.hosted.get(key, ()) for key in keys)
        if hosts and held.own.get(ref.path) == ref.bytes:
            found.append(Place(node, OWN, ref.path, ref.bytes))
        if held.copies.get(name) == ref.bytes:
            found.append(Place(node, PARTNER, name, ref.bytes))
    if bucket.get(name) == ref.bytes:
        found.append(Place(-1, BUCKET, name, ref.bytes))
    return found


def segment_places(
    holdings: Sequence[Holdings], reader: int, bucket: Mapping[str, int] | None = None
) -> Places:
    """Return the places of the log segments of all streams. Those of the bucket count where no node has the stream."""
    found: Places = {}
    for node, held in enumerate(holdings):
        for tier, files in ((OWN, held.own), (PARTNER, held.copies)):
            for path, nbytes in files.items():
                if path.startswith("journal/"):
                    found.setdefault(path, []).append(Place(node, tier, path, nbytes))
    known = {path.split("/")[1] for path in found}
    for path, nbytes in (bucket or {}).items():
        if path.split("/")[1] not in known:
            found.setdefault(path, []).append(Place(-1, BUCKET, path, nbytes))
    return {path: sorted(places, key=lambda place: _order(place, reader)) for path, places in found.items()}


def _order(place: Place, reader: int) -> tuple[int, bool, int]:
    """Return the order of preference: the writer's own file, then a copy, in each tier the reader's node first."""
    return TIERS.index(place.tier), place.node != reader, place.node


def missing_streams(manifest: Manifest, places: Places) -> list[str]:
    """Return the streams of ``manifest`` of whose payload some file is nowhere."""
    return [
        stream
        for stream in manifest.streams
        if not all(places.get(ref.path) for ref in manifest.files_of(stream).values())
    ]


def newest_complete(line: Iterable[Manifest], places: Places) -> Manifest | None:
    """Return the newest commit of ``line``, newest first, of which every share is somewhere."""
    return next((manifest for manifest in line if not missing_streams(manifest, places)), None)


def tiers_of(manifest: Manifest, places: Places, segments: Places) -> dict[str, str]:
    """Return for each stream the farthest tier from which its share is read, for a person."""
    found = {}
    for stream in manifest.streams:
        paths = [ref.path for ref in manifest.files_of(stream).values()]
        best = [places[path][0].tier for path in paths if places.get(path)]
        best += [each[0].tier for path, each in segments.items() if path.startswith(f"journal/{stream}/")]
        found[stream] = max(best, key=TIERS.index, default=OWN)
    return found


def is_own(paths: Iterable[str], places: Places, node: int, tier: str = OWN) -> bool:
    """Return whether each of ``paths`` is in ``tier`` of the directory of ``node``."""
    return all(any((at.node, at.tier) == (node, tier) for at in places.get(path, ())) for path in paths)


def streams_of_segments(places: Places) -> list[str]:
    """Return the streams that have a segment anywhere."""
    return sorted({path.split("/")[1] for path in places})


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
    """Writer of copies. Used by one thread at a time. ``direct`` writes past the page cache."""

    def __init__(self, disk: AnyDisk, direct: bool = True) -> None:
        self._disk, self._direct = disk, direct
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
        folder, half = path.rpartition("/")[0], path + TEMPORARY
        file = self._file(half, self._disk.size(half))  # ranks that share this one send files in turn
        self._disk.sync(file, why="partner's data")
        self._close(folder)
        failpoints.reach("after_copy_written")
        self._disk.rename(half, path)
        self._disk.sync_dir(folder, why="partner's data directory")
        self._unnamed.discard(half)
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
        file = self._disk.open(path, direct=self._direct)
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
