"""The copy of one rank's share at its partner: log records as they are written, and the files of snapshots.

Records, in the recorder's thread:

1. The bytes of a group of records go to the partner's memory, before they are written here.
2. The partner syncs its copy while this rank writes and syncs its own. The group is durable when both are.

Snapshots, in a thread of their own, block by block, so that records never wait for more than one block:

1. Each file is read back, verified, sent, and named by its content at the partner, durably. A file that the partner has
   is not sent again.
2. Only then the rank reports its share. So a commit is published when all its shares are at their partners.

Nothing is queued: what waits to be sent lies in staging buffers, which ``memory=`` bounds, or on the disk. Bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import xxhash

from ...store.commit.generations import corrupt
from ...store.disk import TEMPORARY, AnyDisk
from ...store.format.file_names import block_spans
from ...store.format.manifest import FileRef, object_path
from ...store.format.payload_files import INSPECT, check_size
from ...store.share_places import PartnerFiles
from .peer_channel import BLOCK_BYTES, PeerChannel, Request
from .peer_disk import FileServer


class PartnerCopy:
    """The sending side, of one rank to the rank ``partner``."""

    def __init__(self, channel: PeerChannel, partner: int, disk: AnyDisk) -> None:
        self._channel, self._partner, self._disk = channel, partner, disk
        self.sent_bytes = 0

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
        for view in views:
            for start in range(0, len(view), BLOCK_BYTES):
                piece = view[start : start + BLOCK_BYTES]
                self._write(path, nbytes, offset + start, piece)
                if beat is not None:
                    beat()
            offset += len(view)
        with self._channel.asked(self._partner, {"do": "sync", "path": path}) as answer:
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
        memory = memoryview(bytearray(min(BLOCK_BYTES, ref.bytes)))
        with closing(self._disk.open(ref.path, write=False, direct=False)) as file:
            for (start, stop), expected in zip(block_spans(ref.bytes), ref.checksums, strict=True):
                view = memory[: stop - start]
                file.read(view, start)
                got = xxhash.xxh3_64_hexdigest(view)
                if is_given_up():  # its files may be written again
                    return
                if got != expected:
                    raise corrupt(ref.path, start, len(view), (), expected, got, INSPECT)
                self._write(name + TEMPORARY, ref.bytes, start, view)
        self._channel.ask(self._partner, {"do": "finish", "path": name})

    def _write(self, path: str, nbytes: int, offset: int, view: memoryview) -> None:
        request = {"do": "write", "path": path, "size": nbytes, "offset": offset}
        self._channel.ask(self._partner, request, view)
        self.sent_bytes += len(view)


class PeerServer:
    """The answering side of one rank: it writes copies, and reads files for other nodes."""

    def __init__(self, disk: AnyDisk, copies: AnyDisk) -> None:
        self._files, self._reader = PartnerFiles(copies), FileServer(disk, copies)
        self._memory = memoryview(bytearray(BLOCK_BYTES))

    def handle(self, request: Request, sent: memoryview) -> tuple[Request, memoryview | None]:
        """Answer one request. Called by the channel's thread."""
        what, path = request["do"], request["path"]
        if what == "read":
            return {}, self._reader.read(request, self._memory)
        if what == "headers":
            return {}, self._reader.headers(request, self._memory)
        if what == "has":
            return {"has": self._files.has(path, request["size"])}, None
        if what == "write":
            self._files.write(path, request["size"], request["offset"], sent)
        elif what == "sync":
            self._files.sync(path)
        elif what == "finish":
            self._files.finish(path)
        else:
            raise ValueError(f"{what!r} is no request")
        return {}, None

    def close(self) -> None:
        self._files.close()
