"""The segments of the log: their files, the records in them by their headers, and the payloads.

Records are found by reading from the start, so no other file has to agree with the segment, and a length is trusted
only in a header whose digest holds. A page of zeros is the clean end of the written part. Anything else that is no
header is either a torn tail, which was never reported as durable, or damage. The two look alike, so a reader returns
where and why it stopped. Sizes and offsets are bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import xxhash

from holdfast.errors import ChunkCorrupt, Damaged, DiskFailed, FileMissing, ManifestCorrupt
from holdfast.io.queue import IOQueue
from holdfast.quantities import PAGE, MiB, round_up
from holdfast.store.disk import AnyDisk
from holdfast.store.format.manifest import Timeline, unseal
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK, block_spans
from holdfast.store.log.striping import (
    SegmentFile,
    Stripes,
    find_segment,
    joined,
    loose_stripes,
    segment_paths,
    submitted,
)

KINDS = {"kind": "records", "phase": "journal", "priority": 1}
"""The names by which the I/O queue counts the transfers of the log."""
_NAME = re.compile(r"step-(\d{12,})\.t(\d{4,})\.log")
_START = re.compile(rb'\{\n "bytes": ([1-9]\d{0,9}),\n')


class SegmentRef(NamedTuple):
    """The name of a segment. Sorts in the order in which a stream's segments were begun."""

    timeline: int
    first_step: int
    stream: str

    @property
    def path(self) -> str:
        return f"journal/{self.stream}/step-{self.first_step:012d}.t{self.timeline:04d}.log"

    @classmethod
    def of_path(cls, path: str) -> SegmentRef:
        """Return the segment at ``path``. Raises ``ValueError`` for another file.

        >>> SegmentRef.of_path("journal/rank-00000/step-000000000007.t0002.log")
        SegmentRef(timeline=2, first_step=7, stream='rank-00000')
        """
        _, stream, name = path.split("/")
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{path!r} is no segment")
        return cls(int(match[2]), int(match[1]), stream)


@dataclass(frozen=True)
class StoredRecord:
    """A log record as its header describes it."""

    step: int
    timeline: int
    key: str
    """The key of the timeline."""
    previous: str
    """The digest of the record before it in the timeline; for the first record, the timeline's key."""
    about: dict[str, Any]
    parts: tuple[tuple[int, tuple[str, ...]], ...]
    """The bytes of each part of the payload, and the xxh3_64 of its checksum blocks."""
    path: str
    offset: int
    header_bytes: int
    digest: str
    """The xxh3_128 of the header."""
    fork: tuple[int | None, int | None, str | None] | None = None
    """The timeline's parent, the last step of that, and the parent's key. None in records of older versions."""
    stripes: Stripes | None = None
    """The way in which the segment lies on several drives; None if it is one file."""

    @property
    def timeline_record(self) -> Timeline | None:
        """The timeline record as the log record repeats it."""
        if self.fork is None:
            return None
        parent, step, parent_key = self.fork
        return Timeline(self.timeline, parent, step, self.key, parent_key)

    @cached_property
    def payload_bytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.parts)

    @property
    def end(self) -> int:
        """The offset of the record that follows."""
        return self.offset + self.header_bytes + self.payload_bytes


def segments(disk: AnyDisk, stream: str) -> list[SegmentRef]:
    """Return the segments of ``stream``, in the order in which they were begun."""
    matches = [_NAME.fullmatch(name) for name in disk.listdir(f"journal/{stream}")]
    refs = [SegmentRef(int(match[2]), int(match[1]), stream) for match in matches if match]
    names = {f"journal/{stream}/{match.string}" for match in matches if match}
    return sorted(ref for ref in refs if ref.path in names)


def streams(disk: AnyDisk) -> list[str]:
    return disk.listdir("journal")


def stripe_paths(disk: AnyDisk) -> list[str]:
    """Return the files on drives that have records of the segments that are there, or of missing ones."""
    refs = [ref for stream in streams(disk) for ref in segments(disk, stream)]
    found = [path for ref in refs for path in segment_paths(disk, ref.path)[1:]]
    return [*found, *loose_stripes(disk)]


def steps_of_segments(disk: AnyDisk, stream: str) -> list[tuple[SegmentRef, int]]:
    """Return the segments of ``stream``, each with its last step.

    That is the step before the next segment's first, or the last one in its headers. An unreadable segment may hold
    any step.
    """
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
    """Yield the timelines that log records describe and that are not ``known``, lowest first."""
    for ref in sorted(ref for stream in streams(disk) for ref in segments(disk, stream)):
        found = [] if ref.timeline in known else read_segment(disk, ref)[0]
        if found and (record := found[0].timeline_record) is not None:
            yield record


def trim(disk: AnyDisk, stream: str) -> list[DiskFailed]:
    """Release the space that segments of ``stream`` reserve behind what was written.

    Nobody may be writing to them. An unreadable segment stays as it is, and its error is returned. So does one without
    some of its files, which may be put back.
    """
    unread: list[DiskFailed] = []
    for ref in segments(disk, stream):
        try:
            records, damage = read_segment(disk, ref)  # payloads may end with zeros
            if isinstance(damage, FileMissing):
                continue
            for path, least in _file_ends(disk, ref.path, records):
                _cut(disk, path, least)
        except DiskFailed as error:
            unread.append(error)
            continue
        except Damaged:  # not a regular file: nothing is reserved
            continue
    return unread


def _file_ends(disk: AnyDisk, path: str, records: Sequence[StoredRecord]) -> list[tuple[str, int]]:
    """Return the files of the segment ``path``, each with the bytes that ``records`` have there."""
    if not records:
        return [(each, 0) for each in segment_paths(disk, path)]
    end, stripes = records[-1].end, records[-1].stripes
    return [(path, end)] if stripes is None else [*zip(stripes.paths(path), stripes.sizes(end), strict=True)]


def _cut(disk: AnyDisk, path: str, least: int) -> None:
    """Cut a file behind its last page that is not zeros, and not before ``least``."""
    with suppress(FileNotFoundError):  # of a segment that nothing needs and a power cut brought back in part
        end = max(written_bytes(disk, path), least)
        if end < disk.size(path):
            disk.cut(path, end)


def written_bytes(disk: AnyDisk, path: str) -> int:
    """Return the bytes of a file of a segment up to its last page that is not zeros."""
    end, piece = min(disk.size(path), round_up(disk.data_end(path))), bytearray(MiB)
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
    """Return the records of a segment from ``start`` on by their headers, and the damage that ended the reading.

    The damage is None at the clean end. The payloads are not read; the last one may be torn. A segment that was
    removed since it was listed has no records. Raises ``DiskFailed`` for a header that cannot be read.
    """
    found, error = read_what_can_be(disk, ref, start)
    if isinstance(error, DiskFailed):
        raise error
    return found, error


def read_what_can_be(
    disk: AnyDisk, ref: SegmentRef, start: int = 0
) -> tuple[list[StoredRecord], Damaged | DiskFailed | None]:
    """Return as ``read_segment`` does, with a header that cannot be read ending the reading."""
    found: list[StoredRecord] = []
    try:
        file = find_segment(disk, ref.path)
    except FileNotFoundError:
        return [], None
    except (Damaged, DiskFailed) as error:
        return [], error
    size, offset = file.nbytes, start
    try:
        while offset + PAGE <= size:
            header = _read_header(file, offset, size)
            if header is None:
                break
            record = _decode(header, ref.path, offset, file.stripes)
            if record.timeline != ref.timeline or record.end > size:
                raise _torn(ref.path, offset, "a record that does not belong here")
            found.append(record)
            offset = record.end
    except FileNotFoundError:  # removed since: in a bucket that shows at a read
        return [], None
    except (Damaged, DiskFailed) as error:
        return found, error
    finally:
        file.close()
    return found, None


def _read_header(file: SegmentFile, offset: int, size: int) -> bytes | None:
    """Return the bytes of the header at ``offset``, or None for a page of zeros.

    Raises ``Damaged`` if there is no header.
    """
    page = bytearray(PAGE)
    file.read(memoryview(page), offset)
    if not any(page):
        return None
    match = _START.match(page)
    nbytes = int(match[1]) if match else 0
    if nbytes % PAGE or not nbytes or offset + nbytes > size:
        raise _torn(str(file.path), offset, "no header of a record")
    while len(page) < nbytes:
        rest = bytearray(min(nbytes - len(page), MiB))
        file.read(memoryview(rest), offset + len(page))
        if not any(rest):  # a header is text to its end
            raise _torn(str(file.path), offset, "no header of a record")
        page += rest
    return bytes(page)


def _decode(header: bytes, path: str, offset: int, stripes: Stripes | None) -> StoredRecord:
    try:
        table = unseal(header, path)
        parts = tuple((part["bytes"], tuple(part["xxh3_64"])) for part in table["parts"])
        if not all(_is_part(*part) for part in parts):
            raise ManifestCorrupt("a part has other sizes than checksums")
        names = ("step", "timeline", "key", "previous", "about")
        fields = {name: table[name] for name in names}
        fork = tuple(table["fork"]) if "fork" in table else None
    except (ManifestCorrupt, KeyError, TypeError) as error:
        raise _torn(path, offset, "the header of a record that fails its digest") from error
    digest = xxhash.xxh3_128_hexdigest(header)
    return StoredRecord(
        **fields, parts=parts, path=path, offset=offset, header_bytes=len(header), digest=digest, fork=fork,
        stripes=stripes,
    )  # fmt: skip


def _is_part(nbytes: Any, checksums: tuple[str, ...]) -> bool:
    """Return whether a part of ``nbytes`` has the right number of checksums."""
    whole = isinstance(nbytes, int) and nbytes >= 0 and nbytes % PAGE == 0
    return whole and len(checksums) == len(range(0, nbytes, CHECKSUM_BLOCK))


def _torn(path: str, offset: int, what: str) -> Damaged:
    return Damaged(
        f"{path} holds {what} at offset {offset}: what was being written when its writer was stopped, or damage. The"
        " records before it are whole as far as they verify.",
        path=path,
        offset=offset,
    )


def read_payload(queue: IOQueue, file: SegmentFile, record: StoredRecord, view: memoryview) -> Future[None]:
    """Fill ``view``, of ``record.payload_bytes``, and verify it. Raises ``ChunkCorrupt``."""
    requests, start = [], 0
    for nbytes, checksums in record.parts:
        for (a, b), expected in zip(block_spans(nbytes), checksums, strict=True):
            piece = view[start + a : start + b]
            offset = record.offset + record.header_bytes + start + a
            check = partial(_verify, record, offset, piece, expected)
            requests += file.requests(piece, offset, write=False, after=check)
        start += nbytes
    return joined(submitted(queue, requests, **KINDS))


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
