"""Fellows: the ranks that train one model out of core together, each with its share of every unit.

Three groups of their own keep apart what may happen at once: what the caller's thread asks of all, what the operations
of a step exchange, and commits. In each of them all ranks do the same in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch

from ..errors import BadInput, RankFailed
from ..ranks import Ranks, this_machine
from ..state.plain import flat_bytes, tensor_of
from .residency import Gradients
from .units import Unit

T = TypeVar("T")


@dataclass(frozen=True)
class Fellows:
    """This rank and the others, or a process by itself."""

    control: Ranks
    exchange: Ranks
    commits: Ranks
    on_host: int = 1
    """Of them, those on this host."""

    @classmethod
    def here(cls, deadline_seconds: float) -> Fellows:
        """Those of torch.distributed, if it is in use. Called on all ranks, and waits for them."""
        control, exchange, commits = (Ranks.here(deadline_seconds, "call holdfast.offload") for _ in range(3))
        fellows = cls(control, exchange, commits)
        try:
            machines = control.everyone(this_machine())
        except BaseException:
            fellows.close()
            raise
        return replace(fellows, on_host=machines.count(this_machine()))

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
        """Let go of the others: who waits for this rank gets ``RankFailed``. A second call does nothing."""
        for ranks in (self.control, self.exchange, self.commits):
            ranks.close()

    def call(self, what: str, check: Callable[[], T], how: Callable[[], str] = lambda: "") -> list[T]:
        """What ``check`` returns on each rank, all of which have called ``what``, and ``how``, asked after the check,
        says more of it. ``BadInput`` that it raises on one rank is raised on all; whatever else it raises on another
        rank, or that has called something else, is ``RankFailed``."""
        refused: list[BadInput] = []

        def checked() -> tuple[str, str, T | None, str | None]:
            try:
                value = check()
            except BadInput as error:
                refused.append(error)
                return what, "", None, str(error)
            return what, how(), value, None

        told = self.control.all_do(checked)
        self._refuse_others([call for call, _, _, _ in told])
        for error in refused:
            raise error
        for rank, (_, _, _, failed) in enumerate(told):
            if failed is not None:
                raise BadInput(f"{what} is not done on any rank, for what rank {rank} is told: {failed}")
        self._refuse_others([call + more for call, more, _, _ in told])
        return [cast(T, value) for _, _, value, _ in told]

    def _refuse_others(self, calls: Sequence[str]) -> None:
        """Raise ``RankFailed`` unless all ranks make the call that this one makes."""
        for rank, other in enumerate(calls):
            if other != calls[self.rank]:
                raise RankFailed(
                    f"rank {rank} calls {other}, and rank {self.rank} {calls[self.rank]}. All ranks have to make the"
                    " same calls in the same order, with as many micro-batches each."
                )

    # What the operations exchange

    def gather_copy(self, unit: Unit, copy: torch.Tensor) -> None:
        """Let all ranks have a whole working copy, of which each has put its own part in place."""
        for ranges in zip(*unit.copy_ranges, strict=True):
            self.exchange.fill(copy, ranges)

    def gather_value(self, unit: Unit, name: str, value: torch.Tensor) -> None:
        """Let all ranks have a whole parameter, of which each has put its own piece in place."""
        if value.numel():
            self.exchange.fill(value.view(-1), unit.owners[name])

    def from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let all ranks have what the first has in ``tensors``. On the caller's thread."""
        for tensor in tensors if not self.alone else ():
            flat = flat_bytes(tensor.cpu())
            self.control.fill(flat, [(0, len(flat))])
            tensor.copy_(tensor_of(flat, tensor.dtype, tensor.shape))

    def reduce(self, unit: Unit, summed: Gradients, share: torch.Tensor) -> Gradients:
        """What all ranks have ``summed`` of a unit's gradients: of it this rank's part, put into ``share``."""
        touched = self._touched(unit, summed.touched)
        for member in unit.trained:
            if member.name in touched - summed.touched:
                unit.grad_view(summed.flat, member).zero_()
        ranges = [(start // 4, stop // 4) for start, stop in unit.grad_ranges]
        if any(start < stop for start, stop in ranges):
            self.exchange.sum_into(share.view(torch.float32), summed.flat.view(torch.float32), ranges)
        return Gradients(share, None, touched)

    def _touched(self, unit: Unit, here: set[str]) -> set[str]:
        """The parameters of a unit that have a gradient on any rank."""
        return set().union(*self.exchange.everyone(here)) if unit.trained else set()

    @staticmethod
    def joined_norms(ranks: Ranks, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The norm of each parameter's gradient, given that of the pieces that this rank has. Of one that is cut it is
        the norm of the norms of its pieces, in the order of the ranks."""
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


def refuse_alone_only(fellows: Fellows, schedule: str) -> None:
    """Raise ``BadInput`` for what several ranks cannot do."""
    if fellows.alone:
        return
    what = None
    if schedule == "zeroth":
        what = "MeZO is of one process. Use an optimizer with gradients, or one process"
    elif schedule != "vertical":
        what = f"schedule={schedule!r} is of one process: several ranks sum their gradients once a step. Leave it out"
    if what is not None:
        raise BadInput(f"{fellows.world_size} ranks train together here, and {what}.")
