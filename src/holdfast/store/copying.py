"""The copying of log records to an object store, each object holding whole records.

The boundaries of the local segments play no part. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import xxhash

from ..errors import ChunkCorrupt, Damaged
from ..quantities import MiB
from .commit.retention import ancestry
from .disk import AnyDisk
from .format.manifest import CommitRef, Timeline
from .format.payload_layout import block_spans
from .log.chain import Journal
from .log.segments import SegmentRef, StoredRecord, read_segment, segments, streams
from .log.striping import open_segment
from .object_store import ObjectDisk

GROUP_BYTES = 32 * MiB
"""Upper bound of a group's bytes, because a group is held in memory.

A longer record is a group of its own and is streamed instead.
"""


@dataclass
class PushResult:
    """The result of a push.

    ``durable_step`` is the newest step that can be recovered from the object store alone. ``damaged`` lists what the
    directory has and could not be copied.
    """

    commits: list[CommitRef] = field(default_factory=list)
    retired: list[CommitRef] = field(default_factory=list)
    """Commits that the writer of the directory retired while they were being copied."""
    removed: list[CommitRef] = field(default_factory=list)
    records: int = 0
    bytes: int = 0
    durable_step: int | None = None
    damaged: list[Damaged] = field(default_factory=list)


class RecordsCopy:
    """The headers of the log records in an object store, and the copying of further ones."""

    def __init__(self, source: AnyDisk, target: ObjectDisk) -> None:
        self._source, self._target = source, target
        self._found: dict[str, dict[tuple[int, int], StoredRecord]] = {}
        self._last: dict[tuple[str, int], int] = {}
        self._ends: dict[SegmentRef, int] = {}
        self._bases: dict[int, tuple[int, int]] = {}
        self._looked: set[SegmentRef] = set()

    def look(self) -> None:
        """Read the headers of the records that the object store has, but for those read before."""
        for stream in streams(self._target):
            for ref in segments(self._target, stream):
                if ref not in self._looked:  # an object never changes
                    self._add(stream, read_segment(self._target, ref)[0])
                    self._looked.add(ref)

    def push(self, done: PushResult, timelines: Collection[int]) -> None:
        """Copy the records of all streams that the object store lacks, of ``timelines`` whose own record it has."""
        for stream in streams(self._source):
            refs = segments(self._source, stream)
            for ref, following in pairwise([*refs, None]):
                assert ref is not None
                ended = following is not None and following.timeline == ref.timeline
                is_there = ended and following is not None and following.first_step - 1 <= self._last_of(ref)
                if ref.timeline in timelines and not is_there:
                    with suppress(FileNotFoundError):  # its writer has removed it
                        self._push_segment(ref, ended, done)

    def forget(self, step: int) -> None:
        """Forget the copied records up to ``step``, which lead to no step that can be asked for."""
        for stream, found in self._found.items():
            self._found[stream] = {key: record for key, record in found.items() if key[1] > step}

    def _push_segment(self, ref: SegmentRef, ended: bool, done: PushResult) -> None:
        """Copy the records of one segment that the object store lacks.

        Damage counts only in a segment that another one has followed. At the end of the log, the record may still be
        on its way, or its writer was stopped.
        """
        found, damage = read_segment(self._source, ref, self._ends.get(ref, 0))
        left = [record for record in found if record.step > self._last_of(ref)]
        if found and not left:  # all of it is there
            self._ends[ref] = found[-1].end
        while left:
            group = next(groups_of(left))
            pushed, wrong = self._push_group(ref, group, done)
            if pushed:
                self._ends[ref] = group[pushed - 1].end
            left = left[pushed:] if wrong is None else left[pushed + 1 :] if ended else []
            damage = wrong or damage
        if damage is not None and ended:
            done.damaged.append(damage)

    def _push_group(
        self, ref: SegmentRef, group: list[StoredRecord], done: PushResult
    ) -> tuple[int, Damaged | None]:
        """Copy a group as one object.

        Returns how many of its records the object store then has, and the damage of the next one.
        """
        place = ref._replace(first_step=group[0].step)
        if is_long(group):
            try:
                self._target.put(place.path, blocks_of(self._source, group[0]))
            except Damaged as error:
                return 0, error
            count, wrong = 1, None
        else:
            data, count, wrong = read_group(self._source, group)
            if count and not self._target.put_new(place.path, data):  # another process pushes as well
                there = {record.step for record in read_segment(self._target, place)[0]}
                count, wrong = sum(record.step in there for record in group), None
                if not count:
                    raise Damaged(
                        f"{self._target.root / place.path} does not hold what it is named", path=place.path
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
        """Return the newest copied step of the segment's stream and timeline, or -1."""
        return self._last.get((ref.stream, ref.timeline), -1)

    def base_of(self, timeline: int) -> int | None:
        """Return the step of the snapshot before the first copied record of ``timeline``."""
        return self._bases[timeline][1] if timeline in self._bases else None

    def journal(self, stream: str, timelines: Mapping[int, Timeline], tip: int) -> Journal:
        """Return the copied records on the line of the timeline ``tip``."""
        limits = dict(ancestry(timelines, tip))
        journal = Journal()
        for (timeline, step), record in sorted(self._found.get(stream, {}).items()):
            if timeline in limits and ((limit := limits[timeline]) is None or step <= limit):
                journal.records[step] = record
        return journal


def groups_of(records: Iterable[StoredRecord]) -> Iterator[list[StoredRecord]]:
    """Yield runs of consecutive records of at most ``GROUP_BYTES``, or of one record."""
    group: list[StoredRecord] = []
    for record in records:
        if group and (record.step != group[-1].step + 1 or _nbytes([*group, record]) > GROUP_BYTES):
            yield group
            group = []
        group.append(record)
    if group:
        yield group


def is_long(group: Sequence[StoredRecord]) -> bool:
    """Return whether the group is one record that is too long to hold in memory."""
    return _nbytes(group) > GROUP_BYTES


def _nbytes(group: Sequence[StoredRecord]) -> int:
    return sum(record.header_bytes + record.payload_bytes for record in group)


def read_group(disk: AnyDisk, group: list[StoredRecord]) -> tuple[bytes, int, Damaged | None]:
    """Read the first records of ``group`` that verify.

    Returns their bytes, their number, and the damage of the record after them.
    """
    data = bytearray()
    for number, record in enumerate(group):
        try:
            data += b"".join(blocks_of(disk, record))
        except Damaged as error:
            return bytes(data), number, error
    return bytes(data), len(group), None


def blocks_of(disk: AnyDisk, record: StoredRecord) -> Iterator[bytes]:
    """Yield the verified bytes of a record.

    Raises ``Damaged``, or ``FileNotFoundError`` if its segment has gone.
    """
    with closing(open_segment(disk, record.path, record.stripes, direct=False)) as file:
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
