"""A run directory, open for its one writer, and the files that it writes.

``LocalStore`` locks the directory, opens a timeline and hands out the files of units, logs and scratch; its base
classes make commits (``commit_writer``) and retire them (``retained_commits``). With several ranks the first one locks
the run and opens its timeline, then the others join, after a check that all see the same directories. Before the
first write, every listed commit survives power loss with all that it names. Called by everything that writes a run.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path, PurePath
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from holdfast import failpoints
from holdfast.errors import (
    DiskFailed,
    DoesNotFit,
    HoldfastError,
    NoCommit,
    PoolExhausted,
    RunMismatch,
    StaleCommit,
)
from holdfast.io.queue import IOQueue
from holdfast.quantities import format_bytes
from holdfast.store import drive_links as drive_links
from holdfast.store.commit.commit_writer import WrittenCommits
from holdfast.store.commit.generations import Generations, remove_generations
from holdfast.store.commit.housekeeping import refuse_other_data, refuse_two_runs, restore, sweep, sync_all
from holdfast.store.commit.retention import Keep
from holdfast.store.disk import AnyDisk, Disk, write_durably
from holdfast.store.drive_links import MARK, RECORD, Drive, data_paths, refuse_lost
from holdfast.store.format.manifest import HOME, Point, Timeline, is_ours, this_writer
from holdfast.store.format.payload_layout import Layout
from holdfast.store.format.reference_files import Reference
from holdfast.store.lock import LOCK, HeldLock
from holdfast.store.log.journal import Copying, JournalWriter, uncopied
from holdfast.store.log.segments import segments, streams, stripe_paths, trim
from holdfast.store.log.striping import Stripes
from holdfast.store.object_store import place_of, remote_disk
from holdfast.store.path_checks import check_place
from holdfast.store.reader import RunReader, run_key_of
from holdfast.store.scratch import Scratch

if TYPE_CHECKING:
    from holdfast.distributed import Ranks

RESERVED_PART = 4
"""The part of the free storage that a segment of the log may reserve: bases need room, too."""
DIRECTORIES = ("data", "index", "commits", "timelines", "scratch")


class LocalStore(WrittenCommits):
    """A run directory, open for its one writer.

    A context manager. The order of calls: ``open``, ``newest_whole``, ``begin``, ``unit`` and ``put_index``; then for
    each step ``acquire`` and ``write`` of its units, then ``publish``. One thread publishes at a time.
    """

    def __init__(
        self,
        root: str | PurePath,
        *,
        retain: int = 2,
        keep: Keep | None = None,
        spare: int = 1,
        disk: AnyDisk | None = None,
        queue: IOQueue | None = None,
        direct: bool = True,
    ) -> None:
        """Prepare the store.

        Until ``enter``, nothing is written or locked; the run may be read and units counted.

        Args:
            retain: Number of commits to keep.
            keep: Retention rules that replace ``retain``; units then have more files, as there are more commits.
            spare: Number of files of each unit that must be free of commits: 1 to write a step, 1 more where steps
                between commits are written too.
            queue: An I/O queue that stays open; without one, the store makes its own.
        """
        retain = retain if keep is None else keep.last
        disk = disk or remote_disk(place_of(root))
        if disk is None:
            check_place(Path(root))
        self.queue, self._own_queue = queue or IOQueue(), queue is None
        super().__init__(
            root, retain=retain, spare=spare, keep=keep, disk=disk, queue=self.queue, direct=direct
        )
        self._scratch: list[Scratch] = []
        self._new_drives: list[str] = []
        self._entered: list[Path] = []
        """The paths that ``enter`` made, inner ones first."""
        self.unread: list[DiskFailed] = []
        """Errors of the segments that ``enter`` could not read."""
        self.stripes: Stripes | None = None
        """The way in which new segments of the log lie on several drives; None if they are on the run's own."""
        self.folders_for: Callable[[Sequence[int]], list[str]] = lambda sizes: [HOME] * len(sizes)
        """A function that returns the folders of units of these sizes, which name their drives."""
        self.is_part = False
        """True for the directory of one node, of a run that may have commits on others."""

    @classmethod
    def open(cls, root: str | PurePath, **options: Any) -> LocalStore:
        """Return a store that has been entered; ``options`` are those of the constructor."""
        store = cls(root, **options)
        store.enter()
        return store

    def enter(self, syncs_beside: bool = False) -> None:
        """Take the lock and make the directory ready, created if absent.

        Every listed commit survives power loss with all that it names: on return, or with ``syncs_beside`` before the
        first write. That holds even in a directory that was just copied or restored. Temporary files and scratch of an
        earlier process are gone. ``close`` removes what this made if nothing was begun.

        Args:
            syncs_beside: Sync in the background while the caller reads. The first write waits for it, and raises its
                error.

        Raises:
            RunLocked: Another process writes to the directory.
            RunMismatch: The directory holds files that no run of this library left, or parts of two runs.
        """
        try:
            self._entered = self._absent()
            self.disk.makedirs("")
            self._lock = self.disk.lock(LOCK, {**this_writer(), "started": time.time()})
            if not self.commits() and not self.is_part:
                refuse_other_data(self)
            retained = {ref: self._load_or_none(ref) for ref in self.commits()}
            refuse_two_runs(self, retained)
            payload = [f.path for m in retained.values() if m is not None for f in m.files.values()]
            refuse_lost(self.disk, [*payload, *stripe_paths(self.disk)])
            for directory in DIRECTORIES:
                self.disk.makedirs(directory)
            sweep(self.disk, retained)
            self._keep(retained)
            self._drop_orphans()
            self.unread = [error for stream in streams(self.disk) for error in trim(self.disk, stream)]
            sync = partial(sync_all, self.disk, self._retained)
            if syncs_beside:
                self._syncing = self.queue.submit([], kind="state", phase="reopen", priority=0, finish=sync)
            else:
                sync()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def read(root: str | PurePath, **options: Any) -> RunReader:
        """Open ``root`` for reading, without a lock and without writing, even beside a writer.

        ``options`` are those of ``RunReader``. Raises ``NoCommit`` if ``root`` is not a run directory.
        """
        reader = RunReader(root, **options)
        if not reader.disk.exists("commits"):
            raise NoCommit(f"{root} is not a run directory: it has no commits/ in it")
        return reader

    def begin(
        self, fork: Point | None, *, by_saves: bool = False, about: Mapping[str, Any] | None = None
    ) -> int:
        """Open a timeline that continues ``fork``, durable on return, and return its id.

        Verify ``fork`` before. Commits that an earlier process had no time to retire are retired, except with
        ``by_saves``; damaged timeline records are repaired.

        Args:
            fork: A commit or a log record; None starts from nothing.
            by_saves: Switch the run to the new timeline only at its first commit, and leave it where it was until
                then.
            about: More facts about the writer for the timeline's record.
        """
        self._check_writer()
        known = {*self.timeline_ids(), *(ref.timeline for ref in self.commits())}
        known |= {ref.timeline for stream in streams(self.disk) for ref in segments(self.disk, stream)}
        key, now, (records, damaged) = secrets.token_hex(16), time.time(), self.timelines()
        record = Timeline(
            max(known, default=0) + 1,
            None if fork is None else fork.timeline,
            None if fork is None else fork.step,
            key,
            None if fork is None else fork.key,
            now,
            {**this_writer(), **(about or {})},
            by_saves,
            run_key_of(records) or key,
            min((record.begun or record.created or now for record in records.values()), default=now),
        )
        with self._failing():
            write_durably(self.disk, record.path, record.encode(), why="timeline")
            failpoints.reach("after_timeline_opened")
            self.timeline, self._fork = record.id, record
            self._timelines = self.timelines()[0] if damaged else {**records, record.id: record}
            restore(self.disk, self._timelines, damaged)
            if not by_saves:  # with by_saves, the first commit switches the timeline and retires
                self._retire()
                self._prune_timelines()
        return record.id

    def continue_timeline(self, timeline: Timeline) -> None:
        """Continue in ``timeline``, the newest one, after its newest commit, instead of calling ``begin``.

        For writers that resume nothing and write whole states one after another.
        """
        self._check_writer()
        with self._failing():
            self.timeline, self._fork = timeline.id, timeline
            self._timelines, damaged = self.timelines()
            restore(self.disk, self._timelines, damaged)

    def writer(self) -> str:
        """Return what the lock file says of the last writer: its process, host and time. Empty without one."""
        return self.disk.read_bytes(LOCK).decode(errors="replace") if self.disk.exists(LOCK) else ""

    @property
    def opened(self) -> Timeline:
        """The timeline that ``begin`` opened."""
        assert self._fork is not None
        return self._fork

    def run_key(self) -> str:
        return super().run_key() if self._fork is None else self._fork.run

    def take_drives(self, drives: Sequence[Drive]) -> None:
        """Make ``drives`` the drives of the run; without any, all files are on the run's own.

        ``directories_for`` must have accepted their directories. Called after ``begin``, before units there are
        created.
        """
        self._check_writer()
        with self._failing():
            named = [*self._retained_files, *stripe_paths(self.disk)]
            self._new_drives = drive_links.take(self.disk, drives, named)

    def unit(
        self,
        name: str,
        layout: Layout,
        copies: int,
        folder: str = HOME,
        cuts: Sequence[int] = (),
        reference: Reference | None = None,
    ) -> Generations:
        """Return the files of one unit in ``folder``, which names their drive.

        ``copies`` is 1 for a unit that never changes, otherwise more than ``retain``. Bytes between two of ``cuts`` can
        be read by themselves. With a ``reference``, the bytes lie in its folder.
        """
        unit = Generations(
            name,
            layout,
            copies,
            disk=self.disk,
            queue=self.queue,
            retained=lambda: self._retained_files,
            way_out=self.way_out,
            check_writer=self._check_writer,
            direct=self.direct,
            grows=self.keep is not None,
            folder=folder,
            cuts=cuts,
            reference=reference,
        )
        self._units[name] = unit
        return unit

    def write_unit(
        self,
        name: str,
        layout: Layout,
        fill: Callable[[memoryview, int], None],
        *,
        phase: str = "save",
        folder: str = HOME,
    ) -> tuple[int, tuple[str, ...]]:
        """Write a whole unit once to ``folder``, durably, and return its generation and checksums for ``publish``.

        ``fill(view, start)`` puts the bytes of the file from ``start`` on into ``view``.
        """
        unit = self.unit(name, layout, copies=1, folder=folder)
        unit.create()
        generation = self.free_generation(unit)
        return generation, unit.write_through(generation, fill, phase=phase, priority=2)

    def journal(self, stream: str, copying: Copying = uncopied) -> JournalWriter:
        """Return a log writer for the timeline that ``begin`` opened; the caller closes it.

        ``copying`` keeps a second copy of all records.
        """
        if self._fork is None:
            raise ValueError("begin() opens the timeline that records are written in; call it first")

        def check_writer() -> None:
            self._check_writer()
            self._check_fence()

        def reserve(least: int, wanted: int) -> int:
            if self.cap_bytes is not None:
                free = self.cap_bytes - self.used_bytes - 2 * least
                wanted = max(least, min(wanted, free // RESERVED_PART))
            self.used_bytes += wanted
            return wanted

        return JournalWriter(
            self.disk, self.queue, stream, self._fork, check_writer=check_writer, reserve=reserve,
            copying=copying, direct=self.direct, stripes=self.stripes,
        )  # fmt: skip

    def scratch(self, name: str, nbytes: int) -> Scratch:
        """Return an empty scratch file of ``nbytes``, which is removed when the store is closed."""
        self._check_writer()
        scratch = Scratch(self.disk, self.queue, name, nbytes, direct=self.direct)
        self._scratch.append(scratch)
        return scratch

    def remove_scratch(self, scratch: Scratch) -> None:
        """Close and remove a scratch file before the store is closed. No transfer may be under way."""
        self._scratch.remove(scratch)
        scratch.close()
        if self._lock is not None:
            self._lock.check()
            scratch.remove()

    def drop_unit(self, unit: Generations) -> None:
        """Stop writing ``unit`` and remove its files as soon as no commit names them.

        No transfer may be under way.
        """
        self._units.pop(unit.name, None)
        unit.close()
        remove_generations(self.disk, unit.name, unit.layout.file_bytes, self._retained_files)

    def close_units(self) -> None:
        """Close the files of all units, before ``begin`` is called again to continue an earlier commit.

        No transfer may be under way.
        """
        units, self._units = self._units, {}
        for unit in units.values():
            unit.close()

    def free_generation(self, unit: Generations) -> int:
        """Return a generation to write, made if all are taken."""
        try:
            return unit.acquire()
        except PoolExhausted:
            if self.keep is None:
                raise
            if not self.make_room(unit.layout.file_bytes):
                try:
                    return unit.acquire()  # make_room retired a snapshot, which freed one
                except PoolExhausted as error:
                    raise self._no_room_for(unit) from error
            self.used_bytes += unit.layout.file_bytes
            return unit.acquire_new()

    def _no_room_for(self, unit: Generations) -> DoesNotFit:
        """Return the error where the cap allows no further file of ``unit``, and kept commits need all it has."""
        more = unit.layout.file_bytes
        return DoesNotFit(
            f"storage = {format_bytes(self.run_cap_bytes)} is too little: {self.root} takes"
            f" {format_bytes(self.used_bytes)}, and a file for the next base {format_bytes(more)} more, since the"
            f" two newest bases stay. Give more than {int((self.used_bytes + self.newest_bytes) / self.cap_share)}"
            " bytes, since records take some as well."
        )

    def names(self) -> set[str]:
        """Return the files in the directories in which a fresh start makes permanent files."""
        found = {
            f"{folder}/{name}" for folder in ("index", "timelines") for name in self.disk.listdir(folder)
        }
        return {*found, *data_paths(self.disk)}

    def withdraw(self, before: Collection[str]) -> None:
        """Remove what a fresh start without a commit made since ``names`` returned ``before``.

        Files of others stay. The timeline's record goes last, so an interruption leaves only what an interrupted
        fresh start leaves. Raises ``StaleCommit``, with nothing removed, if the directory is not the one that was
        opened.
        """
        if self._lock is None or self.commits():
            return
        self._lock.check()
        made = [unit.path(k) for unit in self._units.values() for k in range(unit.copies)]
        made += [f"index/{name}" for name in self.disk.listdir("index") if is_ours("index", name)]
        for path in made:
            if path not in before:
                self.disk.unlink(path)
        if self._new_drives:
            drive_links.leave(self.disk, self._new_drives)
            self.disk.unlink(RECORD)
        if self._fork is not None and self._fork.path not in before:
            self.disk.unlink(self._fork.path)
        self._fork = None  # as if nothing had been begun

    def space_needed(self, units: Iterable[Generations], scratch_bytes: int = 0) -> int:
        """Return the bytes that ``create`` of ``units`` and a scratch of ``scratch_bytes`` will still take."""
        return sum(unit.missing_bytes() for unit in units) + scratch_bytes

    def free_bytes(self) -> int:
        return self.disk.free_bytes()

    def close(self) -> None:
        """Close all files and release the lock. No transfer may be under way. A second call does nothing.

        A directory that was entered and in which nothing was begun is left as it was found.
        """
        lock, self._lock = self._lock, None
        scratch, self._scratch = self._scratch, []
        try:
            if self._own_queue:
                self.queue.close()
            for file in [*self._units.values(), *scratch]:
                file.close()
            if lock is not None:
                with suppress(DiskFailed, StaleCommit):  # the next opening removes the rest
                    for file in scratch:
                        # raises in a forked child, whose parent owns the files, and in another run's directory
                        lock.check()
                        file.remove()
        finally:
            if lock is not None:
                self._leave(lock)

    def _absent(self) -> list[Path]:
        """Return the paths that ``enter`` is about to make: directories and the lock file, inner ones first."""
        if not isinstance(self.disk, Disk):  # a bucket has no directories
            return []
        root = self.disk.root
        paths = [*(root / name for name in (*DIRECTORIES, LOCK)), root, *root.parents]
        return [path for path in paths if not os.path.lexists(path)]

    def _leave(self, lock: HeldLock) -> None:
        """Release the lock. If nothing was begun, remove it and the empty directories that ``enter`` made."""
        unused: list[Path] = []
        with suppress(HoldfastError, OSError):  # of another directory, whose files are not ours
            if self._entered and self._fork is None and not self.commits():
                lock.check()
                unused = self._entered
                if any(path.name == LOCK for path in unused):
                    self.disk.unlink(LOCK)
        lock.release()
        for directory in unused:
            with suppress(OSError):  # somebody has put files into it
                directory.rmdir()


def see_alike(store: LocalStore, ranks: Ranks) -> None:
    """Raise ``RunMismatch`` unless all ranks see the directory that the first rank has entered.

    Collective: every rank must call this.
    """

    def see() -> None:
        if store.writer() != writer:
            raise RunMismatch(
                f"{store.root} as rank {ranks.rank} sees it on {socket.gethostname()} is not the directory that rank 0"
                f" has entered ({writer.strip()}). Give all ranks one directory on a file system that they share."
            )

    writer = ranks.first_does(store.writer)
    ranks.all_do(see)


def see_drives(drives: Mapping[str, Path], ranks: Ranks) -> None:
    """Raise ``RunMismatch`` unless all ranks see each of ``drives`` as the first rank does.

    The first rank shows a file for a moment in the directory given for each drive: the drive's own, or the place
    where it will be.
    Collective: every rank must call this.
    """

    def show() -> list[tuple[str, str]]:
        marks = []
        for drive, directory in drives.items():
            with suppress(OSError):  # the code that writes there later reports the cause
                file = NamedTemporaryFile(prefix=MARK, dir=directory)  # noqa: SIM115 (until all have seen it)
                marks.append((drive, shown.enter_context(file).name))
        return marks

    def see() -> None:
        for drive, mark in marks:
            if not os.path.exists(mark):
                raise RunMismatch(
                    f"the drive {drive} as rank {ranks.rank} sees it on {socket.gethostname()} is not the one that rank"
                    " 0 has there. Every rank reads and writes the drives, so those of several hosts need a file system"
                    " that they share; leave out disks that only one of them has."
                )

    with ExitStack() as shown:
        marks = ranks.first_does(show)
        ranks.all_do(see)


def begin(
    store: LocalStore, ranks: Ranks, point: Point | None, about: Mapping[str, Any] | None = None
) -> None:
    """Open the timeline that continues ``point`` on the first rank, and join it on the others.

    Collective: every rank must call this.
    """

    def opened() -> Timeline:
        store.begin(point, about=about)
        return store.opened

    store.is_mine = ranks.is_mine
    timeline = ranks.first_does(opened)
    ranks.all_do(lambda: store.join(timeline, ranks.rank) if ranks.rank else None)
