"""The state that a replica leaves in memory when its trainer has died, and how the next trainer gets it.

The state is a commit like any other, in ``state`` of the run's shared-memory store. Its progress names the timeline of
the run that it belongs to. With several ranks each replica keeps its share, and behind it the log records of steps that
some rank may not have. So there is a step to which all replicas can be brought. A state that was handed over anew, and
that some rank may not have either, is beside it in ``sync``. The replica listens at ``socket`` until a trainer comes,
or until it has waited long enough.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BadInput, CommitRetired, Damaged, RunLocked
from ...io.buffers import Buffer
from ...io.queue import IOQueue
from ...state.live_state import LiveState
from ...store.commit.retention import ancestry
from ...store.disk import Disk
from ...store.format.manifest import ALONE, FileRef
from ...store.format.payload_files import index_of_stream, read_file
from ...store.lock import own_text
from ...store.log.journal import Record
from ...store.run_store import LocalStore
from ..recovery.lineage import Lineage
from ..snapshot.snapshot_chunks import of_one_base
from . import shared_memory
from .channel import Channel, ChannelClosed, is_readable

KEPT, SYNC = shared_memory.FOLDERS
SOCKET = "socket"
"""Names in the shared-memory store: the kept state, a state handed over by a trainer, and the replica's socket."""

REPLICA_IN = "replica_in"
"""The key in a timeline's record that names where the writer's replica keeps its state."""

MARKS = ("run", "cut")
"""The keys that a kept state adds to its progress."""

COPY = "copy"
"""The ``cut`` of a kept state that no replica left: the trainer copied its whole state into memory itself."""


@dataclass(frozen=True)
class ForkPoint:
    """The step that a run continues, wherever its state was found."""

    step: int
    timeline: int
    key: str


@dataclass(frozen=True)
class RetainedState:
    """The content of ``folder`` in a shared-memory store: the steps ``first`` to ``last`` of a timeline.

    ``timeline`` and ``key`` name the timeline. ``cut`` says which part of the state this is.
    """

    first: int
    last: int
    timeline: int
    key: str
    cut: str
    folder: str
    place: str = ""
    """The directory of the shared-memory store."""

    @property
    def path(self) -> Path:
        return Path(self.place) / self.folder


def mark(run: list[Any], cut: str) -> dict[str, Any]:
    """Return the entries that mark the progress of a kept state: ``run``, a timeline's number and key, and ``cut``."""
    return dict(zip(MARKS, (run, cut), strict=True))


def unmarked(progress: dict[str, Any]) -> dict[str, Any]:
    """Return ``progress`` without the entries that mark a kept state."""
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
    """Keep ``state`` in the shared-memory store, and behind it ``records`` of the steps since.

    Args:
        place: The directory of the store.
        step: The step of the state.
        progress: The progress of that step.
        run: The number and the key of the timeline.
        cut: Which part of the state this is.
    """
    drop(place)
    shared_memory.put(place / KEPT, state, step, {**progress, **mark(run, cut)}, records)


def drop(place: Path) -> None:
    shared_memory.remove(place / KEPT)


def take_sync(place: Path) -> None:
    """Make the state that was handed over the kept state."""
    drop(place)
    Disk(place).rename(SYNC, KEPT)


def look(place: Path, store: LocalStore) -> list[RetainedState]:
    """Return what is kept and lies on the current timeline of the run in ``store``.

    Whether it is whole shows when it is loaded.
    """
    found = [_look(place, folder, store) for folder in (KEPT, SYNC)]
    return [each for each in found if each is not None]


def is_copy(place: Path, queue: IOQueue) -> bool:
    """Return whether ``place`` holds a copy by the trainer, of any timeline, or one that was never whole.

    Nobody may be writing to it. It is read through ``queue``.
    """
    if not (place / KEPT).is_dir():
        return False
    with shared_memory.opened(place / KEPT, queue) as memory:
        commits = memory.commits()
        try:
            return not commits or memory.load(commits[0]).progress.get("cut") == COPY
        except Damaged:
            return False


def newest_of(places: Iterable[Path], store: LocalStore) -> int:
    """Return the newest step that is kept in any of ``places``; -1 if none is."""
    return max((each.last for place in places for each in look(place, store)), default=-1)


def refuse_to_leave(run: Path, store: LocalStore, step: int) -> None:
    """Raise ``BadInput`` if memory has a newer step of ``run`` than ``step``, which the disk has.

    For trainers that cannot continue from there, and would abandon that step.
    """
    timelines, key = store.timelines()[0], store.run_key()
    told = {record.writer.get(REPLICA_IN) for record in timelines.values()}
    memories = {shared_memory.MEMORY, *(Path(place) for place in told if isinstance(place, str))}
    places = [
        place
        for memory in memories
        for find in (shared_memory.places_of, shared_memory.strays_of)
        for place in find(run, memory, key)
    ]
    found = [each for place in places for each in look(place, store)]
    newest = max(found, key=lambda each: each.last, default=None)
    if newest is None or newest.last <= step:
        return
    owner = shared_memory.owner_of(Path(newest.place))
    if newest.cut == COPY and owner is not None and not owner.is_run(run, key):
        way_out = f"That was for the directory {owner.run}, and from another one it cannot be taken. C"
    else:
        way_out = "Resume as before to have it, with replica= or in one process, or c"
    raise BadInput(
        f'{run}: a replica, or every="auto", kept step {newest.last} in memory, and step {step} is on the disk.'
        f" {way_out}all resume(step={step}) to go on without it."
    )


def _look(place: Path, folder: str, store: LocalStore) -> RetainedState | None:
    if not (place / folder / "commits").is_dir():
        return None
    with shared_memory.opened(place / folder, store.queue) as memory:
        try:
            with memory.unchanging():
                commits = memory.commits()
                line = Lineage.of(memory, memory.load(commits[0]), None) if commits else None
        except CommitRetired:  # its owner has removed it meanwhile
            return None
        except Damaged as error:
            warnings.warn(
                f"the state of {store.root} that memory kept is damaged, and is passed over: {error}",
                stacklevel=3,
            )
            return None
    timelines = store.timelines()[0]
    if line is None or "run" not in line.base.progress or not timelines:
        return None
    limits = dict(ancestry(timelines, store.tip()))
    timeline, key = line.base.progress["run"]
    record = timelines.get(timeline)
    if record is None or record.key != key or timeline not in limits:
        return None
    limit = limits[timeline]
    last = line.step if limit is None else min(line.step, limit)
    if last < line.base.step:
        return None
    cut = line.base.progress.get("cut", "")
    return RetainedState(line.base.step, last, timeline, key, cut, folder, str(place))


def agreed(
    found: Sequence[Sequence[RetainedState]], newest_step: int, target: int | None, exact: bool
) -> ForkPoint | None:
    """Return the newest step to which every rank with kept states can be brought, with its timeline.

    Args:
        found: What each rank found.
        newest_step: The newest step on the disk. Older steps are not wanted.
        target: The greatest step that is wanted.
        exact: Accept no step but ``target``.
    """
    ends = {each.last if target is None else min(each.last, target) for own in found for each in own}
    for step in sorted(ends, reverse=True):
        there = [leading_to(step, own) for own in found]
        if step < newest_step or (exact and step != target):
            return None
        if None not in there:
            newest = max(filter(None, there), key=lambda each: each.timeline)
            return ForkPoint(step, newest.timeline, newest.key)
    return None


def leading_to(step: int, own: Sequence[RetainedState]) -> RetainedState | None:
    """Return the kept state in ``own`` that can be brought to ``step``."""
    return next((each for each in own if each.first <= step <= each.last), None)


def persist(place: Path, store: LocalStore, beat: Callable[[], None], stop: Callable[[], bool]) -> int | None:
    """Make a snapshot of what one replica kept in ``place``, file by file, if the disk has nothing as new.

    This needs no model. Returns the step, which is durable then. Returns None if there was nothing to do, or if
    ``stop`` returned true. In a run without a commit nothing was acknowledged: all of ``place`` is removed, and no
    timeline is opened, which would look as if the commits had been removed.
    """
    if not store.commits():
        shared_memory.remove(place)
        return None
    own = next((each for each in look(place, store) if each.folder == KEPT), None)
    if own is None or own.last <= newest(store, None) or stop():
        return None
    with shared_memory.opened(place / KEPT) as memory:
        base = memory.load(memory.line()[0])
        store.begin(ForkPoint(own.last, own.timeline, own.key))
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
    """Write the verified file ``ref`` of ``memory`` as a file of the chunk ``name`` of ``store``."""
    unit = store.unit(name, memory.layout(ref), copies=min(store.retain, 2) + 1)
    unit.create()
    buffer = Buffer(ref.bytes, "base")
    try:
        read_file(memory.disk, memory.queue, ref, buffer.view, direct=False).result()
        generation = store.free_generation(unit)

        def fill(view: memoryview, start: int) -> None:
            view[:] = buffer.view[start : start + len(view)]

        return generation, unit.write_through(generation, fill, phase="base", priority=2, beat=beat)
    finally:
        buffer.free()


def newest(store: LocalStore, target: int | None) -> int:
    """Return the newest step, at most ``target``, to which the snapshots and records in ``store`` lead by their
    headers.
    """
    for ref in store.line():
        if target is None or ref.step <= target:
            with suppress(Damaged):
                return Lineage.of(store, store.load(ref), target).step
    return -1


class ReplicaListener:
    """The socket at which the next trainer asks for the state, and says whether it takes what was kept.

    Opened by the holder of the run's lock.
    """

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
        """The answer of the asking trainer: whether it takes the state; None before it has answered."""

    def has_client(self, timeout: float = 0.0) -> bool:
        """Return whether a trainer is asking, within ``timeout`` seconds.

        Checked anew in each call, since an asking trainer may have been killed.
        """
        until = time.monotonic() + timeout
        self._hear()
        while self._asking is None:
            left = max(until - time.monotonic(), 0.0)
            if not is_readable(self._listener, left):
                return False
            self._asking = Channel(self._listener.accept()[0], 1.0)
            self._hear()
        return True

    def is_taken(self) -> bool:
        """Return whether the asking trainer takes what was kept, so that the disk need not have it first."""
        if self.has_client() and self._takes is None:
            self._hear(1.0)
        return bool(self._takes)

    def say_busy(self, trainer: int) -> None:
        """Answer the asking trainer that this replica's trainer lives."""
        asking = self._let_go()
        with suppress(OSError):
            asking.send({"busy": trainer})
        asking.close()

    def leave(self) -> None:
        """Close, and tell the asking trainer that this replica touches nothing any more."""
        asking = self._let_go()
        self.close()
        with suppress(OSError):
            asking.send({"leaving": True})
        asking.close()

    def _hear(self, timeout: float = 0.0) -> None:
        """Read the answer of the asking trainer, within ``timeout`` seconds, and forget a trainer that is gone."""
        if self._asking is None:
            return
        try:
            while (word := self._asking.receive(timeout)) is not None:
                self._takes, timeout = word.about.get("takes", False), 0.0
        except ChannelClosed:
            self._let_go().close()

    def _let_go(self) -> Channel:
        """Return the connection of the asking trainer, and forget it."""
        assert self._asking is not None
        asking, self._asking, self._takes = self._asking, None, None
        return asking

    def close(self) -> None:
        """Stop listening.

        Called under the run's lock, or before the asking trainer is answered: its own replica reuses the socket's name.
        """
        self._listener.close()
        if self._asking is not None:
            self._asking.close()
        with suppress(FileNotFoundError):
            self._path.unlink()


@contextmanager
def _address(place: Path) -> Iterator[str]:
    """Yield a short address of the socket in ``place``, whose own path may be too long for one."""
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def make_earlier_one_leave(place: Path, run: str, deadline_seconds: float, takes: bool) -> None:
    """Return when no replica of ``run`` is left.

    A replica whose trainer died finishes first, but need not write what it kept if the caller ``takes`` that. Raises
    ``RunLocked`` if its trainer lives.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            with _address(place) as address:
                sock.connect(address)
        except OSError:  # no replica listens
            return
        channel = Channel(sock)
        with suppress(OSError):  # the replica may have answered and gone
            channel.send({"takes": takes})
        with suppress(ChannelClosed):
            answer = channel.receive(deadline_seconds)
            if answer is not None and answer.about.get("busy") == os.getpid():
                raise RunLocked(own_text(run))
            if answer is not None and "busy" in answer.about:
                raise RunLocked(
                    f"{run} is being written by the replica of process {answer.about['busy']}, which trains. Wait for"
                    " it or stop it."
                )
