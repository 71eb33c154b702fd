"""LocalStore: a run directory. Opens it, publishes commits into it, retires them.

Order on disk of every commit: data, sync -> manifest under a temporary name, sync -> rename -> sync of
the directory -> only then is an older manifest unlinked, the directory synced again, and its files written
anew. No manifest, no commit; a manifest that can be listed names files that are whole.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import xxhash

from holdfast import failpoints
from holdfast.errors import DiskFailed, EngineFailed, NoCommit, PoolExhausted, StaleCommit
from holdfast.io.queue import IOQueue
from holdfast.store.files import AnyDisk, check_place, write_durably
from holdfast.store.generations import Generations, remove_generations
from holdfast.store.housekeeping import refuse_other_data, refuse_two_runs, restore, sweep, sync_all
from holdfast.store.journal import JournalWriter, segments, streams, trim
from holdfast.store.layout import Layout
from holdfast.store.lock import HeldLock
from holdfast.store.manifest import CommitRef, FileRef, Manifest, Point, Share, Timeline, is_ours, this_writer
from holdfast.store.reader import RunReader
from holdfast.store.reading import encode_index, read_named
from holdfast.store.retained import RetainedCommits
from holdfast.store.retention import Keep
from holdfast.store.room import Need, unneeded_segments
from holdfast.store.scratch import Scratch
from holdfast.store.target import place_of, remote_disk

LOCK = "lock"
DIRECTORIES = ("data", "index", "commits", "timelines", "scratch")

Written = dict[str, tuple[int, tuple[str, ...]]]
"""By unit the generation that was written, and the checksums of its blocks."""


class LocalStore(RetainedCommits):
    """A run directory, open for its one writer. A context manager.

    The order of calls: ``open``, ``newest_whole``, ``begin``, ``unit`` and ``put_index``; then for
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
        """``spare`` is how many files of each unit must be free of commits: 1 to write a step, 1 more where
        steps between commits are written too. ``queue`` stays open; without one the store has its own. ``keep`` goes
        before ``retain``; units have more files then as there are more commits.

        Until ``enter`` the run may be read and units counted, and nothing is written or locked.
        """
        retain = retain if keep is None else keep.last
        if retain < 1:
            raise ValueError(f"durability.retain is at least 1, got {retain}")
        disk = disk or remote_disk(place_of(root))
        if disk is None:
            check_place(Path(root))
        self.queue, self._own_queue = queue or IOQueue(), queue is None
        super().__init__(
            root, retain=retain, spare=spare, keep=keep, disk=disk, queue=self.queue, direct=direct
        )
        self._lock: HeldLock | None = None
        self._scratch: list[Scratch] = []
        self._following = threading.Lock()
        self._fork: Timeline | None = None
        self._failed: BaseException | None = None

    @classmethod
    def open(cls, root: str | PurePath, **options: Any) -> LocalStore:
        """A store that has been entered; ``options`` are those of the constructor."""
        store = cls(root, **options)
        store.enter()
        return store

    def enter(self) -> None:
        """Take the lock and make the directory ready, made if absent. Raises ``RunLocked`` if another process
        writes to it, ``RunMismatch`` if it holds what no run of ours left there, or parts of two runs.

        When this returns, every commit that the directory lists survives power loss with all that it names, also
        where the directory was copied or restored a moment ago; what an earlier process left half-made
        (temporary files, scratch) is gone.
        """
        try:
            self.disk.makedirs("")
            self._lock = self.disk.lock(LOCK, {**this_writer(), "started": time.time()})
            if not self.commits():
                refuse_other_data(self)
            retained = {ref: self._load_or_none(ref) for ref in self.commits()}
            refuse_two_runs(self, retained)
            for directory in DIRECTORIES:
                self.disk.makedirs(directory)
            sweep(self.disk)
            self._keep(retained)
            self._drop_orphans()
            for stream in streams(self.disk):
                trim(self.disk, stream)
            sync_all(self.disk, self._retained)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def read(root: str | PurePath, **options: Any) -> RunReader:
        """Open ``root`` for reading: takes no lock, writes nothing, may be used beside a writer. ``options`` are
        those of ``RunReader``."""
        reader = RunReader(root, **options)
        if not reader.disk.exists("commits"):
            raise NoCommit(f"{root} is not a run directory: it has no commits/ in it")
        return reader

    def begin(self, fork: Point | None) -> int:
        """Open a timeline that continues ``fork``, a commit or a record (None: from nothing); durable before this
        returns.

        Retires what an earlier process had no time to retire, and repairs timeline records. Verify
        ``fork`` before.
        """
        self._check_writer()
        known = {*self._timeline_ids(), *(ref.timeline for ref in self.commits())}
        known |= {ref.timeline for stream in streams(self.disk) for ref in segments(self.disk, stream)}
        record = Timeline(
            max(known, default=0) + 1,
            None if fork is None else fork.timeline,
            None if fork is None else fork.step,
            secrets.token_hex(16),
            None if fork is None else fork.key,
            time.time(),
            this_writer(),
        )
        with self._failing():
            write_durably(self.disk, record.path, record.encode(), why="timeline")
            failpoints.reach("after_timeline_opened")
            self.timeline, self._fork = record.id, record
            self._timelines, damaged = self.timelines()
            restore(self.disk, self._timelines, damaged)
            self._retire()
        return record.id

    def go_on(self, timeline: Timeline) -> None:
        """Instead of ``begin``: go on in ``timeline``, the newest, after its newest commit. For who resumes nothing and
        writes whole states one after another."""
        self._check_writer()
        with self._failing():
            self.timeline, self._fork = timeline.id, timeline
            self._timelines, damaged = self.timelines()
            restore(self.disk, self._timelines, damaged)

    def writer(self) -> str:
        """What the lock says of the one that has entered: its process, host and time. Empty if nobody ever has."""
        return self.disk.read_bytes(LOCK).decode() if self.disk.exists(LOCK) else ""

    @property
    def opened(self) -> Timeline:
        """The timeline that ``begin`` opened."""
        assert self._fork is not None
        return self._fork

    def join(self, timeline: Timeline, rank: int) -> None:
        """Instead of ``enter`` and ``begin``, on a rank that is not the first, which has opened ``timeline``: units and
        journals of this rank may be written, the first rank alone publishes. Raises ``RunLocked`` if another process
        writes as this rank.
        """
        self._lock = self.disk.lock(lock_of(rank), {**this_writer(), "started": time.time()})
        self.timeline, self._fork, self._small = timeline.id, timeline, set()
        self._timelines = self.timelines()[0]
        self.follow()

    def has_writer(self, rank: int) -> bool:
        """Whether a process writes as ``rank``, which has joined."""
        return self.disk.is_locked(lock_of(rank))

    def follow(self) -> None:
        """Take note of what the first rank has published and retired. Any thread may call it."""
        with self._following:
            before = self._retained
            self._keep({ref: self._load_or_none(ref) for ref in self.commits()})
            self._drop_files([manifest for ref, manifest in before.items() if ref not in self._retained])
            for unit in list(self._units.values()):
                unit.trim()

    def unit(self, name: str, layout: Layout, copies: int) -> Generations:
        """The files of one unit; ``copies`` is 1 for one that never changes, else > ``retain``."""
        if self.keep is None and copies != 1 and copies <= self.retain:
            raise ValueError(
                f"unit {name!r} needs {self.retain + 1} copies to keep {self.retain} commits, not {copies}"
            )
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
        )
        self._units[name] = unit
        return unit

    def journal(self, stream: str) -> JournalWriter:
        """A journal of the timeline that ``begin`` opened; the caller closes it."""
        if self._fork is None:
            raise ValueError("begin() opens the timeline that records are written in; call it first")

        def check_writer() -> None:
            self._check_writer()
            self._check_fence()

        def reserve(least: int, wanted: int) -> int:
            if self.cap_bytes is not None:
                wanted = max(least, min(wanted, self.cap_bytes - self.used_bytes - 2 * least))
            self.used_bytes += wanted
            return wanted

        return JournalWriter(
            self.disk, self.queue, stream, self._fork, check_writer=check_writer, reserve=reserve, direct=self.direct
        )  # fmt: skip

    def scratch(self, name: str, nbytes: int) -> Scratch:
        """An empty scratch file of ``nbytes``; it goes when the store is closed."""
        self._check_writer()
        scratch = Scratch(self.disk, self.queue, name, nbytes, direct=self.direct)
        self._scratch.append(scratch)
        return scratch

    def remove_scratch(self, scratch: Scratch) -> None:
        """Close and remove a scratch file before the store is closed. Nothing may be under way on it."""
        self._scratch.remove(scratch)
        scratch.close()
        if self._lock is not None:
            self._lock.check()
            scratch.remove()

    def drop_unit(self, unit: Generations) -> None:
        """Write no more of ``unit``, whose files go as soon as no commit names them. Nothing may be under way."""
        self._units.pop(unit.name, None)
        unit.close()
        remove_generations(self.disk, unit.name, unit.layout.file_bytes, self._retained_files)

    def put_index(self, data: dict[str, Any]) -> dict[str, Any]:
        """Store an index under the hash of its content. Durable when this returns; what ``publish`` takes."""
        return self._put_named(encode_index(data))

    def _put_named(self, text: bytes) -> dict[str, Any]:
        self._check_writer()
        digest = xxhash.xxh3_128_hexdigest(text)
        with self._failing():
            if self._small is not None:
                self._small.add(f"index/{digest}.json")
            write_durably(self.disk, f"index/{digest}.json", text, why="index")
        return {"path": f"index/{digest}.json", "bytes": len(text), "xxh3_128": digest}

    def publish(
        self,
        step: int,
        files: Written,
        index: dict[str, Any],
        progress: dict[str, Any],
        steps: Mapping[str, int] | None = None,
    ) -> Manifest:
        """Make ``step`` a commit: ``files`` gives the generation and the checksums of each unit, ``steps`` the step of
        its content for those of an earlier one, of which the records must be durable.

        When this returns, the step survives power loss, and commits beyond ``retain`` are retired.
        Raises ``StaleCommit`` if another writer has opened a newer timeline, or the directory or its lock is
        not the one that was opened.
        """
        self._check_writer()
        manifest = self._manifest(step, files, index, progress, steps or {})
        return self._publish(manifest, files)

    def share(
        self,
        step: int,
        files: Written,
        index: dict[str, Any],
        progress: dict[str, Any],
        steps: Mapping[str, int],
    ) -> Share:
        """What this rank has of a commit, as ``publish`` takes it, durable and ready for ``publish_shares``."""
        refs = {
            name: replace(self._file_ref(name, *value), step=steps[name]) for name, value in files.items()
        }
        share = Share("", 0, "", step, refs, index, progress)
        with self._failing():
            for unit, (generation, _) in files.items():
                self._units[unit].check_there(generation)
        return replace(share, **self._put_named(json.dumps(share.to_json()).encode()))

    def publish_shares(self, refs: dict[str, dict[str, Any]]) -> Manifest:
        """Make a commit of what the ranks have, by stream, each in the file that its ``Share.ref`` names: of the newest
        step among them, up to which every one has records. One of this step that was made beside training gives way.
        Otherwise as ``publish``."""
        self._check_writer()
        shares = {
            stream: Share.from_json(ref, read_named(self.disk, ref, f"the share of {stream}"))
            for stream, ref in refs.items()
        }
        step = max(share.step for share in shares.values())
        there = self._retained.get(CommitRef(self.timeline or 0, step))
        manifest = self._manifest(step, {}, {}, {}, {}, again=there is not None).with_shares(shares)
        self._publish(manifest, {})
        self._drop_indexes([there])
        return manifest

    def insert(
        self,
        point: Point,
        files: Written,
        index: dict[str, Any],
        progress: dict[str, Any],
    ) -> Manifest:
        """Make the step of ``point``, a record, a commit of its timeline. For who opened the run without going on with
        it; durable when this returns."""
        self._check_writer()
        timeline = self.timelines()[0][point.timeline]
        refs = {name: self._file_ref(name, *value) for name, value in files.items()}
        return self._insert(_manifest_of(timeline, point.step, refs, index, progress))

    def insert_shares(self, point: Point, shares: dict[str, Share]) -> Manifest:
        """As ``insert``, of what several ranks would have, by stream."""
        self._check_writer()
        timeline = self.timelines()[0][point.timeline]
        return self._insert(_manifest_of(timeline, point.step, {}, {}, {}).with_shares(shares))

    def _insert(self, manifest: Manifest) -> Manifest:
        data = manifest.encode()
        with self._failing():
            self._write(manifest, data)
        return manifest

    def _publish(self, manifest: Manifest, files: Written) -> Manifest:
        data = manifest.encode()
        self._check_fence()
        with self._failing():
            for unit, (generation, _) in files.items():
                self._units[unit].check_there(generation)
            self._write(manifest, data)
            for unit, (generation, _) in files.items():
                self._units[unit].release(generation)
            self._retire()
        return manifest

    def _write(self, manifest: Manifest, data: bytes) -> None:
        """Make ``manifest``, encoded, a commit."""
        write_durably(self.disk, manifest.path, data, why="manifest", after=_reach)
        failpoints.reach("after_directory_sync")
        self._check_writer()
        self._keep({**self._retained, manifest.ref: manifest})

    def retire(self, refs: Collection[CommitRef], needed: Collection[Need]) -> None:
        """Remove the commits ``refs``, which somebody has asked for, then the files that only they named, then the
        segments with no record that is ``needed``. For who opened the run without going on with it."""
        self._check_writer()
        with self._failing():
            gone = [self._retained[ref] for ref in refs]
            self._drop(sorted(refs))
            for path in {f.path for m in gone if m is not None for f in m.files.values()} - {
                *self._retained_files
            }:
                failpoints.reach("before_retired_unlink")
                self.disk.unlink(path)
            for path in unneeded_segments(self.disk, needed, None):
                failpoints.reach("before_segment_unlink")
                self.disk.unlink(path)

    def free_generation(self, unit: Generations) -> int:
        """A generation to write, made if all are taken."""
        try:
            return unit.acquire()
        except PoolExhausted:
            if self.keep is None or not self.make_room(unit.layout.file_bytes):
                raise
            self.used_bytes += unit.layout.file_bytes
            return unit.acquire_new()

    def names(self) -> set[str]:
        """The files that are there now in the directories in which a fresh start makes some that stay."""
        folders = ("data", "index", "timelines")
        return {f"{folder}/{name}" for folder in folders for name in self.disk.listdir(folder)}

    def withdraw(self, before: Collection[str]) -> None:
        """Remove what a fresh start, which has no commit yet, made since ``names`` was ``before``; files of others
        stay. The timeline's record goes last: if this is cut short, it leaves what such a start leaves.

        Raises ``StaleCommit``, with nothing removed, if the directory is not the one that was opened.
        """
        if self._lock is None or self.commits():
            return
        self._lock.check()
        made = [unit.path(k) for unit in self._units.values() for k in range(unit.copies)]
        made += [f"index/{name}" for name in self.disk.listdir("index") if is_ours("index", name)]
        made += [] if self._fork is None else [self._fork.path]
        for path in made:
            if path not in before:
                self.disk.unlink(path)

    def space_needed(self, units: Iterable[Generations], scratch_bytes: int = 0) -> int:
        """Bytes that ``create`` of ``units`` and a scratch of ``scratch_bytes`` will still take."""
        return sum(unit.missing_bytes() for unit in units) + scratch_bytes

    def free_bytes(self) -> int:
        return self.disk.free_bytes()

    def close(self) -> None:
        """Close all files and let go of the lock. Nothing may be under way. A second call does nothing."""
        lock, self._lock = self._lock, None
        scratch, self._scratch = self._scratch, []
        try:
            if self._own_queue:
                self.queue.close()
            for file in [*self._units.values(), *scratch]:
                file.close()
            if lock is not None:
                with suppress(DiskFailed, StaleCommit):  # what is left of it is removed at the next opening
                    for file in scratch:
                        lock.check()  # a forked child leaves its parent's, and nobody touches another run's
                        file.remove()
        finally:
            if lock is not None:
                lock.release()

    def _manifest(
        self,
        step: int,
        files: Written,
        index: dict[str, Any],
        progress: dict[str, Any],
        steps: Mapping[str, int],
        again: bool = False,
    ) -> Manifest:
        if self._fork is None:
            raise ValueError("begin() opens the timeline that a step is published in; call it first")
        last = max((ref.step for ref in self._retained if ref.timeline == self._fork.id), default=None)
        first = self._fork.fork_step  # a line may begin with a commit of the step that it forks after
        if (last is not None and step <= last - again) or (first is not None and step < first):
            last = first if last is None else last
            raise ValueError(f"step {step} cannot follow step {last}, which this line already has")
        refs = {name: self._file_ref(name, *value) for name, value in files.items()}
        refs |= {name: replace(refs[name], step=of) for name, of in steps.items() if of != step}
        return _manifest_of(self._fork, step, refs, index, progress)

    def _file_ref(self, name: str, generation: int, checksums: tuple[str, ...]) -> FileRef:
        unit = self._units[name]
        ref = FileRef(unit.path(generation), unit.layout.file_bytes, tuple(checksums))
        known = [manifest.files.get(name) for manifest in self._retained.values() if manifest is not None]
        known = [replace(item, step=None) for item in known if item is not None]
        if not unit.is_synced(generation, ref.checksums) and ref not in known:
            raise ValueError(f"{ref.path} was not written and synced with these checksums; await the write")
        return ref

    def _check_writer(self) -> None:
        if self._lock is None:
            raise ValueError(f"{self.root} is not open for writing (any more); use LocalStore.open")
        self._lock.check()
        if self._failed is not None:
            raise EngineFailed(
                f"an earlier write to {self.root} failed ({self._failed}); run again to resume"
            )

    def _check_fence(self) -> None:
        newest = max(self._timeline_ids(), default=0)
        assert self.timeline is not None
        if newest > self.timeline:
            raise StaleCommit(
                f"{self.root}: timeline {newest} was opened while this writer was in {self.timeline};"
                f" nothing was published. Stop this process; the run continues in the newer one."
            )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Remembers a failure: what is on the disk is then known again only after a new ``open``."""
        try:
            yield
        except BaseException as error:
            self._failed = error
            raise


def lock_of(rank: int) -> str:
    """The lock of who writes as ``rank``; the first one's is the run's."""
    return f"{LOCK}.rank-{rank:05d}" if rank else LOCK


def _reach(done: str) -> None:
    failpoints.reach(f"after_manifest_{done}")


def _manifest_of(
    timeline: Timeline,
    step: int,
    files: dict[str, FileRef],
    index: dict[str, Any],
    progress: dict[str, Any],
) -> Manifest:
    """That of ``step`` of ``timeline``, made by this process now."""
    return Manifest(
        step, timeline.id, timeline.parent, timeline.fork_step, timeline.key, timeline.parent_key, files, index,
        progress, time.time(), this_writer(),
    )  # fmt: skip
