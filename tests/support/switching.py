"""``every="auto"`` that measures a few steps and changes its choice each time, whatever it has measured; or that
chooses copies in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.checkpoint import recording
from holdfast.checkpoint.replica import shared_memory
from holdfast.checkpoint.snapshot import snapshot_scheduler
from holdfast.schedule.interval import step_cadence
from holdfast.schedule.interval.step_cadence import CadenceChoice, StepRates

EVERY = 3
SMALL = {
    "WARM_STEPS": 1, "BLOCK_STEPS": 3, "UNCOUNTED_STEPS": 1, "COPIED_STEPS": 2, "NUM_ROUNDS": 1, "LEAST_STEPS": 7,
    "LEAST_SECONDS": 0.0,
}  # fmt: skip
"""A round is of eight steps, and a choice is kept for seven."""


def other(measured: Any, limits: Any, rates: StepRates, now: int = 1, *_: Any) -> CadenceChoice:
    """What is not chosen ``now``: bases alone, every third step, or records."""
    return CadenceChoice(EVERY if now == 1 else 1, 0.2, 0.1, 1.0, rates)


def switch_often(put: Any = setattr) -> None:
    """From here on in this process. ``put`` may be that of a monkeypatch."""
    for name, value in SMALL.items():
        put(step_cadence, name, value)
    put(snapshot_scheduler, "choose", other)
    put(recording, "why_unavailable", lambda *_: "this test is about the disk")


COPIES_EVERY, BASES_EVERY = 2, 100
COPYING = {**SMALL, "HELD_STEPS": 2, "UNCOUNTED_HELD": 0, "LEAST_STEPS": 10_000}
"""As above, with a block of two steps and one copy in memory. The choice comes after 11 steps and is kept."""


def copies(measured: Any, limits: Any, rates: StepRates, *_: Any) -> CadenceChoice:
    """Copies in memory, every second step, or records where there can be none."""
    if rates.held_seconds is None:
        return CadenceChoice(1, 0.1, 0.2, 1.0, rates)
    return CadenceChoice(BASES_EVERY, 0.2, 0.1, 1.0, rates, COPIES_EVERY, 0.05)


def copy_often(memory: str | Path, put: Any = setattr) -> None:
    """Choose copies in memory from here on in this process. The directory ``memory`` stands for /dev/shm."""
    for name, value in COPYING.items():
        put(step_cadence, name, value)
    put(snapshot_scheduler, "choose", copies)
    put(shared_memory, "MEMORY", Path(memory))
