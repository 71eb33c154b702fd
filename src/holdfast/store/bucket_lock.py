"""The lock of a place in a bucket: of all that push to it, one at a time publishes a commit or removes objects.

A commit may be listed only while all that it names is there, and only what no commit names may be removed. One request
cannot check both, so whoever does either holds the lock:

1. A process puts an object of a new name below ``lock/``, and lists ``lock/`` after that.
2. If no other object counts there, the process has the lock. Of two processes, at least one lists after both have put
   their objects and sees the object of the other, so at most one has the lock.
3. Otherwise it lists again later. The process whose object is the oldest there lets it stay. All others remove theirs,
   and put the next one when they see none that counts, so the oldest soon sees no other. Who is the oldest decides
   nothing else: an object may appear later than an older one of another process.
4. At the end the process removes its object, or makes it empty where it may not remove. An empty object does not count.
   An object that was left behind counts until it is ``LEFT_SECONDS`` old by the clock of the bucket, or until its
   process has ended, if that was on this machine.
5. Nothing is written under a lock whose object was put more than ``LEASE_SECONDS`` ago. The difference is longer than
   the longest request, so nothing of a former holder arrives after another process has the lock. No name is used again,
   so a late removal of an object concerns no later one.

Called by ``Pusher``, on one thread.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ..errors import DiskFailed
from ..regular_files import load_json
from .format.manifest import this_writer
from .object_store import ObjectDisk, ObjectFacts

FOLDER = "lock"
LEASE_SECONDS, LEFT_SECONDS = 240.0, 600.0
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.2, 2.0
"""The mean time between two listings: at first and for the oldest, and in the end for all others."""


class BucketLock:
    """The lock of the place that ``disk`` reads and writes."""

    def __init__(self, disk: ObjectDisk) -> None:
        self._disk, self._path = disk, ""
        self._own: set[str] = set()
        """The objects of this process that may be in the bucket."""
        self._taken_at = 0.0
        self._now = 0.0
        """The time of the bucket when the last object was put."""
        self._first, self._first_seen = "", 0.0
        """The object of another process for which this one waited last, and when it was first seen."""
        self.is_removal_refused = False
        """True if the last object could not be removed and was made empty."""
        self.holder = "another process"
        """The process that has or awaits the lock by that object, and until when the object counts, for people."""

    @contextmanager
    def acquired(
        self, wait_seconds: float, is_needless: Callable[[], bool] = lambda: False
    ) -> Iterator[bool]:
        """Hold the lock inside, if ``acquire`` could acquire it; yield whether it could."""
        is_acquired = self.acquire(wait_seconds, is_needless)
        try:
            yield is_acquired
        finally:
            if is_acquired:
                self.release()

    def acquire(self, wait_seconds: float, is_needless: Callable[[], bool] = lambda: False) -> bool:
        """Acquire the lock, and return whether that was possible.

        Args:
            wait_seconds: The longest time to wait, in all calls together for one object of another process.
            is_needless: Called before each wait; the lock is not acquired if it returns True.
        """
        self.release()  # what could not be removed before
        try:
            is_acquired = self._acquire(wait_seconds, is_needless)
        except BaseException:
            self.release()
            raise
        if not is_acquired:
            self.release()
        return is_acquired

    def _acquire(self, wait_seconds: float, is_needless: Callable[[], bool]) -> bool:
        end, pause_seconds = time.monotonic() + wait_seconds, POLL_SECONDS
        self._put()
        while True:
            others = self._disk.facts(FOLDER)
            own = others.get(self._path)
            for path in self._own & others.keys():
                del others[path]
            if own is not None:
                self._now = own.seconds
            oldest = self._oldest(others)
            if oldest is None and own is not None:
                all(self._is_removed(path) for path in others)  # up to the first that must not be removed
                return True
            if oldest is not None:
                self._note_first(oldest, others[oldest])
            is_patient = oldest is None or time.monotonic() < self._first_seen + wait_seconds
            if not is_patient or time.monotonic() >= end or is_needless():
                return False
            if oldest is None:
                self._put()
                continue
            if own is None or (others[oldest].seconds, oldest) < (own.seconds, self._path):
                self.release()
                pause_seconds = min(pause_seconds * 1.5, LONGEST_POLL_SECONDS)
            time.sleep(random.uniform(0.5, 1.5) * pause_seconds)

    def check(self) -> None:
        """Raise ``DiskFailed`` if the lock was taken so long ago that another process may have it."""
        seconds = _running_seconds() - self._taken_at
        if seconds > LEASE_SECONDS:
            raise DiskFailed(
                f"{self._disk.root} answered too slowly: after {seconds:.0f} s others may publish and remove there, so"
                " nothing more is written in this turn. What was there before still is: push again."
            )

    def release(self) -> None:
        """Release the lock. Where that fails, others wait until the object no longer counts."""
        self._path = ""  # a late request may still remove the object, so the lock is not held by it again
        for path in sorted(self._own):
            is_removed = self._is_removed(path)
            if is_removed or self._is_emptied(path):
                self._own.remove(path)
                self.is_removal_refused = not is_removed

    def _put(self) -> None:
        self._path, self._taken_at = f"{FOLDER}/{secrets.token_hex(8)}", _running_seconds()
        self._own.add(self._path)
        self._disk.put(self._path, json.dumps({**this_writer(), **_machine()}).encode())

    def _oldest(self, objects: dict[str, ObjectFacts]) -> str | None:
        """Return the oldest of ``objects`` that counts. Objects of the same time are in the order of their names."""
        in_order = sorted(objects, key=lambda path: (objects[path].seconds, path))
        return next((path for path in in_order if self._counts(path, objects[path])), None)

    def _counts(self, path: str, facts: ObjectFacts) -> bool:
        """Return whether a process may hold the lock by the object ``path``, and note that process."""
        if facts.bytes == 0 or self._now - facts.seconds > LEFT_SECONDS:
            return False
        try:
            text = self._disk.read_bytes(path)
        except FileNotFoundError:
            return False
        try:
            owner = load_json(text)
            here, pid = _machine(), owner["pid"]
            self.holder = f"process {pid} on {owner['host']}"
            is_here = bool(here) and here.items() <= owner.items()
            return not is_here or os.path.exists(f"/proc/{int(pid)}")
        except (ValueError, KeyError, TypeError):  # of a later version, or made empty meanwhile
            self.holder = "another process"
            return bool(text)

    def _note_first(self, path: str, facts: ObjectFacts) -> None:
        if path != self._first:
            self._first, self._first_seen = path, time.monotonic()
        until = datetime.fromtimestamp(facts.seconds + LEFT_SECONDS, UTC)
        self.holder += f" ({self._disk.root / path}, which counts until {until:%Y-%m-%d %H:%M:%S} UTC)"

    def _is_removed(self, path: str) -> bool:
        try:
            self._disk.unlink(path)
        except DiskFailed:  # it may not be permitted
            return False
        return True

    def _is_emptied(self, path: str) -> bool:
        try:
            self._disk.put(path, b"")
        except DiskFailed:
            return False
        return True


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
