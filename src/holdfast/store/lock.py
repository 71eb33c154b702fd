"""Locks: the file by which one process says that it alone writes to a run.

A lock is an ``flock``, which the system drops with the process. What the file says of its holder is for people.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from holdfast.errors import RunMismatch, StaleCommit

LOCK = "lock"
"""Of a run: the file of the first rank, which publishes."""


def lock_of(rank: int) -> str:
    """The lock of who writes as ``rank``; the first one's is the run's."""
    return f"{LOCK}.rank-{rank:05d}" if rank else LOCK


class HeldLock(Protocol):
    """A lock that was taken, of any disk."""

    def check(self) -> None: ...
    def release(self) -> None: ...


class Lock:
    """A lock file that this process holds."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd
        _held_locks.add(self)

    @property
    def held(self) -> bool:
        """Whether it was neither released nor left with the parent of a forked process."""
        return self._fd >= 0

    def check(self) -> None:
        """Raise ``StaleCommit`` unless the file of that name is still the one that is locked.

        Nobody may write to the directory otherwise: it is another one, or another writer may have locked it.
        """
        if not self.held:
            raise StaleCommit(
                f"{self.path.parent} is not open for writing in this process, which let go of its lock or was forked"
                f" from the one that has it. Nothing was written: go on in the process that opened the run."
            )
        if not is_file_of(self.path, self._fd):
            raise StaleCommit(
                f"{self.path.parent} was moved, removed or replaced, or its lock was removed, while this process had"
                f" the run open: {self.path} is not the file that it locked. Nothing more is written; what was"
                f" acknowledged stays where it was. Stop this process, see that no other writes to the run, and"
                f" resume it from the directory in which it is now."
            )

    def release(self, emptied: bool = True) -> None:
        """Let go, whatever the disk says. A second call does nothing, nor does one in a forked child."""
        fd, self._fd = self._fd, -1
        _held_locks.discard(self)
        if fd >= 0:
            with suppress(OSError):  # what a lock that nobody holds contains means nothing
                if emptied:
                    os.ftruncate(fd, 0)
            with suppress(OSError):
                os.close(fd)

    def leave_to_parent(self) -> None:
        """Forget it in a forked child (a data loader's worker), which must not keep its dead parent's lock."""
        fd, self._fd = self._fd, -1
        os.close(fd)


def _let_go_in_child() -> None:
    for lock in _held_locks:
        lock.leave_to_parent()
    _held_locks.clear()


_held_locks: set[Lock] = set()
os.register_at_fork(after_in_child=_let_go_in_child)


def refuse_other_content(path: Path, content: bytes) -> None:
    """Raise ``RunMismatch`` if a lock file holds what no writer of a run leaves in it, even through a power cut."""
    if content.strip(b"\0") and not content.startswith(b'{"pid"'):
        raise RunMismatch(
            f"{path} is not a lock of this library: it holds {content[:40]!r}. Nothing was changed: move it away,"
            f" or give the run another directory."
        )


def is_file_of(path: Path, fd: int) -> bool:
    """Whether ``path`` is the name of the file that is open as ``fd``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def locked_text(root: Path, holder: bytes) -> str:
    who = "another process"
    with suppress(ValueError, KeyError, TypeError):
        owner = json.loads(holder)
        if (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname()):
            return own_text(root)
        who = f"process {owner['pid']} on {owner['host']}"
    return (
        f"{root} is being written by {who}. Wait for it or stop it; `holdfast ls`, `show` and `verify`"
        f" read a run that is being written."
    )


def own_text(root: str | Path) -> str:
    """For who opens a run again that this process writes."""
    return (
        f"{root} is being written by this very process ({os.getpid()}), which has it open: close() that first, as a"
        " cell of a notebook has to that is run again. Where no name is left for it, start the process anew."
    )
