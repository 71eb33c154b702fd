"""SimDisk: a disk in memory that records every operation and can say what a power cut would leave of it.

Sizes are bytes. POSIX promises little: what was written to a file since its last sync may be there, or
not, or in part; a name made, changed or removed since the directory's last sync may be so, or not; each
on its own. A loop-mounted file system keeps more than that, so only this disk shows a missing sync.
A write is torn at sectors of 512 bytes; syncs can be left out of the account afterwards, one by one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import DiskFailed, RunLocked

SECTOR = 512
_ABOVE = ".."  # the directory that holds the root


@dataclass(frozen=True)
class Operation:
    """One line of the log. ``place`` is an inode number for file operations, a directory otherwise.

    verbs: write, resize (inode); create, rename, unlink, mkdir (directory); sync (inode), sync_dir; ack.
    """

    verb: str
    place: Any
    name: str = ""
    new_name: str = ""
    inode: int = -1
    offset: int = 0
    data: bytes = b""
    why: str = ""
    value: Any = None

    @property
    def tearable(self) -> bool:
        return self.verb == "write" and len(self.data) > SECTOR


@dataclass
class _State:
    """Files by inode, and what each directory holds: inode by name, -1 for a directory."""

    files: dict[int, bytes | bytearray] = field(default_factory=dict)
    directories: dict[str, dict[str, int]] = field(default_factory=lambda: {_ABOVE: {}})

    def copy(self) -> _State:
        return _State(dict(self.files), {path: dict(names) for path, names in self.directories.items()})

    def apply(self, operation: Operation, sectors: frozenset[int] | None = None) -> None:
        """Let ``operation`` happen; of a write only ``sectors`` if given."""
        if operation.verb in ("write", "resize"):
            data = bytearray(self.files.get(operation.place, b""))
            if operation.verb == "resize":
                data = data[: operation.offset].ljust(operation.offset, b"\0")
            else:
                _write_sectors(data, operation, sectors)
            self.files[operation.place] = data
            return
        names = self.directories.setdefault(operation.place, {})
        if operation.verb in ("rename", "unlink"):
            names.pop(operation.name, None)
        if operation.verb in ("create", "rename"):
            names[operation.new_name or operation.name] = operation.inode
        if operation.verb == "mkdir":
            names[operation.name] = -1


@dataclass(frozen=True)
class Image:
    """What a power cut after ``position`` operations left: ``disk``, and the newest mark."""

    disk: SimDisk
    position: int
    acked: Any
    lost: tuple[Operation, ...]


class SimFile:
    """An open file of a ``SimDisk``."""

    def __init__(self, disk: SimDisk, path: Path, inode: int) -> None:
        self.path, self.inode, self._disk = path, inode, disk

    def read(self, view: memoryview, offset: int) -> None:
        data = self._disk._state.files[self.inode][offset : offset + len(view)]
        if len(data) < len(view):
            raise DiskFailed(f"short read: {self.path} at {offset}: wanted {len(view)}, got {len(data)}")
        view[:] = data

    def write(self, view: memoryview, offset: int) -> None:
        self._disk._do(Operation("write", self.inode, offset=offset, data=bytes(view)))

    def close(self) -> None:
        pass


class SimDisk:
    """Has the methods of ``store.files.Disk``. Safe to use from several threads."""

    def __init__(self, root: str | Path = "/sim") -> None:
        self.root = Path(root)
        self.log: list[Operation] = []
        self._state = _State()
        self._next_inode = 0
        self._locked = False
        self._lock = threading.Lock()

    # the file system's calls

    def open(self, path: str, *, create: bool = False, write: bool = True, direct: bool = True) -> SimFile:
        directory, name = self._place(path)
        inode = self._state.directories.get(directory, {}).get(name)
        if inode is None:
            if not create or directory not in self._state.directories:
                raise FileNotFoundError(path)
            inode = self._create(directory, name)
        return SimFile(self, self.root / path, inode)

    def allocate(self, path: str, nbytes: int) -> None:
        self._do(Operation("resize", self.open(path, create=True).inode, offset=nbytes))

    def sync(self, target: SimFile | str, *, why: str) -> None:
        file = self.open(target) if isinstance(target, str) else target
        self._do(Operation("sync", file.inode, why=why))

    def sync_dir(self, path: str, *, why: str) -> None:
        self._do(Operation("sync_dir", path, why=why))

    def rename(self, src: str, dst: str) -> None:
        (directory, name), (target, new_name) = self._place(src), self._place(dst)
        assert directory == target, "the store renames within one directory"
        inode = self.open(src).inode
        self._do(Operation("rename", directory, name, new_name, inode))

    def unlink(self, path: str) -> None:
        if self.exists(path):
            directory, name = self._place(path)
            self._do(Operation("unlink", directory, name))

    def makedirs(self, path: str) -> None:
        parts = path.split("/") if path else []
        for depth in range(len(parts) + 1):
            directory = "/".join(parts[:depth])
            parent, name = self._place(directory) if directory else (_ABOVE, "")
            absent = name not in self._state.directories[parent]
            if absent:
                self._do(Operation("mkdir", parent, name))
                self._state.directories.setdefault(directory, {})
            if absent or directory == path:
                self._do(Operation("sync_dir", parent, why="makedirs"))

    def listdir(self, path: str) -> list[str]:
        return sorted(self._state.directories.get(path, {}))

    def exists(self, path: str) -> bool:
        if path in self._state.directories:
            return True
        directory, name = self._place(path)
        return name in self._state.directories.get(directory, {})

    def size(self, path: str) -> int:
        return len(self._state.files[self.open(path, write=False).inode])

    def read_bytes(self, path: str) -> bytes:
        return bytes(self._state.files[self.open(path, write=False).inode])

    def write_bytes(self, path: str, data: bytes) -> None:
        file = self.open(path, create=True)
        self._do(Operation("resize", file.inode, offset=0))
        self._do(Operation("write", file.inode, data=data))

    def free_bytes(self) -> int:
        return 1 << 40

    def lock(self, path: str, owner: dict) -> Callable[[], None]:
        if self._locked:
            raise RunLocked(f"{self.root} is being written")
        self._locked = True
        return self.end_process

    # the test's calls

    def end_process(self) -> None:
        """The writer is gone, killed or closed; what it wrote stays in the page cache."""
        self._locked = False

    def ack(self, value: Any) -> None:
        """Mark in the log that ``value`` was acknowledged: images from here on must show it."""
        self._do(Operation("ack", None, value=value))

    def whys(self) -> list[str]:
        """The reasons of the syncs of the log, each once, in order."""
        return list(dict.fromkeys(op.why for op in self.log if op.verb in ("sync", "sync_dir")))

    def images(
        self, rng: random.Random, *, samples: int = 4, without: str | None = None, start: int = 0
    ) -> Iterator[Image]:
        """What a power cut could leave after each prefix of the log, from the operation ``start`` on.

        After each: nothing un-synced kept, all of it, each operation alone kept, each alone lost, each
        write torn, and ``samples`` random subsets with torn writes. Syncs with the reason ``without``
        are taken as if they had not been made.
        """
        account = _Account(without)
        seen: set[Any] = set()
        for position in range(len(self.log) + 1):
            if position:
                account.add(self.log[position - 1])
            if position < start:
                continue
            for kept in account.choices(rng, samples):
                key = (account.epoch, account.acked, tuple(sorted(kept.items(), key=lambda item: item[0])))
                if key not in seen:
                    seen.add(key)
                    yield account.image(self.root, kept, position)

    # inside

    @staticmethod
    def _place(path: str) -> tuple[str, str]:
        directory, _, name = path.rpartition("/")
        return directory, name

    def _create(self, directory: str, name: str) -> int:
        with self._lock:
            inode = self._next_inode
            self._next_inode += 1
        self._do(Operation("resize", inode, offset=0))
        self._do(Operation("create", directory, name, inode=inode))
        return inode

    def _do(self, operation: Operation) -> None:
        with self._lock:
            self.log.append(operation)
            if operation.verb not in ("sync", "sync_dir", "ack"):
                self._state.apply(operation)


class _Account:
    """What is durable after some operations, and what is pending. ``epoch`` counts changes of the former."""

    def __init__(self, without: str | None) -> None:
        self.without = without
        self.durable = _State()
        self.pending: list[Operation] = []
        self.epoch = 0
        self.acked: Any = None

    def add(self, operation: Operation) -> None:
        if operation.verb == "ack":
            self.acked = operation.value
        elif operation.verb not in ("sync", "sync_dir"):
            self.pending.append(operation)
        elif operation.why != self.without:
            self._sync(operation)

    def _sync(self, operation: Operation) -> None:
        of_files = operation.verb == "sync"
        rest = []
        for item in self.pending:
            if item.place == operation.place and (item.verb in ("write", "resize")) == of_files:
                self.durable.apply(item)
            else:
                rest.append(item)
        if len(rest) < len(self.pending):
            self.epoch += 1
        self.pending = rest

    def choices(self, rng: random.Random, samples: int) -> Iterator[dict[int, frozenset[int] | None]]:
        """Which pending operations are kept: by position, with the sectors of a torn write (None: whole)."""
        everything: dict[int, frozenset[int] | None] = dict.fromkeys(range(len(self.pending)))
        yield {}
        yield everything
        for index in everything:
            yield {index: None}
            yield {other: None for other in everything if other != index}
            if self.pending[index].tearable:
                yield {**everything, index: self._tear(rng, index)}
        for _ in range(samples if self.pending else 0):
            kept = [index for index in everything if rng.random() < 0.5]
            yield {
                index: self._tear(rng, index) if self.pending[index].tearable and rng.random() < 0.3 else None
                for index in kept
            }

    def _tear(self, rng: random.Random, index: int) -> frozenset[int]:
        count = -(-len(self.pending[index].data) // SECTOR)
        return frozenset(sector for sector in range(count) if rng.random() < 0.5)

    def image(self, root: Path, kept: dict[int, frozenset[int] | None], position: int) -> Image:
        disk = SimDisk(root)
        state = self.durable.copy()
        for index, operation in enumerate(self.pending):
            if index in kept:
                state.apply(operation, kept[index])
        disk._state = _reachable(state)
        disk._next_inode = 1 + max(state.files, default=0)
        lost = tuple(operation for index, operation in enumerate(self.pending) if index not in kept)
        return Image(disk, position, self.acked, lost)


def _reachable(state: _State) -> _State:
    """``state`` without the directories whose own name was lost."""
    reached = _State(state.files, {_ABOVE: state.directories[_ABOVE]})
    queue = [""] if "" in state.directories[_ABOVE] else []
    while queue:
        path = queue.pop()
        names = state.directories.get(path, {})
        reached.directories[path] = names
        queue += [f"{path}/{name}" if path else name for name, inode in names.items() if inode == -1]
    for names in reached.directories.values():
        for inode in names.values():
            if inode != -1:
                state.files.setdefault(inode, b"")
    return reached


def _write_sectors(data: bytearray, operation: Operation, sectors: frozenset[int] | None) -> None:
    end = operation.offset + len(operation.data)
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    if sectors is None:
        data[operation.offset : end] = operation.data
        return
    for sector in sectors:
        piece = operation.data[sector * SECTOR : (sector + 1) * SECTOR]
        start = operation.offset + sector * SECTOR
        data[start : start + len(piece)] = piece
