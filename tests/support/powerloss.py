"""Power loss: what a cut may leave of the operations on a disk, and a choice among that.

Sizes are bytes. POSIX promises little: what was written to a file since its last sync may be there, or
not, or in part; a name made, changed or removed since the directory's last sync may be so, or not; each
on its own. A write is torn at sectors of 512 bytes. ``SimDisk`` records, this module accounts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

SECTOR = 512
ABOVE = ".."
"""The directory that holds the root."""

Choice = dict[int, frozenset[int] | None]
"""Pending operations that happened, by position, with the sectors of a torn write (None: whole)."""


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
class State:
    """Files by inode, and what each directory holds: inode by name, -1 for a directory."""

    files: dict[int, bytes | bytearray] = field(default_factory=dict)
    directories: dict[str, dict[str, int]] = field(default_factory=lambda: {ABOVE: {}})

    def copy(self) -> State:
        return State(dict(self.files), {path: dict(names) for path, names in self.directories.items()})

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

    def digest(self) -> bytes:
        """Of all that can be read: names, and the bytes behind them."""
        found = xxhash.xxh3_128()
        for path, names in sorted(self.directories.items()):
            found.update(f"\n{path}\n".encode())
            for name, inode in sorted(names.items()):
                data = b"" if inode == -1 else self.files[inode]
                found.update(f"{name}/{inode == -1} {len(data)}:".encode())
                found.update(_digest(data))
        return found.digest()


class Account:
    """What is durable after some operations, and what is pending. ``epoch`` counts changes of the former."""

    def __init__(self, without: str | None) -> None:
        self.without = without
        self.durable = State()
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

    def choices(self, rng: random.Random, samples: int) -> Iterator[Choice]:
        """Which pending operations may have happened: none, all, each alone, all but each, random ones."""
        everything: Choice = dict.fromkeys(range(len(self.pending)))
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

    def state(self, kept: Choice) -> State:
        """The files and names that are left if of the pending operations only ``kept`` happened."""
        state = self.durable.copy()
        for index, operation in enumerate(self.pending):
            if index in kept:
                state.apply(operation, kept[index])
        return _reachable(state)


_digests: dict[int, tuple[bytes | bytearray, bytes]] = {}
"""Contents of files that were digested, by identity: ``State.apply`` makes a new one and changes none."""


def _digest(data: bytes | bytearray) -> bytes:
    if id(data) not in _digests:
        if len(_digests) > 10_000:
            _digests.clear()
        _digests[id(data)] = data, xxhash.xxh3_128_digest(data)
    return _digests[id(data)][1]


def _reachable(state: State) -> State:
    """``state`` without the directories whose own name was lost."""
    reached = State(state.files, {ABOVE: state.directories[ABOVE]})
    queue = [""] if "" in state.directories[ABOVE] else []
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
