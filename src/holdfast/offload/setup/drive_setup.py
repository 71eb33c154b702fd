"""The drives of a run: their rates, and the drive on which each unit of the state lies.

Rates are measured once for a list of drives and stored with the run, so that a unit stays on its drive from one resume
to the next; units that belong elsewhere after a change of the list are written to their new drive as the run continues.
A unit's files all lie on one drive. Units go round in proportion to the rate of each drive, so that in every stretch of
blocks all drives are busy for about the same time, and the parts of several ranks lie on different drives. All ranks
use the drives that the first rank finds. Called by ``offload``. Bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...distributed import Ranks
from ...events import tell
from ...io.queue import DriveQueues, IOQueue
from ...measure.drive_rates import Limits, measured_drives, nearest, spread
from ...optim.torch_threads import one_torch_thread
from ...schedule.operations import SSD_READ, SSD_WRITE, as_guessed
from ...store.commit.generations import Generations
from ...store.disk import Disk
from ...store.drive_links import Drive
from ...store.run_store import see_drives
from ..model.model_parts import ModelParts
from .step_planning import RunPlan


@dataclass(frozen=True)
class Drives:
    """The drives of a run, its own first; empty where the run has only its own.

    Their shares of the state count once ``decided``.
    """

    all: tuple[Drive, ...] = ()
    decided: bool = True
    folders_of: dict[str, str] = field(default_factory=dict)
    """Folder of each unit's files, by file name; empty where all files are in the run's own folder."""

    @classmethod
    def of(
        cls,
        ssd: str | Path,
        drives: Sequence[str | Path],
        limits: Limits,
        say: Callable[[str], object] | None,
        ranks: Ranks,
    ) -> Drives:
        """Return the drives of a run in ``ssd`` that may use ``drives`` too.

        They are as the run has recorded them, or newly measured and not shared out yet. Collective: all of ``ranks``
        must call this; what the first rank finds holds for all. Raises ``BadInput`` and its subclasses.
        """
        with ranks.agreeing():
            found = ranks.first_takes_its_time(
                lambda: measured_drives(Disk(ssd), drives, limits, say or tell)
            )
        return cls(*ranks.everyone(found or ((), True))[0])

    def queue(self, ssd: str | Path, threads: int, limits: Limits) -> IOQueue:
        """Return the queue that moves all bytes of the run; threads and limits apply to each drive."""
        if not self.all:
            return IOQueue(threads, *limits, prepare=one_torch_thread)
        root = Disk(ssd).root
        return DriveQueues(
            [root / folder for folder in self.folders], threads, *limits, prepare=one_torch_thread
        )

    @property
    def folders(self) -> list[str]:
        """Folders by which the run names the drives other than its own."""
        return [drive.folder for drive in self.all[1:]]

    @property
    def speed_up(self) -> float:
        """Rate of all drives together, divided by that of the first."""
        rates = [drive.bytes_per_second for drive in self.all]
        return sum(rates) / rates[0] if rates else 1.0

    def shared_out(self, plan: RunPlan, parts: ModelParts, ranks: Ranks) -> Drives:
        """Return the drives with their shares of the state, and with the units of this rank that lie on each.

        Shares are computed where they are not decided yet. Collective: all of ``ranks`` must call this. Raises
        ``RunMismatch`` if a rank does not see the drives of the first rank.
        """
        if not self.all:
            return self
        if not ranks.alone:
            see_drives({d.directory: nearest(Path(d.directory)) for d in self.all[1:]}, ranks)
        sizes = [sum(file.layout.file_bytes for file in unit.files) for unit in parts.all_units]
        gathered = ranks.everyone((*moved_bytes(plan), sizes))
        shares = [drive.share for drive in self.all]
        if not self.decided:
            rates = [drive.bytes_per_second for drive in self.all]
            shares = [
                *shares_of_state(
                    rates, sum(state for state, _, _ in gathered), sum(o for _, o, _ in gathered)
                )
            ]
        places = spread([each for _, _, each in gathered], shares)[ranks.rank]
        folders = {}
        for unit, place in zip(parts.all_units, places, strict=True):
            folders |= dict.fromkeys((file.name for file in unit.files), self.all[place].folder)
        decided = tuple(replace(d, share=share) for d, share in zip(self.all, shares, strict=True))
        return Drives(decided, True, folders)

    def needed(self, stored: dict[str, Generations]) -> list[int]:
        """Return the bytes that ``create`` will take on each drive other than the run's own."""
        return [
            sum(unit.missing_bytes() for unit in stored.values() if unit.folder == folder)
            for folder in self.folders
        ]


OF_STATE = ("load_state", "store_state", "load_resident", "store_resident", "load_frozen")
"""Kinds of operation whose bytes are in generation files; all others on the SSD stay on the run's own drive."""


def moved_bytes(plan: RunPlan) -> tuple[int, int]:
    """Return the bytes of state that a step of this rank moves on the SSD, and all other bytes."""
    moved = [op for op in as_guessed(plan.operations) if op.lane in (SSD_READ, SSD_WRITE)]
    state = sum(op.nbytes for op in moved if op.key.kind in OF_STATE)
    frozen = [block.frozen_file_bytes for block in plan.work.blocks]
    state += sum(frozen[op.key.block] for op in moved if op.key.kind == "load_params")
    return state, sum(op.nbytes for op in moved) - state


def shares_of_state(rates: Sequence[float], state_bytes: int, other_bytes: int) -> tuple[float, ...]:
    """Return the fraction of the state that each drive has, given the drives' ``rates``.

    A step moves ``state_bytes`` of the state, and ``other_bytes`` that lie on the first drive anyway.

    >>> shares_of_state([1.0, 3.0], 100, 0)
    (0.25, 0.75)
    >>> shares_of_state([1.0, 1.0], 100, 50)
    (0.25, 0.75)
    """
    total, others = sum(rates), sum(rates[1:])
    if not state_bytes or not others:
        return tuple(rate / total for rate in rates)
    first = max(0.0, rates[0] / total * (state_bytes + other_bytes) - other_bytes) / state_bytes
    return first, *((1 - first) * rate / others for rate in rates[1:])
