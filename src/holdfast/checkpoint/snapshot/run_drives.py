"""The drives of a ``Checkpointer``'s run, over which the chunks of its snapshots and the stripes of its log are spread.

Rates are measured once for a list of drives and stored with the run, so that files stay on their drives from one resume
to the next. After a change of the list, files are read where they are, and later snapshots and segments are written to
the new places. Everything but payload and records stays in the run's directory. Called by the log backend:

1. ``decide``, before the run is entered.
2. ``take``, once the timeline is open and before anything is written.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...distributed import Ranks
from ...errors import BadInput
from ...events import tell
from ...io.queue import DriveQueues, IOQueue
from ...io.threads import use_cpus
from ...measure.drive_rates import measured_drives, nearest, spread
from ...store.disk import Disk
from ...store.drive_links import RECORD, Drive, directories_for, folders, refuse_no_list
from ...store.log.striping import Stripes
from ...store.run_store import LocalStore, see_drives


class RunDrives:
    """The drives of a run, its own first; none where all files are on its own."""

    def __init__(self, given: Sequence[str | Path], ranks: Ranks) -> None:
        self._given, self._ranks = tuple(given), ranks
        self.all: tuple[Drive, ...] = ()

    def decide(self, store: LocalStore) -> None:
        """Find the drives, measure their rates if that was not done, and have ``store`` write to them.

        Collective: every rank must call this. Raises ``BadInput`` or ``RunMismatch`` for a drive that cannot be used,
        with nothing written.
        """
        no_limits = None, None, None
        self.all, _ = self._ranks.first_does(
            lambda: measured_drives(store.disk, self._given, no_limits, tell)
        )
        if not self.all:
            return
        if not self._ranks.alone:
            see_drives(
                {drive.directory: nearest(Path(drive.directory)) for drive in self.all[1:]}, self._ranks
            )
        store.stripes, store.folders_for = Stripes.over(self.all), self._folders_for
        if isinstance(store.queue, DriveQueues):
            store.queue.add([store.disk.root / drive.folder for drive in self.all[1:]])

    def take(self, store: LocalStore) -> None:
        """Make the drives those of the run, durably, and leave former ones that nothing needs.

        Collective: every rank must call this.
        """
        self._ranks.first_does(lambda: self._take(store))

    def _take(self, store: LocalStore) -> None:
        if self.all or len(folders(store.disk)) > 1 or store.disk.exists(RECORD):
            store.take_drives(self.all)

    def _folders_for(self, sizes: Sequence[int]) -> list[str]:
        """Return the folders of this rank's chunks of ``sizes``. Other ranks are taken to have chunks as large."""
        ranks = self._ranks
        places = spread([sizes] * ranks.world_size, [drive.share for drive in self.all])[ranks.rank]
        return [self.all[place].folder for place in places]


def queue_for(drives: Sequence[str | Path], cpus: Collection[int]) -> IOQueue:
    """Return the queue that moves all bytes of a run that may use ``drives``. Its threads run on ``cpus``, if given."""
    prepare = partial(use_cpus, cpus)
    return DriveQueues([], prepare=prepare) if drives else IOQueue(prepare=prepare)


def places_of_drives(drives: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the resolved directories of ``drives``, to compare them between ranks."""
    return tuple(sorted(os.path.realpath(drive) for drive in drives))


def refuse_bad_drives(run: str | Path, drives: Any, replica: Any, nodes: Any, disk: Any) -> None:
    """Raise ``BadInput`` for ``drives`` that are no list of usable directories, or that nothing else could use.

    Raises ``RunMismatch`` for a drive of another run. Writes nothing.
    """
    refuse_no_list(drives)
    if not drives:
        return
    if replica is not False:
        raise BadInput(
            "drives= with replica= is not offered: the replica writes bases only, to the run's directory. Leave out one"
            " of them."
        )
    if nodes is not None:
        raise BadInput(
            "drives= with nodes= is not offered: a partner copies files by their names in one directory. Leave out one"
            " of them."
        )
    directories_for(Disk(run) if disk is None else disk, drives)
