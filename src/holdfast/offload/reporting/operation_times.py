"""The record of when the operations of a step ran, for the event log. Seconds.

Recorded are the first and the third step since the engine was built, and every thousandth. In all others nothing is
recorded. A step's updates and its commit continue beside the next step, so a record is written when the computations of
the next step are over: by then it is complete. It includes the operations of other steps in that time, because they
kept the lanes busy too.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ...events import EventLog
from ...schedule.operations import LANES, as_guessed, traffic
from ...schedule.work import StepShape
from ..executor import Executor, Span
from ..runtime import Step
from .step_reports import by_lane

SAMPLED, EVERY = (1, 3), 1000
"""Recorded steps since the engine was built, counted from 1."""
DIGITS = 6
"""Decimal digits of recorded seconds."""


class Timelines:
    """Records of one engine's steps; the engine calls ``begins`` and ``returns`` around each.

    Writes nothing if ``events`` are not kept.
    """

    def __init__(self, executor: Executor, events: EventLog) -> None:
        self._executor, self._events = executor, events
        self._num_steps = 0
        self._told: dict[StepShape, float] = {}
        """The fraction computed again that was written last, by the shape without it."""
        self._spans: list[Span] | None = None
        self._about: dict[str, Any] = {}
        self._began = self._returned = 0.0

    def begins(self, step: Step, schedule: str) -> None:
        """Note that ``step`` begins. Write what it will move, unless the last step of its shape was the same."""
        self._num_steps += 1
        if self._events.path is None:
            return
        again = step.shape.recomputed_fraction
        if self._told.get(shape := replace(step.shape, recomputed_fraction=1.0)) != again:
            self._told[shape] = again
            self._events.emit(
                "schedule", schedule=schedule, micro_batches=step.shape.micro_batches, clipping=step.shape.clipping,
                order=step.shape.order, delayed_fraction=step.shape.delayed_fraction,
                recomputed_fraction=again, commit=step.shape.commit,
                num_operations=len(step.operations), moves=by_lane(traffic(as_guessed(step.operations))),
            )  # fmt: skip
        due = self._num_steps in SAMPLED or self._num_steps % EVERY == 0
        if due and self._spans is None and self._executor.spans is None:
            self._spans = self._executor.spans = []
            self._about = {"step": step.number + 1, "of_sitting": self._num_steps, "began": time.time()}
            self._began, self._returned = time.perf_counter(), 0.0

    def returns(self) -> None:
        """Note that the computations of the step are over."""
        if self._spans is None:
            return
        if not self._returned:
            self._returned = time.perf_counter()
        else:  # the computations of the step after the recorded one
            self.end()

    def end(self) -> None:
        """Write the record, if there is one. Nothing of the recorded step is under way any more."""
        spans, self._spans = self._spans, None
        if spans is None:
            return
        if self._executor.spans is spans:
            self._executor.spans = None
        if self._returned:
            spans = [span for span in spans if span.step >= 0]
            kinds = sorted({span.key.kind for span in spans})
            self._events.emit(
                "timeline", **self._about, seconds=round(self._returned - self._began, DIGITS), lanes=LANES,
                kinds=kinds, spans=[self._row(span, kinds) for span in spans],
            )  # fmt: skip

    def _row(self, span: Span, kinds: list[str]) -> list[Any]:
        """Return lane, kind, start, end, step, phase, block, micro-batch, bytes. A transfer starts when it is
        requested."""
        key = span.key
        start, end = (round(at - self._began, DIGITS) for at in (span.start, span.end))
        lane, kind = LANES.index(span.lane), kinds.index(key.kind)
        return [lane, kind, start, end, span.step + 1, key.phase, key.block, key.micro_batch, span.nbytes]
