"""Kept: the state that a replica leaves in memory when its trainer has died, and how the next trainer gets at it.

It is a commit like any other, in ``state`` of the run's tier, whose progress names the timeline of the run that it is
of. The replica that kept it listens at ``socket`` until somebody comes, or has waited for long enough.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Damaged, RunLocked
from ..state.live import LiveState
from ..store.local import LocalStore
from ..store.retention import ancestry
from . import tier
from .channel import Channel, Gone
from .line import Line

KEPT, SOCKET = "state", "socket"


@dataclass(frozen=True)
class Fork:
    """The step that a run continues, wherever its state was found."""

    step: int
    timeline: int
    key: str


def keep(place: Path, state: LiveState, step: int, progress: dict[str, Any], run: list[Any]) -> None:
    """Keep ``state`` at ``step`` of the timeline ``run``, its number and key."""
    drop(place)
    tier.put(place / KEPT, state, step, {**progress, "run": run})


def drop(place: Path) -> None:
    tier.remove(place / KEPT)


def find(place: Path, store: LocalStore, target: int | None, exact: bool) -> Fork | None:
    """The step that is kept, if it is wanted, on the current line of the run in ``store``, and not older than what
    that has. Whether it is whole shows when it is loaded."""
    if not (place / KEPT / "commits").is_dir():
        return None
    with tier.opened(place / KEPT) as memory:
        commits = memory.commits()
        try:
            run = memory.load(commits[0]).progress["run"] if commits else None
        except Damaged:
            return None
    timelines = store.timelines()[0]
    if run is None or not timelines:
        return None
    kept, limits = Fork(commits[0].step, *run), dict(ancestry(timelines, max(timelines)))
    record = timelines.get(kept.timeline)
    if record is None or record.key != kept.key or kept.timeline not in limits:
        return None
    last = limits[kept.timeline]
    wanted = target is None or kept.step == target or (kept.step < target and not exact)
    if not wanted or (last is not None and kept.step > last) or kept.step < newest(store, target):
        return None
    return kept


def newest(store: LocalStore, target: int | None) -> int:
    """The newest step, at most ``target``, that bases and records in ``store`` lead to, as far as headers say."""
    for ref in store.line():
        if target is None or ref.step <= target:
            with suppress(Damaged):
                return Line.of(store, store.load(ref), target).step
    return -1


class Door:
    """Where the next trainer asks. Opened with the run's lock."""

    def __init__(self, place: Path) -> None:
        self._path = place / SOCKET
        with suppress(FileNotFoundError):
            self._path.unlink()
        self._listener = socket.socket(socket.AF_UNIX)
        with _address(place) as address:
            self._listener.bind(address)
        self._listener.listen()

    def knocked(self, timeout: float = 0.0) -> bool:
        return bool(select.select([self._listener], [], [], timeout)[0])

    def say_busy(self, trainer: int) -> None:
        """To who asks: a trainer lives."""
        asking = Channel(self._listener.accept()[0], 1.0)
        with suppress(OSError):
            asking.send({"busy": trainer})
        asking.close()

    def leave(self) -> None:
        """Close, and let go whoever asks: nothing is touched here any more."""
        asking = Channel(self._listener.accept()[0], 1.0)
        self.close()
        with suppress(OSError):
            asking.send({"leaving": True})
        asking.close()

    def close(self) -> None:
        """Called with the run's lock, or before who asks is let go: the next one has the same name."""
        self._listener.close()
        with suppress(FileNotFoundError):
            self._path.unlink()


@contextmanager
def _address(place: Path) -> Iterator[str]:
    """Of the socket in ``place``, whose own path may be longer than an address."""
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def make_earlier_one_leave(place: Path, run: str, deadline_seconds: float) -> None:
    """Return when no replica of ``run`` is there any more; one whose trainer has died finishes first. Raises
    ``RunLocked`` if its trainer lives."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            with _address(place) as address:
                sock.connect(address)
        except OSError:  # nobody is there
            return
        with suppress(Gone):
            answer = Channel(sock).receive(deadline_seconds)
            if answer is not None and "busy" in answer.about:
                raise RunLocked(
                    f"{run} is being written by the replica of process {answer.about['busy']}, which trains. Wait for"
                    " it or stop it."
                )
