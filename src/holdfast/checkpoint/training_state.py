"""The training state of a run: the trained tensors, the steps done, and all state that is no tensor.

It joins the live tensors (``LiveState``), the user state, and the checks that find changes which no step made. All
ranks must hold it alike except for their shards. Called by ``Checkpointer`` and by its durability backends, at the end
of every step.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..distributed import Ranks
from ..errors import BadInput
from ..optim.kinds import is_elementwise
from ..quantities import shown
from ..state.capture import aliases_of, changes_of
from ..state.layout.overlaps import buffers_within, joined_buffers
from ..state.live_state import LiveState
from ..state.prepared_models import refuse_away
from ..state.progress import UngivenSchedulers
from .capture.mutation_check import CarriedBuffers
from .capture.optimizer_attributes import OptimizerAttributes, StateCheck
from .capture.optimizer_hooks import Update
from .compression.codecs import Codec
from .compression.comm_hook import HookState, hooked, warn_of_hook_state
from .compression.lossy import Sparse, TopK
from .options import (
    Exactness,
    one_model,
    optimizers_of,
    refuse_renormalised,
    refuse_sparse_gradients,
    refuse_taken,
    refuse_without_values,
    warn_of_rank_allocator,
)
from .rank_consistency import look
from .recovery.rollback import drop_iteration, refuse_places
from .recovery.run_recovery import RecoveryResult
from .snapshot.snapshot_state import replay_info
from .user_state import ScriptState, is_no_place, is_schedule

Averages = nn.Module | Mapping[str, nn.Module] | None
Which = Callable[[str, Any], bool]
"""A predicate on the script's objects, by name and value."""
NO_GUARD = (
    "under a trainer's callback there is no rollback() and no guard(): the trainer's loop counts steps and batches in"
    " variables of its own, and would continue where it is. Stop training at a bad loss, and begin another run from an"
    " earlier step (holdfast convert RUN@STEP), or write the loop with holdfast.Checkpointer."
)


class TrainingState:
    """The training state on one rank, with everything that was given to a ``Checkpointer``.

    Call order:

    1. ``hook_up`` and ``look``.
    2. ``continue_from`` or ``begin_anew``.
    3. ``begin_iteration``.
    4. ``ends_step`` and ``stepped`` in every iteration.
    """

    state: LiveState
    """The state as the last ``look`` found it."""

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        scheduler: Any,
        loader: Any,
        scaler: Any,
        also: Mapping[str, Any],
        codec: Codec,
        averages: Averages,
        after_update: Callable[[], None] | None,
    ) -> None:
        """Check what was given. Raises ``BadInput`` for an object that is no optimizer, or has no state to store."""
        self.ranks, self.codec, self.after_update = ranks, codec, after_update
        self.optimizers = optimizers_of(optimizer)
        model = one_model(model)
        refuse_renormalised(model)
        refuse_sparse_gradients(model, self.optimizers)
        refuse_away(model)
        refuse_without_values(model)
        warn_of_hook_state(model)
        warn_of_rank_allocator(model)
        things = {"scheduler": scheduler, "loader": loader, "scaler": scaler}
        refuse_taken(also, things)
        things = {name: thing for name, thing in {**things, **also}.items() if thing is not None}
        self.script = ScriptState(self.optimizers, things)
        self._forgotten = UngivenSchedulers(self.optimizers, things.values())
        self._looks_for_scaler = scaler is None
        self.model, self._averages, self._scaler, self._schedule = model, averages, scaler, scheduler
        self._ends_again = loader is not None and not getattr(loader, "endless", False)
        """True if a resumed script reaches the end of the epoch again, and then moves the schedule again."""
        self._redoes = getattr(loader, "redoes", False)
        self._residuals: dict[torch.Tensor, torch.Tensor] = {}
        self._hook: HookState | None = None
        self._scale = 0.0
        self._schedule_at: Any = None
        self._late_moves = 0
        """The number of successive steps before which the schedule was moved too late to be noted."""
        self._warned: set[str] = set()
        self._replaced: set[str] = set()
        """Names of parameters that a warning has named since they were replaced by other objects."""
        self._buffers_at_look: set[str] = set()
        self._given_frozen: list[str] | None = None
        """Parameters that did not require gradients at the first scan."""
        self._looks: list[int] = []
        """The steps of the last scans."""
        self._own = [OptimizerAttributes(optimizer) for optimizer in self.optimizers]
        self._checks = [StateCheck(optimizer) for optimizer in self.optimizers]
        self._told_of_own: set[int] = set()
        self._passing = CarriedBuffers(ranks.alone)
        self._joined: set[str] = set()
        """Names of buffers that overlapped only with one another at a scan; a forward pass may separate them."""
        self.has_new_buffers = False
        """True if a non-persistent buffer was first seen to change in the last step."""
        self._is_first = False
        self._trained: Collection[str] = ()
        """The parameters that the run's last step before a resume trained; empty after the next step."""
        self._buffers_were: list[tuple[int, int]] = []
        self._accumulates = False
        self.now: dict[str, Any] = {}
        """The user state at the end of the last step, as JSON."""
        self.steps_done = 0
        self.exactness: Exactness = "continuation"
        self._measured: tuple[int, dict[str, Any]] = 0, {}
        """The step that the script gave metrics of last, and these."""
        self.certified_step: int | None = None
        """The newest step that a guard of the loss has certified, or that the run says was; None without one."""
        self.rates: dict[str, float] = {}
        """Measured rates, from which the duration of the next recovery is predicted."""

    @property
    def is_elementwise(self) -> bool:
        """Return whether each part of the state advances by itself, so that parts may be of different steps."""
        return self.after_update is None and all(map(is_elementwise, self.optimizers))

    def hook_up(self) -> None:
        """Register the codec's hook on the model, if the codec has one. Collective: every rank must call this."""
        if self.ranks.alone or not isinstance(self.codec, TopK):
            return
        self._hook = hooked(self.model, self.codec, self._scaler, self._residuals)
        if self._hook is not None:
            self.codec = Sparse(self.codec, self.ranks.world_size)

    def look_again(self) -> None:
        """Scan the state again, and warn of buffers that came or went. Collective: every rank must call this.

        Warns as well when four steps in a row needed a scan, since each took a snapshot.
        """
        before, replaced = self._buffers_at_look, self.state.changes.replaced
        self.look()
        self._tell_of_replaced(replaced)
        self._looks = [step for step in self._looks if step > self.steps_done - 4] + [self.steps_done]
        if len(self._looks) == 4:
            self._looks = []
            warnings.warn(
                "none of the last 4 steps could be recorded, so a base was made of each, which takes long. A cause may"
                " be gradients of another dtype than their parameters, a pre-hook that is registered anew in every"
                " iteration, groups that change, or parameters that the script changes after the step.",
                stacklevel=5,
            )
        passing = self.state.passing.keys()
        _tell_of_buffers(before - passing, self._buffers_at_look - passing)

    def look(self) -> None:
        """Scan the state as it is now. Collective: every rank must call this."""
        self.state = look(
            self.ranks, self.model, self.optimizers, self._averages, self._residuals,
            own_residuals=self._hook is not None,
        )  # fmt: skip
        self.state.carry(self._passing.carried)
        self._passing.begin(self.state)
        self._joined |= buffers_within(self.state.shared())
        self.state.own = self._own
        for own in self._own:
            own.begin(self.state)
        self._buffers_at_look = {atom.name for atom, _ in self.state.buffers().values()}
        if self._given_frozen is None:
            self._given_frozen = [p.name for p in self.state.parameters if not p.parameter.requires_grad]

    @property
    def has_replaced_tensors(self) -> bool:
        """True if a parameter or buffer came, went, was replaced, or was first seen to change and be carried."""
        return self.has_new_buffers or bool(self.state.changes)

    def has_changed_since_step(self) -> bool:
        """Return whether ``has_replaced_tensors`` or a buffer has another module, looking again now."""
        return self.state.follow_modules() or self.has_replaced_tensors

    @property
    def update_again(self) -> Callable[[int], None] | None:
        """Return the function to call after a replayed update, with the number of steps done; None without
        ``after_update``.
        """
        after_update = self.after_update
        if after_update is None:
            return None

        def again(steps_done: int) -> None:
            self.steps_done = steps_done
            after_update()

        return again

    def begin_anew(self) -> None:
        """Begin the run with the current state of the script."""
        self.ranks.all_do(self.script.refuse_large)
        self.state.forget_residuals()  # of steps before the run

    def continue_from(self, found: RecoveryResult) -> None:
        """Continue from the recovered step, with a warning of every anomaly."""
        self.steps_done, self._trained = found.point.step, found.trained
        self._measured = self.steps_done, found.progress.get("metrics", {})
        self.certified_step = found.progress.get("certified")
        self._passing.restore(self.state, found.progress)
        for text in found.problems:
            warnings.warn(f"resuming after step {self.steps_done}: {text}", stacklevel=4)
        if not self.codec.error_feedback:
            self.state.forget_residuals()
        elif found.residuals_lost:  # without the residuals of that step training continues differently
            self.exactness = "state"
            warnings.warn(
                f"resuming after step {self.steps_done}, state-exact and not continuation-exact: the residuals of"
                " error feedback begin at zero, since records cannot bring those of a base forward. For the newest step"
                ' from which training goes on as it did, call resume(exactness="continuation").',
                stacklevel=4,
            )
        if found.is_approximate:
            self.exactness = "approximate"
            warnings.warn(
                f"resuming after step {self.steps_done}, with the arithmetic of this machine, which is not that of"
                " training: last bits of the state differ.",
                stacklevel=4,
            )

    def refuse_rollback(self, keeps_places: bool) -> None:
        """Raise ``BadInput`` if this process holds something that only a new process could bring back."""
        if any(getattr(thing, "has_loop", False) for thing in self.script.things.values()):
            raise BadInput(NO_GUARD)
        if self.codec.error_feedback:
            raise BadInput(
                f"{type(self.codec).__name__} keeps residuals, which only bases hold, so training would not go on as it"
                ' did. Close this Checkpointer, and make another with resume(before=..., exactness="continuation").'
            )
        for optimizer, own in zip(self.optimizers, self._own, strict=True):
            if not own.can_restore:
                raise BadInput(
                    f"{type(optimizer).__name__} has attributes of its own that can be restored only in a new one: they"
                    " are large, or of a kind that bases do not hold. Close this Checkpointer, and make optimizer and"
                    " Checkpointer anew, with resume(before=...)."
                )
        if not keeps_places:
            refuse_places(self.script.things)

    def drop_iteration(self) -> None:
        """Remove gradients, and what else the unfinished iteration has left, and scan the state again.

        Collective: every rank must call this.
        """
        drop_iteration(self.model, self.optimizers, self._scaler)
        self._accumulates, self._late_moves = False, 0
        self.look()

    def begin_iteration(self) -> None:
        """Start the iteration after ``steps_done``, and note the state as it is now."""
        self._scale = self._scale_now()
        self._is_first = True
        for own in self._own:
            own.accept()
        self._passing.accept(self.state)
        self._buffers_at_look = {atom.name for atom, _ in self.state.buffers().values()}
        self.note()

    def begins_step(self) -> None:
        """Warn of a missing scaler and of a late scheduler. Called before the first update of each step."""
        if self._looks_for_scaler:
            self._looks_for_scaler = False
            _tell_of_scaler(list(self.script.things.values()))
        self._late_moves = self._late_moves + 1 if self._schedule_at != self._schedule_now() else 0
        if self._late_moves == 2 and not self._redoes:
            warnings.warn(
                "the scheduler is moved between every step() of the Checkpointer and the next update. Where that is the"
                " end of an iteration, a resume would go on with the learning rate of the step before: call step() last"
                " in it, after scheduler.step().",
                stacklevel=5,
            )

    def ends_step(self, updated: bool) -> bool:
        """Return whether the iteration is a step: an optimizer has ``updated``, or a fallen loss scale shows a skipped
        step.
        """
        before, self._scale = self._scale, self._scale_now()
        if self._hook is not None:
            self._hook.restore_skipped()
        ends = updated or self._scale < before
        self._accumulates = not ends
        if not ends:
            self._schedule_at = self._schedule_now()
        return ends

    def stepped(self, updates: Sequence[Update]) -> None:
        """Count one more step, done by ``updates``, or skipped if there are none, and check what it changed."""
        self.steps_done += 1
        self._forgotten.look(
            "Pass it as scheduler=, several as also={name: ...}; the script goes on stepping it, before step().",
            6,
        )
        self.state.follow_modules(at_once=False)
        self.has_new_buffers = self._passing.look(self.state)
        for number in {update.optimizer for update in updates}:
            self._checks[number].look(self.state)
            self._tell_of_own(number)
        if self._is_first and updates:
            self.state.refuse_unsupported_state()
            self._is_first = False  # once is enough
            _tell_of_frozen(self.state, self._trained, updates)
        self.note()

    def check_again(self, updates: Sequence[Update]) -> None:
        """Raise ``BadInput`` or a subclass for state of new parameters that commits cannot hold.

        Called after ``look_again`` found the parameters.
        """
        for number in {update.optimizer for update in updates}:
            self._checks[number].look(self.state)

    def _tell_of_own(self, number: int) -> None:
        """Warn of own state that a step has changed, and that neither snapshots nor log records can hold."""
        lost = self._own[number].lost
        if lost is None or number in self._told_of_own:
            return
        self._told_of_own.add(number)
        warnings.warn(
            f"{type(self.optimizers[number]).__name__}.{lost} was changed by a step, and is nothing that a base could"
            " hold: a resume would not bring it back. If steps depend on it, keep numbers and tensors instead, or keep"
            " it in param_groups.",
            stacklevel=5,
        )

    def note(self) -> None:
        """Note the current user state as that after ``steps_done``."""
        joined = {"joined": joined_buffers(self.state, self._joined)} if self._joined else {}
        certified = {} if self.certified_step is None else {"certified": self.certified_step}
        self.now = {
            **self.script.now(),
            **self._passing.recorded_attributes(self.state),
            **joined,
            **certified,
        }
        self._schedule_at = self._schedule_now()
        self._buffers_were = self._buffers_are()

    def note_again(self, which: Which) -> None:
        """Note hyper-parameters and the objects ``which`` again, for a snapshot made after the step."""
        self._passing.drop_emptied(self.state)
        self.now = self._now_again(which)
        self._schedule_at = self._schedule_now()

    @property
    def has_moved(self) -> bool:
        """Return whether the script has changed something since the last step, other than positions in data."""
        return self._now_again(is_no_place) != self.now

    @property
    def schedule_moved(self) -> bool:
        return self._now_again(is_schedule) != self.now

    def _now_again(self, which: Which) -> dict[str, Any]:
        """Return the user state with the objects ``which`` as they are now.

        In the middle of an accumulation everything is that of the last step. The same holds where the end of an epoch
        will be repeated after a resume.
        """
        return self.now if self._accumulates or self._ends_again else self.script.again(self.now, which)

    @property
    def has_begun_another(self) -> bool:
        """Return whether a buffer has changed since the last step, so that an unfinished iteration has begun."""
        return self._buffers_were != self._buffers_are()

    @property
    def has_moved_on(self) -> bool:
        """Return whether iterations that were no steps have changed buffers, so that no snapshot can be made."""
        return self._accumulates and self.has_begun_another

    def refuse_moved_on(self) -> None:
        if self.has_moved_on:
            raise BadInput(
                f"gradients are being accumulated, and the forward passes since step {self.steps_done} have changed"
                " buffers, so a base would be of no step. Call this after the step() of an iteration in which an"
                " optimizer has stepped."
            )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=6)

    def _tell_of_replaced(self, names: Sequence[str]) -> None:
        """Warn of parameters that were replaced by other objects, each time such as were not before."""
        if new := [name for name in names if name not in self._replaced]:
            self._replaced.update(new)
            warnings.warn(
                f"of the model's parameters {shown(new)} became another object. Each step at which that happens becomes"
                " a base, which takes long; where only values change, copy them in place (parameter.data.copy_).",
                stacklevel=6,
            )

    def progress(self) -> dict[str, Any]:
        """Return the progress of the current step as JSON: all state that is no tensor."""
        changes = self.state.changes
        if not self.ranks.alone and (names := (*changes.replaced, *changes.moved)):
            self._warn_once(
                "parameters",
                f"{shown(names)} came, went or were replaced by other objects after the run began, and of several ranks"
                " none has the new ones in the run. Close this Checkpointer, and make another with the model as it is"
                " now; where only values change, copy them in place (parameter.data.copy_).",
            )
        if not self.ranks.alone and changes.has_other_buffers:
            self._warn_once(
                "buffers",
                "buffers came or went after the run began, and of several ranks none has them in the run: register them"
                " with their shapes, or run a forward pass before Checkpointer().",
            )
        about = replay_info(self.state, self.after_update is not None)
        aliases = aliases_of(self.state.parameters)
        step, metrics = self._measured
        return {
            **self.now,
            "given": self.script.given,
            "given_schedule": self.script.given_schedule,
            "given_frozen": self._given_frozen,
            **self.state.standing(),
            "replay": about,
            "rates": self.rates,
            **({"aliases": aliases} if aliases else {}),
            **({"metrics": metrics} if metrics and step == self.steps_done else {}),
        }

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Note what the script measured at the current step: it becomes part of a snapshot of this step."""
        self._measured = self.steps_done, dict(metrics)

    def forget_metrics(self) -> None:
        """Note that the state is not the one that the script measured at this step: it was changed since."""
        self._measured = 0, {}

    def release(self) -> None:
        """Deactivate the hook: from here on gradients are exchanged as without it."""
        if self._hook is not None:
            self._hook.active = False

    def _buffers_are(self) -> list[tuple[int, int]]:
        """Return the identity of each buffer, and how often it has been changed."""
        return [(id(tensor), changes_of(tensor)) for tensor in self.state.buffer_tensors()]

    def _schedule_now(self) -> Any:
        """Return how often the scheduler was moved; None where it does not count that."""
        return getattr(self._schedule, "last_epoch", None)

    def _scale_now(self) -> float:
        return self._scaler.get_scale() if self._scaler is not None else 0.0


def _tell_of_scaler(given: Sequence[Any]) -> None:
    """Warn of a ``GradScaler`` that is calling ``optimizer.step`` now and is not among ``given``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "step" and isinstance(owner, torch.amp.GradScaler):
            if owner.is_enabled() and not any(owner is each for each in given):
                warnings.warn(
                    "a GradScaler steps the optimizer and was not given, so no step of the run has its scale, and after"
                    " a resume it begins anew. Pass it as scaler=.",
                    stacklevel=6,
                )
            return
        frame = frame.f_back


def _tell_of_frozen(state: LiveState, trained: Collection[str], updates: Sequence[Update]) -> None:
    """Warn of parameters in ``trained`` that lost ``requires_grad`` at the resume.

    Args:
        trained: The parameters that were trained before the resume.
        updates: The updates of the first step since. They had no gradients of such parameters.
    """
    with_gradient = {
        (update.optimizer, parameter.name)
        for update in updates
        for parameter in state.parameters
        if parameter.name not in update.without
    }
    frozen = [
        p.name
        for p in state.parameters
        if p.name in trained
        and not p.parameter.requires_grad
        and (index := state.optimizer_of(p)) is not None
        and (index, p.name) not in with_gradient
    ]
    if frozen:
        warnings.warn(
            f"{shown(frozen)} trained until the resume, and do not require gradients now: which do is"
            " the script's and no part of the run. If it unfreezes some at a step, have it do so by the steps done, as"
            " in `if step >= 6` instead of `if step == 6`.",
            stacklevel=5,
        )


def _tell_of_buffers(before: set[str], now: set[str]) -> None:
    """Warn of buffers that came or went, by name."""
    if went := sorted(before - now):
        warnings.warn(
            f"{', '.join(went)} went after the run began. A resume refuses a model that has them: leave them out"
            " from the beginning, or register them with persistent=False.",
            stacklevel=6,
        )
    if came := sorted(now - before):
        warnings.warn(
            f"{', '.join(came)} came into being after the run began. A resume can put them back only where they"
            " are there before it: register them with their shapes, or run a forward pass before Checkpointer().",
            stacklevel=6,
        )
