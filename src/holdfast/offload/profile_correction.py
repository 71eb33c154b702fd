"""The correction of the machine's profile by the times of a run's own steps, for the next start.

It changes nothing in the run. The rule:

1. Five steps are recorded, from the first one of the planned shape on, and not before the fifth since the engine was
   built. Those of the planned shape count, except the last.
2. For each resource that serves lanes (the SSD, the bus, the cores, the commit), the time in which it had work is
   compared with the time predicted for a step. The ratio is the median over the steps.
3. The profile's rates of the resource are divided by the square root of that ratio, clamped to between a half and two.
   That is half way to the measurement on a logarithmic scale: a disturbed step moves little, and a few runs arrive.
4. A resource predicted or measured to work for less than half of a step does not count: its operations have slack, in
   which they wait for the cores. Neither does an SSD that was given a limit.

Called by ``StepReports``. Seconds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import median

from ..events import EventLog
from ..measure.machine_probe import CORRECTED, keep
from ..profiles import MachineProfile
from ..schedule.operations import COMMIT, COMPUTE, UPDATE, covered
from ..schedule.planner.machine_rates import BUS, CORES, SSD
from .executor import Executor, Span
from .runtime import Step
from .setup.automatic_placement import Prediction

FIRST_STEP, NUM_STEPS = 5, 5
"""The first step that may be recorded since the engine was built, counted from 1; the number of recorded steps."""
LARGEST_RATIO = 2.0
"""Largest ratio that counts."""
LEAST_BUSY_FRACTION = 0.5
"""Fraction of a step during which a resource must work to be corrected."""


class ProfileCorrection:
    """Corrects the machine's profile once, by the times of the steps of one engine."""

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
        if not self._last and self._num_steps >= FIRST_STEP and is_planned and self._executor.spans is None:
            self._executor.spans, self._last = self._spans, self._num_steps + NUM_STEPS - 1
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
    found: dict[str, float] = {}
    least_predicted = LEAST_BUSY_FRACTION * prediction.choice.step_seconds
    least_measured = LEAST_BUSY_FRACTION * median(end - start for start, end in steps)
    for server, predicted in prediction.busy_seconds.items():
        measured = median(covered(intervals[server], *step) for step in steps)
        is_busy = predicted >= least_predicted and measured >= least_measured
        if is_busy and not (server == SSD and prediction.ssd_adjusted):
            found[server] = measured / predicted
    return found


def correct(profile: MachineProfile, found: Mapping[str, float]) -> MachineProfile:
    """Return ``profile`` moved half way to the measured ratios ``found``."""
    slower = {
        server: sqrt(min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO)) for server, ratio in found.items()
    }
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


def _digits(value: float) -> float:
    """Round to six digits: no measurement has more."""
    return float(f"{value:.6g}")


def _over(rate: int | None, factor: float) -> int | None:
    return None if rate is None else int(rate / factor)
