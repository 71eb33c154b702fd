"""The events of an engine: what a run will take, what a step did and moved, and when its operations ran.

Bytes are those that really moved, counted by the queue and the device, so that a report can compare them with the
schedule.

The times of operations are recorded for the first and the third step since the engine was built, and for every
thousandth; in all others nothing is recorded. A step's updates and its commit continue beside the next step, so a
record is written when the computations of the next step are over: by then it is complete. It includes the operations of
other steps in that time, because they kept the lanes busy too.

The machine's profile is corrected by the times of a run's own steps, for the next start (``Calibration``). They change
nothing in the run. The rule:

1. Five steps are recorded, from the first one of the planned shape on, and not before the fifth since the engine was
   built. Those of the planned shape count, except the last.
2. For each resource that serves lanes (the SSD, the bus, the cores, the commit), the time in which it had work is
   compared with the time predicted for a step. The ratio is the median over the steps.
3. The profile's rates of the resource are divided by the square root of that ratio, clamped to between a half and two.
   That is half way to the measurement on a logarithmic scale: a disturbed step moves little, and a few runs arrive.
4. A resource predicted or measured to work for less than half of a step does not count: its operations have slack, in
   which they wait for the cores. Neither does an SSD that was given a limit.

Called by the engine. Bytes, seconds.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import sqrt
from statistics import median
from typing import Any

import torch

from .. import accelerators
from ..events import EventLog
from ..measure.machine_probe import CORRECTED, keep
from ..profiles import MachineProfile
from ..schedule.operations import COMMIT, COMPUTE, LANES, UPDATE, as_guessed
from ..schedule.operations import traffic as scheduled_traffic
from ..schedule.planner.machine_rates import BUS, CORES, SSD
from ..schedule.work import StepShape
from .executor import Executor, Span
from .loss_scaling import mean_of
from .model.microbatches import OwnCall
from .runtime import Runtime, Step
from .setup.automatic_placement import Prediction
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
        self._timelines = Timelines(executor, schedule, events)
        self._corrections = Calibration(executor, plan.prediction, events)
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
        self._timelines.begins(step)
        self._corrections.begins(step)

    def returns(self, step: Step) -> None:
        """Note that the computations of ``step`` are over."""
        self._timelines.returns()
        self._corrections.returns(step)

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
        self._timelines.end()

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


SAMPLED, EVERY = (1, 3), 1000
"""Recorded steps since the engine was built, counted from 1."""
DIGITS = 6
"""Decimal digits of recorded seconds."""


class Timelines:
    """Records of when the operations of some steps ran. Writes nothing if ``events`` are not kept."""

    def __init__(self, executor: Executor, schedule: str, events: EventLog) -> None:
        self._executor, self._schedule, self._events = executor, schedule, events
        self._num_steps = 0
        self._told: dict[StepShape, float] = {}
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
        if self._told.get(kind) != again:
            self._told[kind] = again
            self._events.emit(
                "schedule", schedule=self._schedule, micro_batches=shape.micro_batches, clipping=shape.clipping,
                order=shape.order, delayed_fraction=shape.delayed_fraction, recomputed_fraction=again,
                commit=shape.commit, num_operations=len(step.operations),
                moves=by_lane(scheduled_traffic(as_guessed(step.operations))),
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


FIRST, RECORDED = 5, 5
"""The first step that may be recorded since the engine was built, counted from 1; the number of recorded steps."""
MOST = 2.0
"""Largest ratio that counts."""
LEAST_PART = 0.5
"""Fraction of a step during which a resource must work to be corrected."""


class Calibration:
    """Corrections of the machine's profile by the steps of one engine."""

    def __init__(self, executor: Executor, prediction: Prediction | None, events: EventLog) -> None:
        kept = prediction is not None and prediction.known.path is not None
        self._prediction = prediction if kept else None
        self._executor, self._events = executor, events
        self._num_steps, self._last = 0, 0
        self._began = 0.0
        self._spans: list[Span] = []
        self._steps: list[tuple[float, float]] = []
        """Begin and return times of the steps of the planned shape."""

    def begins(self, step: Step) -> None:
        if self._prediction is None:
            return
        self._num_steps += 1
        is_planned = step.shape == self._prediction.shape
        if self._last and self._num_steps > self._last:
            return self._end(self._prediction)
        if not self._last and self._num_steps >= FIRST and is_planned and self._executor.spans is None:
            self._executor.spans, self._last = self._spans, self._num_steps + RECORDED - 1
        self._began = time.perf_counter() if is_planned else 0.0

    def returns(self, step: Step) -> None:
        if step.redone or step.skipped or step.left_out:  # such a step moves other bytes than were predicted
            return
        if self._prediction is not None and self._began and self._executor.spans is self._spans:
            self._steps.append((self._began, time.perf_counter()))

    def _end(self, prediction: Prediction) -> None:
        """Correct the stored profile, once.

        The last step is left out, because the operations that it started have not had time to end.
        """
        self._prediction = None
        if self._executor.spans is not self._spans:
            return  # another recording has taken over
        self._executor.spans = None
        if len(self._steps) < 2:
            return
        found = ratios(prediction, list(self._spans), self._steps[:-1])
        path = prediction.known.path
        if found and path is not None:
            keep(path, correct(prediction.known.profile, found), CORRECTED)
        self._events.emit(
            "corrected", machine=prediction.known.name, ratios=found, steps=len(self._steps) - 1
        )
        self._spans = []


def ratios(
    prediction: Prediction, spans: Sequence[Span], steps: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Return measured over predicted time of each resource that worked long enough."""
    machine, intervals = prediction.choice.simulation.machine, defaultdict(list)
    for span in spans:
        intervals[machine.server(span.lane)].append((span.start, span.end))
    found, usual = {}, median(end - start for start, end in steps)
    for server, predicted in prediction.busy_seconds.items():
        measured = median(covered(intervals[server], *step) for step in steps)
        tells = predicted >= LEAST_PART * prediction.choice.step_seconds and measured >= LEAST_PART * usual
        if tells and not (server == SSD and prediction.ssd_adjusted):
            found[server] = measured / predicted
    return found


def correct(profile: MachineProfile, found: Mapping[str, float]) -> MachineProfile:
    """Return ``profile`` moved half way to the measured ratios ``found``."""
    slower = {server: sqrt(min(max(ratio, 1 / MOST), MOST)) for server, ratio in found.items()}
    ssd, bus = slower.get(SSD, 1.0), slower.get(BUS, 1.0)
    compute = slower.get(CORES, slower.get(COMPUTE, 1.0))
    update = slower.get(CORES, slower.get(UPDATE, 1.0))
    return replace(
        profile,
        compute_factor=round(profile.compute_factor * compute, 4),
        update_elements_per_second=_digits(profile.update_elements_per_second / update),
        ssd_read_bytes_per_second=int(profile.ssd_read_bytes_per_second / ssd),
        ssd_write_bytes_per_second=int(profile.ssd_write_bytes_per_second / ssd),
        ssd_mixed_bytes_per_second=_over(profile.ssd_mixed_bytes_per_second, ssd),
        ssd_sync_seconds=_digits(profile.ssd_sync_seconds * slower.get(COMMIT, 1.0)),
        upload_bytes_per_second=_over(profile.upload_bytes_per_second, bus),
        download_bytes_per_second=_over(profile.download_bytes_per_second, bus),
        copy_bytes_per_second=_over(profile.copy_bytes_per_second, bus),
    )


def covered(intervals: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Return how much of the time from ``since`` to ``until`` lies in at least one of ``intervals`` (start, end).

    >>> covered([(0, 2), (1, 3), (5, 6), (8, 12)], 1, 10)
    5.0
    """
    total = 0.0
    for start, end in sorted(intervals):
        start, end = max(start, since), min(end, until)
        if end > start:
            total += end - start
            since = end
    return total


def _digits(value: float) -> float:
    """Round to six digits: no measurement has more."""
    return float(f"{value:.6g}")


def _over(rate: int | None, factor: float) -> int | None:
    return None if rate is None else int(rate / factor)
