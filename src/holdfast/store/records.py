"""Records of a run as they are copied: in groups of whole ones, each verified. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing

import xxhash

from ..errors import ChunkCorrupt, Damaged
from ..units import MiB
from .chain import Journal
from .files import AnyDisk
from .journal import StoredRecord
from .layout import block_spans
from .manifest import Timeline
from .retention import ancestry

GROUP_BYTES = 32 * MiB
"""Most bytes of a group, which is in memory; a record that is longer is a group, and is not."""


class Records:
    """The records that a copy has, by their headers."""

    def __init__(self) -> None:
        self._found: dict[str, dict[tuple[int, int], StoredRecord]] = {}
        self._last: dict[tuple[str, int], int] = {}

    def add(self, stream: str, records: Iterable[StoredRecord]) -> None:
        for record in records:
            self._found.setdefault(stream, {})[record.timeline, record.step] = record
            key = stream, record.timeline
            self._last[key] = max(self._last.get(key, -1), record.step)

    def last(self, stream: str, timeline: int) -> int:
        """The newest step of which there is a record; -1 if there is none."""
        return self._last.get((stream, timeline), -1)

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
