"""Journal: the records of steps, appended to segment files in groups, each durable by one write and one sync.

Sizes and offsets are bytes. A segment, ``journal/<stream>/step-<first>.t<timeline>.log``, is a row of records. A
record is a sealed JSON header in whole pages (the step, its timeline, the digest of the record before, checksums of
the payload) and the payload in whole pages. The digests chain the records of a timeline: none can be left out,
repeated or taken from another run.

Records are found by reading from the start, so no other file has to agree with the segment, and a length is believed
only in a header whose digest holds. A page of zeros is the clean end of what was written. Anything else that is no
header is a torn tail, which nobody was told of, or damage: the two look alike, so a reader says where and why it
stopped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import xxhash

from holdfast import failpoints
from holdfast.errors import ChunkCorrupt, Damaged, DiskFailed, DiskFull, ManifestCorrupt
from holdfast.io.buffers import Buffer
from holdfast.io.queue import IOQueue, Request
from holdfast.store.files import AnyDisk, OpenFile
from holdfast.store.layout import block_spans
from holdfast.store.manifest import Timeline
from holdfast.store.sealing import FORMAT, VERSION, seal, unseal
from holdfast.units import PAGE, MiB, round_up

SEGMENT_BYTES = 256 * MiB
"""Most bytes of a segment; a group of records that needs more gets one of its own."""

GROUPS_PER_SEGMENT = 64
"""Room of a segment where records are small, at most."""

LEAST_GROUPS = 8
"""And at least, so that not every write begins one."""

KINDS = {"kind": "records", "phase": "journal", "priority": 1}
"""How the I/O queue knows the journal's transfers."""

_NAME = re.compile(r"step-(\d{12,})\.t(\d{4,})\.log")
_START = re.compile(rb'\{\n "bytes": ([1-9]\d{0,9}),\n')


class SegmentRef(NamedTuple):
    """A segment by its name. Sorts in the order in which a stream's segments were begun."""

    timeline: int
    first_step: int
    stream: str

    @property
    def path(self) -> str:
        return f"journal/{self.stream}/step-{self.first_step:012d}.t{self.timeline:04d}.log"


@dataclass(frozen=True)
class Record:
    """What takes the state to ``step``. ``about`` is JSON; ``parts`` are page-aligned memory in whole pages, which
    does not change until the record is written."""

    step: int
    about: dict[str, Any]
    parts: tuple[memoryview, ...]


@dataclass(frozen=True)
class StoredRecord:
    """A record as its header says."""

    step: int
    timeline: int
    key: str
    """Of the timeline."""
    previous: str
    """Digest of the record before it in the timeline; of the first, the timeline's key."""
    about: dict[str, Any]
    parts: tuple[tuple[int, tuple[str, ...]], ...]
    """Of each part of the payload its bytes, and the xxh3_64 of its checksum blocks."""
    path: str
    offset: int
    header_bytes: int
    digest: str
    """The xxh3_128 of the header."""
    fork: tuple[int | None, int | None, str | None] | None = None
    """Of the timeline: its parent, the last step of that, and the parent's key. None: written before it was said."""

    @property
    def timeline_record(self) -> Timeline | None:
        """What the record says of its timeline."""
        if self.fork is None:
            return None
        parent, step, parent_key = self.fork
        return Timeline(self.timeline, parent, step, self.key, parent_key)

    @property
    def payload_bytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.parts)

    @property
    def end(self) -> int:
        """Offset of the record that follows."""
        return self.offset + self.header_bytes + self.payload_bytes


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
        segment_bytes: int = SEGMENT_BYTES,
        direct: bool = True,
    ) -> None:
        self._disk, self._queue, self._stream, self._timeline = disk, queue, stream, timeline
        self._check_writer, self._reserve = check_writer, reserve
        self._segment_bytes, self._direct = segment_bytes, direct
        self._file: OpenFile | None = None
        self._end = self._capacity = 0
        self._digest = timeline.key
        self.records_ahead = segment_bytes // PAGE
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
        wanted = max(nbytes, min(self._segment_bytes, GROUPS_PER_SEGMENT * nbytes, ahead))
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


def segments(disk: AnyDisk, stream: str) -> list[SegmentRef]:
    """The segments of ``stream``, in the order in which they were begun."""
    matches = [_NAME.fullmatch(name) for name in disk.listdir(f"journal/{stream}")]
    refs = [SegmentRef(int(match[2]), int(match[1]), stream) for match in matches if match]
    names = {f"journal/{stream}/{match.string}" for match in matches if match}
    return sorted(ref for ref in refs if ref.path in names)


def streams(disk: AnyDisk) -> list[str]:
    return disk.listdir("journal")


def steps_of_segments(disk: AnyDisk, stream: str) -> list[tuple[SegmentRef, int]]:
    """The segments of ``stream``, each with its last step: the one before the next segment's first, or as its headers
    say. One that cannot be read may hold any."""
    refs, found = segments(disk, stream), []
    for number, ref in enumerate(refs):
        following = refs[number + 1] if number + 1 < len(refs) else None
        if following is not None and following.timeline == ref.timeline:
            last = following.first_step - 1
        else:
            try:
                records, _ = read_segment(disk, ref)
                last = records[-1].step if records else ref.first_step - 1
            except DiskFailed:
                last = sys.maxsize
        found.append((ref, last))
    return found


def timelines_of_segments(disk: AnyDisk, known: Collection[int]) -> Iterator[Timeline]:
    """What records say of the timelines that are not ``known``, lowest first."""
    for ref in sorted(ref for stream in streams(disk) for ref in segments(disk, stream)):
        found = [] if ref.timeline in known else read_segment(disk, ref)[0]
        if found and (record := found[0].timeline_record) is not None:
            yield record


def trim(disk: AnyDisk, stream: str) -> list[DiskFailed]:
    """Give back the space that segments of ``stream`` reserve behind what was written. Nobody writes to them. One that
    cannot be read stays as it is; why is returned."""
    unread: list[DiskFailed] = []
    for ref in segments(disk, stream):
        try:
            records, _ = read_segment(disk, ref)  # whose payloads may end with zeros
            end = max(_written_bytes(disk, ref.path), records[-1].end if records else 0)
        except DiskFailed as error:
            unread.append(error)
            continue
        if end < disk.size(ref.path):
            disk.cut(ref.path, end)
    return unread


def _written_bytes(disk: AnyDisk, path: str) -> int:
    """Of a segment: up to its last page that is not zeros."""
    end, piece = disk.size(path), bytearray(MiB)
    file = disk.open(path, write=False, direct=False)
    try:
        while end > 0:
            start = max(0, end - MiB)
            view = memoryview(piece)[: end - start]
            file.read(view, start)
            used = len(bytes(view).rstrip(b"\0"))
            if used:
                return start + round_up(used)
            end = start
    finally:
        file.close()
    return 0


def read_segment(disk: AnyDisk, ref: SegmentRef, start: int = 0) -> tuple[list[StoredRecord], Damaged | None]:
    """The records of a segment by their headers, from the one at ``start`` on, and what ended the reading if it was not
    the clean end.

    The payloads are not read; the last one may be torn. A segment that was removed since it was listed has none.
    """
    found, odd = read_what_can_be(disk, ref, start)
    if isinstance(odd, DiskFailed):
        raise odd
    return found, odd


def read_what_can_be(
    disk: AnyDisk, ref: SegmentRef, start: int = 0
) -> tuple[list[StoredRecord], Damaged | DiskFailed | None]:
    """As ``read_segment``, where a device that does not give back a header ends the reading."""
    found: list[StoredRecord] = []
    try:
        size, offset = disk.size(ref.path), start
        file = disk.open(ref.path, write=False, direct=False)
    except FileNotFoundError:
        return [], None
    try:
        while offset + PAGE <= size:
            header = _read_header(file, offset, size)
            if header is None:
                break
            record = _decode(header, ref.path, offset)
            if record.timeline != ref.timeline or record.end > size:
                raise _torn(ref.path, offset, "a record that does not belong here")
            found.append(record)
            offset = record.end
    except (Damaged, DiskFailed) as error:
        return found, error
    finally:
        file.close()
    return found, None


def _read_header(file: OpenFile, offset: int, size: int) -> bytes | None:
    """The bytes of the header at ``offset``, None for a page of zeros. Raises ``Damaged`` if there is none."""
    page = bytearray(PAGE)
    file.read(memoryview(page), offset)
    if not any(page):
        return None
    match = _START.match(page)
    nbytes = int(match[1]) if match else 0
    if nbytes % PAGE or not nbytes or offset + nbytes > size:
        raise _torn(str(file.path), offset, "no header of a record")
    rest = bytearray(nbytes - PAGE)
    if rest:
        file.read(memoryview(rest), offset + PAGE)
    return bytes(page + rest)


def _decode(header: bytes, path: str, offset: int) -> StoredRecord:
    try:
        table = unseal(header, path)
        parts = tuple((part["bytes"], tuple(part["xxh3_64"])) for part in table["parts"])
        names = ("step", "timeline", "key", "previous", "about")
        fields = {name: table[name] for name in names}
        fork = tuple(table["fork"]) if "fork" in table else None
    except (ManifestCorrupt, KeyError, TypeError) as error:
        raise _torn(path, offset, "the header of a record that fails its digest") from error
    digest = xxhash.xxh3_128_hexdigest(header)
    return StoredRecord(
        **fields, parts=parts, path=path, offset=offset, header_bytes=len(header), digest=digest, fork=fork
    )


def _torn(path: str, offset: int, what: str) -> Damaged:
    return Damaged(
        f"{path} holds {what} at offset {offset}: what was being written when its writer was stopped, or damage. The"
        " records before it are whole as far as they verify.",
        path=path,
        offset=offset,
    )


def read_payload(queue: IOQueue, file: OpenFile, record: StoredRecord, view: memoryview) -> Future[None]:
    """Fill ``view``, of ``record.payload_bytes``, and verify it. Raises ``ChunkCorrupt``."""
    requests, start = [], 0
    for nbytes, checksums in record.parts:
        for (a, b), expected in zip(block_spans(nbytes), checksums, strict=True):
            piece = view[start + a : start + b]
            offset = record.offset + record.header_bytes + start + a
            check = partial(_verify, record, offset, piece, expected)
            requests.append(Request(file, piece, offset, False, after=check))
        start += nbytes
    return queue.submit(requests, **KINDS)


def _verify(record: StoredRecord, offset: int, piece: memoryview, expected: str) -> None:
    got = xxhash.xxh3_64_hexdigest(piece)
    if got != expected:
        raise ChunkCorrupt(
            f"the record of step {record.step} fails its checksum: expected xxh3:{expected}, read xxh3:{got} at"
            f" {record.path} offset {offset}, {len(piece)} bytes. Step {record.step - 1} is the newest that can be"
            f" recovered from here.",
            path=record.path,
            offset=offset,
            nbytes=len(piece),
        )
