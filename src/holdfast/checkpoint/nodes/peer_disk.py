"""The disks of other nodes: what lies there, for reading, and the copy of this rank's share at its partner.

Reading. Manifests and indexes are in the node's own directory. Payload and log segments are read where they are: in
that directory, in the copies it keeps, at another node by ranges (``peer_channel``), or in the bucket. A process reads
what it needs and nothing else. Of a log it needs the headers of all records, which lie far apart: the other node sends
them together, in one answer of at most ``BLOCK_BYTES``. Called by the recovery through ``LocalStore``.

The copy of records, in the recorder's thread:

1. The bytes of a group of records go to the partner's memory, before they are written here, in as few requests as
   possible: the last one asks for the sync.
2. The partner writes and syncs its copy while this rank writes and syncs its own. The group is durable when both are.

The copy of snapshots, in a thread of their own, block by block, so that records never wait for more than one block:

1. Each file is read back, verified, sent, and named by its content at the partner, durably. A file that the partner has
   is not sent again.
2. Only then the rank reports its share. So a commit is published when all its shares are at their partners.

Nothing is queued: what waits to be sent lies in staging buffers, which ``memory=`` bounds, or on the disk. Offsets and
sizes are bytes.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import xxhash

from ...errors import DiskFailed
from ...io.buffers import Buffer
from ...quantities import PAGE, KiB
from ...store.commit.generations import corrupt
from ...store.disk import TEMPORARY, AnyDisk, Disk
from ...store.format.manifest import FileRef, object_path
from ...store.format.payload_files import INSPECT, check_size
from ...store.format.payload_layout import block_spans
from ...store.log.segments import SegmentRef, read_what_can_be
from ...store.share_places import (
    BUCKET,
    OWN,
    PARTNER,
    PartnerFiles,
    Place,
    Places,
    copies_disk,
    streams_of_segments,
)
from .peer_channel import BLOCK_BYTES, MOST_PIECES, PeerChannel, Request

AHEAD_BYTES = 64 * KiB
"""The least bytes of a read at another node."""
_COUNT, _SPAN = struct.Struct("<Q"), struct.Struct("<QQ")
"""The beginning of an answer with headers: their number, then the offset and the bytes of each."""


class PeerDisk(Disk):
    """The run in ``root`` and on the other nodes.

    Args:
        root: The node's own run directory.
        node: The place of the node.
        places: The places of payload and segments.
        ask: Sends a request to a rank of the node at a place, and fills a view with the bytes of the answer.
        bucket: The copy in a bucket, if there is one.
        has_log: Whether any node has a directory of logs.
    """

    def __init__(
        self,
        root: str | Path,
        node: int,
        places: Places,
        ask: Callable[[int, Request, memoryview], Request],
        bucket: AnyDisk | None = None,
        has_log: bool = False,
    ) -> None:
        super().__init__(root)
        self._node, self._places, self._ask, self._bucket = node, places, ask, bucket
        self._copies = copies_disk(self.root)
        self._has_log = has_log
        self._segments = {path: at for path, at in places.items() if path.startswith("journal/")}
        self.read_bytes_by_tier: dict[str, int] = {}
        """Bytes that were opened outside of the node's own shares, by tier."""

    def listdir(self, path: str) -> list[str]:
        """Return the sorted names in ``path``: of logs those of all nodes, of others those of the directory."""
        if path == "journal":
            return streams_of_segments(self._segments)
        if path.startswith("journal/"):
            return sorted(each.rpartition("/")[2] for each in self._segments if each.startswith(f"{path}/"))
        return super().listdir(path)

    def exists(self, path: str) -> bool:
        if path == "journal":
            return self._has_log or super().exists(path)
        return bool(self._places.get(path)) if path in self._places else super().exists(path)

    def size(self, path: str) -> int:
        """Return the bytes of ``path``. Raises ``FileNotFoundError`` if it is nowhere."""
        place = self._place_of(path)
        return super().size(path) if place is None else place.nbytes

    def open(self, path: str, *, write: bool = True, direct: bool = True) -> Any:
        """Open ``path`` for reading where it is. Raises ``FileNotFoundError`` if it is nowhere."""
        place = self._place_of(path)
        if place is None or (place.node == self._node and place.tier == OWN):
            return super().open(path, write=False, direct=direct)
        tier = place.tier
        self.read_bytes_by_tier[tier] = self.read_bytes_by_tier.get(tier, 0) + place.nbytes
        if tier == BUCKET:
            assert self._bucket is not None
            return self._bucket.open(place.path)
        if place.node == self._node:
            return self._copies.open(place.path, write=False, direct=direct)
        return PeerFile(self.root / path, place, self._ask, is_log=path in self._segments)

    def data_end(self, path: str) -> int:
        return self.size(path)

    def _place_of(self, path: str) -> Place | None:
        """Return the best place of a file of the run's nodes; None for a file of the directory itself."""
        if path not in self._places:
            return None
        if not self._places[path]:
            raise FileNotFoundError(f"{self.root / path} is on no node")
        return self._places[path][0]


class PeerFile:
    """A file of another node, read by ranges; of a segment of the log (``is_log``) headers are read together."""

    def __init__(
        self,
        path: Path,
        place: Place,
        ask: Callable[[int, Request, memoryview], Request],
        is_log: bool = False,
    ) -> None:
        self.path, self._place, self._ask = path, place, ask
        self._lock = threading.Lock()
        self._pieces: list[tuple[int, memoryview]] = []
        """Bytes that were read ahead, each with the offset of their first."""
        self._is_log = is_log

    def read(self, view: memoryview, offset: int) -> None:
        """Fill all of ``view`` from ``offset``. Raises ``DiskFailed`` if the file ends before."""
        if len(view) < AHEAD_BYTES:
            view[:] = self._near(offset, len(view))
            return
        for start in range(0, len(view), BLOCK_BYTES):
            self._fill(view[start : start + BLOCK_BYTES], offset + start)

    def write(self, view: memoryview, offset: int) -> None:
        raise DiskFailed(f"{self.path} is on another node and is not written from here")

    def close(self) -> None:
        """Do nothing, since nothing stays open."""

    def _near(self, offset: int, nbytes: int) -> memoryview:
        with self._lock:
            found = self._held(offset, nbytes)
            if found is None and self._is_log and nbytes == PAGE:  # a header begins
                self._pieces = self._headers(offset)
                found = self._held(offset, nbytes)
            if found is None:
                memory = memoryview(bytearray(max(nbytes, min(AHEAD_BYTES, self._place.nbytes - offset))))
                self._fill(memory, offset)
                self._pieces, found = [(offset, memory)], memory[:nbytes]
            return found

    def _held(self, offset: int, nbytes: int) -> memoryview | None:
        """Return ``nbytes`` from ``offset`` that were read ahead; None if they were not."""
        number = bisect_right(self._pieces, offset, key=lambda piece: piece[0]) - 1
        if number < 0:
            return None
        start, piece = self._pieces[number]
        first = offset - start
        return piece[first : first + nbytes] if first + nbytes <= len(piece) else None

    def _headers(self, offset: int) -> list[tuple[int, memoryview]]:
        """Return the headers of records from ``offset`` on, each with its offset, as many as one answer holds."""
        place, memory = self._place, memoryview(bytearray(BLOCK_BYTES))
        request = {"do": "headers", "tier": place.tier, "path": place.path, "offset": offset}
        answer = self._ask(place.node, request, memory)
        return unpacked(bytes(memory[: answer["bytes"]]))

    def _fill(self, view: memoryview, offset: int) -> None:
        place = self._place
        request = {"do": "read", "tier": place.tier, "path": place.path, "offset": offset, "count": len(view)}
        answer = self._ask(place.node, request, view)
        if answer["bytes"] != len(view):
            raise DiskFailed(
                f"node {place.node} has given {answer['bytes']} of {len(view)} bytes of {self.path}"
            )


class FileServer:
    """Answers the requests of other nodes to read files of this one."""

    def __init__(self, disk: AnyDisk, copies: AnyDisk) -> None:
        self._disks: Mapping[str, AnyDisk] = {OWN: disk, PARTNER: copies}

    def read(self, request: Request, memory: memoryview) -> memoryview:
        """Return the bytes that ``request`` asks for, in ``memory``."""
        disk, offset = self._disks[request["tier"]], request["offset"]
        with closing(disk.open(request["path"], write=False, direct=False)) as file:
            view = memory[: request["count"]]
            file.read(view, offset)
        return view

    def headers(self, request: Request, memory: memoryview) -> memoryview:
        """Return the headers of the records of a segment from an offset on, packed in ``memory``, as many as fit.

        Behind the last one is the page that follows it, at which a reader finds out that there are no more.
        """
        disk, path, offset = self._disks[request["tier"]], request["path"], request["offset"]
        records, _ = read_what_can_be(disk, SegmentRef.of_path(path), offset)
        spans = [(record.offset, record.header_bytes) for record in records]
        end = records[-1].end if records else offset
        if end + PAGE <= disk.size(path):
            spans.append((end, PAGE))
        with closing(disk.open(path, write=False, direct=False)) as file:
            return packed(file.read, spans, memory)


def packed(
    read: Callable[[memoryview, int], None], spans: list[tuple[int, int]], memory: memoryview
) -> memoryview:
    """Return the bytes of the first ``spans`` that fit in ``memory``, packed there with their offsets and sizes."""
    room = len(memory) - _COUNT.size
    count = 0
    for _, nbytes in spans:
        room -= _SPAN.size + nbytes
        count += room >= 0
    start = _COUNT.size + count * _SPAN.size
    _COUNT.pack_into(memory, 0, count)
    for number, (offset, nbytes) in enumerate(spans[:count]):
        _SPAN.pack_into(memory, _COUNT.size + number * _SPAN.size, offset, nbytes)
        read(memory[start : start + nbytes], offset)
        start += nbytes
    return memory[:start]


def unpacked(data: bytes) -> list[tuple[int, memoryview]]:
    """Return what ``packed`` has packed: offsets, in their order, each with the bytes from there on."""
    [count] = _COUNT.unpack_from(data)
    spans = [_SPAN.unpack_from(data, _COUNT.size + number * _SPAN.size) for number in range(count)]
    start, found = _COUNT.size + count * _SPAN.size, []
    for offset, nbytes in spans:
        found.append((offset, memoryview(data)[start : start + nbytes]))
        start += nbytes
    return found


def in_blocks(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Divide ``views`` into lists of pieces, in order, that one request can carry each."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for view in views:
        while len(view):
            piece, view = view[:room], view[room:]
            block.append(piece)
            room -= len(piece)
            if not room or len(block) == MOST_PIECES:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def asking(
    channel: PeerChannel, server_of: Callable[[int], int]
) -> Callable[[int, Request, memoryview], Request]:
    """Return a function that asks a rank of the node at a place. ``server_of`` says which."""
    return lambda node, request, view: channel.ask(server_of(node), request, (), view)


class PartnerCopy:
    """The sending side, of one rank to the rank ``partner``. ``direct`` reads past the page cache."""

    def __init__(self, channel: PeerChannel, partner: int, disk: AnyDisk, direct: bool = True) -> None:
        self._channel, self._partner, self._disk, self._direct = channel, partner, disk, direct

    @contextmanager
    def copying(
        self,
        path: str,
        nbytes: int,
        offset: int,
        views: Sequence[memoryview],
        beat: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Have ``views`` durable at the partner when the block ends, at ``offset`` of the segment ``path``.

        The segment has ``nbytes``. The block writes the same bytes here meanwhile. Raises ``RankFailed`` or
        ``DiskFailed``; then what the partner has from there on is unknown.
        """
        blocks = list(in_blocks(views))
        for block in blocks[:-1]:
            self._write(path, nbytes, offset, block)
            offset += sum(map(len, block))
            if beat is not None:
                beat()
        last = {"do": "write", "path": path, "size": nbytes, "offset": offset, "sync": True}
        with self._channel.asked(self._partner, last, blocks[-1]) as answer:
            try:
                yield
            finally:
                answer(None)

    def copy_files(self, files: Sequence[FileRef], is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Have ``files`` durable at the partner on return, unless the snapshot is given up meanwhile.

        Raises as ``copying`` does, and ``ChunkCorrupt`` for a file that does not verify.
        """
        for ref in files:
            if is_given_up():
                return
            name = object_path(ref)
            if not self._channel.ask(self._partner, {"do": "has", "path": name, "size": ref.bytes})["has"]:
                self._copy_file(ref, name, is_given_up)

    def _copy_file(self, ref: FileRef, name: str, is_given_up: Callable[[], bool]) -> None:
        check_size(self._disk, ref)
        memory = Buffer(min(BLOCK_BYTES, ref.bytes), "copy").view
        with closing(self._disk.open(ref.path, write=False, direct=self._direct)) as file:
            for (start, stop), expected in zip(block_spans(ref.bytes), ref.checksums, strict=True):
                view = memory[: stop - start]
                file.read(view, start)
                got = xxhash.xxh3_64_hexdigest(view)
                if is_given_up():  # its files may be written again
                    return
                if got != expected:
                    raise corrupt(ref.path, start, len(view), (), expected, got, INSPECT)
                self._write(name + TEMPORARY, ref.bytes, start, [view])
        self._channel.ask(self._partner, {"do": "finish", "path": name})

    def _write(self, path: str, nbytes: int, offset: int, block: Sequence[memoryview]) -> None:
        request = {"do": "write", "path": path, "size": nbytes, "offset": offset}
        self._channel.ask(self._partner, request, block)


class PeerServer:
    """The answering side of one rank: it writes copies, and reads files for other nodes.

    ``direct`` writes past the page cache.
    """

    def __init__(self, disk: AnyDisk, copies: AnyDisk, direct: bool = True) -> None:
        self._files, self._reader = PartnerFiles(copies, direct), FileServer(disk, copies)
        self._memory = memoryview(bytearray(BLOCK_BYTES))

    def handle(self, request: Request, sent: memoryview) -> tuple[Request, memoryview | None]:
        """Answer one request. Called by the channel's threads, one at a time."""
        what, path = request["do"], request["path"]
        if what == "read":
            return {}, self._reader.read(request, self._memory)
        if what == "headers":
            return {}, self._reader.headers(request, self._memory)
        if what == "has":
            return {"has": self._files.has(path, request["size"])}, None
        if what == "write":
            self._files.write(path, request["size"], request["offset"], sent)
            if request.get("sync"):
                self._files.sync(path)
        elif what == "finish":
            self._files.finish(path)
        else:
            raise ValueError(f"{what!r} is no request")
        return {}, None

    def close(self) -> None:
        self._files.close()
