"""The number of micro-batches of a run with ``train.micro_batches = "auto"``, chosen once, when the run begins.

The number is the fewest that keep this machine busy within the budget. A step moves the state once, however many
micro-batches it has, so each further one hides more of that behind computing, until computing binds. Counts are doubled
from 1 as long as a doubling gains ``GAIN`` and its memory fits the budget, each with the best placement for it.

The number changes a run's numbers, since a step has that many times ``train.micro_batch_size`` samples; so the run's
record has the number, and a resume takes it from there (``kept_config``). The engine is built up to its preflight,
which has the plan, and nothing is written. Called by ``train_job``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...config import FRACTIONS, Config
from ...data.loader import step_loader
from ...errors import ConfigError, DoesNotFit
from ...events import EventLog
from ...offload.setup.preflight import Preflight
from ...quantities import MiB
from ...schedule.planner.placement_search import Answer, Question, answer, play
from .engine_build import make_engine
from .recipe import Recipe


def require_planned_steps(config: Config, num_ranks: int) -> None:
    """Raise ``ConfigError`` if "auto" cannot be chosen, because the steps of ``config`` are not planned by rates."""
    reason = ""
    if num_ranks > 1:
        reason = f"with {num_ranks} ranks nothing is measured"
    elif config.train.optimizer == "mezo":
        reason = "with mezo nothing is measured"
    elif all(getattr(config.offload, name) != "auto" for name in FRACTIONS):
        reason = f"nothing is planned where all of {', '.join(FRACTIONS)} are given"
    if reason:
        raise _not_chosen(reason)


def with_chosen_count(config: Config, recipe: Recipe, say: Callable[[str], object]) -> Config:
    """Return ``config`` with a number of micro-batches for "auto", which ``say`` receives as a line."""
    if config.train.micro_batches != "auto":
        return config
    size = config.train.micro_batch_size
    most = max(min(MOST_MICRO_BATCHES, len(recipe.corpus.training) // size), 1)
    question = _question(config, recipe, say)
    found = fewest_micro_batches(question, commits=config.durability.every == 1, most=most)
    say(described(found, size))
    return _with_count(config, found.count)


def described(found: CountFound, size: int) -> str:
    """Return the line that tells a person the number, and the rates that it was chosen by."""
    rates = ", ".join(f"{count * size / seconds:.3g}" for count, seconds in found.step_seconds.items())
    counts = ", ".join(map(str, found.step_seconds))
    why = {
        "gain": f"twice as many would gain less than {GAIN:.0%}",
        "memory": "twice as many do not fit in the budget",
        "most": "more are not tried",
    }[found.limited_by]
    return (
        f"Chosen: {found.count} micro-batch{'es' * (found.count > 1)} of {size}, {found.count * size} samples a step."
        f" Planned samples/s with {counts}: {rates}; {why}. The run keeps the number."
    )


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


class _Planned(Exception):
    """Carries a preflight out of an engine that is not to be built."""

    def __init__(self, preflight: Preflight) -> None:
        super().__init__("planned")
        self.preflight = preflight


def _question(config: Config, recipe: Recipe, say: Callable[[str], object]) -> Question:
    """Return the planner's question for steps of ``config``, with the measured machine and model."""
    loader = step_loader(recipe.corpus, config.train.micro_batch_size, 1, stack=recipe.stack)

    def stop(preflight: Preflight) -> None:
        raise _Planned(preflight)

    def say_measuring(text: str) -> None:  # the run's own engine says the rest
        if text.startswith("measuring "):
            say(text)

    try:
        with warnings.catch_warnings(action="ignore"):  # the run's own engine gives them again
            make_engine(_with_count(config, 1), recipe, loader, 1, EventLog(None), stop, say=say_measuring)
    except _Planned as planned:
        prediction = planned.preflight.prediction
    else:
        raise AssertionError("the engine was not stopped")
    if prediction is None:
        raise _not_chosen("the model could not be measured")
    return prediction.question


def _with_count(config: Config, count: int) -> Config:
    return replace(config, train=replace(config.train, micro_batches=count))


def _not_chosen(reason: str) -> ConfigError:
    return ConfigError(
        f'train.micro_batches = "auto" cannot be chosen: {reason}. Give a number, with --set train.micro_batches=N'
    )


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
