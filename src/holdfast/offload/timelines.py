"""Timelines: when the operations of a step ran, for the log of events. Seconds.

Recorded are the first and the third step of a sitting and every thousandth; in all others nothing is looked at. A
step's updates and its commit go on beside the next step, so a timeline is written when the computations of that one are
over: by then it is all there. What other steps did meanwhile is in it, since the lanes were busy with that too.
"""

from __future__ import annotations

import time
from typing import Any

from ..events import EventLog
from ..plan.ops import LANES, as_guessed, traffic
from ..plan.work import StepShape
from .executor import Executor, Span
from .reports import by_lane
from .runtime import Step

SAMPLED, EVERY = (1, 3), 1000
"""Steps of a sitting, counted from 1."""

DIGITS = 6
"""Of seconds."""


class Timelines:
    """Of one engine. Told when each of its steps begins and returns; writes nothing where nobody keeps ``events``."""

    def __init__(self, executor: Executor, events: EventLog) -> None:
        self._executor, self._events = executor, events
        self._num_steps = 0
        self._told: set[StepShape] = set()
        self._spans: list[Span] | None = None
        self._about: dict[str, Any] = {}
        self._began = self._returned = 0.0

    def begins(self, step: Step, schedule: str) -> None:
        """``step`` begins. The first of its shape is told of: what it is to move."""
        self._num_steps += 1
        if self._events.path is None:
            return
        if step.shape not in self._told:
            self._told.add(step.shape)
            self._events.emit(
                "schedule", schedule=schedule, micro_batches=step.shape.micro_batches, clipping=step.shape.clipping,
                order=step.shape.order, delayed_fraction=step.shape.delayed_fraction,
                recomputed_fraction=step.shape.recomputed_fraction, commit=step.shape.commit,
                num_operations=len(step.operations), moves=by_lane(traffic(as_guessed(step.operations))),
            )  # fmt: skip
        due = self._num_steps in SAMPLED or self._num_steps % EVERY == 0
        if due and self._spans is None and self._executor.spans is None:
            self._spans = self._executor.spans = []
            self._about = {"step": step.number + 1, "of_sitting": self._num_steps, "began": time.time()}
            self._began, self._returned = time.perf_counter(), 0.0

    def returns(self) -> None:
        """The computations of the step are over."""
        if self._spans is None:
            return
        if not self._returned:
            self._returned = time.perf_counter()
        else:  # those of the step after the one that is recorded
            self.end()

    def end(self) -> None:
        """Write what was recorded, if anything was. Nothing of that step is under way any more."""
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
        """Lane, kind, start, end, step, phase, block, micro-batch, bytes. A transfer starts when it is asked for."""
        key = span.key
        start, end = (round(at - self._began, DIGITS) for at in (span.start, span.end))
        lane, kind = LANES.index(span.lane), kinds.index(key.kind)
        return [lane, kind, start, end, span.step + 1, key.phase, key.block, key.micro_batch, span.nbytes]
