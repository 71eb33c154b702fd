"""Journal: the records of steps, appended to segment files in groups, each durable by one write and one sync.

Sizes and offsets are bytes. A segment, ``journal/<stream>/step-<first>.t<timeline>.log``, is a row of records. A
record is a sealed JSON header in whole pages (the step, its timeline, the digest of the record before, checksums of
the payload) and the payload in whole pages. The digests chain the records of a timeline: none can be left out,
repeated or taken from another run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from holdfast import failpoints
from holdfast.errors import DiskFull
from holdfast.io.buffers import Buffer
from holdfast.io.queue import IOQueue, Request
from holdfast.store.files import AnyDisk, OpenFile
from holdfast.store.layout import block_spans
from holdfast.store.manifest import Timeline
from holdfast.store.sealing import FORMAT, VERSION, seal
from holdfast.store.segments import KINDS, SegmentRef
from holdfast.units import PAGE, MiB, round_up

SEGMENT_BYTES = 256 * MiB
"""Most bytes of a segment; a group of records that needs more gets one of its own."""

GROUPS_PER_SEGMENT = 64
"""Room of a segment where records are small, at most."""

LEAST_GROUPS = 8
"""And at least, so that not every write begins one."""


@dataclass(frozen=True)
class Record:
    """What takes the state to ``step``. ``about`` is JSON; ``parts`` are page-aligned memory in whole pages, which
    does not change until the record is written."""

    step: int
    about: dict[str, Any]
    parts: tuple[memoryview, ...]


class JournalWriter:
    """Appends the records of one stream in one timeline. Used by one thread at a time.

    ``check_writer`` raises if the run may not be written (any more); ``reserve`` says how large a segment is made, of
    which so many bytes are needed and so many wanted.
    """

    def __init__(
        self,
        disk: AnyDisk,
        queue: IOQueue,
        stream: str,
        timeline: Timeline,
        *,
        check_writer: Callable[[], None] = lambda: None,
        reserve: Callable[[int, int], int] = lambda least, wanted: wanted,
        direct: bool = True,
    ) -> None:
        self._disk, self._queue, self._stream, self._timeline = disk, queue, stream, timeline
        self._check_writer, self._reserve, self._direct = check_writer, reserve, direct
        self._file: OpenFile | None = None
        self._end = self._capacity = 0
        self._digest = timeline.key
        self.records_ahead = SEGMENT_BYTES // PAGE
        """So many are expected to be needed at once: a larger segment would hold what nobody needs any more."""
        disk.makedirs(f"journal/{stream}")

    @property
    def free_bytes(self) -> int:
        """Of the present segment."""
        return self._capacity - self._end if self._file is not None else 0

    def append(self, records: Sequence[Record], beat: Callable[[], None] | None = None) -> int:
        """Write ``records``, in the order of their steps, and sync them. When this returns, they survive power loss.
        ``beat`` is called as the write gets on. Returns the bytes of the largest header.

        Raises ``DiskFailed``; the next call then begins another segment.
        """
        self._check_writer()
        headers = self._headers(records)
        memory = [view for header, record in zip(headers, records, strict=True)
                  for view in (header.view, *record.parts)]  # fmt: skip
        try:
            self._make_room(records[0].step, sum(map(len, memory)), len(records))
            assert self._file is not None
            requests = list(_requests(self._file, memory, self._end, beat))
            self._queue.submit(requests, **KINDS).result()
            failpoints.reach("after_records_write")
            self._disk.sync(self._file, why="records")
            failpoints.reach("after_records_sync")
        except BaseException:
            self.close()  # what the file holds from here on is not known
            raise
        self._end += sum(map(len, memory))
        self._digest = xxhash.xxh3_128_hexdigest(headers[-1].view)
        largest = max(len(header.view) for header in headers)
        for header in headers:
            header.free()
        return largest

    def close(self) -> None:
        """Close the segment. Nothing may be under way. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _headers(self, records: Sequence[Record]) -> list[Buffer]:
        """The headers of ``records``, each with the digest of the one before."""
        digest, headers = self._digest, []
        for record in records:
            text = _encode(record, self._timeline, digest)
            headers.append(buffer := Buffer(len(text), "record header"))
            buffer.view[:] = text
            digest = xxhash.xxh3_128_hexdigest(text)
        return headers

    def _make_room(self, step: int, nbytes: int, count: int) -> None:
        """Begin a segment unless the present one has room for ``count`` records; its name and its space are durable
        then."""
        if self._file is not None and self._end + nbytes <= self._capacity:
            return
        self.close()
        path = SegmentRef(self._timeline.id, step, self._stream).path
        ahead = max(LEAST_GROUPS * nbytes, self.records_ahead * round_up(nbytes // count))
        wanted = max(nbytes, min(SEGMENT_BYTES, GROUPS_PER_SEGMENT * nbytes, ahead))
        self._capacity, self._end = self._reserve(nbytes, wanted), 0
        try:
            self._disk.allocate(path, self._capacity)
        except DiskFull:
            if self._capacity == nbytes:
                raise
            self._capacity = self._reserve(nbytes, nbytes)  # for as long as there is room for records at all
            self._disk.allocate(path, self._capacity)
        self._disk.sync_dir(f"journal/{self._stream}", why="segment directory")
        failpoints.reach("after_segment_made")
        self._file = self._disk.open(path, direct=self._direct)


def _encode(record: Record, timeline: Timeline, previous: str) -> bytes:
    """The header of ``record``: whole pages."""
    parts = [
        {
            "bytes": len(part),
            "xxh3_64": [xxhash.xxh3_64_hexdigest(part[a:b]) for a, b in block_spans(len(part))],
        }
        for part in record.parts
    ]
    nbytes = PAGE
    while True:  # the length is in the header
        table = {
            "bytes": nbytes,
            "format": FORMAT,
            "version": VERSION,
            "step": record.step,
            "timeline": timeline.id,
            "key": timeline.key,
            "fork": [timeline.parent, timeline.fork_step, timeline.parent_key],
            "previous": previous,
            "about": record.about,
            "parts": parts,
        }
        text = seal(table, nbytes)
        if len(text) == nbytes:
            return text
        nbytes = round_up(len(text))


def _requests(
    file: OpenFile, memory: Sequence[memoryview], offset: int, beat: Callable[[], None] | None
) -> Iterator[Request]:
    """The writes that put ``memory`` into ``file``, one piece after another."""
    for view in memory:
        for start, stop in block_spans(len(view)):
            yield Request(file, view[start:stop], offset + start, True, before=beat)
        offset += len(view)
