"""SharedCommits: commits of several ranks, each with its share. The first rank publishes, the others follow."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.store.commit.commit_writer import Written, WrittenCommits, manifest_of
from holdfast.store.format.manifest import CommitRef, Manifest, Point, RankShare, Timeline, this_writer
from holdfast.store.format.payload_files import read_named
from holdfast.store.lock import lock_of


class RankCommits(WrittenCommits):
    """The commits of one writer, or of several ranks of which the first has entered the run."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._following = threading.Lock()

    def join(self, timeline: Timeline, rank: int) -> None:
        """Join ``timeline``, which the first rank has opened, instead of calling ``enter`` and ``begin``.

        Called on every rank but the first. Units and logs of this rank may then be written; only the first rank
        publishes. Raises ``RunLocked`` if another process writes as this rank.
        """
        self._lock = self.disk.lock(lock_of(rank), {**this_writer(), "started": time.time()})
        self.timeline, self._fork, self._small = timeline.id, timeline, set()
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
                self._units[unit].check_there(generation)
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
