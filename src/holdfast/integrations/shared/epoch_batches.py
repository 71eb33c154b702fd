"""The division of an epoch into batches of ranks, and what of it another number of ranks may change.

Hosts split batches by rank, so that a place in an epoch is a number of batches of one rank. The batches of all ranks
together are consecutive samples of one order: those of ``num_ranks`` times the batch size. So a place also is a number
of samples, which means the same to another number of ranks, as long as three things hold. The order is drawn from the
same generator or seed. A step has as many samples. An epoch has as many steps. Everything else is refused, with nothing
written. Called by ``position`` and ``trainer_run``.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ...errors import RunMismatch
from ...quantities import counted

IN_ORDER, BY_SEED = "the order of the dataset", "an order by seed and epoch"
BY_GENERATOR, BY_PROCESS = "an order by the sampler's generator", "an order by the process's generators"
ORDERS = (IN_ORDER, BY_SEED, BY_GENERATOR, BY_PROCESS)
WITH_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class EpochBatches:
    """The batches of an epoch, with all that a place in it depends on. Stored in every log record, as ``as_dict``."""

    ranks: int
    """The number of ranks that train."""
    batch: int
    """The samples in one batch of all ranks together."""
    accumulation: int
    """The batches of one optimizer step."""
    length: int
    """The samples of the dataset."""
    batches: int
    """The batches of one rank in an epoch."""
    order: str
    """The source of the order of samples; the class of a sampler whose order may depend on the number of ranks."""
    moves: int = 1
    """The moves of the learning-rate schedule in an optimizer step."""

    @classmethod
    def of(
        cls, indices: Any, data: Sized, *, ranks: int, accumulation: int = 1, moves: int = 1
    ) -> EpochBatches:
        """Return the batches of an epoch.

        Args:
            indices: The batch sampler of one rank.
            data: The dataset.
            ranks: The number of ranks that train.
            accumulation: The batches of one optimizer step.
            moves: The moves of the learning-rate schedule in an optimizer step.
        """
        inner = getattr(indices, "batch_sampler", indices)
        sampler = getattr(inner, "sampler", None)
        size = getattr(inner, "batch_size", None) or 0
        shares = getattr(sampler, "num_replicas", getattr(indices, "num_processes", 1))
        return cls(
            ranks=ranks,
            batch=size if getattr(indices, "split_batches", False) else size * shares,
            accumulation=accumulation,
            length=len(data),
            batches=len(indices),
            order=order_of(sampler) if type(inner) is BatchSampler else type(inner).__name__,
            moves=moves,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, from which the constructor makes an equal object."""
        return asdict(self)

    @property
    def steps(self) -> int:
        """The optimizer steps of an epoch. The last may have fewer batches."""
        return -(-self.batches // self.accumulation)

    def refuse_unlike(self, there: EpochBatches, run: object) -> None:
        """Raise ``RunMismatch`` unless a place of ``there``, of another number of ranks, means the same here."""
        ranks = f"{run} was trained by {counted(there.ranks, 'rank')}, and here are {self.ranks}"
        again = f"Resume with {there.ranks}, or begin another run."
        if self.length != there.length:
            raise RunMismatch(
                f"{ranks}, and the dataset has {counted(self.length, 'sample')} instead of {there.length:,}. {again}"
            )
        self._refuse_other_order(there, ranks, again)
        if self.batch * self.accumulation != there.batch * there.accumulation:
            raise RunMismatch(
                f"{ranks}. A step of the run has {there._samples()}, and here {self._samples()}. Set the batch size, or"
                f" the number of accumulated batches, so that it has {there.batch * there.accumulation}."
            )
        if self.steps != there.steps:
            raise RunMismatch(
                f"{ranks}. An epoch of the run has {counted(there.steps, 'step')}, and here {self.steps}, because other"
                f" samples are dropped at its end. {again}"
            )
        if self.moves != there.moves:
            raise RunMismatch(
                f"{ranks}. Each process moves the schedule once, {counted(there.moves, 'time')} a step in the run and"
                f" {self.moves} here, so its learning rates would be others. Resume with {there.ranks}. In runs that"
                " are to change the number, let it move once a step from the beginning:"
                " DataLoaderConfiguration(split_batches=True), or a schedule that is registered for checkpointing"
                " instead of prepared."
            )

    def _refuse_other_order(self, there: EpochBatches, ranks: str, again: str) -> None:
        for order in (there.order, self.order):
            if order not in ORDERS:
                raise RunMismatch(
                    f"{ranks}, and the order of {order} may depend on the number of ranks. {again}"
                )
        if there.order == BY_PROCESS and self.order != BY_SEED:
            raise RunMismatch(
                f"{ranks}. The run reads {there.order}, which other ranks do not draw. {again} Runs that are to change"
                " the number give the DataLoader a generator= from the beginning."
            )
        if there.order != self.order and (there.order, self.order) != (BY_GENERATOR, BY_PROCESS):
            raise RunMismatch(f"{ranks}. The run reads {there.order}, and this script {self.order}. {again}")

    def _samples(self) -> str:
        total = self.batch * self.accumulation
        return f"{counted(total, 'sample')} ({self.batch} in a batch of all ranks, {self.accumulation} accumulated)"

    def count_of(self, there: EpochBatches, count: int) -> int:
        """Return the number of batches here that have the samples of ``count`` batches of ``there``.

        Raises ``RunMismatch`` if they end within a batch.
        """
        if count >= there.batches:
            return self.batches
        here, rest = divmod(count * there.batch, self.batch)
        if rest:
            raise RunMismatch(
                f"{count * there.batch} samples of the epoch are done, and batches of {self.batch} do not end there."
                f" Resume with {counted(there.ranks, 'rank')}, or with batches of {there.batch} samples."
            )
        return here


def moves_of(accelerator: Any) -> int:
    """Return how often prepared schedules move in an optimizer step: once, or once for each process."""
    for each in accelerator._schedulers:
        if getattr(each, "step_with_optimizer", False) and not each.split_batches:
            return accelerator.num_processes
    return 1


def order_of(sampler: Any) -> str:
    """Return the source of the order of ``sampler``; its class where that may depend on the number of ranks."""
    if type(sampler) is DistributedSampler:
        return BY_SEED if sampler.shuffle else IN_ORDER
    if type(sampler) is SequentialSampler:
        return IN_ORDER
    if hasattr(sampler, "initial_seed"):
        return BY_SEED
    if type(sampler) in WITH_GENERATOR:
        return BY_PROCESS if sampler.generator is None else BY_GENERATOR
    return type(sampler).__name__
