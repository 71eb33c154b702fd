"""The interface of a durability backend: how the steps of a run outlive the process that does them.

There are two backends. ``recording`` writes a log record of every step to the disk; ``replicating`` has a second
process do every step as well. Both build the record of a step with ``RecordBuilder``. Called by ``Checkpointer``, in
the order that ``DurabilityBackend`` lists.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..events import EventLog
from ..state.layout.regions import local_held
from ..store.run_store import LocalStore
from .capture.optimizer_hooks import OptimizerHooks, Update
from .capture.staging_buffers import StagingBuffer, StagingPool
from .coordinator import RankCoordinator
from .grace import Grace
from .log.log_records import RecordBuilder
from .log.recorder import FinalizedStep
from .options import CopyBytes, Options, slots_for_free_memory
from .recovery.recovery_progress import RecoveryProgress
from .recovery.rollback import HostCopy
from .recovery.run_recovery import RecoveryResult
from .training_state import TrainingState
from .user_state import is_schedule


class DurabilityBackend(ABC):
    """The interface of a durability backend, for the steps of a training state.

    1. ``enter`` and ``begin``.
    2. For each step ``take_slot``, ``record`` and ``advance_snapshot``.
    3. For a rollback ``prepare_rollback``, ``go_back`` and ``begin``.
    4. At the end ``finish``, ``close`` and ``release``.

    One rank alone may call ``take_slot``, ``record_irreproducible``, ``give_back`` and ``fail``. All other methods are
    collective: every rank must call them.
    """

    beside = False
    """True if a replica does every step as well."""

    def __init__(self, training: TrainingState, options: Options, events: EventLog) -> None:
        """Prepare the backend. Raises ``BadInput`` if the memory is too small for two steps."""
        self._training, self._options, self._events = training, options, events
        self.staging_bytes = options.staging_bytes
        self._most_slots: int | None = None
        """The most staging buffers that the free memory had room for; None if it had room for all."""
        self._num_slots = self._slots_that_fit()
        self._sealer = RecordBuilder(
            training.state, shortens=not self.beside
        )  # a replica's record stands alone
        self.agreement: RankCoordinator | None = None
        """The agreement with the other ranks, from ``begin`` on; None for one process."""
        self.grace: Grace | None = None
        """The seconds after a SIGTERM; None if everything is written, however long it takes."""
        self.begun = False

    def fit_free_memory(self) -> None:
        """Take fewer staging buffers where the machine lacks memory for them. Collective: every rank must call this.

        Raises ``BadInput`` if the user gave the bound of the memory.
        """
        held = sum(local_held(each.parameter).nbytes for each in self._training.state.stored)
        base_bytes = min(self.staging_bytes, held)
        copies = CopyBytes(self._num_slots, self._slot_bytes(), base_bytes, self._had_bytes())
        most = slots_for_free_memory(self._training.ranks, copies, self._options)
        if most < self._num_slots:
            self._num_slots = self._most_slots = most

    def _had_bytes(self) -> int:
        """Return the bytes that a process takes already whose place this one takes."""
        return 0

    # Progress

    @property
    @abstractmethod
    def durable_step(self) -> int:
        """The newest step that survives power loss, on every rank; -1 before there is one."""

    @property
    def written_step(self) -> int:
        """The newest step that survives power loss on this rank, whatever the others have."""
        return self.durable_step

    @property
    @abstractmethod
    def replica_step(self) -> int:
        """The newest step that survives the death of all trainers."""

    @property
    @abstractmethod
    def base_step(self) -> int:
        """The step of the newest snapshot, as far as this rank knows."""

    def has_state_in_base(self) -> bool:
        """Return whether the snapshot of the current step holds the state as it is now, as far as is known.

        Called where nothing was seen to change since that snapshot.
        """
        return True

    def note_saved(self) -> None:
        """Note that the script has asked for a snapshot of the current state, which it may have changed before."""
        return

    @property
    def records_steps(self) -> bool:
        """Return whether the next step is to be kept by itself; otherwise only a later snapshot keeps its result."""
        return True

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Return whether every step done is durable, or on its way to be."""

    @abstractmethod
    def has(self, step: int) -> bool:
        """Return whether ``step`` is durable on this rank, or will be without another snapshot."""

    @abstractmethod
    def standing(self) -> dict[str, Any]:
        """Return what was written and what waits in memory, for the event log."""

    def about(self) -> dict[str, Any]:
        """Return the resources of the backend, for the event log."""
        ring_bytes = self.pool.count * self.pool.slot_bytes
        return {
            "replica": self.beside, "memory": self._options.memory_bytes, "storage": self._options.storage_bytes,
            "ring_bytes": ring_bytes, "staging_bytes": self.staging_bytes,
        }  # fmt: skip

    @property
    def recovered_by(self) -> str:
        """The way in which ``enter`` recovered its step, for a person; empty where that is not known."""
        return ""

    # Start

    @abstractmethod
    def enter(self, store: LocalStore, asked: ResumeRequest) -> RecoveryResult | None:
        """Become the run's writer, and restore the newest recoverable step; None if the run has none."""

    def following(self, store: LocalStore, asked: ResumeRequest) -> AbstractContextManager[Any]:
        """Return the context in which a standby waits until ``enter`` can be called."""
        return nullcontext()

    @abstractmethod
    def begin(self, found: RecoveryResult | None) -> None:
        """Continue after the recovered step, with the training where it is now. The current step is safe on return."""

    @abstractmethod
    def optimizer_hooks(
        self, take_slot: Callable[[], StagingBuffer | None], clip_norm: float | None
    ) -> OptimizerHooks:
        """Return the hooks that see the steps of the optimizers."""

    # Every step

    @property
    @abstractmethod
    def pool(self) -> StagingPool:
        """The staging buffers into which updates are copied."""

    @abstractmethod
    def take_slot(self) -> StagingBuffer | None:
        """Return a staging buffer for the next step; None where the disk is behind and nobody shall wait."""

    @abstractmethod
    def record(self, updates: Sequence[Update]) -> None:
        """Keep the step that ``updates`` have done."""

    def record_irreproducible(self, updates: Sequence[Update], why: str) -> None:
        """Keep a step that no record would reproduce, which only this rank may know."""
        self.record(updates)  # the fingerprint finds a replica that differs

    @abstractmethod
    def advance_snapshot(self) -> None:
        """Do the due work of the next snapshot. Called at the end of each step."""

    @abstractmethod
    def adapt(self) -> None:
        """Keep the current step after the state has changed its form, as the last ``TrainingState.look`` found."""

    def make_room(self, nbytes: int) -> bool:
        """Return whether a file of ``nbytes`` fits within the storage cap. Older snapshots may be retired for it."""
        return True

    def stepped(self, seconds: float, stall_seconds: float) -> None:
        """Note that the step took ``seconds``, including ``stall_seconds`` that training waited."""
        return

    def give_back(self, updates: Sequence[Update]) -> None:
        """Release the staging buffers of ``updates``, which are not kept."""
        self.pool.give(list({id(u.slot): u.slot for u in updates if u.slot is not None}.values()))

    # Waiting and shutdown

    @abstractmethod
    def save_snapshot(self, again: bool = False, compares: bool = True) -> None:
        """Make a snapshot of the current step. It is durable on return.

        ``again`` replaces a snapshot of this step that lacks later changes, and ``compares`` one whose bytes differ.
        """

    @abstractmethod
    def wait(self, step: int) -> None:
        """Return when ``step`` is durable on all ranks. It has a record, or a snapshot under way."""

    @abstractmethod
    def drain(self) -> None:
        """Return when nothing is under way any more."""

    def is_broken(self) -> bool:
        """Return whether the training cannot go on, because a rank has failed or ended."""
        return self.agreement is not None and self.agreement.failure is not None

    def leave_broken(self) -> None:
        """Write what waits, and wait until the other ranks have read the failure. The process ends afterwards.

        Called by a thread of its own, whatever the main thread is doing.
        """
        try:
            self.drain()
        finally:
            if self.agreement is not None:
                self.agreement.wait_until_failure_is_read()

    def finish(self) -> None:
        """Make a snapshot if what is durable lacks something. Collective: every rank must call this."""
        if not self.begun:
            return
        begun = self._training.has_begun_another
        residuals = {} if begun else self._training.state.residuals
        if residuals:
            self.drain()  # a snapshot under way may be of this very step
        moved = not begun and self._training.schedule_moved
        needed = not self.complete or moved or bool(residuals and self.base_step < self._training.steps_done)
        asked = self._training.ranks.everyone((needed, moved))  # ranks may know different snapshots
        if not any(needed for needed, _ in asked) or not all(self._training.ranks.everyone(self._is_time())):
            return
        if any(self._training.ranks.everyone(self._training.has_moved_on)):
            self._go_without_base()
        else:
            if begun:
                self._tell_of_later_buffers()
            self._training.note_again(is_schedule)
            self.save_snapshot(any(moved for _, moved in asked), compares=False)

    def has_time(self) -> bool:
        """Return whether there is time for a snapshot before the process has to end. Always true before a SIGTERM."""
        return True

    def _is_time(self) -> bool:
        """Return whether a process that is about to end has time for a snapshot."""
        return True

    def _go_without_base(self) -> None:
        """Warn that the current step can have no snapshot any more, and has no record."""
        step, durable = self._training.steps_done, self.durable_step
        warnings.warn(
            f"closed in mid-accumulation, and buffers are not those of step {step} any more, so there can be no base of"
            f" it: step {durable} is durable. Close after an optimizer's step and its step().",
            stacklevel=5,
        )

    def _tell_of_later_buffers(self) -> None:
        """Warn that the base that is made now has buffers of later than its step."""
        step = self._training.steps_done
        warnings.warn(
            f"buffers were changed after step {step}, which has no record, and its base has them as they are now. If an"
            " iteration was begun and not ended, a resume does it again with them: close after the step() that ends an"
            " iteration.",
            stacklevel=5,
        )

    # Going back

    @property
    def copies_differ(self) -> bool:
        """Return whether the last comparison found that ranks hold different copies."""
        return False

    def refuse_rollback(self) -> None:
        """Raise ``BadInput`` if the backend cannot go back."""
        return

    @abstractmethod
    def prepare_rollback(self, step: int, nearest: bool) -> int:
        """Return the step that ``go_back`` can reach, after all that was recorded is durable. Changes nothing live.

        This is ``step``; with ``nearest`` it is that of the oldest snapshot, if that is later. Raises ``NoCommit`` if
        nothing leads to the step. Called after ``refuse_rollback``.
        """

    @abstractmethod
    def go_back(
        self, step: int, restores: Callable[[str, Any], bool], copy: HostCopy | None
    ) -> RecoveryResult:
        """End the timeline, and restore ``step``; of the script's objects those that ``restores`` names.

        Tensors come from ``copy`` if all ranks have one of that step, else from the disk. Call ``begin`` afterwards,
        with the training at that step. Called after ``prepare_rollback``.
        """

    # Shutdown

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Return whether anything still uses staging buffers, files or the lock."""

    @abstractmethod
    def close(self) -> None:
        """Begin nothing more, and end the work beside training. Raises the error of that work."""

    @abstractmethod
    def release(self) -> None:
        """Free all memory. Called when nothing is at work any more."""

    # With other ranks

    def check(self) -> None:
        """Raise the error of any rank."""
        if self.agreement is not None:
            self.agreement.check()

    def fail(self, error: BaseException) -> None:
        """Report to every rank that this one has failed."""
        if self.agreement is not None:
            self.agreement.fail(error)

    def barrier(self, stop: bool) -> str:
        """Return what all ranks do together after this step: "stop", "base" or nothing.

        ``stop`` says whether this rank wants to stop; any rank may.
        """
        if self.agreement is None:
            return "stop" if stop else ""
        if stop:
            self.agreement.call(stop=True)
        return self.agreement.barrier() if self.agreement.called else ""

    def wait_for_all(self, step: int) -> None:
        """Return when every rank has ``step``."""
        if self.agreement is not None:
            self.agreement.wait(step)

    def part(self, orderly: bool) -> None:
        """End the agreement; ``orderly`` if no rank is left behind."""
        if self.agreement is not None:
            self.agreement.close(orderly)

    # Helpers of both

    def _seal(self, updates: Sequence[Update]) -> FinalizedStep:
        training = self._training
        return self._sealer.seal(training.state, training.steps_done, updates, training.now, self.base_step)

    def _slot_bytes(self) -> int:
        return sum(layout.file_bytes for layout in self._training.codec.layouts(self._training.state))

    def _slots_that_fit(self) -> int:
        slots = self._options.slots_that_fit(self._slot_bytes() + self._training.script.text_bytes)
        return slots if self._most_slots is None else min(slots, self._most_slots)


@dataclass(frozen=True)
class ResumeRequest:
    """The request of a ``resume``: the step ``target``, the newest up to it unless ``exact``, or the newest of all."""

    target: int | None
    exact: bool
    continuing: bool
    """Accept only a step from which training continues bit for bit."""
    show: Callable[[RecoveryProgress], None] | None
    """Called with the progress of the recovery."""
    approximate: bool = False
    """Replay records of another kind of processor with the arithmetic of this one."""
