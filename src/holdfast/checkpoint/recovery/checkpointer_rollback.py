"""The return of a living ``Checkpointer`` to a recorded step, and what a guard of the loss uses of it.

What a new process does in ``resume(step=)`` happens to the live objects, without giving up the run's lock. The
invariant: nothing is changed before every rank knows that it can go back. Called by ``Checkpointer``, by the training
thread, in this order:

1. ``prepare`` finds the step that can be reached. Any error leaves the process as it was.
2. ``go_back`` restores it. After an error the state is of no step, so the process has to end.
3. ``report`` tells people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...distributed import Ranks
from ...errors import BadInput
from ...events import EventLog, tell
from ...store.run_store import LocalStore
from ..capture.optimizer_hooks import OptimizerHooks
from ..durability import DurabilityBackend
from ..loss_guard import GuardedRun, GuardOptions, LossGuard
from ..snapshot.host_copy import HostCopy
from ..training_state import TrainingState, is_no_place
from .live_rollback import all_finite


class Rollback:
    """The return of one rank to recorded steps."""

    def __init__(
        self,
        training: TrainingState,
        backend: DurabilityBackend,
        hooks: OptimizerHooks,
        store: LocalStore,
        events: EventLog,
    ) -> None:
        self._ranks: Ranks = training.ranks
        self._training, self._backend, self._hooks = training, backend, hooks
        self._store, self._events = store, events
        self._is_guarded = False
        self._copy: HostCopy | None = None

    def guard(self, options: GuardOptions, go_back: Callable[[int, str], int]) -> LossGuard:
        """Return a guard of the loss. ``go_back`` goes to a step for a reason, and returns the step reached."""
        self._training.refuse_rollback(keeps_places=True)
        self._backend.refuse_rollback()
        every, after_update = options.copy_every, self._training.after_update is not None
        if every is not None and self._backend.beside:
            raise BadInput(
                f"copy_every = {every} needs records of steps, and a run with a replica has none: leave it out. A"
                " rollback then goes to a base (base_every=)."
            )
        self._is_guarded = True
        self._copy = None if every is None else HostCopy(every, with_frozen=after_update)
        run = GuardedRun(
            self._ranks, lambda: self._training.steps_done, lambda: self._backend.base_step,
            go_back, self._is_sound, self._certify,
        )  # fmt: skip
        return LossGuard(run, options)

    def begin_step(self) -> None:
        """Forget the certified step where no guard judges the loss. Called before a step is recorded."""
        if not self._is_guarded:
            self._training.certified_step = self._store.certified_step = None

    def end_step(self) -> None:
        """Advance the copy of the state in host memory, if there is one. Called after a step was recorded."""
        if self._copy is not None:
            self._copy.advance(self._training.state, self._training.steps_done)

    def prepare(self, step: int, keeps_places: bool, refuse: Callable[[], None]) -> int:
        """Return the step that ``go_back`` will reach. Changes nothing live.

        Collective: every rank must call this.

        Args:
            step: The step asked for.
            keeps_places: Positions in data stay. Then a step that nothing leads to gives way to the oldest snapshot's.
            refuse: Raises ``BadInput`` where this rank cannot go back now.
        """

        def checked() -> int:
            refuse()
            self._refuse_step(step)
            self._training.refuse_rollback(keeps_places)
            self._backend.refuse_rollback()
            return step

        asked = self._ranks.all_do(checked)
        if len(set(asked)) > 1:
            raise BadInput(
                f"rollback was called with other steps on other ranks: {asked}; call it alike on all"
            )
        copy, leads_there = self._copy, self._backend.records_steps  # without records only a base would
        if copy is not None and keeps_places and leads_there and 0 <= copy.step <= step:
            step = copy.step
        return self._backend.prepare_rollback(step, nearest=keeps_places)

    def _refuse_step(self, step: Any) -> None:
        done = self._training.steps_done
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= done:
            raise BadInput(f"step = {step!r} must be a whole number from 0 to {done}, the steps done")

    def go_back(self, target: int, keeps_places: bool) -> None:
        """Restore step ``target``, which ``prepare`` returned, and begin a timeline there.

        Collective: every rank must call this.
        """
        training, backend, hooks, copy = self._training, self._backend, self._hooks, self._copy
        backend.give_back(hooks.discard())
        hooks.detach()  # a replay steps the optimizers
        training.drop_iteration()
        restores = is_no_place if keeps_places else lambda name, thing: True
        found = backend.go_back(target, restores, copy)
        if copy is not None and copy.step > target:
            copy.step = -1  # the step that it is of was abandoned
        certified = training.certified_step
        training.continue_from(found)
        training.certified_step = None if certified is None else min(certified, target)
        self._store.certified_step = training.certified_step
        training.begin_iteration()
        backend.begin(found)
        hooks.watch(training.state)
        hooks.attach()

    def report(self, target: int, before: int, seconds: float, keeps_places: bool, why: str) -> None:
        """Write the event of a rollback from step ``before``, and print a line on the first rank."""
        self._events.emit("rollback", step=target, from_step=before, seconds=seconds, why=why or None)
        if not self._ranks.rank:
            passed = " The batches since are passed over." * keeps_places
            cause = f" at step {before:,}, since {why}" if why else f" from step {before:,}"
            tell(f"{self._store.root} went back to step {target:,}{cause}.{passed}")

    def _is_sound(self) -> bool:
        """Return whether the state is finite here, and no comparison has found other copies on other ranks."""
        return all_finite(self._training.state) and not self._backend.copies_differ

    def _certify(self, step: int) -> None:
        self._training.certified_step = self._store.certified_step = step
        self._events.emit("certified", step=step, base_step=self._backend.base_step)
