"""``holdfast train``: the main job, a language model trained on text with its state out of core.

The same command starts a run, continues it and, with more ``train.steps``, extends it: what is in the run
directory decides. Losses are nats per byte.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ..config import Config, first_difference, to_toml, to_values
from ..data.corpus import Corpus
from ..data.loader import CorpusLoader, micro_batches_of
from ..errors import Damaged, NoCommit, RunMismatch
from ..events import EventLog, read_events
from ..models.decoder import Decoder, DecoderConfig, init_weights
from ..offload.blocks import empty_parameters
from ..offload.engine import Engine
from ..offload.entry import Budget, offload
from ..offload.preflight import Preflight
from ..store.files import Disk, write_durably
from ..store.local import LocalStore
from ..units import format_seconds
from ..watch.panel import TrainingPanel
from .announce import announce, print_sample, say_how_to_go_on
from .machine import choose_device, free_host_bytes
from .runs import CONFIGURATION, stored_config
from .stop import StopRequest

VALIDATION_SAMPLES = 64
"""Evenly spread over the held-out text, the same ones every time."""

PROMPT, SAMPLE_BYTES, TEMPERATURE = "def ", 240, 0.7


def train(config: Config) -> None:
    """Run, continue or extend the run that ``config`` describes. Returns when it is done or was stopped."""
    console = Console(highlight=False)
    run = Path(config.run.dir)
    refuse_another_run(run, config)
    done = newest_step(config)
    if done >= config.train.steps:
        console.print(f"{run} is finished: step {done:,} of {config.train.steps:,} is durable.")
        say_how_to_go_on(console, config, extend=True)
        return
    corpus = Corpus(
        config.data.text,
        context=config.model.context,
        validation_fraction=config.data.validation_fraction,
    )
    events = EventLog(run / "events.jsonl")
    left = config.train.steps - done
    with make_engine(config, corpus, events, lambda it: announce(console, config, corpus, it, left)) as engine:
        store_configuration(run, config)
        Job(config, console, corpus, events, engine).run()


def make_engine(
    config: Config, corpus: Corpus, events: EventLog, confirm: Callable[[Preflight], None]
) -> Engine:
    """The decoder, its optimizer, schedule and text, out of core. Fresh, or as the newest commit has them."""
    seed_all(config.run.seed)
    with empty_parameters():
        model = Decoder(decoder_config(config))
    optimizer = make_optimizer(model, config)
    warmup, steps = config.train.warmup_steps, config.train.steps
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, steps))
    size, count = config.train.micro_batch_size, config.train.micro_batches
    loader = CorpusLoader(corpus, config.run.seed, size, count)
    element_bytes = 2 if config.train.dtype == "bf16" else 4
    return offload(
        model,
        optimizer,
        config.offload.ssd or config.run.dir,
        scheduler=scheduler,
        loader=loader,
        dtype=config.train.dtype,
        device=choose_device(config.offload.device),
        schedule=config.offload.schedule,
        order=config.offload.order,
        params_on_host=config.offload.params_on_host,
        optimizer_on_host=config.offload.optimizer_on_host,
        activations_on_host=config.offload.activations_on_host,
        budget=Budget(
            device=config.offload.device_budget_bytes,
            host=config.offload.host_budget_bytes or free_host_bytes(),
        ),
        clip_norm=config.train.clip_norm or None,
        commit_every=config.durability.every,
        retain=config.durability.retain,
        seed=config.run.seed,
        init=init_weights,
        block_input_bytes=size * config.model.context * config.model.width * element_bytes,
        micro_batches=count,
        direct=config.io.direct,
        io_threads=config.io.threads,
        read_limit=config.io.read_limit_bytes_per_second,
        write_limit=config.io.write_limit_bytes_per_second,
        events=events,
        confirm=confirm,
    )


class Job:
    """One sitting of a run: from the step where the engine is to the last, or until somebody stops it."""

    def __init__(
        self, config: Config, console: Console, corpus: Corpus, events: EventLog, engine: Engine
    ) -> None:
        self.config, self.console, self.corpus = config, console, corpus
        self.events, self.engine = events, engine
        self.steps = config.train.steps

    def run(self) -> None:
        started = time.perf_counter()
        first = self.engine.steps_done
        self.events.emit("run", first_step=first, pid=os.getpid(), config=to_values(self.config))
        if self.engine.resumed_from is not None:
            self.console.print(f"Continuing after step {first:,}, the newest that is whole.")
        before = self.validate()
        stopped = self.take_steps()
        self.make_durable()
        seconds = format_seconds(time.perf_counter() - started)
        if stopped:
            self.report_stop(stopped)
        else:
            self.report_end(before, seconds)
        say_how_to_go_on(self.console, self.config, extend=not stopped)

    def take_steps(self) -> str:
        """Train to the last step; the name of the signal if one asked to stop before."""
        panel = TrainingPanel(
            self.console,
            title=self.config.run.dir,
            steps=self.steps,
            host_budget=self.engine.preflight.host_budget,
            commit_every=self.config.durability.every,
        )
        with panel, StopRequest(panel.announce_stop) as stop:
            while self.engine.steps_done < self.steps and not stop.requested:
                self.engine.step(next(self.engine.loader))
                panel.step(self.engine.last | {"durable_step": self.engine.durable_step})
            if self.config.durability.every:
                self.engine.save()
                panel.durable(self.engine.durable_step)
        return stop.requested

    def validate(self) -> dict[str, Any] | None:
        """The loss on held-out text now, as an event; None where no text is held out."""
        samples = held_out(self.corpus)
        if not samples:
            return None
        loss = self.engine.evaluate(micro_batches_of(samples, self.config.train.micro_batch_size))
        event = {"step": self.engine.steps_done, "loss": loss}
        self.events.emit("validation", **event)
        self.console.print(f"Validation loss {loss:.3f} at step {event['step']:,}.")
        return event
