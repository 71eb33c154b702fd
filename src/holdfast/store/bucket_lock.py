"""The lock of a place in a bucket: of all that push to it, one at a time publishes a commit or removes objects.

A commit may be listed only while all that it names is there, and only what no commit names may be removed. One request
cannot check both, so whoever does either holds the lock:

1. A process puts an object of its own below ``lock/``, and lists ``lock/`` after that.
2. If no other object counts there, the process has the lock. Otherwise it removes its object and tries again. Of two
   that do so at once, at least one sees the object of the other, so at most one has the lock.
3. At the end the process removes its object. An object that was left behind counts until it is ``LEFT_SECONDS`` old by
   the clock of the bucket, or until its process has ended, if that was on this machine.
4. Nothing is written under a lock that was taken more than ``LEASE_SECONDS`` ago. The difference is longer than the
   longest request, so nothing of a former holder arrives after another process has taken the lock.

Called by ``Pusher``, on one thread.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import DiskFailed
from ..regular_files import load_json
from .format.manifest import this_writer
from .object_store import ObjectDisk

FOLDER = "lock"
LEASE_SECONDS, LEFT_SECONDS = 240.0, 600.0
POLL_SECONDS = 0.2
"""The mean time between two attempts."""


class BucketLock:
    """The lock of the place that ``disk`` reads and writes."""

    def __init__(self, disk: ObjectDisk) -> None:
        self._disk, self._path = disk, f"{FOLDER}/{secrets.token_hex(8)}"
        self._taken_at = 0.0
        self.holder = ""
        """The process that had the lock at the last attempt in vain, for people."""

    @contextmanager
    def acquired(self, wait_seconds: float) -> Iterator[bool]:
        """Hold the lock inside, if it could be acquired within ``wait_seconds``; yield whether it was."""
        is_acquired = self.acquire(wait_seconds)
        try:
            yield is_acquired
        finally:
            if is_acquired:
                self.release()

    def acquire(self, wait_seconds: float) -> bool:
        """Acquire the lock, and return whether that was possible within ``wait_seconds``."""
        end = time.monotonic() + wait_seconds
        while True:
            self._taken_at = _running_seconds()
            self._disk.put(self._path, json.dumps({**this_writer(), **_machine()}).encode())
            times = self._disk.times(FOLDER)
            others = times.keys() - {self._path}
            left = [each for each in others if self._is_left(each, times.get(self._path, 0.0) - times[each])]
            if self._path in times and len(left) == len(others):
                for each in left:
                    self._disk.unlink(each)
                return True
            self.release()
            if time.monotonic() >= end:
                return False
            time.sleep(random.uniform(0.5, 1.5) * POLL_SECONDS)

    def check(self) -> None:
        """Raise ``DiskFailed`` if the lock was taken so long ago that another process may have it."""
        seconds = _running_seconds() - self._taken_at
        if seconds > LEASE_SECONDS:
            raise DiskFailed(
                f"{self._disk.root} answered too slowly: after {seconds:.0f} s others may publish and remove there, so"
                " nothing more is written in this turn. What was there before still is: push again."
            )

    def release(self) -> None:
        """Release the lock. Where its object cannot be removed, others wait until it no longer counts."""
        with suppress(DiskFailed):
            self._disk.unlink(self._path)

    def _is_left(self, path: str, age_seconds: float) -> bool:
        """Return whether nobody holds the lock by the object ``path``, and note the holder otherwise."""
        if age_seconds > LEFT_SECONDS:
            return True
        try:
            owner = load_json(self._disk.read_bytes(path))
            here, pid = _machine(), owner["pid"]
            self.holder = f"process {pid} on {owner['host']}"
            is_here = bool(here) and here.items() <= owner.items()
            return is_here and not os.path.exists(f"/proc/{int(pid)}")
        except FileNotFoundError:
            return True
        except (ValueError, KeyError, TypeError):  # of a later version
            self.holder = "another process"
            return False


def _machine() -> dict[str, str]:
    """Return the start of this machine and what numbers its processes; nothing where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "processes": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {}


def _running_seconds() -> float:
    """Return the seconds since the machine started, including those in which it was suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
