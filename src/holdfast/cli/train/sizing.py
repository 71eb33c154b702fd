"""The size of a default job: what this machine trains to the lowest loss in about three minutes.

Called by ``train_job`` for a run without a CONFIG. In this order:

1. A key of [model] given by ``--set`` means that a person chose the size: nothing is changed.
2. A run that is there keeps the [model], [train] and placement in its ``config.toml``; nothing is measured. Where its
   micro-batches cannot be shared out evenly among the ranks, smaller ones hold the same samples.
3. A key of [train] given by ``--set``, or several ranks: nothing is changed.
4. Otherwise some real steps of one or two shapes are timed, with state on the run's disk, in a directory that is then
   removed. ``size_for`` chooses a shape and a number of steps from these times.

The state of a sized job stays on the SSD, as in ``examples/first-light.toml``.

The losses in ``SHAPES`` were measured on 26 November 2026 with torch 2.13 on two cores of an AMD EPYC, in a plain loop
in fp32 on one thread: the model, optimizer, schedule, samples (seed 0, "stdlib" of Python 3.11) and held-out text of
``holdfast train``, one run for each number. Two runs of ``holdfast train`` in bf16 compare: 4 blocks of width 128 ended
at 1.741 (table: 1.756) after 512,000 tokens, and at 1.848 with steps of 2,048 tokens; 2 blocks at 1.478 after 1,778,688
tokens, which is where ``WON_PER_DOUBLING`` comes from. Nothing larger was measured.
"""

from __future__ import annotations

import math
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...config import FRACTIONS, Config, from_values, to_values
from ...data.loader import step_loader
from ...errors import ConfigError, NoCommit, RunMismatch
from ...events import EventLog
from ...measure.hardware_rates import median_seconds
from ...quantities import counted, format_seconds
from ...store.path_checks import check_place, refuse_foreign_checkpoint
from ...store.run_store import LocalStore
from .engine_build import make_engine
from .kept_config import NAME, record_of_run, state_directory
from .recipe import SAMPLE_SECONDS, SAMPLE_TOKENS, recipe_of

SECONDS = 180.0
"""The seconds that a sized job takes unless ``--seconds`` gives others."""
CONTEXT, SAMPLES = 128, 8
TOKENS = CONTEXT * SAMPLES
"""The tokens of a step."""


@dataclass(frozen=True)
class Wish:
    """The time that a run without a CONFIG is to take, which may leave its size open."""

    seconds: float | None
    """The seconds of ``--seconds``; None if it was not given."""
    began: float
    """The ``time.perf_counter`` at which the command began."""

    def passed(self) -> float:
        """Return the seconds since the command began."""
        return time.perf_counter() - self.began


SPLIT = ("train.micro_batches", "train.micro_batch_size")
"""The keys that divide the samples of a step, which may change with the number of ranks."""
PLACED = [f"offload.{name}" for name in FRACTIONS]
"""The keys of the place of the state."""
LEAST_STEPS, MOST_WARMUP = 10, 20
MEASURED_SHARE = 0.05
"""The share of the time that measuring may take: no further shape is measured that would exceed it."""
MEASURED_TOKENS = (256_000, 512_000, 1_024_000)
WON_PER_DOUBLING, TOKENS_PER_PARAMETER = 0.08, 20
"""The loss won by twice the tokens beyond the table, up to so many tokens per parameter. Both are assumptions."""


@dataclass(frozen=True)
class Shape:
    """A decoder of the table, with the learning rate and the losses that it was measured with."""

    blocks: int
    width: int
    learning_rate: float
    losses: tuple[float, ...]
    """The validation losses after ``MEASURED_TOKENS``."""

    @property
    def parameters(self) -> int:
        """The approximate number of parameters, to which the arithmetic of a token is in proportion."""
        return 12 * self.blocks * self.width**2 + 2 * 256 * self.width

    def loss_after(self, tokens: float) -> float:
        """Return the validation loss (nats per byte) expected after ``tokens``: linear in their logarithm."""
        known = list(zip(MEASURED_TOKENS, self.losses, strict=True))
        last, loss = known[-1]
        if tokens > last:
            return loss - WON_PER_DOUBLING * math.log2(
                min(tokens, TOKENS_PER_PARAMETER * self.parameters) / last
            )
        place = max(1, bisect_left(MEASURED_TOKENS, tokens))
        (few, high), (many, low) = known[place - 1 : place + 1]
        slope = (high - low) / math.log(many / few)
        return min(math.log(256), high - slope * math.log(max(1.0, tokens) / few))


SHAPES = (
    Shape(2, 128, 3e-3, (2.087, 1.812, 1.544)),
    Shape(4, 128, 3e-3, (2.005, 1.756, 1.502)),
    Shape(4, 192, 2e-3, (1.968, 1.700, 1.447)),
)
"""The shapes to choose from, by rising cost. 4 heads share 2 heads of keys and values."""
TRIED = (SHAPES[0], SHAPES[-1])
"""The shapes that are measured, the cheap one first. Those between are interpolated."""


@dataclass(frozen=True)
class Size:
    """The chosen shape and number of steps."""

    shape: Shape
    steps: int
    step_seconds: float

    @property
    def loss(self) -> float:
        """The validation loss expected at the end."""
        return self.shape.loss_after(self.steps * TOKENS)

    def values(self) -> dict[str, Any]:
        """Return ``{"section.key": value}`` of the configuration."""
        return {
            "model.blocks": self.shape.blocks,
            "model.width": self.shape.width,
            "model.heads": 4,
            "model.kv_heads": 2,
            "model.context": CONTEXT,
            "train.steps": self.steps,
            "train.micro_batches": 1,
            "train.micro_batch_size": SAMPLES,
            "train.learning_rate": self.shape.learning_rate,
            "train.warmup_steps": min(MOST_WARMUP, self.steps // 5),
            **dict.fromkeys(PLACED, 0.0),
            "offload.activations_on_host": 1.0,
        }


def size_for(step_seconds: Mapping[Shape, float], seconds: float) -> Size:
    """Return the size with the lowest expected loss after ``seconds`` of steps.

    Args:
        step_seconds: The measured seconds of a step, of the first shape of the table and perhaps of others.
        seconds: The seconds that all steps may take.
    """
    sizes = []
    for shape in SHAPES:
        each = _interpolated(step_seconds, shape)
        sizes.append(Size(shape, max(LEAST_STEPS, int(seconds / each)), each))
    affordable = [size for size in sizes if size.steps * size.step_seconds <= seconds] or sizes[:1]
    return min(affordable, key=lambda size: size.loss)


def _interpolated(step_seconds: Mapping[Shape, float], shape: Shape) -> float:
    """Return the seconds of a step: a power of its arithmetic, or in proportion to it if one shape was measured."""
    (low, low_seconds), *_, (high, high_seconds) = [*step_seconds.items()] * 2
    ratio = shape.parameters / low.parameters
    if low == high:
        return low_seconds * ratio
    power = math.log(high_seconds / low_seconds) / math.log(high.parameters / low.parameters)
    return low_seconds * ratio**power


def sized(
    config: Config,
    stated: Collection[str],
    wish: Wish,
    num_ranks: int,
    say: Callable[[str], object],
) -> Config:
    """Return ``config``, which no CONFIG file gave, with the size that the module's rules give it.

    Args:
        config: The configuration so far.
        stated: The keys given by ``--set``, which win.
        wish: The time that the job is to take.
        num_ranks: The number of ranks, this process included.
        say: Receives lines for a person.

    Raises:
        ConfigError: ``--seconds`` was given, and the size is given too.
        RunMismatch: The directory holds a state without the record of its size.
    """
    run = Path(config.run.dir)
    state = state_directory(run, config)
    chosen = next((key for key in stated if key.startswith("model.")), "")
    if not chosen and (record := record_of_run(run, state)) is not None:
        size = _size_of(record)
        if not any(key in stated for key in SPLIT):
            size |= zip(SPLIT, shared_out(size[SPLIT[0]], size[SPLIT[1]], num_ranks), strict=True)
        return _with_values(config, size, stated)
    chosen = chosen or next(
        (key for key in stated if key.startswith("train.")), "" if num_ranks == 1 else "torchrun"
    )
    if chosen and wish.seconds is not None:
        raise ConfigError(
            f"--seconds chooses the size, and {chosen} leaves no choice. Leave one of the two out."
        )
    if chosen:
        return config
    _refuse_unrecorded(run, state)
    say("Measuring some steps, to choose a model and a number of steps for this machine.")
    size = _measured(config, state, wish)
    for line in described(size, config):
        say(line)
    return _with_values(config, size.values(), stated)


def may_change(stated: Collection[str]) -> tuple[str, ...]:
    """Return the keys of a continued run that ``sized`` changes without a ``--set``."""
    return () if any(key.startswith("model.") for key in stated) else SPLIT


def shared_out(micro_batches: int, size: int, num_ranks: int) -> tuple[int, int]:
    """Return a number and a size of micro-batches that divide evenly among the ranks and hold the same samples.

    Micro-batches are not made larger. Returns the arguments if there is no such number.

    >>> shared_out(1, 8, 2), shared_out(4, 6, 3), shared_out(4, 4, 2), shared_out(1, 8, 3)
    ((2, 4), (6, 4), (4, 4), (1, 8))
    """
    samples = micro_batches * size
    numbers = [n for n in range(num_ranks, samples + 1, num_ranks) if n >= micro_batches and samples % n == 0]
    number = min(numbers, default=micro_batches)
    return number, samples // number


def described(size: Size, config: Config) -> list[str]:
    """Return the lines that tell a person the size and the loss that is expected of it."""
    shape, rate = size.shape, TOKENS / size.step_seconds
    text = "" if config.data.text == "stdlib" else " (of Python's own source)"
    return [
        f"Chosen: {counted(shape.blocks, 'block')} of width {shape.width}, {size.steps:,} steps of {TOKENS:,} bytes. At"
        f" the measured {rate:,.0f} bytes/s they take {format_seconds(size.steps * size.step_seconds)}.",
        f"Expected: the loss{text} falls from {math.log(256):.1f} to about {size.loss:.1f} nats per byte.",
    ]


def _measured(config: Config, state: Path, wish: Wish) -> Size:
    """Return the size for what remains of the time after measuring, and after what is not a step."""
    check_place(state)
    refuse_foreign_checkpoint(state)
    seconds = SECONDS if wish.seconds is None else wish.seconds
    found: dict[Shape, float] = {}
    other = 0.0
    for shape in TRIED:
        if found and wish.passed() + 3 * _interpolated(found, shape) > MEASURED_SHARE * seconds:
            break
        found[shape], other = _tried(config, state, shape, MEASURED_SHARE / 4 * seconds)
    return size_for(found, seconds - wish.passed() - other)


def _tried(config: Config, state: Path, shape: Shape, seconds: float) -> tuple[float, float]:
    """Return the seconds of a step, and those of everything else in a run, measured in about ``seconds``."""
    began = time.perf_counter()
    there = next(place for place in state.absolute().parents if place.is_dir())
    with tempfile.TemporaryDirectory(dir=there, prefix=".holdfast-sizing-") as folder:
        elsewhere = {"run.dir": folder, "offload.ssd": "", "offload.drives": ()}
        trial = from_values(to_values(config) | Size(shape, LEAST_STEPS, 0.0).values() | elsewhere)
        recipe = recipe_of(trial, lambda _: None)
        loader = step_loader(recipe.corpus, SAMPLES, 1, seed=trial.run.seed, stack=recipe.stack)
        nothing, silent = lambda _: None, EventLog(None)
        with make_engine(trial, recipe, loader, 1, silent, nothing, say=nothing) as engine:
            ready = time.perf_counter() - began
            step = median_seconds(lambda: engine.step(next(loader)), seconds)
            prompt = torch.zeros(1, CONTEXT, dtype=torch.int64)
            token = median_seconds(lambda: engine.generate(prompt, 1), 0.0)
    return step, ready + step + min(token * SAMPLE_TOKENS, SAMPLE_SECONDS)


def _size_of(record: Config) -> dict[str, Any]:
    """Return what a recorded run keeps: its model, its training and the place of its state."""
    values = to_values(record)
    return {key: values[key] for key in values if key.startswith(("model.", "train.")) or key in PLACED}


def _with_values(config: Config, values: Mapping[str, Any], stated: Collection[str]) -> Config:
    """Return ``config`` with ``values``, but for the keys in ``stated``."""
    return from_values(to_values(config) | {key: value for key, value in values.items() if key not in stated})


def _refuse_unrecorded(run: Path, state: Path) -> None:
    """Raise ``RunMismatch`` if a state lies in ``state`` whose size is recorded nowhere."""
    with suppress(NoCommit):
        if LocalStore.read(state).commits():
            raise RunMismatch(
                f"{state} holds a run, and {run / NAME}, which has its size, is not there. Give the size by a CONFIG"
                " file or --set, begin anew in another directory with --set run.dir=..., or remove this one."
            )
