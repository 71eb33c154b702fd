"""The writer of the log: it appends records to segments in groups, each durable by one write and one sync.

A segment, ``journal/<stream>/step-<first>.t<timeline>.log``, is a row of records. A record is a sealed JSON header in
whole pages (the step, its timeline, the digest of the record before, checksums of the payload), followed by the payload
in whole pages. The digests chain the records of a timeline: none can be left out, repeated or taken from another run.
Sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from holdfast import failpoints
from holdfast.errors import DiskFull
from holdfast.io.buffers import Buffer
from holdfast.io.queue import IOQueue, Request
from holdfast.quantities import PAGE, MiB, round_up
from holdfast.store.disk import AnyDisk
from holdfast.store.format.manifest import FORMAT, VERSION, Timeline, seal
from holdfast.store.format.payload_layout import block_spans
from holdfast.store.log.segments import KINDS, SegmentRef
from holdfast.store.log.striping import (
    SegmentFile,
    Stripes,
    cut_segment,
    make_segment,
    open_segment,
    submitted,
)

SEGMENT_BYTES = 256 * MiB
"""Upper bound of a segment's bytes; a group of records that needs more gets a segment of its own."""
GROUPS_PER_SEGMENT = 64
"""Upper bound of a segment's size in groups, which matters where records are small."""
LEAST_GROUPS = 8
"""Lower bound of a segment's size in groups, so that not every write begins a segment."""
Copying = Callable[
    [str, int, int, Sequence[memoryview], Callable[[], None] | None], AbstractContextManager[None]
]
"""Copies to another place what the block writes.

The arguments are the path of a segment, its bytes, an offset, what is written there, and a function to call as the copy
progresses. The copy is durable when the block ends.
"""


def uncopied(
    path: str, nbytes: int, offset: int, views: Sequence[memoryview], beat: Callable[[], None] | None
) -> AbstractContextManager[None]:
    """Make no copy."""
    return nullcontext()


@dataclass(frozen=True)
class Record:
    """The log record that takes the state to ``step``.

    ``about`` is JSON. ``parts`` are page-aligned memory in whole pages, which must not change until the record is
    written.
    """

    step: int
    about: dict[str, Any]
    parts: tuple[memoryview, ...]


class JournalWriter:
    """Appends the log records of one stream in one timeline.

    Used by one thread at a time.
    ``check_writer`` raises if the run may not be written (any more). ``reserve(needed, wanted)`` returns the size in
    bytes of a new segment. ``copying`` keeps a second copy of all records, as durable as this one.
    ``stripes`` say how new segments lie on several drives.
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
        copying: Copying = uncopied,
        direct: bool = True,
        stripes: Stripes | None = None,
    ) -> None:
        self._disk, self._queue, self._stream, self._timeline = disk, queue, stream, timeline
        self._check_writer, self._reserve, self._direct = check_writer, reserve, direct
        self._copying, self._stripes = copying, stripes
        self._file: SegmentFile | None = None
        self._path = ""
        self._end = self._capacity = 0
        self._digest = timeline.key
        self.records_ahead = SEGMENT_BYTES // PAGE
        """Number of records that a segment is sized for, since a larger segment would outlive its use."""
        disk.makedirs(f"journal/{stream}")

    @property
    def free_bytes(self) -> int:
        """Bytes that are free in the current segment."""
        return self._capacity - self._end if self._file is not None else 0

    def append(self, records: Sequence[Record], beat: Callable[[], None] | None = None) -> int:
        """Write ``records``, in the order of their steps, and sync them: on return they survive power loss.

        ``beat`` is called as the write progresses. Returns the bytes of the largest header. Raises ``DiskFailed``;
        the next call then begins another segment.
        """
        self._check_writer()
        headers = self._headers(records)
        memory = [view for header, record in zip(headers, records, strict=True)
                  for view in (header.view, *record.parts)]  # fmt: skip
        written: list[Future] = []
        try:
            self._make_room(records[0].step, sum(map(len, memory)), len(records))
            assert self._file is not None
            requests = list(_requests(self._file, memory, self._end, beat))
            with self._copying(self._path, self._capacity, self._end, memory, beat):
                written += submitted(self._queue, requests, **KINDS)
                for future in written:
                    future.result()
                failpoints.reach("after_records_write")
                self._sync(requests)
                failpoints.reach("after_records_sync")
        except BaseException:
            wait(written)  # after an interrupt, a thread may be writing to this descriptor
            self.close()  # the content of the file from here on is unknown
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

    def cut(self) -> None:
        """Release the space that the last segment reserves behind its records. Called once it is closed."""
        if self._end < self._capacity:
            cut_segment(self._disk, self._path, self._stripes, self._end)
            self._capacity = self._end

    def _sync(self, requests: Sequence[Request]) -> None:
        """Make what ``requests`` have written durable, on all drives at the same time."""
        files = list({id(request.file): request.file for request in requests}.values())
        if len(files) == 1:
            return self._disk.sync(files[0], why="records")
        syncs = [
            self._queue.submit([], finish=partial(self._disk.sync, file, why="records"), **KINDS)
            for file in files
        ]
        wait(syncs)
        for future in syncs:
            future.result()

    def _headers(self, records: Sequence[Record]) -> list[Buffer]:
        """Return the headers of ``records``, each with the digest of the one before."""
        digest, headers = self._digest, []
        for record in records:
            text = _encode(record, self._timeline, digest)
            headers.append(buffer := Buffer(len(text), "record header"))
            buffer.view[:] = text
            digest = xxhash.xxh3_128_hexdigest(text)
        return headers

    def _make_room(self, step: int, nbytes: int, count: int) -> None:
        """Begin a segment, with durable name and space, unless the current one has room for the records."""
        if self._file is not None and self._end + nbytes <= self._capacity:
            return
        self.close()
        self._path = path = SegmentRef(self._timeline.id, step, self._stream).path
        ahead = max(LEAST_GROUPS * nbytes, self.records_ahead * round_up(nbytes // count))
        wanted = max(nbytes, min(SEGMENT_BYTES, GROUPS_PER_SEGMENT * nbytes, ahead))
        head = 0 if self._stripes is None else PAGE
        self._capacity, self._end = self._reserve(nbytes + head, wanted + head) - head, 0
        try:
            make_segment(self._disk, path, self._stripes, self._capacity)
        except DiskFull:
            if self._capacity == nbytes:
                raise
            # a smaller segment will do as long as the records themselves fit
            self._capacity = self._reserve(nbytes + head, nbytes + head) - head
            make_segment(self._disk, path, self._stripes, self._capacity)
        failpoints.reach("after_segment_made")
        self._file = open_segment(self._disk, path, self._stripes, write=True, direct=self._direct)


def _encode(record: Record, timeline: Timeline, previous: str) -> bytes:
    """Return the header of ``record`` in whole pages."""
    parts = [
        {
            "bytes": len(part),
            "xxh3_64": [xxhash.xxh3_64_hexdigest(part[a:b]) for a, b in block_spans(len(part))],
        }
        for part in record.parts
    ]
    nbytes = PAGE
    while True:  # the header contains its own length
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
    file: SegmentFile, memory: Sequence[memoryview], offset: int, beat: Callable[[], None] | None
) -> Iterator[Request]:
    """Yield the writes that put ``memory`` into ``file``, one block after another."""
    for view in memory:
        for start, stop in block_spans(len(view)):
            yield from file.requests(view[start:stop], offset + start, write=True, before=beat)
        offset += len(view)
