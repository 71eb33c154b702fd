"""The verb ``holdfast train``: a language model is trained on text with its state out of core.

The same command starts a run, continues it and, with more ``train.steps``, extends it: the content of the run directory
decides. Under torchrun several ranks share the micro-batches of a step, stop at the same step, and use the same samples
as any other number of ranks. Only the first rank prints and keeps the record of the run. Losses are nats per token; a
token of the reference decoder is a byte. Called by ``main``.
"""

from __future__ import annotations

import math
import os
import random
import shlex
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.status import Status
from torch import Tensor

from ...config import Config, LogConfig, to_values
from ...data.corpus import Windowed
from ...data.loader import SampleLoader, micro_batches_of
from ...distributed import Ranks
from ...errors import BadInput, ConfigError, Damaged, NoCommit
from ...events import EventLog, read_events
from ...measure.hardware_rates import fast_dtype
from ...monitor.training_panel import TrainingPanel
from ...offload.engine import Engine
from ...offload.setup.equal_on_ranks import agree
from ...offload.setup.preflight import Preflight
from ...quantities import format_seconds
from ...store.run_store import LocalStore
from ...supervised.attempt import in_drill, training_directory
from ..machine import choose_device, launched
from ..output import console
from .announce import announce, print_sample, same_command, say_how_to_go_on
from .engine_build import make_engine
from .kept_config import (
    changes_to_run,
    describe,
    kept_dtype,
    kept_micro_batches,
    kept_packing,
    state_directory,
    write_record,
)
from .micro_batch_choice import require_planned_steps, with_chosen_count
from .orderly_stop import StopRequest
from .recipe import SAMPLE_SECONDS, SAMPLE_TOKENS, Recipe, recipe_of
from .row_packing import loader_of, with_possible_packing, with_verified_packing
from .sizing import Wish, may_change, shared_out, sized
from .step_loggers import StepLoggers, refuse_missing_loggers
from .validations import (
    BEST,
    Validations,
    drop_later_weights,
    has_loss,
    has_losses_of_another,
    keep_weights,
    kept_losses,
)

VALIDATION_SAMPLES = 64
"""The number of validation samples, spread evenly over the held-out text and always the same."""
SAME = "Start all ranks with the same settings and files"
TEMPERATURE = 0.7


def train(config: Config, stated: Collection[str] = (), wish: Wish | None = None) -> None:
    """Run, continue or extend the run that ``config`` describes. Returns when it is done or was stopped.

    ``stated`` are the keys that may change the computations of a continued run. ``wish`` sizes a run that no
    CONFIG file describes; None if one does. Raises ``RunMismatch`` for changes of keys that are not stated.
    """
    with together() as ranks:
        _train(ranks, in_attempt(config), stated, wish)


def _train(ranks: Ranks, config: Config, stated: Collection[str], wish: Wish | None) -> None:
    console, run = console_of(ranks), Path(config.run.dir)
    agree(ranks, "configurations", to_values(config), SAME)
    config = ranks.first_does(lambda: with_dtype(config))
    if wish is not None:
        say_here = partial(say, console)
        config = ranks.first_does(lambda: sized(config, stated, wish, ranks.world_size, say_here))
    allowed = stated if wish is None else {*stated, *may_change(stated)}
    config = ranks.first_does(lambda: with_kept_packing(with_kept_count(config)))
    with ranks.agreeing():
        if config.train.micro_batches == "auto":
            require_planned_steps(config, ranks.world_size)
        else:
            share_of(config, ranks)
        changed = changes_to_run(config, allowed)
        state = state_directory(run, config)
    done, packing_before = ranks.first_does(lambda: (newest_step(state), kept_packing(config)))
    is_loss_missing = ranks.first_does(lambda: is_last_loss_missing(config, done))
    if (
        done >= config.train.steps
        and not is_loss_missing
        and first_alone(ranks, lambda: newest_step_verifies(console, state))
    ):
        console.print(
            f"{run} is finished: step {done:,} is durable and whole, and train.steps is {config.train.steps:,}.",
            soft_wrap=True,
        )
        say_how_to_go_on(console, config, extend=("train.steps", 2 * done))
        return
    with ranks.agreeing():
        refuse_missing_loggers(config.log)
    recipe = shared_recipe(ranks, config, console)
    _refuse_nothing_held_out(config, recipe)
    config = with_possible_packing(config, recipe, partial(say, console))
    config = with_chosen_count(config, recipe, partial(say, console))
    micro_batches = share_of(config, ranks)
    loader = loader_of(config, recipe, micro_batches)
    events = EventLog(run / "events.jsonl" if ranks.rank == 0 else None)

    def confirm(preflight: Preflight) -> None:
        announce(console, config, recipe.corpus, preflight, config.train.steps - done, ranks.world_size)

    if changed:  # the change was requested with --set, and run() prints it (kept_config.py)
        warnings.filterwarnings("ignore", message="this run goes on with other settings")
    with reading(console, f"step {done:,}") if done else console.status("making the first commit"):
        engine = make_engine(
            config,
            recipe,
            loader,
            micro_batches,
            events,
            confirm,
            before_first_commit=lambda: write_record(config),
            say=lambda text: say_measuring(console, text),
        )
    with engine:
        ranks.first_does(recipe.keep)
        if engine.steps_done == 0 or packing_before != "on" or "train.micro_batch_size" in changed:
            config = with_verified_packing(config, engine, recipe, loader, partial(say, console))
        # not before: what the record has is not verified again
        ranks.first_does(lambda: write_record(config))
        job = Job(config, ranks, console, recipe, loader, engine, events)
        with closing(job.loggers):
            job.run(changed)


def in_attempt(config: Config) -> Config:
    """Return ``config`` with the directories that stand for its own, in a drill."""
    if not in_drill():
        return config
    ssd = str(training_directory(config.offload.ssd)) if config.offload.ssd else ""
    return replace(
        config,
        run=replace(config.run, dir=str(training_directory(config.run.dir))),
        offload=replace(config.offload, ssd=ssd, drives=()),
    )


def with_dtype(config: Config) -> Config:
    """Return ``config`` with the dtype for "auto": that of the run, or the fast one on this machine."""
    if config.train.dtype != "auto":
        return config
    dtype = kept_dtype(config) or fast_dtype(torch.device(choose_device(config.offload.device)))
    return replace(config, train=replace(config.train, dtype=dtype))


def with_kept_count(config: Config) -> Config:
    """Return ``config`` with the run's number of micro-batches for "auto", which is chosen only once."""
    if config.train.micro_batches != "auto":
        return config
    return replace(config, train=replace(config.train, micro_batches=kept_micro_batches(config) or "auto"))


def with_kept_packing(config: Config) -> Config:
    """Return ``config`` with "lengths" for "on" if the run has found that its model does not keep samples apart."""
    if config.data.packing != "on" or kept_packing(config) != "lengths":
        return config
    return replace(config, data=replace(config.data, packing="lengths"))


def shared_recipe(ranks: Ranks, config: Config, console: Console) -> Recipe:
    """Return the recipe. The first rank encodes the text if necessary, and the others find it.

    Collective: every rank must call this.
    """
    with ranks.agreeing():
        first = ranks.first_takes_its_time(lambda: recipe_of(config, lambda text: say(console, text)))
    with ranks.agreeing():
        recipe = first or recipe_of(config, refuse_encoding_here)
    held_out = recipe.corpus.validation.fingerprint
    agree(ranks, "texts", {**recipe.corpus.fingerprint, "held out": held_out}, SAME)
    return recipe


class Job:
    """One sitting of a run: from the engine's step to the last one, or until a stop."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        console: Console,
        recipe: Recipe,
        loader: SampleLoader,
        engine: Engine,
        events: EventLog,
    ) -> None:
        self.config, self.ranks, self.console, self.recipe = config, ranks, console, recipe
        self.loader, self.engine, self.events = loader, engine, events
        self.stopped_by = ""
        first, log = engine.steps_done, config.log if ranks.rank == 0 else LogConfig()
        self.loggers = StepLoggers(log, Path(config.run.dir), first, to_values(config))
        self.validations = self.kept_validations()
        prediction = engine.preflight.prediction
        self.panel = TrainingPanel(
            console,
            title=config.run.dir,
            steps=config.train.steps,
            host_budget=engine.preflight.host_budget,
            commit_every=config.durability.every,
            busiest_seconds=prediction.busiest_seconds if prediction else None,
        )

    def run(self, changed: dict[str, tuple[Any, Any]]) -> None:
        """Train to the end and report it. ``changed`` are the keys that differ from before."""
        started = time.perf_counter()
        speaks = self.ranks.rank == 0
        with StopRequest(self.panel.announce_stop, self.last_words, speaks=speaks) as stop:
            self.begin(changed)
            before = self.validate()
            if before is not None:
                self.say(f"Validation loss {before['loss']:.3f} at step {before['step']:,}.")
            try:
                self.take_steps(stop)
            except Exception as error:
                self.events.emit(
                    "failed", step=self.engine.steps_done, error=f"{type(error).__name__}: {error}"
                )
                raise
            if self.engine.steps_done < self.config.train.steps and not self.validations.is_over:
                self.report_stop(self.stopped_by)
            else:
                self.report_end(before, time.perf_counter() - started, stop)

    def begin(self, changed: dict[str, tuple[Any, Any]]) -> None:
        first, values = self.engine.steps_done, to_values(self.config)
        self.events.emit("run", first_step=first, pid=os.getpid(), config=values, changed=changed)
        if self.engine.resumed_from:  # step 0 is where a folder's weights begin
            self.say(
                f"Continuing after step {first:,}, the newest that is whole. {self.engine.lost_steps_text}"
            )
        if changed:
            self.say(f"Changed from here on: {describe(changed)}.")
        if has_losses_of_another(Path(self.config.run.dir), self.validations.text):
            self.say("The held-out text has changed: losses are compared, and patience counts, from here on.")

    def take_steps(self, stop: StopRequest) -> None:
        """Train to the last step, or until a stop is requested, and commit the reached step."""
        with self.panel:
            while self.engine.steps_done < self.config.train.steps and not self.validations.is_over:
                self.stopped_by = self.first_reason(stop.requested)
                if self.stopped_by:
                    break
                self.engine.step(next(self.loader))
                self.panel.step(self.engine.last)
                self.loggers.step(self.engine.last)
                if self.validation_is_due() and self.engine.steps_done < self.config.train.steps:
                    self.say_loss(self.held_out_loss())
            if self.config.durability.every:
                self.engine.save()
                self.panel.durable(self.engine.durable_step)

    def first_reason(self, why: str) -> str:
        """Return the first rank's reason to stop, or an empty text. Collective: every rank must call this."""
        return next(filter(None, self.ranks.everyone(why)), "")

    def kept_validations(self) -> Validations:
        """Return the losses on held-out text of the run so far. Collective: every rank must call this."""
        text, run = self.recipe.corpus.validation.fingerprint, Path(self.config.run.dir)
        done = self.engine.steps_done
        self.ranks.first_does(lambda: drop_later_weights(run, done))
        kept = self.ranks.first_does(lambda: kept_losses(run, text, done))
        return Validations(self.config.train.patience, text, kept)

    def validation_is_due(self) -> bool:
        every = self.config.train.validate_every
        return every > 0 and self.engine.steps_done % every == 0

    def validate(self) -> dict[str, Any] | None:
        """Return ``held_out_loss``, and show that it is computed. Collective: every rank must call this."""
        with self.console.status("reading held-out text"):
            return self.held_out_loss()

    def held_out_loss(self) -> dict[str, Any] | None:
        """Return the current loss on held-out text as an event; None without held-out text.

        Each rank computes its share of the micro-batches, or all if they do not divide evenly. A loss that is due is
        kept by the run. Collective: every rank must call this.
        """
        samples = held_out_samples(self.recipe.corpus)
        if not samples:
            return None
        batches = micro_batches_of(samples, self.config.train.micro_batch_size, self.recipe.stack)
        if len(batches) % self.ranks.world_size == 0:
            batches = batches[self.ranks.rank :: self.ranks.world_size]
        event = {"step": self.engine.steps_done, "loss": self.engine.evaluate(batches)}
        self.events.emit("validation", **event, text=self.validations.text_digest)
        self.loggers.validation(event)
        if self.validation_is_due():
            self.keep_loss(**event)
        return event

    def keep_loss(self, step: int, loss: float) -> None:
        """Keep a loss on held-out text and, as far as configured, the weights if it is the lowest."""
        run = Path(self.config.run.dir)
        is_lowest = self.validations.add(step, loss)
        if is_lowest and step and self.config.train.keep_best:
            self.engine.save()
            first_alone(self.ranks, lambda: keep_weights(run, step))
        self.ranks.first_does(lambda: self.validations.write(run))

    def report_stop(self, signal_name: str) -> None:
        done, durable = self.engine.steps_done, self.engine.durable_step
        self.events.emit("stopped", signal=signal_name, step=done, durable_step=durable)
        self.say(f"Stopped by {signal_name} after step {done:,}, {self.kept()}.")
        say_how_to_go_on(self.console, self.config)

    def report_end(self, before: dict[str, Any] | None, seconds: float, stop: StopRequest) -> None:
        done = self.engine.steps_done
        self.say(f"{self.end_text()}, {self.kept()}, after {format_seconds(seconds)}.")
        after = self.validate()
        self.say_lowest()
        if before is not None and after is not None:
            first = first_validation(self.events.path, self.validations.text_digest) or before
            self.say(
                f"Validation loss {after['loss']:.3f}; it was {first['loss']:.3f} at step {first['step']:,}, "
                f"and a uniform guess has {math.log(self.recipe.choices):.3f}."
            )

        def is_over(late: bool) -> bool:
            return bool(self.first_reason(stop.requested or "late" * late))

        ids = sampled_ids(self.engine, self.config, self.recipe.prompt_ids, is_over)
        text = print_sample(self.console, self.recipe.prompt, self.recipe.text_of(ids))
        self.events.emit(
            "finished", step=done, durable_step=self.engine.durable_step, seconds=seconds, sample=text
        )
        more = ("train.steps", 2 * done)
        if done < self.config.train.steps:
            more = ("train.patience", self.config.train.patience + self.validations.num_since_lowest)
        say_how_to_go_on(self.console, self.config, extend=more)

    def end_text(self) -> str:
        done, steps = self.engine.steps_done, self.config.train.steps
        if done >= steps:
            return f"Finished step {done:,} of {done:,}"
        patience = self.config.train.patience
        return (
            f"Ended after step {done:,} of {steps:,}, since {patience} validation losses in a row were no lowest ones"
            " (train.patience)"
        )

    def say_loss(self, event: dict[str, Any] | None) -> None:
        """Print a loss on held-out text in the course of training."""
        if event is not None and self.validations.best is not None:
            lowest = ", the lowest so far" * (self.validations.best[0] == event["step"])
            self.say(f"Validation loss {event['loss']:.3f} at step {event['step']:,}{lowest}.")

    def say_lowest(self) -> None:
        """Print the lowest loss on held-out text, if the run has more than one."""
        best = self.validations.best
        if best is not None and len(self.validations.losses) > 1:
            folder = Path(self.config.run.dir) / BEST / f"step-{best[0]}"
            where = f"; its weights are in {folder}" * folder.is_dir()
            self.say(f"The lowest validation loss was {best[1]:.3f}, at step {best[0]:,}{where}.")

    def last_words(self) -> str:
        """Return the text that is printed when the run is left at once."""
        command = shlex.join(same_command())
        return f"Left at once; step {self.engine.durable_step:,} is durable. Continue with: {command}"

    def kept(self) -> str:
        if self.engine.durable_step == self.engine.steps_done:
            return "which is durable"
        return "and nothing was committed: durability.every is 0"

    def say(self, text: str) -> None:
        say(self.console, text)


def newest_step(state: Path) -> int:
    """Return the newest step of a run's state, 0 if none. The engine finds out whether it is whole."""
    try:
        newest = LocalStore.read(state).head()
    except (NoCommit, Damaged):
        return 0
    return 0 if newest is None else newest.step


def is_last_loss_missing(config: Config, done: int) -> bool:
    """Return whether a run was killed after its last step, and before that step's loss on held-out text was kept."""
    every = config.train.validate_every
    is_due = every > 0 and done == config.train.steps and done % every == 0
    return is_due and not has_loss(Path(config.run.dir), done)


def newest_step_verifies(console: Console, state: Path) -> bool:
    """Return whether the newest step of a finished run verifies.

    Damage is reported when the run continues from an older step.
    """
    with reading(console, "the newest step"):
        reader = LocalStore.read(state)
        newest = reader.head()
        return newest is not None and not reader.verify(newest)


def reading(console: Console, what: str) -> Status:
    """Show, also without a terminal, that all of ``what`` is being read, which may take long."""
    text = f"reading all of {what}"
    if not console.is_terminal:
        console.print(text)
    return console.status(text)


def say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


def say_measuring(console: Console, text: str) -> None:
    """Print that the machine is measured. Plans are printed by ``announce``."""
    if not text.startswith("plan: "):
        say(console, text)


def held_out_samples(corpus: Windowed) -> list[dict[str, Tensor]]:
    count = min(VALIDATION_SAMPLES, len(corpus.validation))
    return [corpus.validation[place * len(corpus.validation) // count] for place in range(count)]


def first_validation(path: Path | None, text_digest: str) -> dict[str, Any] | None:
    """Return the validation before the run's first step; None if it was on another text, or no number."""
    events = read_events(path) if path is not None and path.exists() else iter(())
    found = (event for event in events if event["event"] == "validation" and event["step"] == 0)
    numbers = (event for event in found if event.get("loss") is not None)
    return next((each for each in numbers if each.get("text", text_digest) == text_digest), None)


def sampled_ids(
    engine: Engine, config: Config, prompt: list[int], is_over: Callable[[bool], bool]
) -> Iterator[int]:
    """Yield the tokens that the model writes after ``prompt``, until ``is_over``."""
    tokens, ends = torch.tensor([prompt]), time.perf_counter() + SAMPLE_SECONDS
    seeds = random.Random(config.run.seed)
    for _ in range(SAMPLE_TOKENS):
        if is_over(time.perf_counter() > ends):
            break
        tokens = engine.generate(
            tokens, 1, temperature=TEMPERATURE, seed=seeds.getrandbits(63), context=config.model.context
        )
        yield int(tokens[0, -1])


T = TypeVar("T")
DEADLINE_SECONDS = 300.0
"""The seconds that a rank waits for another one, as in ``offload``."""


@contextmanager
def together() -> Iterator[Ranks]:
    """Yield the ranks that torchrun started, or a single one. Collective: every rank must call this."""
    if launched() == (0, 1):
        yield Ranks()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_SECONDS))  # as the engine does
    ranks = Ranks.here(DEADLINE_SECONDS, "begin to train")
    try:
        yield ranks
    finally:
        ranks.close()
        dist.destroy_process_group()


def console_of(ranks: Ranks) -> Console:
    """Return a console on standard output for the first rank, and one that prints nowhere for the others."""
    return console() if ranks.rank == 0 else Console(file=open(os.devnull, "w", encoding="utf-8"))


def share_of(config: Config, ranks: Ranks) -> int:
    """Return this rank's number of micro-batches in a step. Raises ``ConfigError`` if they do not divide evenly."""
    whole = config.train.num_micro_batches
    if whole % ranks.world_size:
        number, size = shared_out(whole, config.train.micro_batch_size, ranks.world_size)
        same = (
            f"; --set train.micro_batches={number} --set train.micro_batch_size={size} keep a step's samples"
        )
        raise ConfigError(
            f"train.micro_batches = {whole} cannot be shared out evenly among {ranks.world_size} ranks: start as many"
            f" as divide it, or set another number, of all ranks together{same * (number != whole)}"
        )
    return whole // ranks.world_size


def _refuse_nothing_held_out(config: Config, recipe: Recipe) -> None:
    every = config.train.validate_every
    if every and not len(recipe.corpus.validation):
        raise ConfigError(
            f"train.validate_every = {every}: nothing is held out. Give data.validation, or a data.validation_fraction"
            " above 0 in another run"
        )


def refuse_encoding_here(what: str) -> None:
    """Raise ``BadInput``, because rank 0 should have done ``what`` already."""
    raise BadInput(
        f"{what} was done by rank 0, whose copy is not what this rank has: all ranks need one file system for the run's"
        " directory and for the text"
    )


def first_alone(ranks: Ranks, what: Callable[[], T]) -> T:
    """Return the result of ``what`` on the first rank, however long it takes. Collective: every rank must call this.

    An error on the first rank is raised on all.
    """
    with ranks.agreeing():
        result = ranks.first_takes_its_time(what)
    return ranks.everyone(result)[0]  # type: ignore[return-value]
