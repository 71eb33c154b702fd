"""The run as one node sees it together with the disks of the others, for reading alone.

Manifests and indexes are in the node's own directory. Payload and log segments are read where they are: in that
directory, in the copies it keeps, at another node by ranges (``peer_channel``), or in the bucket. A process reads what
it needs and nothing else. Called by the recovery through ``LocalStore``. Offsets and sizes are bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ...errors import DiskFailed
from ...quantities import KiB
from ...store.disk import AnyDisk, Disk
from ...store.partner_files import copies_disk
from .peer_channel import BLOCK_BYTES, PeerChannel, Request
from .share_places import BUCKET, OWN, PARTNER, Place, Places, streams_of_segments

AHEAD_BYTES = 64 * KiB
"""The least bytes of a read at another node, because the headers of small records lie close together."""


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
        return PeerFile(self.root / path, place, self._ask)

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
    """A file of another node, read by ranges."""

    def __init__(self, path: Path, place: Place, ask: Callable[[int, Request, memoryview], Request]) -> None:
        self.path, self._place, self._ask = path, place, ask
        self._lock = threading.Lock()
        self._ahead, self._from = memoryview(b""), 0

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
            if not (self._from <= offset and offset + nbytes <= self._from + len(self._ahead)):
                ahead = max(nbytes, min(AHEAD_BYTES, self._place.nbytes - offset))
                memory = memoryview(bytearray(ahead))
                self._fill(memory, offset)
                self._ahead, self._from = memory, offset
            start = offset - self._from
            return self._ahead[start : start + nbytes]

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


def asking(
    channel: PeerChannel, server_of: Callable[[int], int]
) -> Callable[[int, Request, memoryview], Request]:
    """Return a function that asks a rank of the node at a place. ``server_of`` says which."""
    return lambda node, request, view: channel.ask(server_of(node), request, None, view)
