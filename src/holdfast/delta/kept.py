"""Kept: the state that a replica leaves in memory when its trainer has died, and how the next trainer gets at it.

It is a commit like any other, in ``state`` of the run's tier, whose progress names the timeline of the run that it is
of. Of several ranks each keeps its part, and the records of the steps behind it that not all ranks were known to have:
so there is a step that all of them can be brought to. A state that was handed over anew, which not all were known to
have either, is beside it in ``sync``. The replica that kept them listens at ``socket`` until somebody comes, or has
waited for long enough.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadInput, Damaged, RunLocked
from ..io.buffers import Buffer
from ..state.live import LiveState
from ..store.files import Disk
from ..store.journal import Record
from ..store.local import LocalStore
from ..store.lock import own_text
from ..store.manifest import ALONE, FileRef
from ..store.reading import index_of_stream, read_file
from ..store.retention import ancestry
from . import tier
from .channel import Channel, Gone
from .division import of_one_base
from .line import Line

KEPT, SYNC = tier.FOLDERS
SOCKET = "socket"
"""In a tier: what a replica kept, a whole state that a trainer hands over, and where it listens."""

REPLICA_IN = "replica_in"
"""In the record of a timeline, of its writer: where its replica keeps things."""

MARKS = ("run", "cut")
"""In the progress of a state that is kept."""


@dataclass(frozen=True)
class Fork:
    """The step that a run continues, wherever its state was found."""

    step: int
    timeline: int
    key: str


@dataclass(frozen=True)
class Kept:
    """What there is in ``folder`` of a tier: the steps ``first`` to ``last`` of a timeline, by its number and key.
    ``cut`` says which part of the state it is."""

    first: int
    last: int
    timeline: int
    key: str
    cut: str
    folder: str
    place: str = ""
    """The tier."""

    @property
    def path(self) -> Path:
        return Path(self.place) / self.folder


def mark(run: list[Any], cut: str) -> dict[str, Any]:
    """What the progress of a state says of the timeline ``run`` that it is of, its number and key, and its ``cut``."""
    return dict(zip(MARKS, (run, cut), strict=True))


def unmarked(progress: dict[str, Any]) -> dict[str, Any]:
    """What ``progress`` says besides."""
    return {name: value for name, value in progress.items() if name not in MARKS}


def keep(
    place: Path,
    state: LiveState,
    step: int,
    progress: dict[str, Any],
    run: list[Any],
    cut: str = "",
    records: Sequence[Record] = (),
) -> None:
    """Keep ``state`` at ``step`` of the timeline ``run``, and ``records`` of the steps since."""
    drop(place)
    tier.put(place / KEPT, state, step, {**progress, **mark(run, cut)}, records)


def drop(place: Path) -> None:
    tier.remove(place / KEPT)


def take_sync(place: Path) -> None:
    """What was handed over is what is kept from here on."""
    drop(place)
    Disk(place).rename(SYNC, KEPT)


def look(place: Path, store: LocalStore) -> list[Kept]:
    """What is kept, as far as it lies on the current line of the run in ``store``. Whether it is whole shows when it
    is loaded."""
    found = [_look(place, folder, store) for folder in (KEPT, SYNC)]
    return [each for each in found if each is not None]


def newest_of(places: Iterable[Path], store: LocalStore) -> int:
    """The newest step that is kept in any of ``places``; -1 if none is."""
    return max((each.last for place in places for each in look(place, store)), default=-1)


def refuse_to_leave(run: Path, store: LocalStore, step: int) -> None:
    """Raise ``BadInput`` if a replica of ``run`` kept a newer step than ``step``, which the disk has: for who trains
    without one, and would leave it behind."""
    timelines, key = store.timelines()[0], store.run_key()
    told = {record.writer.get(REPLICA_IN) for record in timelines.values()}
    memories = {tier.MEMORY, *(Path(place) for place in told if isinstance(place, str))}
    last = max(
        newest_of([*tier.places_of(run, memory, key), *tier.strays_of(run, memory, key)], store)
        for memory in memories
    )
    if last > step:
        raise BadInput(
            f"{run}: a replica kept step {last} in memory, and step {step} is on the disk."
            f" Resume with replica= as before to have it, or call resume(step={step}) to go on without it."
        )


def _look(place: Path, folder: str, store: LocalStore) -> Kept | None:
    if not (place / folder / "commits").is_dir():
        return None
    with tier.opened(place / folder) as memory:
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
    cut = line.base.progress.get("cut", "")
    return Kept(line.base.step, last, timeline, key, cut, folder, str(place))


def agreed(found: Sequence[Sequence[Kept]], newest_step: int, target: int | None, exact: bool) -> Fork | None:
    """The newest step that each of those who ``found`` something can be brought to, if it is wanted and not older than
    ``newest_step``, that of the disk."""
    ends = {each.last if target is None else min(each.last, target) for own in found for each in own}
    for step in sorted(ends, reverse=True):
        there = [leading_to(step, own) for own in found]
        if step < newest_step or (exact and step != target):
            return None
        if None not in there:
            newest = max(filter(None, there), key=lambda each: each.timeline)
            return Fork(step, newest.timeline, newest.key)
    return None


def leading_to(step: int, own: Sequence[Kept]) -> Kept | None:
    """What of one's ``own`` can be brought to ``step``."""
    return next((each for each in own if each.first <= step <= each.last), None)


def persist(place: Path, store: LocalStore, beat: Callable[[], None], stop: Callable[[], bool]) -> int | None:
    """Make what one replica kept in ``place`` a base, file by file, where the disk has nothing as new: for who does
    not know the model. Its step, which is durable then; None if there was nothing to do, or it was to ``stop``."""
    own = next((each for each in look(place, store) if each.folder == KEPT), None)
    if own is None or own.last <= newest(store, None) or stop():
        return None
    with tier.opened(place / KEPT) as memory:
        base = memory.load(memory.line()[0])
        store.begin(Fork(own.last, own.timeline, own.key))
        files = {}
        for name, ref in base.files.items():
            if stop():
                return None
            files[name] = _copied(memory, name, ref, store, beat)
        index = of_one_base(index_of_stream(memory.disk, base, ALONE), store.timeline, base.step)
        store.publish(base.step, files, store.put_index(index), unmarked(base.progress))
        store.prune_journal()
    drop(place)
    return base.step


def _copied(
    memory: LocalStore, name: str, ref: FileRef, store: LocalStore, beat: Callable[[], None]
) -> tuple[int, tuple[str, ...]]:
    """Write the file ``ref`` of ``memory``, verified, as one of the unit ``name`` of ``store``."""
    unit = store.unit(name, memory.layout(ref), copies=min(store.retain, 2) + 1)
    unit.create()
    buffer = Buffer(ref.bytes, "base")
    try:
        read_file(memory.disk, memory.queue, ref, buffer.view, direct=False).result()
        generation = store.free_generation(unit)

        def fill(view: memoryview, start: int) -> None:
            view[:] = buffer.view[start : start + len(view)]

        return generation, unit.write_through(
            generation, fill, kind="state", phase="base", priority=2, beat=beat
        )
    finally:
        buffer.free()


def newest(store: LocalStore, target: int | None) -> int:
    """The newest step, at most ``target``, that bases and records in ``store`` lead to, as far as headers say."""
    for ref in store.line():
        if target is None or ref.step <= target:
            with suppress(Damaged):
                return Line.of(store, store.load(ref), target).step
    return -1


class Door:
    """Where the next trainer asks, and says whether it takes what was kept. Opened with the run's lock."""

    def __init__(self, place: Path) -> None:
        self._path = place / SOCKET
        with suppress(FileNotFoundError):
            self._path.unlink()
        self._listener = socket.socket(socket.AF_UNIX)
        with _address(place) as address:
            self._listener.bind(address)
        self._listener.listen()
        self._asking: Channel | None = None
        self._takes: bool | None = None
        """What who asks has said; None if nothing yet."""

    def knocked(self, timeout: float = 0.0) -> bool:
        """Whether somebody asks, at the latest in ``timeout`` seconds. Looked at anew each time: one that was killed
        since asks no more."""
        until = time.monotonic() + timeout
        self._hear()
        while self._asking is None:
            left = max(until - time.monotonic(), 0.0)
            if not select.select([self._listener], [], [], left)[0]:
                return False
            self._asking = Channel(self._listener.accept()[0], 1.0)
            self._hear()
        return True

    def is_taken(self) -> bool:
        """Whether who asks takes what was kept, so that the disk need not have it first."""
        if self.knocked() and self._takes is None:
            self._hear(1.0)
        return bool(self._takes)

    def say_busy(self, trainer: int) -> None:
        """To who asks: a trainer lives."""
        asking = self._let_go()
        with suppress(OSError):
            asking.send({"busy": trainer})
        asking.close()

    def leave(self) -> None:
        """Close, and let go who asks: nothing is touched here any more."""
        asking = self._let_go()
        self.close()
        with suppress(OSError):
            asking.send({"leaving": True})
        asking.close()

    def _hear(self, timeout: float = 0.0) -> None:
        """What who asks has said, within ``timeout`` seconds; who has gone is forgotten."""
        if self._asking is None:
            return
        try:
            while (word := self._asking.receive(timeout)) is not None:
                self._takes, timeout = word.about.get("takes", False), 0.0
        except Gone:
            self._let_go().close()

    def _let_go(self) -> Channel:
        """Who asks, to be answered and forgotten."""
        assert self._asking is not None
        asking, self._asking, self._takes = self._asking, None, None
        return asking

    def close(self) -> None:
        """Called with the run's lock, or before who asks is let go: the next one has the same name."""
        self._listener.close()
        if self._asking is not None:
            self._asking.close()
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


def make_earlier_one_leave(place: Path, run: str, deadline_seconds: float, takes: bool) -> None:
    """Return when no replica of ``run`` is there any more; one whose trainer died finishes first, but need not write
    what it kept if who asks ``takes`` that. Raises ``RunLocked`` if its trainer lives."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            with _address(place) as address:
                sock.connect(address)
        except OSError:  # nobody is there
            return
        channel = Channel(sock)
        with suppress(OSError):  # it may have answered and gone
            channel.send({"takes": takes})
        with suppress(Gone):
            answer = channel.receive(deadline_seconds)
            if answer is not None and answer.about.get("busy") == os.getpid():
                raise RunLocked(own_text(run))
            if answer is not None and "busy" in answer.about:
                raise RunLocked(
                    f"{run} is being written by the replica of process {answer.about['busy']}, which trains. Wait for"
                    " it or stop it."
                )
