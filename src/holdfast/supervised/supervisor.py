"""The sign by which a process knows that the command that started it is still there.

A command that starts scripts holds a lock in its folder, which the system drops with the command. A process that waits
for what only the command would end asks here from time to time, so that it does not wait for ever.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..store.disk import Disk

NAME = "supervisor"
"""The file in the folder of the command that it holds a lock of."""


class Supervisor:
    """A command's claim on its ``folder``, for as long as this object is open. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def is_supervised(folder: Path) -> bool:
    """Return whether the command that made ``folder`` still runs."""
    return Disk(folder).is_locked(NAME)
