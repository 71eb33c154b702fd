"""``holdfast train``: the main job, a language model trained on text with its state out of core.

The same command starts a run, continues it and, with more ``train.steps``, extends it: what is in the run
directory decides. Losses are nats per byte.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..config import Config, first_difference, to_toml, to_values
from ..data.corpus import Corpus
from ..data.loader import CorpusLoader, micro_batches_of
from ..errors import Damaged, NoCommit, RunMismatch
from ..events import EventLog, read_events
from ..offload.engine import Engine
from ..offload.preflight import Preflight
from ..store.files import Disk, write_durably
from ..store.local import LocalStore
from ..units import format_seconds
from ..watch.panel import TrainingPanel
from .announce import announce, print_sample, say_how_to_go_on
from .build import make_engine
from .inspect import console as standard_output
from .runs import CONFIGURATION, stored_config
from .stop import StopRequest

VALIDATION_SAMPLES = 64
"""Evenly spread over the held-out text, the same ones every time."""

PROMPT, SAMPLE_BYTES, TEMPERATURE = "def ", 240, 0.7


def train(config: Config) -> None:
    """Run, continue or extend the run that ``config`` describes. Returns when it is done or was stopped."""
    console = standard_output()
    run = Path(config.run.dir)
    refuse_another_run(run, config)
    done = newest_step(config)
    if done >= config.train.steps:
        console.print(
            f"{run} is finished: step {done:,} is durable, and train.steps is {config.train.steps:,}."
        )
        say_how_to_go_on(console, config, extend_to=2 * done)
        return
    data = config.data
    corpus = Corpus(data.text, context=config.model.context, validation_fraction=data.validation_fraction)
    loader = CorpusLoader(corpus, config.run.seed, config.train.micro_batch_size, config.train.micro_batches)
    events = EventLog(run / "events.jsonl")

    def confirm(preflight: Preflight) -> None:
        announce(console, config, corpus, preflight, steps_left=config.train.steps - done)

    with make_engine(config, loader, events, confirm) as engine:
        store_configuration(run, config)
        Job(config, console, corpus, loader, engine, events).run()


class Job:
    """One sitting of a run: from the step where the engine is to the last, or until somebody stops it."""

    def __init__(
        self,
        config: Config,
        console: Console,
        corpus: Corpus,
        loader: CorpusLoader,
        engine: Engine,
        events: EventLog,
    ) -> None:
        self.config, self.console, self.corpus = config, console, corpus
        self.loader, self.engine, self.events = loader, engine, events
        self.panel = TrainingPanel(
            console,
            title=config.run.dir,
            steps=config.train.steps,
            host_budget=engine.preflight.host_budget,
            commit_every=config.durability.every,
        )

    def run(self) -> None:
        started, first = time.perf_counter(), self.engine.steps_done
        self.events.emit("run", first_step=first, pid=os.getpid(), config=to_values(self.config))
        if self.engine.resumed_from is not None:
            self.console.print(f"Continuing after step {first:,}, the newest that is whole.")
        with StopRequest(self.panel.announce_stop) as stop:
            start = self.validate()
            if start is not None:
                self.console.print(f"Validation loss {start['loss']:.3f} at step {first:,}.")
            self.take_steps(stop)
        if stop.requested:
            self.report_stop(stop.requested)
            say_how_to_go_on(self.console, self.config)
        else:
            self.report_end(start, time.perf_counter() - started)
            say_how_to_go_on(self.console, self.config, extend_to=2 * self.engine.steps_done)

    def take_steps(self, stop: StopRequest) -> None:
        """Train to the last step, or until somebody wants to stop, and commit what was reached."""
        with self.panel:
            while self.engine.steps_done < self.config.train.steps and not stop.requested:
                self.engine.step(next(self.loader))
                self.panel.step(self.engine.last)
            if self.config.durability.every:
                self.engine.save()
                self.panel.durable(self.engine.durable_step)

    def validate(self) -> dict[str, Any] | None:
        """The loss on held-out text now, as an event; None where no text is held out."""
        samples = held_out_samples(self.corpus)
        if not samples:
            return None
        batches = micro_batches_of(samples, self.config.train.micro_batch_size)
        event = {"step": self.engine.steps_done, "loss": self.engine.evaluate(batches)}
        self.events.emit("validation", **event)
        return event

    def report_stop(self, signal_name: str) -> None:
        done, durable = self.engine.steps_done, self.engine.durable_step
        self.events.emit("stopped", signal=signal_name, step=done, durable_step=durable)
        self.console.print(f"Stopped by {signal_name} after step {done:,}, {self.kept()}.")

    def kept(self) -> str:
        if self.engine.durable_step == self.engine.steps_done:
            return "which is durable"
        return "and nothing was committed: durability.every is 0"

    def report_end(self, start: dict[str, Any] | None, seconds: float) -> None:
        done = self.engine.steps_done
        self.console.print(
            f"Finished step {done:,} of {done:,}, {self.kept()}, after {format_seconds(seconds)}."
        )
        end = self.validate()
        if start is not None and end is not None:
            first = first_validation(self.events.path) or start
            self.console.print(
                f"Validation loss {end['loss']:.3f}; it was {first['loss']:.3f} at step {first['step']:,}, "
                f"and guessing a byte has {math.log(256):.3f}."
            )
        text = write_sample(self.engine, self.config)
        self.events.emit(
            "finished", step=done, durable_step=self.engine.durable_step, seconds=seconds, sample=text
        )
        print_sample(self.console, PROMPT, text)


def refuse_another_run(run: Path, config: Config) -> None:
    """Raise ``RunMismatch`` if ``run`` was trained with something else that a run cannot change."""
    stored = stored_config(run)
    difference = None if stored is None else first_difference(stored, config)
    if difference is not None:
        key, before, now = difference
        raise RunMismatch(
            f"{run} is another run: its {key} is {before!r}, and {now!r} was asked for. Give the same value, "
            "or another directory with --set run.dir=..."
        )


def store_configuration(run: Path, config: Config) -> None:
    """Keep the resolved configuration in the run's directory, durably."""
    disk = Disk(run)
    disk.makedirs("")
    write_durably(disk, CONFIGURATION, to_toml(config).encode(), why="configuration")


def newest_step(config: Config) -> int:
    """The newest step that the run's directory has, 0 if none; the engine finds out whether it is whole."""
    try:
        newest = LocalStore.read(config.offload.ssd or config.run.dir).head()
    except (NoCommit, Damaged):
        return 0
    return 0 if newest is None else newest.step


def held_out_samples(corpus: Corpus) -> list[dict[str, Tensor]]:
    count = min(VALIDATION_SAMPLES, len(corpus.validation))
    return [corpus.validation[place * len(corpus.validation) // count] for place in range(count)]


def first_validation(path: Path | None) -> dict[str, Any] | None:
    """The validation before the run's first step, whichever sitting it was in."""
    events = read_events(path) if path is not None and path.exists() else iter(())
    found = (event for event in events if event["event"] == "validation" and event["step"] == 0)
    return next(found, None)


def write_sample(engine: Engine, config: Config) -> str:
    """What the model writes after ``PROMPT``; its bytes are read as UTF-8 where they are that."""
    tokens = torch.tensor([list(PROMPT.encode())])
    made = engine.generate(
        tokens, SAMPLE_BYTES, temperature=TEMPERATURE, seed=config.run.seed, context=config.model.context
    )
    return bytes(made[0, tokens.shape[1] :].tolist()).decode(errors="replace")
