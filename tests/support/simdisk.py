"""SimDisk: a disk in memory that records every operation and yields what a power cut would leave of it.

It has the methods of ``store.disk.Disk``. A loop-mounted file system keeps more through a cut than POSIX
promises, so only this disk shows a missing sync; syncs can be left out of the account one by one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import DiskFailed, RunLocked, StaleCommit
from support.powerloss import ABOVE, Account, Operation, State


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


class SimLock:
    """The lock of a ``SimDisk``, as one process holds it."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk

    @property
    def held(self) -> bool:
        return self._disk._writer is self

    def check(self) -> None:
        if not self.held:
            raise StaleCommit(f"{self._disk.root} is not open for writing by this process any more")

    def release(self) -> None:
        if self.held:
            self._disk.end_process()


class SimDisk:
    """Has the methods of ``store.disk.Disk``. Safe to use from several threads."""

    def __init__(self, root: str | Path = "/sim") -> None:
        self.root = Path(root)
        self.log: list[Operation] = []
        self._state = State()
        self._next_inode = 0
        self._writer: SimLock | None = None
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

    def cut(self, path: str, nbytes: int) -> None:
        self._do(Operation("resize", self.open(path).inode, offset=nbytes))

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

    def link(self, path: str, directory: str) -> None:
        """A directory of this disk, whatever ``directory`` is. Not durable until that above it is synced."""
        if path not in self._state.directories:
            self._do(Operation("mkdir", *self._place(path)))
            self._state.directories[path] = {}

    def link_of(self, path: str) -> str | None:
        return None

    def makedirs(self, path: str) -> None:
        parts = path.split("/") if path else []
        for depth in range(len(parts) + 1):
            directory = "/".join(parts[:depth])
            parent, name = self._place(directory) if directory else (ABOVE, "")
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

    def is_named(self, path: str, file: SimFile) -> bool:
        directory, name = self._place(path)
        return self._state.directories.get(directory, {}).get(name) == file.inode

    def size(self, path: str) -> int:
        return len(self._state.files[self.open(path, write=False).inode])

    def data_end(self, path: str) -> int:
        return self.size(path)

    def read_bytes(self, path: str) -> bytes:
        return bytes(self._state.files[self.open(path, write=False).inode])

    def write_bytes(self, path: str, data: bytes) -> None:
        file = self.open(path, create=True)
        self._do(Operation("resize", file.inode, offset=0))
        self._do(Operation("write", file.inode, data=data))

    def free_bytes(self) -> int:
        return 1 << 40

    def lock(self, path: str, owner: dict) -> SimLock:
        if self._writer is not None:
            raise RunLocked(f"{self.root} is being written")
        self._writer = SimLock(self)
        return self._writer

    def is_locked(self, path: str) -> bool:
        return self._writer is not None

    # the test's calls

    def end_process(self) -> None:
        """The writer is gone, killed or closed; what it wrote stays in the page cache."""
        self._writer = None

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
        write torn, and ``samples`` random subsets with torn writes. Of those in which the same can be read, the first.
        Syncs with the reason ``without`` are taken as if they had not been made.
        """
        account = Account(without)
        seen: set[Any] = set()
        for position in range(len(self.log) + 1):
            if position:
                account.add(self.log[position - 1])
            if position < start:
                continue
            for kept in account.choices(rng, samples):
                key = (account.epoch, account.acked, tuple(sorted(kept.items(), key=lambda item: item[0])))
                if key in seen:
                    continue
                state = account.state(kept)
                content = account.acked, state.digest()
                if content not in seen:
                    lost = tuple(op for index, op in enumerate(account.pending) if index not in kept)
                    yield Image(self._of(state), position, account.acked, lost)
                seen |= {key, content}

    # inside

    def _of(self, state: State) -> SimDisk:
        disk = SimDisk(self.root)
        disk._state = state
        disk._next_inode = 1 + max(state.files, default=0)
        return disk

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
