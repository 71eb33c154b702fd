"""The events of an engine: what a run will take, what a step did and moved, and when its operations ran.

Bytes are those that really moved, counted by the queue and the device, so that a report can compare them with the
schedule.

The times of operations are recorded for the first and the third step since the engine was built, and for every
thousandth; in all others nothing is recorded. A step's updates and its commit continue beside the next step, so a
record is written when the computations of the next step are over: by then it is complete. It includes the operations of
other steps in that time, because they kept the lanes busy too.

The same calls time the steps that correct the machine's profile (``ProfileCorrection``). Called by the engine. Bytes,
seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .. import accelerators
from ..events import EventLog
from ..schedule.operations import LANES, as_guessed
from ..schedule.operations import traffic as scheduled_traffic
from ..schedule.work import StepShape
from .executor import Executor, Span
from .loss_scaling import mean_of
from .model.microbatches import OwnCall
from .profile_correction import ProfileCorrection
from .runtime import Runtime, Step
from .setup.preflight import Preflight
from .setup.process_settings import process_bytes
from .setup.step_planning import RunPlan

Traffic = dict[tuple[str, str], int]
"""Bytes moved, by (lane, kind of operation)."""


class StepReports:
    """The events of one engine, which calls ``begins``, ``returns`` and ``over`` in each of its steps.

    The events of a step count what was moved since the step before, except for what ``uncounted`` moves.
    """

    def __init__(
        self, run: Runtime, plan: RunPlan, schedule: str, executor: Executor, events: EventLog
    ) -> None:
        self._run, self._plan, self._events = run, plan, events
        self._operation_times = OperationTimes(executor, schedule, events)
        self._correction = ProfileCorrection(executor, plan.prediction, events)
        self._counted: Traffic = {}
        """Bytes moved up to the last step in the event log, evaluations included."""
        self._steps_done = 0

    def engine_begins(self, preflight: Preflight, first_step: int) -> None:
        """Write the events for an engine that begins after ``first_step``."""
        run, plan, memory = self._run, self._plan, self._plan.memory
        self._counted, self._steps_done = traffic(run), first_step
        self._events.emit(
            "engine",
            first_step=first_step,
            pid=os.getpid(),
            host=os.uname().nodename,
            directory=preflight.directory,
            device=str(run.device.torch_device),
            unified=run.device.unified,
            blocks=len(run.blocks),
            block_names=[preflight.block_names[0], preflight.block_names[-1]],
            parameters=preflight.parameters,
            streamed_parameters=preflight.streamed_parameters,
            state_bytes=preflight.state_bytes,
            host_budget=preflight.host_budget,
            device_budget=preflight.device_budget,
            host_bytes_predicted=preflight.host_bytes_predicted,
            device_bytes_predicted=preflight.device_bytes_predicted,
            process_bytes=plan.held_bytes,
            on_host=plan.placement.shares,
            memory_predicted=memory and {place: memory.at(place) for place in ("host", "device")},
        )
        if plan.prediction is not None:
            self._events.emit("plan", **plan.prediction.event())

    def begins(self, step: Step) -> None:
        """Note that the operations of ``step`` begin."""
        self._operation_times.begins(step)
        self._correction.begins(step)

    def returns(self, step: Step) -> None:
        """Note that the computations of ``step`` are over."""
        self._operation_times.returns()
        self._correction.returns(step)

    def over(self, step: Step, steps_done: int, tokens: int, seconds: float) -> dict[str, Any]:
        """Write the event for a step that is over, and return its fields. ``tokens`` counts those of all ranks."""
        run, now = self._run, traffic(self._run)
        moved, self._counted, self._steps_done = difference(now, self._counted), now, steps_done
        event = {
            "step": steps_done,
            "loss": mean_loss(step),
            "grad_norm": step.total_norm,
            "seconds": seconds,
            "tokens": tokens,
            "learning_rate": [group["lr"] for group in step.hyper.groups] if step.hyper else [],
            "durable_step": run.durable_step,
            "read_bytes": sum(n for (lane, _), n in moved.items() if lane == "ssd_read"),
            "written_bytes": sum(n for (lane, _), n in moved.items() if lane == "ssd_write"),
            "host_bytes": process_bytes(),
            "skipped": step.reason if step.skipped else None,
            "left_out": sorted(step.left_out) or None,
            "loss_scale": step.loss_scale and step.loss_scale.scale,
            "micro_batches": step.shape.micro_batches,
            "commit": step.shape.commit,
            "moved": by_lane(moved),
            "buffers": dict(run.residency.pool.most_by_kind),
        }
        if accelerators.is_accelerator(run.device.torch_device):
            event["device_bytes"] = accelerators.most_bytes(run.device.torch_device)
            event["pinned_bytes"] = run.residency.pool.pinned_bytes
        self._events.emit("step", **event)
        return event

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count the bytes that the body moves for no step in the event log."""
        before = traffic(self._run)
        yield
        self._counted = difference(traffic(self._run), difference(before, self._counted))

    def end(self) -> None:
        """Write what is not written yet. Nothing is under way any more."""
        self._operation_times.end()

    def engine_ends(self) -> None:
        """Write the event for an engine that is closed, the last of the log."""
        moved = by_lane(traffic(self._run))
        self._events.emit("closed", step=self._steps_done, durable_step=self._run.durable_step, moved=moved)
        self._events.close()


def traffic(run: Runtime) -> Traffic:
    """Return the bytes moved since the run was built."""
    moved = dict(run.moved)
    for (direction, kind, _), count in run.store.queue.counters().items():
        key = (f"ssd_{direction}", kind)
        moved[key] = moved.get(key, 0) + count
    return moved


def difference(now: Traffic, before: Traffic) -> Traffic:
    """Return the bytes moved since ``before``."""
    return {key: count - before.get(key, 0) for key, count in now.items()}


def by_lane(moved: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Return ``moved`` grouped as in an event: by lane, and within a lane by kind of operation.

    >>> by_lane({("ssd_read", "load_state"): 4096, ("upload", "upload_params"): 0})
    {'ssd_read': {'load_state': 4096}}
    """
    found: dict[str, dict[str, int]] = {}
    for (lane, kind), count in sorted(moved.items()):
        if count:
            found.setdefault(lane, {})[kind] = count
    return found


def mean_loss(step: Step) -> float:
    """Return the step's loss, as the micro-batches of all ranks are weighted.

    For a zeroth-order step it is the mean of both of its streams.
    """
    if step.delta is not None:
        return sum(step.mean_losses()) / 2
    return mean_of([loss for loss, _ in step.losses], [weight for _, weight in step.losses])


def count_tokens(micro_batches: Sequence[Any]) -> int:
    """Return the number of elements of the first integer tensor of each micro-batch, summed."""
    return sum(map(_count_tokens, micro_batches))


def _count_tokens(batch: Any) -> int:
    batch = batch.inputs if isinstance(batch, OwnCall) else batch
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((v.numel() for v in values if isinstance(v, torch.Tensor) and not v.is_floating_point()), 0)


TIMED_STEPS, TIMED_EVERY = (1, 3), 1000
"""Recorded steps since the engine was built, counted from 1."""
DIGITS = 6
"""Decimal digits of recorded seconds."""


class OperationTimes:
    """Records of when the operations of some steps ran. Writes nothing if ``events`` are not kept."""

    def __init__(self, executor: Executor, schedule: str, events: EventLog) -> None:
        self._executor, self._schedule, self._events = executor, schedule, events
        self._num_steps = 0
        self._written_fractions: dict[StepShape, float] = {}
        """The fraction computed again that was written last, by the shape without it."""
        self._spans: list[Span] | None = None
        self._about: dict[str, Any] = {}
        self._began = self._returned = 0.0

    def begins(self, step: Step) -> None:
        """Note that ``step`` begins. Write what it will move, unless the last step of its shape was the same."""
        self._num_steps += 1
        if self._events.path is None:
            return
        shape = step.shape
        again, kind = shape.recomputed_fraction, replace(shape, recomputed_fraction=1.0)
        if self._written_fractions.get(kind) != again:
            self._written_fractions[kind] = again
            self._events.emit(
                "schedule", schedule=self._schedule, micro_batches=shape.micro_batches, clipping=shape.clipping,
                order=shape.order, delayed_fraction=shape.delayed_fraction, recomputed_fraction=again,
                commit=shape.commit, num_operations=len(step.operations),
                moves=by_lane(scheduled_traffic(as_guessed(step.operations))),
            )  # fmt: skip
        due = self._num_steps in TIMED_STEPS or self._num_steps % TIMED_EVERY == 0
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
