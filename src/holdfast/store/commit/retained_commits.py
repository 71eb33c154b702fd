"""The commits that a writer remembers, and how its policy retires them.

A commit is retired by unlinking its manifest. Only when that is durable are the files removed that nothing names any
more, then the log records that nothing needs. Sizes are bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import PurePath

from holdfast import failpoints
from holdfast.io.queue import IOQueue
from holdfast.store.commit.generations import Generations, remove_generations
from holdfast.store.commit.retention import (
    Keep,
    best_of,
    copies_bytes,
    copies_in,
    copy_path,
    dropped,
    is_better,
    kept_on_lines,
    lineage,
    needs,
    newest_tip,
    unneeded_segments,
    unneeded_timelines,
    used_bytes,
)
from holdfast.store.disk import AnyDisk
from holdfast.store.format.manifest import CommitRef, Manifest, Timeline, is_ours
from holdfast.store.log.segments import segments, streams
from holdfast.store.log.striping import remove_segment
from holdfast.store.reader import RunReader


class RetainedCommits(RunReader):
    """A reader that remembers the retained commits; the base class of the writer, ``LocalStore``."""

    def __init__(
        self,
        root: str | PurePath,
        *,
        retain: int,
        spare: int,
        keep: Keep | None,
        disk: AnyDisk | None,
        queue: IOQueue,
        direct: bool,
    ) -> None:
        super().__init__(root, disk=disk, queue=queue, direct=direct)
        self.retain, self.spare, self.keep = retain, spare, keep
        self.timeline: int | None = None
        """The timeline that is open for writing."""
        self.damaged: set[CommitRef] = set()
        """Commits that are known to be damaged."""
        self.certified_step: int | None = None
        """The newest step at which training was found good. The newest commit up to that step is not retired."""
        self.used_bytes = 0
        """The bytes that the run took of the disk at the last ``measure``."""
        self.cap_bytes: int | None = None
        """The most bytes that the run, or one of several ranks, may take of the disk."""
        self.cap_share = 1.0
        """This rank's fraction of the cap of the whole run."""
        self.retires_for_room = True
        """True if ``make_room`` may retire commits. One of several ranks may not by itself."""
        self._small: set[str] | None = None
        """The small files that count as this writer's; None means all."""
        self.dropped: list[CommitRef] = []
        """The commits that this writer retired for lack of space."""
        self.dropped_best: list[CommitRef] = []
        """The commits in ``dropped`` that were kept as the best ones."""
        self.is_mine: Callable[[str], bool] = lambda unit: True
        """A function that returns whether files of the unit of this name are this writer's to remove."""
        self._retained: dict[CommitRef, Manifest | None] = {}
        self._retained_files: dict[str, int] = {}
        self._timelines: dict[int, Timeline] = {}
        self._units: dict[str, Generations] = {}
        self._left: list[Manifest] = []  # retired manifests whose units may no longer exist

    @property
    def for_good_bytes(self) -> int:
        """The bytes of what is kept for good besides the newest snapshots: other snapshots, and copies of weights.

        May be called while another thread publishes.
        """
        retained, for_good = self._retained, self._for_good()
        newest = set(self._newest())
        alone = [manifest for ref in for_good - newest if (manifest := retained.get(ref)) is not None]
        others = {f.path for ref in newest if (m := retained.get(ref)) is not None for f in m.files.values()}
        own = {f.path: f.bytes for m in alone for unit, f in m.files.items() if self.is_mine(unit)}
        return copies_bytes(self.disk) + sum(nbytes for path, nbytes in own.items() if path not in others)

    @property
    def run_cap_bytes(self) -> int:
        """The cap of the whole run in bytes."""
        return int((self.cap_bytes or 0) / self.cap_share)

    @property
    def newest_base(self) -> Manifest | None:
        """The newest commit of the line that is not known to be damaged."""
        return next((self._retained[ref] for ref in self._newest(1)), None)

    @property
    def newest_bytes(self) -> int:
        """The bytes of the newest commit that can be read."""
        sizes = [(ref, self._own_bytes(m)) for ref, m in self._retained.items() if m is not None]
        return max(sizes)[1] if sizes else 0

    @property
    def may_grow(self) -> bool:
        """True if a snapshot may need new files because more commits are kept than the newest."""
        kept = self._retained
        return (self.keep is not None and self.keep.for_good) or len(kept) > self.retain

    def _own_bytes(self, manifest: Manifest) -> int:
        """Return the bytes of a commit's payload that this writer wrote."""
        return sum(file.bytes for unit, file in manifest.files.items() if self.is_mine(unit))

    @property
    def timelines_at_begin(self) -> list[Timeline]:
        """The timelines that there were when this writer opened its own, which is the last one."""
        return [record for _, record in sorted(self._timelines.items())]

    def restarts(self) -> tuple[float, int]:
        """Return the seconds since the run was begun, and the number of its resumes.

        Not every stop of a run is a failure; callers that do not know better count it as one.
        """
        records = self._timelines.values()
        begun = [record.begun or record.created for record in records if record.begun or record.created]
        restarts = (
            max(self._timelines, default=1) - 1 if any(record.begun for record in records) else len(begun) - 1
        )
        return (time.time() - min(begun), restarts) if begun else (0.0, 0)

    def measure(self) -> int:
        """Return the bytes that the run takes of the disk now."""
        if self._small is not None:
            self._small = {path for path in self._small if self.disk.exists(path)}
        self.used_bytes = used_bytes(self.disk, self.is_mine, self._small)
        return self.used_bytes

    def prune_journal(self) -> None:
        """Remove the segments of which no retained commit needs a record, except the current one.

        Called after ``publish``.
        """
        manifests = list(self._retained.values())
        if None in manifests:  # an unreadable manifest may need any segment
            return
        alone = self._for_good() - set(self._newest())
        for path in unneeded_segments(self.disk, needs(manifests, alone), self.timeline):
            failpoints.reach("before_segment_unlink")
            remove_segment(self.disk, path)
        self._prune_timelines()

    def _prune_timelines(self) -> None:
        """Remove the timeline records that lead to no commit, no segment and no copy of weights any more.

        A record that a power cut brings back leads nowhere either.
        """
        records = self._timelines
        commits = self.commits()
        used = {ref.timeline for ref in commits}
        used |= {ref.timeline for stream in streams(self.disk) for ref in segments(self.disk, stream)}
        used |= {ref.timeline for ref in copies_in(self.disk)}
        newest, present = max(self.timeline_ids(), default=0), newest_tip(commits, records)
        gone = unneeded_timelines(records, used, newest, present)
        for timeline in gone:
            self.disk.unlink(records[timeline].path)
        self._timelines = {number: record for number, record in records.items() if number not in gone}

    def make_room(self, nbytes: int) -> bool:
        """Retire the oldest commits until ``nbytes`` more fit below the cap, and return whether they do.

        The two newest whole commits stay. ``dropped`` lists the retired ones.
        """
        self.measure()
        while self.cap_bytes is not None and self.used_bytes + nbytes > self.cap_bytes:
            if not self.retires_for_room or self.drop_oldest() is None:
                return False
            self.measure()
        return True

    def drop_oldest(self) -> CommitRef | None:
        """Retire the oldest commit for lack of space, with the log records that only it needs.

        After them go copies of weights, the oldest first, and then the best commits, the worst first. Returns None
        where only the two newest whole commits and the newest certified one are left.
        """
        droppable = sorted(set(self._retained) - set(self._newest(2)) - self._certified())
        line = set(self._line())
        off = [ref for ref in droppable if ref not in line or ref in self.damaged]
        best = [ref for ref in self._best() if ref in droppable]
        others = off or [ref for ref in droppable if ref not in best]
        if not others and (copies := copies_in(self.disk)):
            self.disk.unlink(copy_path(copies[0]))
            self.dropped.append(copies[0])
            return copies[0]
        if not others and not best:
            return None
        victim = (others or best[::-1])[0]
        if victim in best:
            self.dropped_best.append(victim)
        self._drop([victim])
        self.dropped.append(victim)
        self.prune_journal()
        return victim

    def retains(self, ref: CommitRef) -> bool:
        """Return whether ``ref`` is a commit that is retained."""
        return ref in self._retained

    def is_among_best(self, value: float) -> bool:
        """Return whether a new commit with this ``value`` of the metric would be kept as one of the best.

        May be called while another thread publishes.
        """
        keep = self.keep
        if keep is None or keep.best is None or keep.metric is None:
            return False
        return is_better(self._whole_line(), keep.metric, keep.mode, keep.best, value)

    def _best(self) -> list[CommitRef]:
        """Return the commits of the line that are kept as the best ones, best first, but for the two newest."""
        newest = self._newest(2)
        best = [] if self.keep is None else best_of(self._whole_line(), self.keep)
        return [ref for ref in best if ref not in newest]

    def _whole_line(self) -> list[Manifest]:
        """Return the manifests of the line that are not known to be damaged, newest first."""
        retained = self._retained
        line = lineage(retained, self._timelines, self.timeline or 0)
        found = [retained[ref] for ref in line if ref not in self.damaged]
        return [manifest for manifest in found if manifest is not None]

    def _keep(self, retained: dict[CommitRef, Manifest | None]) -> None:
        """Retain exactly these commits (None: an unreadable manifest), with their files, from now on."""
        self._retained = retained
        manifests = [manifest for manifest in retained.values() if manifest is not None]
        self._retained_files = {f.path: f.bytes for item in manifests for f in item.files.values()}

    def _damaged(self) -> set[CommitRef]:
        """Return the retained commits that are known to be damaged."""
        return {ref for ref, manifest in self._retained.items() if manifest is None or ref in self.damaged}

    def _newest(self, count: int | None = None) -> list[CommitRef]:
        """Return the newest whole commits of the line, newest first: as many as keep their log records."""
        whole = set(self._retained) - self._damaged()
        return lineage(whole, self._timelines, self.timeline or 0)[: count or self.retain]

    def _line(self, timeline: int | None = None) -> list[CommitRef]:
        """Return the commits that led to the newest step of ``timeline``, newest first.

        None means the open timeline.
        """
        tip = self.timeline if timeline is None else timeline
        return lineage(self._retained, self._timelines, tip or 0)

    def _for_good(self) -> set[CommitRef]:
        """Return the commits that are kept for good, and the newest certified one.

        The former are on the current line, or on an abandoned one beyond the newest step of the current line.
        """
        if self.keep is None or not self.keep.for_good:
            return self._certified()
        retained = self._retained
        whole = {ref: m for ref, m in retained.items() if m is not None and ref not in self.damaged}
        return self._certified() | kept_on_lines(whole, self._timelines, self.timeline or 0, self.keep)

    def _certified(self) -> set[CommitRef]:
        """Return the newest whole commit of the line up to ``certified_step``, if there is one."""
        step = self.certified_step
        if step is None:
            return set()
        return set([ref for ref in self._newest(len(self._retained)) if ref.step <= step][:1])

    def _retire(self) -> None:
        """Unlink the manifests of commits that are not kept, durably, which frees their files."""
        assert self.timeline is not None
        copies = min(
            (unit.copies for unit in list(self._units.values()) if unit.copies > 1), default=self.retain + 1
        )
        room = max(self.retain, copies - self.spare) if self.keep is None else 2 * self.retain
        drop = dropped(
            self._retained, self._timelines, self.timeline, retain=self.retain, room=room,
            for_good=self._for_good(), damaged=self._damaged() if self.keep is not None else (),
        )  # fmt: skip
        newest = max(self._retained, default=CommitRef(0, 0))
        if newest.timeline < self.timeline:  # nothing replaces the damaged commits yet
            drop = [ref for ref in drop if self.keep is None or ref not in self._damaged()]
        if drop:
            self._drop(drop)

    def _drop(self, drop: list[CommitRef]) -> None:
        failpoints.reach("before_retire")
        for ref in drop:
            self.disk.unlink(ref.path)
        failpoints.reach("after_retire_unlink")
        self.disk.sync_dir("commits", why="retire")
        failpoints.reach("after_retire_sync")
        gone = [self._retained[ref] for ref in drop]
        self._keep({ref: manifest for ref, manifest in self._retained.items() if ref not in drop})
        self._drop_indexes(gone)
        self._drop_files(gone)
        for unit in list(self._units.values()):
            unit.trim()

    def _drop_orphans(self) -> None:
        """Remove the index files that no commit names, left by snapshots that were never published.

        Nothing is removed while a commit cannot be read.
        """
        if self._retained and None not in self._retained.values():
            needed = {
                path for kept in self._retained.values() if kept is not None for path in kept.small_paths
            }
            for name in self.disk.listdir("index"):
                if is_ours("index", name) and f"index/{name}" not in needed:
                    self.disk.unlink(f"index/{name}")

    def _drop_indexes(self, gone: list[Manifest | None]) -> None:
        """Remove the index files that only retired manifests named."""
        needed = {path for kept in self._retained.values() if kept is not None for path in kept.small_paths}
        named = {path for manifest in gone if manifest is not None for path in manifest.small_paths}
        for path in sorted(named - needed):
            self.disk.unlink(path)

    def _drop_files(self, gone: list[Manifest | None]) -> None:
        """Remove the files of former units that retired manifests named.

        Waits until the units of this run are known.
        """
        self._left += [manifest for manifest in gone if manifest is not None]
        if not self._units:
            return
        for manifest in self._left:
            for name, ref in manifest.files.items():
                if name not in self._units and self.is_mine(name):
                    remove_generations(self.disk, name, ref.bytes, self._retained_files)
        self._left = []
