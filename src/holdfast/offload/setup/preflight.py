"""The preflight of a run: the memory and disk space that it will take, known before anything is written.

``DoesNotFit`` names what is too small and by how much. The numbers come from the operation lists that the engine runs.
Called by ``offload``; printed by ``holdfast train`` and compared with what was measured in reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import DoesNotFit
from ...measure.drive_rates import device_of
from ...quantities import ample_budget, format_bytes
from ...schedule.operations import SSD_READ, SSD_WRITE, as_guessed, lane_bytes
from ...store.commit.generations import Generations
from ...store.disk import Disk
from ...store.format.manifest import HOME
from ...store.run_store import LocalStore
from ..model.model_parts import ModelParts
from .automatic_placement import Prediction
from .drive_setup import Drives
from .step_planning import Budget, RunPlan


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The needs of a run, in bytes. Block inputs count if their size is known beforehand."""

    directory: str
    parameters: int
    """Number of parameters, trained and frozen, each counted once."""
    state_bytes: int
    """Bytes of master parameters and optimizer state."""
    needed_bytes: int
    """Bytes that the run still has to take from the file system."""
    free_bytes: int
    read_bytes_per_step: int
    written_bytes_per_step: int
    host_bytes_predicted: int | None
    """Peak memory of the whole process; None if not predicted."""
    host_budget: int | None
    """Memory that the whole process may take; None is no limit."""
    device_bytes_predicted: int | None
    """Peak memory of a separate device; None if the device is the host, or if not predicted."""
    device_budget: int | None
    block_names: tuple[str, ...]
    streamed_parameters: int = 0
    """Number of the ``parameters`` that are in blocks; the others stay in memory."""
    drives: tuple[tuple[str, int, int], ...] = ()
    """Directory of each further drive, the bytes that the run still has to take there, and the free bytes."""
    prediction: Prediction | None = None
    """The planner's prediction, if it was asked."""
    plan: str | None = None
    """The plan as one line for a person; None where everything was given."""
    dtype: str = ""
    """The dtype of the compute copies: "bf16", "fp32" or "fp16"."""

    def check(self) -> None:
        """Raise ``DoesNotFit`` if the disk or the budget is too small."""
        if self.needed_bytes > self.free_bytes:
            raise DoesNotFit(
                f"{self.directory} needs {format_bytes(self.needed_bytes)} more ({self.needed_bytes} bytes), "
                f"and {format_bytes(self.free_bytes)} are free. Free some, choose another directory, or set "
                "durability.retain=1 (two files per block instead of three)."
            )
        for directory, needed, free in self.drives:
            if needed > free:
                raise DoesNotFit(
                    f"the drive {directory} needs {format_bytes(needed)} more ({needed} bytes), and "
                    f"{format_bytes(free)} are free. Free some, or leave this one out of drives: the others then have "
                    "its part."
                )
        for place, needed, budget, advice in (
            (
                "host",
                self.host_bytes_predicted,
                self.host_budget,
                "Lower params_on_host or optimizer_on_host",
            ),
            ("device", self.device_bytes_predicted, self.device_budget, "Use smaller micro-batches"),
        ):
            if needed is not None and budget is not None and needed > budget:
                raise DoesNotFit(
                    f"the run needs {format_bytes(needed)} of {place} memory and its budget is "
                    f'{format_bytes(budget)}. {advice}, or give it "{ample_budget(needed)}" (a margin included).'
                )


def preflight_of(
    parts: ModelParts,
    plan: RunPlan,
    budget: Budget,
    dtype: str,
    store: LocalStore,
    stored: dict[str, Generations],
) -> Preflight:
    """Return the needs of ``plan`` in ``store``, whose files may exist already; other drives see ``space_on``."""
    moved = lane_bytes(as_guessed(plan.operations))
    here = store.space_needed([unit for unit in stored.values() if unit.folder == HOME], plan.scratch_bytes)
    return Preflight(
        directory=str(store.root),
        parameters=sum(p.weights for p in parts.captured.parameters),
        state_bytes=sum(unit.state_bytes for unit in parts.all_units),
        needed_bytes=here,
        free_bytes=store.free_bytes(),
        read_bytes_per_step=moved[SSD_READ],
        written_bytes_per_step=moved[SSD_WRITE],
        host_bytes_predicted=plan.host_bytes,
        host_budget=budget.host_bytes(),
        device_bytes_predicted=plan.device_bytes,
        device_budget=None if plan.work.unified else budget.device_bytes(),
        block_names=parts.blocks.names,
        streamed_parameters=sum(m.owned.captured.weights for unit in parts.units for m in unit.all_members),
        prediction=plan.prediction,
        plan=plan.line,
        dtype=dtype,
    )


def space_on(drives: Drives, here: int, there: Sequence[int]) -> tuple[tuple[str, int, int], ...]:
    """Return ``Preflight.drives``, where the run's own drive needs ``here`` bytes and the further ones ``there``.

    A drive on the same file system as others gets what the earlier ones leave free.
    """
    if not drives.all:
        return ()
    found, taken = [], {device_of(drives.all[0].directory): here}
    for drive, needed in zip(drives.all[1:], there, strict=True):
        device = device_of(drive.directory)
        free = Disk(drive.directory).free_bytes() - taken.get(device, 0)
        found.append((drive.directory, needed, max(0, free)))
        taken[device] = taken.get(device, 0) + needed
    return tuple(found)
