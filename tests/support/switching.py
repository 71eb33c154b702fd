"""``every="auto"`` that measures a few steps and changes its choice each time, whatever it has measured."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint.snapshot import snapshot_scheduler
from holdfast.schedule.interval import step_cadence
from holdfast.schedule.interval.step_cadence import CadenceChoice, StepRates

EVERY = 3
SMALL = {
    "WARM_STEPS": 1, "BLOCK_STEPS": 3, "UNCOUNTED_STEPS": 1, "COPIED_STEPS": 2, "NUM_ROUNDS": 1, "LEAST_STEPS": 7,
    "LEAST_SECONDS": 0.0,
}  # fmt: skip
"""A round is of eight steps, and a choice is kept for seven."""


def other(measured: Any, limits: Any, rates: StepRates, now: int = 1) -> CadenceChoice:
    """What is not chosen ``now``: bases alone, every third step, or records."""
    return CadenceChoice(EVERY if now == 1 else 1, 0.2, 0.1, 1.0, rates)


def switch_often(put: Any = setattr) -> None:
    """From here on in this process. ``put`` may be that of a monkeypatch."""
    for name, value in SMALL.items():
        put(step_cadence, name, value)
    put(snapshot_scheduler, "choose", other)
