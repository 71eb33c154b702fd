"""The lock file by which one process claims to be the only writer of a run.

A lock is an ``flock``, which the system drops with the process. The content of the file names the holder for people and
decides nothing, so it is never synced.
"""

from __future__ import annotations

import os
import secrets
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from holdfast.errors import BadInput, StaleCommit
from holdfast.regular_files import load_json

LOCK = "lock"
"""The lock file of a run, held by the first rank, which publishes."""


def lock_of(rank: int) -> str:
    """Return the lock file of the process that writes as ``rank``; the first rank's is the run's."""
    return f"{LOCK}.rank-{rank:05d}" if rank else LOCK


class HeldLock(Protocol):
    """A lock that was taken on any disk."""

    def check(self) -> None: ...
    def release(self) -> None: ...


class Lock:
    """A lock file that this process holds."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        _held_locks.add(self)

    @property
    def held(self) -> bool:
        """True while the lock is neither released nor left to the parent of a forked process."""
        return self.fd >= 0

    def check(self) -> None:
        """Raise ``StaleCommit`` unless the file of that name is still the one that is locked.

        Otherwise nobody may write to the directory: it is another one, or another writer may have locked it.
        """
        if not self.held:
            raise StaleCommit(
                f"{self.path.parent} is not open for writing in this process, which let go of its lock or was forked"
                f" from the one that has it. Nothing was written: go on in the process that opened the run."
            )
        if not is_file_of(self.path, self.fd):
            raise StaleCommit(
                f"{self.path.parent} was moved, removed or replaced, or its lock was removed, while this process had"
                f" the run open: {self.path} is not the file that it locked. Nothing more is written; what was"
                f" acknowledged stays where it was. Stop this process, see that no other writes to the run, and"
                f" resume it from the directory in which it is now."
            )

    def release(self, emptied: bool = True) -> None:
        """Release the lock, whatever errors the disk reports.

        A second call does nothing, nor does a call in a forked child.
        """
        fd, self.fd = self.fd, -1
        _held_locks.discard(self)
        if fd >= 0:
            with suppress(OSError):  # the content of a lock that nobody holds means nothing
                if emptied:
                    os.ftruncate(fd, 0)
            with suppress(OSError):
                os.close(fd)

    def leave_to_parent(self) -> None:
        """Forget the lock in a forked child, such as a data loader's worker.

        Otherwise the child would keep the lock of its dead parent.
        """
        fd, self.fd = self.fd, -1
        os.close(fd)


def _let_go_in_child() -> None:
    for lock in _held_locks:
        lock.leave_to_parent()
    _held_locks.clear()


_held_locks: set[Lock] = set()
os.register_at_fork(after_in_child=_let_go_in_child)


def is_our_content(content: bytes) -> bool:
    """Return whether a lock file holds what a writer of a run leaves in it. No run is refused because of it."""
    return not content.strip(b"\0") or content.startswith(b'{"pid"')


def set_aside(path: Path) -> None:
    """Rename the file at ``path``, which is locked here, because it may be another program's.

    A lock file is never synced, so after a power cut it may hold blocks of any other file. Within a run the file is
    ours whatever it holds; elsewhere its content is kept.
    """
    aside = path.with_name(f"{path.name}.found-{secrets.token_hex(4)}")
    os.rename(path, aside)
    warnings.warn(
        f"{path} was no lock of this library, or a power cut has left other bytes in it: it is {aside} now.",
        stacklevel=6,
    )


def is_file_of(path: Path, fd: int) -> bool:
    """Return whether ``path`` is the name of the file that is open as ``fd``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def locked_text(root: Path, holder: bytes) -> str:
    who = "another process"
    with suppress(ValueError, KeyError, TypeError):
        owner = load_json(holder)
        if (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname()):
            return own_text(root)
        who = f"process {owner['pid']} on {owner['host']}"
    return (
        f"{root} is being written by {who}. Wait for it or stop it; `holdfast ls`, `show` and `verify`"
        f" read a run that is being written."
    )


def own_text(root: str | Path) -> str:
    """Return the text for a process that opens a run again that it already writes."""
    return (
        f"{root} is being written by this very process ({os.getpid()}), which has it open: close() that first."
        " If a notebook has lost the object that writes it, restart the kernel."
    )


def refuse_without_locks(path: Path, error: OSError) -> BadInput:
    """Return the error for a file system without locks, where two writers could not be kept apart."""
    return BadInput(
        f"{path.parent} is on a file system that locks no files ({error.strerror}), so two writers of a run could not"
        " be kept apart. Mount it with locks (Lustre: -o flock; NFS: with its lock service), or put the run on another"
        " file system."
    )
