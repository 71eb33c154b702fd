"""Kept: the state that a replica leaves in memory when its trainer has died, and how the next trainer gets at it.

It is a commit like any other, in ``state`` of the run's tier, whose progress names the timeline of the run that it is
of. Of several ranks each keeps its part, and the records of the steps behind it that not all ranks were known to have:
so there is a step that all of them can be brought to. The replica that kept it listens at ``socket`` until somebody
comes, or has waited for long enough.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Damaged, RunLocked
from ..state.live import LiveState
from ..store.journal import Record
from ..store.local import LocalStore
from ..store.lock import own_text
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


@dataclass(frozen=True)
class Kept:
    """What there is in memory: the steps ``first`` to ``last`` of a timeline, by its number and key. ``cut`` says which
    part of the state it is."""

    first: int
    last: int
    timeline: int
    key: str
    cut: str


def keep(
    place: Path,
    state: LiveState,
    step: int,
    progress: dict[str, Any],
    run: list[Any],
    cut: str = "",
    records: Sequence[Record] = (),
) -> None:
    """Keep ``state`` at ``step`` of the timeline ``run``, its number and key, and ``records`` of the steps since."""
    drop(place)
    tier.put(place / KEPT, state, step, {**progress, "run": run, "cut": cut}, records)


def drop(place: Path) -> None:
    tier.remove(place / KEPT)


def look(place: Path, store: LocalStore) -> Kept | None:
    """What is kept, as far as it lies on the current line of the run in ``store``. Whether it is whole shows when it
    is loaded."""
    if not (place / KEPT / "commits").is_dir():
        return None
    with tier.opened(place / KEPT) as memory:
        try:
            commits = memory.commits()
            line = Line.of(memory, memory.load(commits[0]), None) if commits else None
        except Damaged:
            return None
    timelines = store.timelines()[0]
    if line is None or "run" not in line.base.progress or not timelines:
        return None
    limits = dict(ancestry(timelines, max(timelines)))
    timeline, key = line.base.progress["run"]
    record = timelines.get(timeline)
    if record is None or record.key != key or timeline not in limits:
        return None
    limit = limits[timeline]
    last = line.step if limit is None else min(line.step, limit)
    if last < line.base.step:
        return None
    return Kept(line.base.step, last, timeline, key, line.base.progress.get("cut", ""))


def agreed(found: Sequence[Kept | None], newest_step: int, target: int | None, exact: bool) -> Fork | None:
    """The newest step that all of what was ``found`` can be brought to, if it is wanted and not older than
    ``newest_step``, that of the disk."""
    there = [kept for kept in found if kept is not None]
    if len(there) < len(found):
        return None
    last = min(kept.last for kept in there)
    if target is not None:
        last = min(last, target)
    if last < max(newest_step, *(kept.first for kept in there)) or (exact and last != target):
        return None
    newest = max(there, key=lambda kept: kept.timeline)
    return Fork(last, newest.timeline, newest.key)


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
            if answer is not None and answer.about.get("busy") == os.getpid():
                raise RunLocked(own_text(run))
            if answer is not None and "busy" in answer.about:
                raise RunLocked(
                    f"{run} is being written by the replica of process {answer.about['busy']}, which trains. Wait for"
                    " it or stop it."
                )
