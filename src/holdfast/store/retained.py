"""RetainedCommits: what a writer remembers of the commits there are, and which of them its policy is to keep."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.io.queue import IOQueue
from holdfast.store.files import AnyDisk
from holdfast.store.manifest import CommitRef, Manifest, Timeline
from holdfast.store.reader import RunReader
from holdfast.store.retention import Keep, kept_for_good, lineage
from holdfast.store.room import used_bytes


class RetainedCommits(RunReader):
    """A reader that remembers the commits there are. ``LocalStore`` is the writer that it is of."""

    def __init__(
        self,
        root: str | Path,
        *,
        retain: int,
        keep: Keep | None,
        disk: AnyDisk | None,
        queue: IOQueue,
        direct: bool,
    ) -> None:
        super().__init__(root, disk=disk, queue=queue, direct=direct)
        self.retain, self.keep = retain, keep
        self.timeline: int | None = None
        """The one that is open for writing."""
        self.damaged: set[CommitRef] = set()
        """Commits that somebody has found not to be whole."""
        self.used_bytes = 0
        """That the run took of the disk when ``measure`` was called last."""
        self._retained: dict[CommitRef, Manifest | None] = {}
        self._retained_files: dict[str, int] = {}
        self._timelines: dict[int, Timeline] = {}

    @property
    def for_good_bytes(self) -> int:
        """Of the bases that are kept for good beside the newest. Called also while another thread publishes."""
        retained = self._retained
        alone = [retained.get(ref) for ref in self._for_good() - set(self._newest())]
        return sum(manifest.total_bytes for manifest in alone if manifest is not None)

    @property
    def newest_base(self) -> Manifest | None:
        """The newest commit of the line that is not known to be damaged."""
        return next((self._retained[ref] for ref in self._newest(1)), None)

    @property
    def newest_bytes(self) -> int:
        """Of the newest commit that can be read."""
        sizes = [(ref, m.total_bytes) for ref, m in self._retained.items() if m is not None]
        return max(sizes)[1] if sizes else 0

    def restarts(self) -> tuple[float, int]:
        """Seconds since the run was begun, and how often it has been resumed. Not all that stops a run is a failure;
        what does not know better counts it as one."""
        created = [record.created for record in self._timelines.values() if record.created]
        return (time.time() - min(created), len(created) - 1) if created else (0.0, 0)

    def measure(self) -> int:
        """What the run takes of the disk now."""
        self.used_bytes = used_bytes(self.disk)
        return self.used_bytes

    def _keep(self, retained: dict[CommitRef, Manifest | None]) -> None:
        """From now on these commits are retained (None: a manifest that cannot be read), with their files."""
        self._retained = retained
        manifests = [manifest for manifest in retained.values() if manifest is not None]
        self._retained_files = {f.path: f.bytes for item in manifests for f in item.files.values()}

    def _damaged(self) -> set[CommitRef]:
        """The retained commits that are known not to be whole."""
        return {ref for ref, manifest in self._retained.items() if manifest is None or ref in self.damaged}

    def _newest(self, count: int | None = None) -> list[CommitRef]:
        """The newest whole commits of the line, newest first: as many as are kept with their records."""
        whole = set(self._retained) - self._damaged()
        return lineage(whole, self._timelines, self.timeline or 0)[: count or self.retain]

    def _for_good(self) -> set[CommitRef]:
        if self.keep is None or not self.keep.for_good:
            return set()
        retained = self._retained
        line = lineage(retained, self._timelines, self.timeline or 0)
        manifests = [retained[ref] for ref in line if ref not in self.damaged]
        return kept_for_good([manifest for manifest in manifests if manifest is not None], self.keep)
