"""The commit of all ranks in one call: the first opens the run, each writes its files, the first publishes.

Used by callers that save whole states now and then, each by a collective call, and keep nothing open in between.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...distributed import stream_of
from ...errors import BadInput, Damaged, HoldfastError, RunMismatch
from ...store.commit.retention import Keep
from ...store.format.manifest import Manifest, Timeline
from ...store.run_store import LocalStore
from ...supervised.attempt import refuse_in_drill
from ...supervised.standing_by import wait_for_run

_FILE = re.compile(r"save-\d+\.t\d+\.rank-\d+(\.unit_\d+-[0-9a-f]+)?\.0\.safetensors")
Progress = dict[str, Any]


def unit_of(step: int, timeline: int, rank: int) -> str:
    """Return the name of what a rank writes, or the prefix of its names."""
    return f"save-{step:012d}.t{timeline:04d}.{stream_of(rank)}"


def newest_progress(run: Path) -> dict[str, Any]:
    """Return the progress of the newest commit of ``run``, as JSON; empty if there is none or it cannot be read.

    A resume of the run reports the error.
    A standby first waits until the run is free, since the newest commit then is the one that it continues.
    """
    wait_for_run(run)
    if not (run / "commits").is_dir():
        return {}
    with suppress(HoldfastError, OSError):
        head = LocalStore.read(run).head()
        if head is not None:
            return head.progress_of(head.streams[0])
    return {}


def check_step(step: int | None) -> None:
    """Raise ``BadInput`` if no commit can have this ``step``."""
    if step is not None and (not isinstance(step, int) or step < 0):
        raise BadInput(f"step = {step!r}: that of a commit is a number from 0 on")


class OpenedRun:
    """The run, open on the first rank for one save.

    It is also closed when its owner is collected, as after a failed rank.
    """

    def __init__(
        self,
        root: str | Path,
        keep: Keep,
        step: int | None,
        is_ours: Callable[[Progress], bool],
        writer: str,
    ) -> None:
        """Open the run for a save.

        Args:
            root: The directory of the run.
            keep: Tells which commits stay.
            step: The step of the commit; None means one more than the newest.
            is_ours: Return whether a commit's progress comes from this kind of save.
            writer: The name of this kind of save, for messages.
        """
        refuse_in_drill(f"a save to {root} by {writer}")
        self.store = LocalStore(root, keep=keep)
        self.close = weakref.finalize(self, LocalStore.close, self.store)
        self.store.enter()
        try:
            before = _commit_before(self.store, step, is_ours, writer)
            self.step = step if step is not None else (before.step + 1 if before is not None else 0)
            self._drop_others()
            self._begin(before)
        except BaseException:
            self.close()
            raise

    def _begin(self, before: Manifest | None) -> None:
        """Begin or continue a timeline: a save after the newest step continues it, any other begins one."""
        timelines = self.store.timelines()[0]
        newest = max((*timelines, *self.store.timeline_ids()), default=0)  # includes one that cannot be read
        if (
            before is None
            or before.ref != self.store.line()[0]
            or before.timeline != newest
            or self.step <= before.step
        ):
            self.store.begin(before, by_saves=True)
        else:
            self.store.continue_timeline(timelines[newest])

    def _drop_others(self) -> None:
        """Remove the files of saves that were interrupted."""
        try:
            commits = [self.store.load(ref) for ref in self.store.commits()]
        except Damaged:  # an unreadable one may name any file
            return
        named = {file.path for manifest in commits for file in manifest.files.values()}
        for name in self.store.disk.listdir("data"):
            if _FILE.fullmatch(name) and f"data/{name}" not in named:
                self.store.disk.unlink(f"data/{name}")


def _commit_before(
    store: LocalStore, step: int | None, is_ours: Callable[[Progress], bool], writer: str
) -> Manifest | None:
    """Return the newest commit of the timeline that a save of ``step`` continues from; None if there is none.

    Raises ``RunMismatch`` if the run does not consist of these saves, ``BadInput`` if it begins later.
    """
    line = store.line()
    found = next((ref for ref in line if step is None or ref.step <= step), None)
    if line and found is None:
        raise BadInput(
            f"{store.root} begins with step {line[-1].step}, so step {step} cannot be saved there. Give another"
            " directory."
        )
    if found is None:
        return None
    manifest = store.load(found)
    if not is_ours(manifest.progress_of(manifest.streams[0])):
        raise RunMismatch(
            f"{store.root} is a run that {writer} did not write, so it cannot be gone on with. Give another directory."
        )
    return manifest


def joined_run(root: str | Path, keep: Keep, timeline: Timeline, rank: int) -> LocalStore:
    """Open the run on a rank other than the first, which has opened it.

    Raises ``BadInput`` if this rank does not see it.
    """
    store = LocalStore(root, keep=keep)
    try:
        with suppress(OSError):
            there = store.timelines()[0].get(timeline.id)
            if there is not None and there.key == timeline.key:
                store.join(timeline, rank)
                return store
    except BaseException:
        store.close()
        raise
    store.close()
    raise BadInput(
        f"rank {rank} does not see in {root} what the first rank wrote there. The directory has to be on a"
        " file system that all ranks share."
    )
