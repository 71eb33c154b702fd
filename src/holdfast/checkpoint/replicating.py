"""The durability backend by a replica: a second process does every step as well and makes all snapshots.

Each step is handed to the replica, which is the run's only writer. A step survives the trainer's death when the replica
has it, and power loss when a snapshot of it is published. Called by ``Checkpointer`` as ``DurabilityBackend``
describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..accelerators import devices_of
from ..events import EventLog
from ..store.run_store import LocalStore, see_alike
from .capture.early_averages import averaging
from .capture.layer_copies import LayerHooks
from .capture.optimizer_hooks import OptimizerHooks, Update
from .capture.staging_buffers import StagingBuffer, StagingPool
from .durability import DurabilityBackend, ResumeRequest
from .options import Options
from .recovery.rollback import HostCopy, LivingScript, reachable_step
from .recovery.run_recovery import RecoveryResult, recover
from .replica.multi_rank_client import Replicas
from .replica.replica_client import Replica
from .training_state import TrainingState


class ReplicaBackend(DurabilityBackend):
    """Survival by the replica of the run in ``run``, which keeps its shared-memory store in ``memory``."""

    beside = True

    def __init__(
        self, training: TrainingState, options: Options, events: EventLog, *, run: str | Path, memory: Path
    ) -> None:
        """Prepare the replica. Raises ``BadInput`` if the training state cannot have one."""
        super().__init__(training, options, events)
        self._memory = memory.absolute()
        self.replica = (Replica if training.ranks.alone else Replicas)(
            run, training.state, memory=memory, staging_bytes=self.staging_bytes, base_every=options.base_every,
            keep=options.keep, direct=options.direct, deadline_seconds=options.deadline_seconds, events=events,
            ranks=training.ranks,
        )  # fmt: skip

    def _had_bytes(self) -> int:
        return self.replica.ring_bytes()

    @property
    def pool(self) -> StagingPool:
        assert self.replica.pool is not None
        return self.replica.pool

    @property
    def durable_step(self) -> int:
        return self.replica.durable_step

    @property
    def replica_step(self) -> int:
        return self.replica.replica_step

    @property
    def base_step(self) -> int:
        return self.replica.durable_step

    @property
    def complete(self) -> bool:
        return self.has(self.replica.last_put)

    def has(self, step: int) -> bool:
        return self.replica.durable_step >= step

    def has_state_in_base(self) -> bool:
        return self.replica.equals_trainer()

    def standing(self) -> dict[str, Any]:
        return {"replica_step": self.replica_step}

    def about(self) -> dict[str, Any]:
        return super().about() | {"replica_in": str(self._memory)}

    # Start

    def enter(self, store: LocalStore, asked: ResumeRequest) -> RecoveryResult | None:
        """Start the replica, and restore the state from memory or from the disk; None if the run has no step.

        With a replica there are no residuals, so training continues exactly from every step. Of several ranks none can
        take a kept state by itself, because all must first see whether all have their parts.
        """
        self._store = store
        self.replica.start(takes=self._training.ranks.alone and asked.target is None)
        see_alike(store, self._training.ranks)
        if not store.commits():
            return None
        return self.replica.recover(
            store,
            self._training.script,
            target=asked.target,
            exact=asked.exact,
            approximate=asked.approximate,
        )

    def begin(self, found: RecoveryResult | None) -> None:
        self.begun, training = True, self._training
        point = None if found is None else found.point
        self._num_slots = self._slots_that_fit()  # beside the script's state, whose size is known now
        try:
            self.replica.begin(point, training.steps_done, training.progress(), self._num_slots)
        finally:  # even after an error, which the other ranks must learn
            self.agreement = self.replica.agreement

    def optimizer_hooks(
        self, take_slot: Callable[[], StagingBuffer | None], clip_norm: float | None
    ) -> OptimizerHooks:
        """Return the hooks: those that copy early, unless gradients are on a device.

        Copies by a device take its time whenever they begin, so early ones gain nothing. The device would also have to
        be waited for, to learn which copies to repeat.
        """
        training = self._training
        if devices_of(p.parameter for p in training.state.parameters):
            return OptimizerHooks(training.state, training.codec, take_slot, clip_norm)
        alone = training.ranks.alone
        state = None if alone else averaging(training.model)
        return LayerHooks(training.state, training.codec, take_slot, clip_norm, alone=alone, averaging=state)

    # Every step

    def take_slot(self) -> StagingBuffer:
        return self.replica.take_slot()

    def record(self, updates: Sequence[Update]) -> None:
        self.replica.put(self._seal(updates))

    def advance_snapshot(self) -> None:
        training = self._training
        self.replica.advance(training.steps_done, training.progress, self._options.bytes_per_step)

    def adapt(self) -> None:
        training, self._num_slots = self._training, self._slots_that_fit()
        self.replica.sync(training.state, training.steps_done, training.progress(), self._num_slots)

    # Waiting and shutdown

    def save_snapshot(self, again: bool = False, compares: bool = True) -> None:
        training = self._training
        if again:  # the replica's user state is that of the last step
            self.replica.sync(
                training.state, training.steps_done, training.progress(), self._num_slots, again=True
            )
        self.replica.save(training.steps_done, training.progress, again)

    def _go_without_base(self) -> None:
        if not self._training.ranks.alone:  # alone, the replica makes a snapshot of what it has
            super()._go_without_base()

    def wait(self, step: int) -> None:
        self.replica.wait(step)
        self.wait_for_all(step)

    def drain(self) -> None:
        self.replica.drain()

    # Going back

    def prepare_rollback(self, step: int, nearest: bool) -> int:
        """Return the step of the base to go back to, since the disk has no records.

        The last step becomes a base by what the replica has, if it is asked for.
        """
        self.replica.settle(makes_base=step == self._training.steps_done)
        return reachable_step(self._store, self._training, step, nearest)

    def go_back(
        self, step: int, restores: Callable[[str, Any], bool], copy: HostCopy | None
    ) -> RecoveryResult:
        """Restore ``step`` from its base. The replica stays, and is handed that state by ``begin``."""
        training = self._training
        script = LivingScript(training.script, restores)
        self.part(orderly=True)
        self.agreement = None
        found = recover(self._store, training.state, script, ranks=training.ranks, target=step, exact=True)
        self.replica.went_back(found.point.step)
        return replace(found, same_cut=True, residuals_lost=False)

    @property
    def is_alive(self) -> bool:
        return self.replica.is_alive

    def close(self) -> None:
        self.replica.close()

    def release(self) -> None:
        if self.replica.pool is not None:
            self.replica.pool.close()
