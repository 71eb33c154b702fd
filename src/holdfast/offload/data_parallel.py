"""The group of ranks that train one model out of core together, each with its shard of every unit.

It uses three process groups, so that exchanges that may happen at the same time do not mix: calls by the caller's
thread, exchanges by the operations of a step, and commits. Within each group all ranks do the same in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch

from ..distributed import Ranks, this_machine
from ..errors import BadInput, RankFailed
from ..state.plain_tensors import flat_bytes, tensor_of
from .memory.block_states import BlockState
from .memory.residency import Gradients

T = TypeVar("T")


@dataclass(frozen=True)
class DataParallelGroup:
    """This rank and the others, or a process by itself."""

    control: Ranks
    exchange: Ranks
    commits: Ranks
    on_host: int = 1
    """Number of ranks on this host, this one included."""

    @classmethod
    def here(cls, deadline_seconds: float) -> DataParallelGroup:
        """Return the ranks of torch.distributed, or a process by itself if it is not in use.

        Collective: every rank must call this; it waits for all of them.
        """
        control, exchange, commits = (Ranks.here(deadline_seconds, "call holdfast.offload") for _ in range(3))
        data_parallel = cls(control, exchange, commits)
        try:
            machines = control.everyone(this_machine())
        except BaseException:
            data_parallel.close()
            raise
        return replace(data_parallel, on_host=machines.count(this_machine()))

    @property
    def rank(self) -> int:
        return self.control.rank

    @property
    def world_size(self) -> int:
        return self.control.world_size

    @property
    def alone(self) -> bool:
        return self.control.alone

    def close(self) -> None:
        """Leave the other ranks; a rank that waits for this one gets ``RankFailed``. A second call does nothing."""
        for ranks in (self.control, self.exchange, self.commits):
            ranks.close()

    def call(self, what: str, check: Callable[[], T], how: Callable[[], str] = lambda: "") -> list[T]:
        """Return what ``check`` returns on each rank, all of which must make the call ``what``.

        Collective: every rank must call this.

        Args:
            what: Name of the call, which must be the same on all ranks.
            check: Run on each rank. ``BadInput`` that it raises on one rank is raised on all.
            how: Asked after the check for details of the call, which must be the same on all ranks.

        Raises ``RankFailed`` if another rank raises any other error or makes another call.
        """
        refused: list[BadInput] = []

        def checked() -> tuple[str, str, T | None, str | None]:
            try:
                value = check()
            except BadInput as error:
                refused.append(error)
                return what, "", None, str(error)
            return what, how(), value, None

        gathered = self.control.all_do(checked)
        self._refuse_others([call for call, _, _, _ in gathered])
        for error in refused:
            raise error
        for rank, (_, _, _, failed) in enumerate(gathered):
            if failed is not None:
                raise BadInput(f"{what} is not done on any rank, for what rank {rank} is told: {failed}")
        self._refuse_others([call + more for call, more, _, _ in gathered])
        return [cast(T, value) for _, _, value, _ in gathered]

    def _refuse_others(self, calls: Sequence[str]) -> None:
        """Raise ``RankFailed`` unless all ranks make the same call as this one."""
        for rank, other in enumerate(calls):
            if other != calls[self.rank]:
                raise RankFailed(
                    f"rank {rank} calls {other}, and rank {self.rank} {calls[self.rank]}. All ranks have to make the"
                    " same calls in the same order, with as many micro-batches each."
                )

    # What the operations exchange

    def gather_copy(self, unit: BlockState, copy: torch.Tensor) -> None:
        """Complete a compute copy on all ranks, of which each rank has put its own part in place."""
        for ranges in zip(*unit.copy_ranges, strict=True):
            self.exchange.fill(copy, ranges)

    def gather_value(self, unit: BlockState, name: str, value: torch.Tensor) -> None:
        """Complete a parameter on all ranks, of which each rank has put its own fragment in place."""
        if value.numel():
            self.exchange.fill(value.view(-1), unit.owners[name])

    def from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks the first rank's values of ``tensors``, in place.

        Called by the caller's thread. Collective: every rank must call this.
        """
        for tensor in tensors if not self.alone else ():
            flat = flat_bytes(tensor.cpu())
            self.control.fill(flat, [(0, len(flat))])
            tensor.copy_(tensor_of(flat, tensor.dtype, tensor.shape))

    def reduce(self, unit: BlockState, summed: Gradients, share: torch.Tensor) -> Gradients:
        """Sum a unit's gradients over all ranks, and return this rank's shard of the sum, put into ``share``.

        ``summed`` are the gradients that this rank has summed over its micro-batches. Collective: every rank must call
        this.
        """
        touched = self._touched(unit, summed.touched)
        for member in unit.trained:
            if member.name in touched - summed.touched:
                unit.grad_view(summed.flat, member).zero_()
        ranges = [(start // 4, stop // 4) for start, stop in unit.grad_ranges]
        if any(start < stop for start, stop in ranges):
            self.exchange.sum_into(share.view(torch.float32), summed.flat.view(torch.float32), ranges)
        return Gradients(share, None, touched)

    def _touched(self, unit: BlockState, here: set[str]) -> set[str]:
        """Return the names of the unit's parameters that have a gradient on any rank."""
        return set().union(*self.exchange.everyone(here)) if unit.trained else set()

    @staticmethod
    def joined_norms(ranks: Ranks, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the norm of each parameter's gradient, given the norms of this rank's fragments.

        The norm of a divided gradient is the norm of its fragments' norms, in the order of the ranks. Collective: all
        of ``ranks`` must call this.
        """
        if ranks.alone:
            return own
        parts: dict[str, list[torch.Tensor]] = {}
        for told in ranks.everyone({name: float(norm) for name, norm in own.items()}):
            for name, norm in told.items():
                parts.setdefault(name, []).append(torch.tensor(norm, dtype=torch.float32))
        return {
            name: found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found))
            for name, found in parts.items()
        }


def refuse_alone_only(data_parallel: DataParallelGroup, schedule: str, expert_slots: int | None) -> None:
    """Raise ``BadInput`` for a schedule or a placement that several ranks cannot run."""
    if data_parallel.alone:
        return
    what = None
    if schedule == "zeroth":
        what = "MeZO is of one process. Use an optimizer with gradients, or one process"
    elif schedule != "vertical":
        what = f"schedule={schedule!r} is of one process: several ranks sum their gradients once a step. Leave it out"
    elif expert_slots is not None:
        what = f"expert_slots={expert_slots!r} is of one process: ranks divide the weights of a block. Leave it out"
    if what is not None:
        raise BadInput(f"{data_parallel.world_size} ranks train together here, and {what}.")
