"""The maker of steps: a ``Step`` with its operations, from micro-batches and options.

Steps of the same shape share one operation list. The weight of each micro-batch and the loss scale are decided here.
Called by the engine at every step.

Clipping (``ClippingChoice``). Updates may wait for the gradient norm or be made at once on a guess, with the same bits
(``Clipping``). Which is faster depends on the machine and on how often a guess is wrong. A run begins by waiting, since
early training clips often. Once at least half of the recent steps would have been guessed right, guessing is tried;
from then on the way with the lower expected time is taken. A step after a change is not measured, because updates of
the step before were under way in it. On a run that clips every step nothing is tried. Of several ranks the first one's
choice holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..schedule.mezo_schedule import STREAMS, catch_up
from ..schedule.operations import Op
from ..schedule.transfer_parts import held_copies
from ..schedule.vertical import commit_only, forward_only
from ..schedule.work import ClippingMode, StepShape, kept_blocks
from .loss_scaling import depends_on_shift, lacks_targets, shares, target_tokens
from .model.microbatches import Coroutine, OwnCall, autocast_state, casts, late_call
from .offload_options import StepRules
from .recomputation import RecomputationChoice
from .runtime import MicroBatch, Runtime, Step
from .setup.step_planning import LISTS, RunPlan


class StepMaker:
    """Makes the steps of one run. Steps are numbered from 0."""

    def __init__(self, run: Runtime, plan: RunPlan, rules: StepRules) -> None:
        self._run, self._plan, self._rules = run, plan, rules
        self.loss_scale = rules.loss_scale
        """Loss scale of the next step."""
        self.clipping = ClippingChoice() if rules.chooses else None
        self._recomputation = RecomputationChoice(run, plan, rules) if rules.chooses_recomputed else None
        self._streams = 1 if run.zeroth is None else STREAMS
        self.shifts: bool | None = None
        """True if the model shifts labels; None until that has been asked."""
        self.lists: dict[tuple[str, StepShape], list[Op]] = {}
        """The operation lists made so far, by schedule and shape."""
        self._held_copies: dict[StepShape, frozenset[int]] = {}
        """The result of ``held_copies`` for the lists of training steps, by shape."""

    @property
    def may_ask(self) -> bool:
        """True if counts may depend on what is not known of the model yet."""
        return self._rules.normalize == "tokens" and self.shifts is None

    def unclear(self, micro_batches: Sequence[Any]) -> Any | None:
        """Return the first micro-batch whose count depends on whether the model shifts labels; None if none does."""
        return next((batch for batch in micro_batches if depends_on_shift(batch)), None)

    def counts(self, micro_batches: Sequence[Any]) -> list[float]:
        """Return the count of each micro-batch; empty where all count the same."""
        rule = self._rules.normalize
        if rule in ("micro_batches", "sum"):
            return []
        count = rule if callable(rule) else partial(target_tokens, self.shifts)
        return [count(batch) for batch in micro_batches]

    def weights(self, counts: Sequence[Sequence[float]], num_micro_batches: int) -> list[float | None]:
        """Return the factor for each loss of this rank, given the ``counts`` of all ranks; None for a plain mean."""
        if self._rules.normalize == "micro_batches":
            return [None] * num_micro_batches
        if self._rules.normalize == "sum":
            return [1.0] * num_micro_batches
        first = self._run.data_parallel.rank * num_micro_batches
        return shares([count for each in counts for count in each])[first : first + num_micro_batches]

    @property
    def next_clipping(self) -> ClippingMode | None:
        """The way of clipping that this rank would take for the next step; None where all steps are alike."""
        return None if self.clipping is None else self.clipping.mode

    def recomputed_fraction(self, micro_batches: Sequence[Any]) -> float:
        """Return the fraction of the blocks that this rank would compute again in a step over ``micro_batches``."""
        if self._recomputation is None:
            return self._rules.recomputed_fraction
        if self._run.attributes.rounds_otherwise:  # or bits would depend on the memory that is free
            return 1.0
        return self._recomputation.fraction(micro_batches)

    def training(
        self,
        number: int,
        micro_batches: Sequence[Any],
        weights: list[float | None],
        loss_fn: Any,
        clipping: ClippingMode | None = None,
        recomputed_fraction: float = 1.0,
    ) -> Step:
        """Return step ``number`` over ``micro_batches``, with the hyper-parameters as they are now.

        Args:
            number: The number of the step.
            micro_batches: This rank's micro-batches.
            weights: The factor for the loss of each.
            loss_fn: As given to the engine.
            clipping: The first rank's ``next_clipping``.
            recomputed_fraction: The largest ``recomputed_fraction`` of all ranks.
        """
        rules = self._rules
        commit = rules.commit_every > 0 and (number + 1) % rules.commit_every == 0
        shape = rules.shape(len(micro_batches), commit, clipping)
        shape = replace(shape, recomputed_fraction=recomputed_fraction)
        if casts(autocast_state()):
            # then every block is computed again, and its inputs must come in time for that
            shape = replace(shape, recomputed_fraction=1.0)
        model, send = self._run.model, self._run.device.take_batch
        calls = [late_call(model, batch, loss_fn, send) for batch in micro_batches] * self._streams
        inputs = [each.inputs if isinstance(each, OwnCall) else each for each in micro_batches]
        operations = self._listed(rules.schedule, shape)
        if shape not in self._held_copies:
            self._held_copies[shape] = held_copies(operations)
        return Step(
            number=number,
            shape=shape,
            training=True,
            operations=operations,
            horizontal=rules.schedule == "horizontal",
            micro_batches=[
                MicroBatch(Coroutine(call), weight, partial(lacks_targets, inputs))
                for call, weight, inputs in zip(
                    calls, weights * self._streams, inputs * self._streams, strict=True
                )
            ],
            hyper=self._run.optimizer.snapshot(),
            clip_norm=rules.clip_norm,
            loss_scale=self.loss_scale,
            held_copies=self._held_copies[shape],
            kept=kept_blocks(shape, len(self._run.blocks)),
            must_repeat=rules.chooses_recomputed,
            gauge=None if self._recomputation is None else self._recomputation.gauge(),
            results=next((each.results for each in micro_batches if isinstance(each, OwnCall)), None),
        )

    def progress(self) -> dict[str, Any]:
        """Return the part of a commit's progress that concerns how steps are made."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.progress()}

    def resume(self, progress: dict[str, Any]) -> None:
        """Continue from the progress of a commit."""
        if self.loss_scale is not None:
            self.loss_scale = replace(self.loss_scale, **progress.get("loss_scale", {}))

    def over(self, step: Step, seconds: float) -> None:
        """Update the loss scale and the choices for the next step after ``step``, of which all is known now."""
        if step.loss_scale is not None:
            self.loss_scale = step.loss_scale.after(step.skipped)
        if self.clipping is not None:
            self.clipping.over(step.shape.clipping, step.skipped or step.scale is not None, seconds)
        if self._recomputation is not None:
            self._recomputation.over(step)

    def evaluation(self, calls: Sequence[Callable[[], Any]]) -> Step:
        """Return a step that takes all of ``calls`` through the blocks together, forward only."""
        shape = StepShape(micro_batches=len(calls))
        batches = [MicroBatch(Coroutine(call), None) for call in calls]
        operations = self._listed("evaluate", shape)
        return Step(number=-1, shape=shape, training=False, operations=operations, micro_batches=batches)

    def saving(self, number: int, progress: dict[str, Any], commit: bool) -> Step:
        """Return a step that commits the state after step ``number``, if ``commit``.

        Where units are behind (MeZO), it also applies the last step to all of them.
        """
        work, placement = self._plan.work, self._plan.placement
        behind = self._run.zeroth is not None and self._run.zeroth.is_behind
        operations = catch_up(work, placement, commit) if behind else commit_only(work, placement)
        return Step(number=number, shape=StepShape(micro_batches=0), operations=operations, progress=progress)

    def _listed(self, schedule: str, shape: StepShape) -> list[Op]:
        """Return the operation list for one shape of step, made once."""
        found = self.lists.get((schedule, shape))
        if found is None:
            make = LISTS.get(schedule, forward_only)
            found = self.lists[schedule, shape] = make(self._plan.work, self._plan.placement, shape)
        return found


TRIED_BELOW = 0.5
"""The share of wrong guesses below which guessing is tried for the first time."""
MEASURED = 3
"""Measured steps that a decision needs."""
CLEARLY = 0.97
"""The factor by which guessing must be faster than waiting to be begun again."""
WRONG_COST = 2.0
"""The assumed time of a step guessed wrong, in steps guessed right, until one was measured."""
RECENT_SHARE, RECENT_SECONDS = 1 / 8, 1 / 4
"""The weights of the newest step in the running means."""


class ClippingChoice:
    """Chooses before each step whether updates wait for the norm or guess it, by mean times of earlier steps."""

    def __init__(self) -> None:
        self.mode: ClippingMode = "defer"
        """The way of the next step."""
        self.wrong_share = 1.0
        """The running share of steps whose guess was wrong, or would have been."""
        self._seconds: dict[tuple[ClippingMode, bool], float] = {}
        """The running mean time of a step, by its way and by whether it was guessed wrong (False while waiting)."""
        self._since_change = -1

    def over(self, mode: ClippingMode, clipped: bool, seconds: float) -> None:
        """Note a step, and choose the way of the next one.

        Args:
            mode: The way in which it was done.
            clipped: Whether a guess that nothing is clipped or skipped was wrong, or would have been.
            seconds: Its time.
        """
        self.wrong_share += (clipped - self.wrong_share) * RECENT_SHARE
        self._since_change += 1
        if mode == self.mode and self._since_change > 0:
            key = mode, clipped and mode == "speculate"
            before = self._seconds.get(key, seconds)
            self._seconds[key] = before + (seconds - before) * RECENT_SECONDS
        chosen = self._chosen()
        if chosen != self.mode:
            self.mode, self._since_change = chosen, -1

    def _chosen(self) -> ClippingMode:
        if self._since_change < MEASURED:
            return self.mode
        waiting, right = self._seconds.get(("defer", False)), self._seconds.get(("speculate", False))
        if right is None or waiting is None:
            return "speculate" if self.wrong_share < TRIED_BELOW else "defer"
        wrong = self._seconds.get(("speculate", True), WRONG_COST * right)
        guessing = right + (wrong - right) * self.wrong_share
        return "speculate" if guessing < waiting * (1.0 if self.mode == "speculate" else CLEARLY) else "defer"
