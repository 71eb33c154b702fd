"""The search for the number of micro-batches in a step of a measured model: the fewest that keep the machine busy.

A step moves the state once, however many micro-batches it has, so each further one hides more of that behind
computing, until computing binds. Counts are doubled from 1 as long as a doubling gains ``GAIN`` and its memory fits the
budget, each with the best placement for it. Called by ``holdfast train`` when a run begins; the count changes a run's
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...errors import DoesNotFit
from ...quantities import MiB
from .placement_search import Answer, Question, answer, play

GAIN = 0.05
"""Relative gain in micro-batches per second below which a count is not doubled any more."""
MOST_MICRO_BATCHES = 64
MARGIN_BYTES = 64 * MiB
"""Host memory that further micro-batches leave free: a process may hold a little more when its engine is built."""
PLAYED = 50_000
"""Most operations that are played for one count: about a second."""


@dataclass(frozen=True)
class CountFound:
    """The chosen number of micro-batches, and the step times of all numbers that were tried."""

    count: int
    step_seconds: dict[int, float]
    limited_by: str
    """The reason why the count was not doubled: "gain", "memory" or "most"."""


def fewest_micro_batches(
    question: Question, *, commits: bool = True, most: int = MOST_MICRO_BATCHES
) -> CountFound:
    """Return the smallest of 1, 2, 4, ... that twice as many would not beat by ``GAIN``, up to ``most``.

    Args:
        question: The machine, the model with its times, and the budget.
        commits: True if every step ends in a commit.
        most: The largest number of micro-batches.

    Raises:
        DoesNotFit: A single micro-batch does not fit in the budget.
    """
    seconds = {1: _step_seconds(question, 1, commits)}
    for count in _doubled(most):
        try:
            seconds[2 * count] = _step_seconds(question, 2 * count, commits)
        except DoesNotFit:
            return CountFound(count, seconds, "memory")
        if 2 * seconds[count] < (1 + GAIN) * seconds[2 * count]:
            return CountFound(count, seconds, "gain")
    return CountFound(max(seconds), seconds, "most")


# -- helpers ----------------------------------------------------------------------------------------


def _doubled(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ..., whose doubles are at most ``most``."""
    count = 1
    while 2 * count <= most:
        yield count
        count *= 2


def _step_seconds(question: Question, count: int, commits: bool) -> float:
    """Return the seconds of a step of ``count`` micro-batches, placed as is best for it."""
    budget = question.host_budget
    if count > 1 and budget is not None:
        budget -= MARGIN_BYTES
    asked = replace(question, shape=replace(question.shape, micro_batches=count), host_budget=budget)
    found: Answer = answer(asked, PLAYED)
    if commits:
        return found.best.step_seconds
    return play(asked, found.best.placement, replace(found.best.shape, commit=False)).step_seconds
