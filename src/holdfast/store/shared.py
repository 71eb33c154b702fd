"""SharedCommits: commits that several ranks make, each its share. The first one publishes, the others follow it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.store.lock import lock_of
from holdfast.store.manifest import CommitRef, Manifest, Point, Share, Timeline, this_writer
from holdfast.store.reading import read_named
from holdfast.store.written import Written, WrittenCommits, manifest_of


class SharedCommits(WrittenCommits):
    """Commits of one writer, or of several ranks of which the first has entered the run."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._following = threading.Lock()

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

    def insert_shares(self, point: Point, shares: dict[str, Share]) -> Manifest:
        """As ``insert``, of what several ranks would have, by stream."""
        self._check_writer()
        timeline = self.timelines()[0][point.timeline]
        return self._insert(manifest_of(timeline, point.step, {}, {}, {}).with_shares(shares))
