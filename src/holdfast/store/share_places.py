"""The places of each share of a run: its own node's disk, the partner, or the bucket. Pure.

The payload of a rank's share lies in the directory that hosted the rank's stream in the timeline of the commit, which
that directory's own record of the timeline says. Copies are named by their content, so a copy that has the name has the
bytes. Log segments have one name everywhere. Every rank computes the same from what all nodes hold, so that all agree
without another exchange. Called by ``node_run``, and by readers of several nodes' directories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.store.format.manifest import FileRef, Manifest, object_path

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
