"""The making of commits, one after another, by the one writer of a run or by several ranks.

The order on disk of every commit:

1. Write the data; sync.
2. Write the manifest under a temporary name; sync.
3. Rename the manifest; sync the directory.
4. Only then unlink an older manifest, sync the directory again, and write its files anew.

The invariant: no manifest, no commit; a manifest that can be listed names files that are whole. Of several ranks each
makes its share durable, the first publishes one manifest of all, and the others follow. ``LocalStore`` inherits from
here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import xxhash

from holdfast import failpoints
from holdfast.errors import EngineFailed, StaleCommit
from holdfast.store.commit.retained_commits import RetainedCommits
from holdfast.store.commit.retention import Need, is_begun, newest_tip, unneeded_segments
from holdfast.store.disk import write_durably
from holdfast.store.format.manifest import (
    CommitRef,
    FileRef,
    Manifest,
    Point,
    RankShare,
    Timeline,
    this_writer,
)
from holdfast.store.format.payload_files import encode_index, read_named
from holdfast.store.lock import HeldLock, lock_of
from holdfast.store.log.striping import remove_segment

Written = dict[str, tuple[int, tuple[str, ...]]]
"""The generation that was written and the checksums of its blocks, by unit."""


class WrittenCommits(RetainedCommits):
    """Retained commits, and the making of new ones by one writer, or by several ranks of which the first has entered.

    ``LocalStore`` opens their directory.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lock: HeldLock | None = None
        self._fork: Timeline | None = None
        """The timeline that is being written."""
        self._failed: BaseException | None = None
        self._syncing: Future[None] | None = None
        """The syncs of what the run has, which end before anything is written; None once they have."""
        self._following = threading.Lock()

    def put_index(self, data: dict[str, Any]) -> dict[str, Any]:
        """Store an index under the hash of its content, durably, and return its reference for ``publish``."""
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
        again: bool = False,
    ) -> Manifest:
        """Make ``step`` a commit.

        On return it survives power loss, and commits beyond ``retain`` are retired.

        Args:
            files: The generation and the checksums of each unit.
            steps: The step of the content of those units that are of an earlier step; the log records since must be
                durable.
            again: Replace a commit of this step.

        Raises ``StaleCommit`` if another writer has opened a newer timeline, or if the directory or its lock is not
        the one that was opened.
        """
        self._check_writer()
        manifest = self._manifest(step, files, index, progress, steps or {}, again)
        return self._publish(manifest, files)

    def insert(
        self,
        point: Point,
        files: Written,
        index: dict[str, Any],
        progress: dict[str, Any],
    ) -> Manifest:
        """Make the step of ``point``, a log record, a commit of its timeline, durable on return.

        For a process that opened the run without continuing it.
        """
        self._check_writer()
        timeline = self.timelines()[0][point.timeline]
        refs = {name: self._file_ref(name, *value) for name, value in files.items()}
        return self._insert(manifest_of(timeline, point.step, refs, index, progress))

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
                self._units[unit].check_exists(generation)
            self._write(manifest, data)
            for unit, (generation, _) in files.items():
                self._units[unit].release(generation)
            self._retire()
        return manifest

    def _write(self, manifest: Manifest, data: bytes) -> None:
        """Publish ``manifest``, encoded as ``data``, and retain it."""
        write_durably(self.disk, manifest.path, data, why="manifest", after=_reach)
        failpoints.reach("after_directory_sync")
        self._check_writer()
        self._keep({**self._retained, manifest.ref: manifest})

    def retire(self, refs: Collection[CommitRef], needed: Collection[Need]) -> None:
        """Remove the commits ``refs`` on request, then their files and the segments without ``needed`` records.

        Only files that no other commit names are removed. For a process that opened the run without continuing it.
        """
        self._check_writer()
        with self._failing():
            gone = [self._retained[ref] for ref in refs]
            self._stay_on_line(refs)
            self._drop(sorted(refs))
            for path in {f.path for m in gone if m is not None for f in m.files.values()} - {
                *self._retained_files
            }:
                failpoints.reach("before_retired_unlink")
                self.disk.unlink(path)
            for path in unneeded_segments(self.disk, needed, None):
                failpoints.reach("before_segment_unlink")
                remove_segment(self.disk, path)
            self._timelines = self.timelines()[0]
            self._prune_timelines()

    def _stay_on_line(self, without: Collection[CommitRef]) -> None:
        """Mark a timeline by saves as begun if it stays the run's although all its commits are removed."""
        timelines = self.timelines()[0]
        tip = timelines.get(newest_tip(self._retained, timelines))
        if tip is not None and not is_begun(set(self._retained) - {*without}, tip):
            write_durably(self.disk, tip.path, replace(tip, by_saves=False).encode(), why="timeline")

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
        first = self._fork.fork_step  # a timeline may begin with a commit of the step that it forks after
        if (last is not None and step <= last - again) or (first is not None and step < first):
            last = first if last is None else last
            raise ValueError(f"step {step} cannot follow step {last}, which this line already has")
        refs = {name: self._file_ref(name, *value) for name, value in files.items()}
        refs |= {name: replace(refs[name], step=of) for name, of in steps.items() if of != step}
        manifest = manifest_of(self._fork, step, refs, index, progress)
        there = self._retained.get(manifest.ref)
        if there is not None and manifest.created <= there.created:  # the clock was set back
            manifest = replace(manifest, created=there.created + 1e-3)  # copies take the later one
        return manifest

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
        if self._syncing is not None:
            self._syncing.result()
            self._syncing = None

    def _check_fence(self) -> None:
        newest = max(self.timeline_ids(), default=0)
        assert self.timeline is not None
        if newest > self.timeline:
            raise StaleCommit(
                f"{self.root}: timeline {newest} was opened while this writer was in {self.timeline};"
                f" nothing was published. Stop this process; the run continues in the newer one."
            )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Remember a failure: the state of the disk is then unknown until a new ``open``."""
        try:
            yield
        except BaseException as error:
            self._failed = error
            raise

    def join(self, timeline: Timeline, rank: int) -> None:
        """Join ``timeline``, which the first rank has opened, instead of calling ``enter`` and ``begin``.

        Called on every rank but the first, again after a rollback. Units and logs of this rank may then be written;
        only the first rank publishes. Raises ``RunLocked`` if another process writes as this rank.
        """
        if self._lock is None:
            self._lock = self.disk.lock(lock_of(rank), {**this_writer(), "started": time.time()})
            self._small = set()
        self.timeline, self._fork = timeline.id, timeline
        self._timelines = self.timelines()[0]
        self.follow()

    def has_writer(self, rank: int) -> bool:
        """Return whether a process that has joined writes as ``rank``."""
        return self.disk.is_locked(lock_of(rank))

    def follow(self) -> None:
        """Read which commits the first rank has published and retired. Any thread may call it."""
        with self._following:
            before = self._retained
            self._keep({ref: self._load_or_none(ref) for ref in self.commits()})
            self._drop_files([manifest for ref, manifest in before.items() if ref not in self._retained])
            for unit in list(self._units.values()):
                unit.trim()

    def share(
        self,
        step: int,
        files: Written,
        index: dict[str, Any],
        progress: dict[str, Any],
        steps: Mapping[str, int],
    ) -> RankShare:
        """Return this rank's part of a commit, durable and ready for ``publish_shares``.

        The arguments are those of ``publish``.
        """
        refs = {
            name: replace(self._file_ref(name, *value), step=steps[name]) for name, value in files.items()
        }
        share = RankShare("", 0, "", step, refs, index, progress)
        with self._failing():
            for unit, (generation, _) in files.items():
                self._units[unit].check_exists(generation)
        return replace(share, **self._put_named(json.dumps(share.to_json()).encode()))

    def publish_shares(self, refs: dict[str, dict[str, Any]]) -> Manifest:
        """Publish one commit from the parts of all ranks and return its manifest.

        ``refs`` names the file of each part by stream, as ``RankShare.ref`` does. The commit is of the newest step
        among the parts, up to which every rank has log records. It replaces a commit of this step that was made
        beside training. Otherwise as ``publish``.
        """
        self._check_writer()
        shares = {
            stream: RankShare.from_json(ref, read_named(self.disk, ref, f"the share of {stream}"))
            for stream, ref in refs.items()
        }
        step = max(share.step for share in shares.values())
        there = self._retained.get(CommitRef(self.timeline or 0, step))
        manifest = self._manifest(step, {}, {}, {}, {}, again=there is not None).with_shares(shares)
        self._publish(manifest, {})
        self._drop_indexes([there])
        return manifest

    def insert_shares(self, point: Point, shares: dict[str, RankShare]) -> Manifest:
        """Insert a commit, as ``insert`` does, from the parts of several ranks by stream."""
        self._check_writer()
        timeline = self.timelines()[0][point.timeline]
        return self._insert(manifest_of(timeline, point.step, {}, {}, {}).with_shares(shares))


def manifest_of(
    timeline: Timeline,
    step: int,
    files: dict[str, FileRef],
    index: dict[str, Any],
    progress: dict[str, Any],
) -> Manifest:
    """Return the manifest of ``step`` of ``timeline``, made by this process now."""
    return Manifest(
        step, timeline.id, timeline.parent, timeline.fork_step, timeline.key, timeline.parent_key, files, index,
        progress, time.time(), this_writer(),
    )  # fmt: skip


def _reach(done: str) -> None:
    failpoints.reach(f"after_manifest_{done}")
