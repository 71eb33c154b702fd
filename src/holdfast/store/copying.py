"""Copying records to a bucket: in objects of whole ones, whatever segments they lie in. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import xxhash

from ..errors import ChunkCorrupt, Damaged
from ..units import MiB
from .chain import Journal
from .files import AnyDisk
from .layout import block_spans
from .manifest import CommitRef, Timeline
from .objects import ObjectDisk
from .retention import ancestry
from .segments import SegmentRef, StoredRecord, read_segment, segments, streams

GROUP_BYTES = 32 * MiB
"""Most bytes of a group, which is in memory; a record that is longer is a group, and is not."""


@dataclass
class Pushed:
    """What was copied. ``durable_step`` is the newest that can be recovered from the bucket alone; ``damaged`` is what
    the directory has and could not be copied."""

    commits: list[CommitRef] = field(default_factory=list)
    retired: list[CommitRef] = field(default_factory=list)
    """By the writer of the directory, while they were copied."""
    removed: list[CommitRef] = field(default_factory=list)
    records: int = 0
    bytes: int = 0
    durable_step: int | None = None
    damaged: list[Damaged] = field(default_factory=list)


class RecordsCopy:
    """The records that are in a bucket, by their headers, and the copying of others."""

    def __init__(self, here: AnyDisk, there: ObjectDisk) -> None:
        self._here, self._there = here, there
        self._found: dict[str, dict[tuple[int, int], StoredRecord]] = {}
        self._last: dict[tuple[str, int], int] = {}
        self._ends: dict[SegmentRef, int] = {}
        self._bases: dict[int, tuple[int, int]] = {}

    def look(self) -> None:
        """See what is there."""
        for stream in streams(self._there):
            for ref in segments(self._there, stream):
                self._add(stream, read_segment(self._there, ref)[0])

    def push(self, done: Pushed) -> None:
        """Copy the records of all streams that are not there."""
        for stream in streams(self._here):
            refs = segments(self._here, stream)
            for ref, following in pairwise([*refs, None]):
                assert ref is not None
                ended = following is not None and following.timeline == ref.timeline
                if not (ended and following is not None and following.first_step - 1 <= self._last_of(ref)):
                    with suppress(FileNotFoundError):  # its writer needs it no more
                        self._push_segment(ref, ended, done)

    def forget(self, step: int) -> None:
        """What is there up to ``step`` leads nowhere that is asked for."""
        for stream, found in self._found.items():
            self._found[stream] = {key: record for key, record in found.items() if key[1] > step}

    def _push_segment(self, ref: SegmentRef, ended: bool, done: Pushed) -> None:
        """What is odd in one that another has followed is damage. At the end it may be on its way, and comes later, or
        was on its way when its writer was stopped."""
        found, odd = read_segment(self._here, ref, self._ends.get(ref, 0))
        left = [record for record in found if record.step > self._last_of(ref)]
        if found and not left:  # all of it is there
            self._ends[ref] = found[-1].end
        while left:
            group = next(groups_of(left))
            pushed, wrong = self._push_group(ref, group, done)
            if pushed:
                self._ends[ref] = group[pushed - 1].end
            left = left[pushed:] if wrong is None else left[pushed + 1 :] if ended else []
            odd = wrong or odd
        if odd is not None and ended:
            done.damaged.append(odd)

    def _push_group(
        self, ref: SegmentRef, group: list[StoredRecord], done: Pushed
    ) -> tuple[int, Damaged | None]:
        """Copy a group as one object: how many of its records are there then, and what is wrong with the next."""
        place = ref._replace(first_step=group[0].step)
        if is_long(group):
            try:
                self._there.put(place.path, blocks_of(self._here, group[0]))
            except Damaged as error:
                return 0, error
            count, wrong = 1, None
        else:
            data, count, wrong = read_group(self._here, group)
            if count and not self._there.put_new(place.path, data):  # another pushes as well
                there = {record.step for record in read_segment(self._there, place)[0]}
                count, wrong = sum(record.step in there for record in group), None
                if not count:
                    raise Damaged(
                        f"{self._there.root / place.path} does not hold what it is named", path=place.path
                    )
        self._add(ref.stream, group[:count])
        done.records += count
        done.bytes += sum(record.end - record.offset for record in group[:count])
        return count, wrong

    def _add(self, stream: str, records: Iterable[StoredRecord]) -> None:
        for record in records:
            first = record.step, record.about.get("base", -1)
            self._bases[record.timeline] = min(first, self._bases.get(record.timeline, first))
            slim = replace(record, about={}, parts=())
            self._found.setdefault(stream, {})[record.timeline, record.step] = slim
            key = stream, record.timeline
            self._last[key] = max(self._last.get(key, -1), record.step)

    def _last_of(self, ref: SegmentRef) -> int:
        """The newest step of its stream and timeline of which a record is there; -1 if there is none."""
        return self._last.get((ref.stream, ref.timeline), -1)

    def base_of(self, timeline: int) -> int | None:
        """The step of the base before the first record that is there of ``timeline``."""
        return self._bases[timeline][1] if timeline in self._bases else None

    def journal(self, stream: str, timelines: Mapping[int, Timeline], tip: int) -> Journal:
        """The records of the line of the timeline ``tip``."""
        limits = dict(ancestry(timelines, tip))
        journal = Journal()
        for (timeline, step), record in sorted(self._found.get(stream, {}).items()):
            if timeline in limits and ((limit := limits[timeline]) is None or step <= limit):
                journal.records[step] = record
        return journal


def groups_of(records: Iterable[StoredRecord]) -> Iterator[list[StoredRecord]]:
    """Runs of records that follow one another, of ``GROUP_BYTES`` at most, or of one record."""
    group: list[StoredRecord] = []
    for record in records:
        if group and (record.step != group[-1].step + 1 or _nbytes([*group, record]) > GROUP_BYTES):
            yield group
            group = []
        group.append(record)
    if group:
        yield group


def is_long(group: Sequence[StoredRecord]) -> bool:
    """Whether it is one record that is not to be in memory."""
    return _nbytes(group) > GROUP_BYTES


def _nbytes(group: Sequence[StoredRecord]) -> int:
    return sum(record.header_bytes + record.payload_bytes for record in group)


def read_group(disk: AnyDisk, group: list[StoredRecord]) -> tuple[bytes, int, Damaged | None]:
    """The bytes of the first records of ``group``, of how many, and what is wrong with the one that follows."""
    data = bytearray()
    for number, record in enumerate(group):
        try:
            data += b"".join(blocks_of(disk, record))
        except Damaged as error:
            return bytes(data), number, error
    return bytes(data), len(group), None


def blocks_of(disk: AnyDisk, record: StoredRecord) -> Iterator[bytes]:
    """The bytes of a record, verified. Raises ``Damaged``, and ``FileNotFoundError`` if its segment has gone."""
    with closing(disk.open(record.path, write=False, direct=False)) as file:
        header = bytearray(record.header_bytes)
        file.read(memoryview(header), record.offset)
        if xxhash.xxh3_128_hexdigest(header) != record.digest:
            raise _changed(record, record.offset, len(header))
        yield bytes(header)
        start = record.offset + record.header_bytes
        for nbytes, checksums in record.parts:
            for (a, b), expected in zip(block_spans(nbytes), checksums, strict=True):
                data = bytearray(b - a)
                file.read(memoryview(data), start + a)
                if xxhash.xxh3_64_hexdigest(data) != expected:
                    raise _changed(record, start + a, len(data))
                yield bytes(data)
            start += nbytes


def _changed(record: StoredRecord, offset: int, nbytes: int) -> ChunkCorrupt:
    return ChunkCorrupt(
        f"the record of step {record.step} fails its checksum at {record.path} offset {offset}, {nbytes} bytes. Step"
        f" {record.step - 1} is the newest that can be recovered from here.",
        path=record.path,
        offset=offset,
        nbytes=nbytes,
    )
