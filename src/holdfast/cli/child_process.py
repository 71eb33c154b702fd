"""A script that a verb started, with all processes that it started in turn.

Ranks of torchrun are in sessions of their own, so a kill of the process group would leave them. All descendants are
stopped first, so that none starts another one meanwhile, and then killed. Called by ``drill`` and ``standby``.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..errors import BadInput, DiskFailed

KILL_SECONDS = 30.0
"""The time after which killed processes that are still there are an error."""


class Child:
    """A running ``command`` with ``environment`` added to this process's own, in a process group of its own."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
    ) -> None:
        """Start it. Its output goes to ``output``, or where that of this process goes. Raises ``BadInput``."""
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            raise BadInput(
                f"{command[0]!r} cannot be started: {error.strerror}. After `--` comes the command as a shell would"
                " start it, such as `-- python train.py --steps 100`."
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send the signal ``number`` to the process itself, which passes it to its own where it wants to."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and all its descendants. On return none of them runs any more."""
        if self.poll() is not None:
            return
        stopped: set[int] = set()
        while new := {self.pid, *descendants(self.pid)} - stopped:
            for pid in new:
                _send(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _send(pid, signal.SIGKILL)
        self._process.wait()
        end = time.monotonic() + KILL_SECONDS
        while any(_runs(pid) for pid in stopped - {self.pid}):
            if time.monotonic() > end:
                raise DiskFailed(
                    f"processes of {self.pid} have not ended {KILL_SECONDS:g} s after SIGKILL, as when a disk hangs"
                )
            time.sleep(0.005)


class ProcessHandle:
    """A process that this one did not start, by a file descriptor, since its number may be given to another process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def of(cls, pid: int) -> ProcessHandle | None:
        """Return a handle of ``pid``; None if it has ended, or if the system has no such descriptors."""
        try:
            return cls(os.pidfd_open(pid))
        except (AttributeError, OSError):
            return None

    def kill(self) -> None:
        """Kill the process, and wait for its end for ``KILL_SECONDS`` at most."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            select.select([self._descriptor], [], [], KILL_SECONDS)

    def close(self) -> None:
        os.close(self._descriptor)


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` started, and those that they started."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and (found := _stat(int(each.name))) is not None:
            children.setdefault(found[1], []).append(int(each.name))
    found_all, left = [], [pid]
    while left:
        new = children.get(left.pop(), [])
        found_all += new
        left += new
    return found_all


def ending(code: int) -> str:
    """Describe how a process ended.

    >>> ending(1), ending(-9)
    ('exit code 1', 'SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _stat(pid: int) -> tuple[str, int] | None:
    """Return the state and the parent of a process; None for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1])


def _runs(pid: int) -> bool:
    found = _stat(pid)
    return found is not None and found[0] not in "ZX"


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
