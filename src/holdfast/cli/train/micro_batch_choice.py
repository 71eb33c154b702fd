"""The number of micro-batches of a run with ``train.micro_batches = "auto"``, chosen once, when the run begins.

The number is the fewest that keep this machine busy within the budget. It changes a run's numbers, since a step has
that many times ``train.micro_batch_size`` samples; so the run's record has the number, and a resume takes it from there
(``kept_config``). The engine is built up to its preflight, which has the plan, and nothing is written. Called by
``train_job``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from ...config import FRACTIONS, Config
from ...data.loader import step_loader
from ...errors import ConfigError
from ...events import EventLog
from ...offload.setup.preflight import Preflight
from ...schedule.planner.micro_batch_search import (
    GAIN,
    MOST_MICRO_BATCHES,
    CountFound,
    fewest_micro_batches,
)
from ...schedule.planner.placement_search import Question
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
