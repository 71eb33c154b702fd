"""One call of a ``Trainer``'s ``train``, with a checkpointer that records every optimizer step.

A step is recorded when all callbacks have seen its end, before it is logged, evaluated or saved; a resume there repeats
these. A place is an epoch and the number of optimizer steps done in it. Earlier batches are skipped by their indices
alone; only an ``IterableDataset``, which has no indices, is read again from the beginning of the epoch.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from ..checkpoint.options import Exactness
from ..checkpointer import Checkpointer
from ..errors import BadInput, RunMismatch
from ..monitor.progress_bar import progress_bar
from ..state.encoding import decode, encode
from ..state.progress import random_state, restore_random_state
from .shared.changed_attributes import (
    OF_MODULES,
    ChangedAttributes,
    datasets_of,
    innermost,
    modules_of,
    names_in,
    set_up_again,
)
from .shared.collective_commit import newest_progress
from .shared.epoch_batches import EpochBatches
from .shared.position import Order, WatchedBatches, refuse_other_batches

STATE = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
"""Fields of ``TrainerState`` that training changes, beside ``log_history``. The rest follows from the script."""

LOSS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""Fields of the trainer with values that are not logged yet."""


class Training:
    """One call of ``train``, which its checkpointer treats as the loader; its state is all that the trainer holds.

    ``elastic`` is true because this class itself refuses another number of processes where a place would mean another.
    """

    elastic = True
    has_loop = True
    """A flag for the ``Checkpointer``: what is restored here does not move the trainer's loop."""
    redoes = True
    """A flag for the ``Checkpointer``: a resume repeats what came after the last step."""
    schedule_advice = "Give it to the trainer, as optimizers=(optimizer, schedule)."

    def __init__(
        self, trainer: Trainer, run: Path, options: dict[str, Any], exactness: Exactness = "state"
    ) -> None:
        self._trainer, self._run, self._options, self._exactness = trainer, run, options, exactness
        self._covered = {
            "_run_epoch": self.run_epoch,
            "_maybe_log_save_evaluate": self.end_step,
            "_load_rng_state": self.load_random_state,
        }
        self._before = {name: vars(trainer).get(name) for name in self._covered}
        handler: Any = trainer.callback_handler
        self._begin_epoch = handler.on_epoch_begin
        vars(handler)["on_epoch_begin"] = self.begin_epoch
        self._attributes: ChangedAttributes | None = None
        self._run_epoch, self._end_step = trainer._run_epoch, trainer._maybe_log_save_evaluate
        self._checkpointer: Checkpointer | None = None
        self._loader: Any = None
        self._batches: WatchedBatches | None = None
        self._restored: dict[str, Any] | None = None
        """The restored state of the run, until the loop exists."""
        self._order = Order(None, None)
        self._accumulation = 0
        """The batches of a step, when training began."""
        self._place = _Place(0, encode(self._order.now()))
        self._logged = _Logged()
        self._recorded_step = 0
        self.of_ranks: list[dict[str, Any]] = []
        """The states of all processes of the run, where another number of them continues it."""
        self._ending: dict[str, Any] | None = None
        """The values with which the last recorded step is logged."""
        self._random_now: dict[str, Any] = {}
        """The state that the generators get when the first batches exist."""

    def __enter__(self) -> Training:
        vars(self._trainer).update(self._covered)
        return self

    def __exit__(self, *error: Any) -> None:
        vars(self._trainer.callback_handler).pop("on_epoch_begin", None)
        for name, method in self._before.items():
            del vars(self._trainer)[name]
            if method is not None:
                vars(self._trainer)[name] = method
        if self._batches is not None:
            vars(self._loader.base_dataloader)["batch_sampler"] = self._batches.inner
        if self._checkpointer is not None:
            self._checkpointer.__exit__(*error)

    # Replacements of the trainer's methods

    def begin_epoch(self, args: Any, state: Any, control: Any) -> Any:
        """Call ``on_epoch_begin`` of callbacks, except for an epoch that the run has begun.

        Its changes are part of the run and would be made twice.
        """
        if self._restored is not None:
            return control
        if self._attributes is None:
            return self._begin_epoch(args, state, control)
        return self._attributes.begin_epoch(lambda: self._begin_epoch(args, state, control), "on_epoch_begin")

    def run_epoch(self, **loop: Any) -> None:
        """Run an epoch; one that the run has completed is skipped."""
        if self._checkpointer is None:
            self._open(loop["train_dataloader"], loop["model"])
        if self._restored is None:
            self._place = _Place(loop["epoch"], encode(self._order.now()))
            self._run_epoch(**loop)
        elif loop["epoch"] == self._restored["place"]["epoch"]:
            found, self._restored = self._restored, None
            self._go_on(found, loop)

    def end_step(
        self, tr_loss: Any, grad_norm: Any, *rest: Any, learning_rate: Any = None, **options: Any
    ) -> None:
        """Record the step. Called at the end of every optimizer step, and again at the end of an epoch."""
        if self._trainer.state.global_step > self._recorded_step:
            assert self._checkpointer is not None
            self.refuse_other_accumulation()
            self._recorded_step = self._trainer.state.global_step
            self._place.updates += 1
            self._ending = {"grad_norm": _whole(grad_norm), "learning_rate": learning_rate}
            self._checkpointer.step()
        elif learning_rate is None and self._place.updates:  # only the end of the epoch was left
            assert self._ending is not None
            grad_norm, learning_rate = self._ending["grad_norm"], self._ending["learning_rate"]
        self._end_step(tr_loss, grad_norm, *rest, learning_rate=learning_rate, **options)

    def refuse_other_accumulation(self) -> None:
        """Raise ``BadInput`` if a callback has changed the number of batches in a step, by which a place is counted."""
        now = self._trainer.args.gradient_accumulation_steps
        if now != self._accumulation:
            raise BadInput(
                f"args.gradient_accumulation_steps was {self._accumulation} when training began and is {now} now. The"
                " place in the data is counted in steps of equally many batches: leave it as it is, or train on in"
                " another run, from the weights of this one"
            )

    def load_random_state(self, checkpoint: Any) -> None:
        """Set the generators when the resumed epoch's first batches exist, unless a watched sampler has done it."""
        if self._batches is None:
            restore_random_state(self._random_now)

    # The run

    def _watch_loader(self, loader: Any) -> None:
        self._loader = loader
        self._accumulation = self._trainer.args.gradient_accumulation_steps
        inside = getattr(loader, "base_dataloader", None)
        batches = getattr(inside, "batch_sampler", None)
        if batches is not None and not isinstance(loader.dataset, IterableDataset):
            self._batches = WatchedBatches(batches)
            vars(inside)["batch_sampler"] = self._batches  # setattr is refused, since lengths might differ
        self._order = Order(inside, self._batches)

    def _open(self, loader: Any, model: Any) -> None:
        trainer = self._trainer
        self._watch_loader(loader)
        self._watch_attributes()
        newest = newest_progress(self._run)
        self._begin_epoch_again(newest)
        set_up_again(newest, "loader", dict(model.named_parameters()), [innermost(trainer.optimizer)])
        self._checkpointer = Checkpointer(
            self._run,
            model=model,
            optimizer=innermost(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            loader=self,
            scaler=trainer.accelerator.scaler,
            **self._options,
        )
        show = progress_bar() if trainer.is_world_process_zero() else None
        self._checkpointer.resume(exactness=self._exactness, show=show)

    def _watch_attributes(self) -> None:
        """Treat the current attributes as set by the script."""
        trainer, model = self._trainer, self._trainer.model
        assert model is not None
        callbacks = trainer.callback_handler.callbacks
        objects = {
            **modules_of(model, type(model).__name__),
            **{f"callback {i} {type(each).__name__}": each for i, each in enumerate(callbacks)},
            **datasets_of(self._loader),
            **_rewards_of(trainer),
            "trainer": trainer,
            "args": trainer.args,
            "state": trainer.state,
        }
        own = {
            kind for each in (trainer, *callbacks) for kind in type(each).__mro__ if _is_transformers(kind)
        }
        self._attributes = ChangedAttributes(
            objects,
            model,
            {
                **{kind: names_in(kind) for kind in own},
                nn.Module: OF_MODULES,
                TrainerState: frozenset(vars(TrainerState())),
            },
        )

    def _begin_epoch_again(self, newest: dict[str, Any]) -> None:
        """Let callbacks set up the epoch of the newest commit, before the run is resumed.

        This matters for set-up in objects; everything else is restored.
        """
        trainer = self._trainer
        found = decode(newest.get("things", {}).get("loader"))
        if found is None:
            return
        if found["place"]["epoch"]:
            state = trainer.state
            before = {name: getattr(state, name) for name in STATE}
            for name in STATE:
                setattr(state, name, found["state"][name])
            self._begin_epoch(trainer.args, state, trainer.control)
            for name, value in before.items():
                setattr(state, name, value)

    def _go_on(self, found: dict[str, Any], loop: dict[str, Any]) -> None:
        """Restore the place of ``found``, end its step as it was ended, and do the rest of the epoch."""
        found = self._restored_here(found)
        trainer, place = self._trainer, _Place(**found["place"])
        self._restore(found)
        self._place, self._recorded_step = place, trainer.state.global_step
        if self._ending is not None:
            loop["model"].train()  # as it was then, which TRL's log asks
            self._end_step(
                trainer._tr_loss, self._ending["grad_norm"], loop["model"], loop["trial"], place.epoch,
                loop["ignore_keys_for_eval"], loop["start_time"], learning_rate=self._ending["learning_rate"],
            )  # fmt: skip
        batches = self._num_batches(loop["steps_in_epoch"])
        if batches:
            loop |= {
                "resume_from_checkpoint": str(self._run),
                "epochs_trained": place.epoch,
                "steps_trained_in_current_epoch": batches,
            }
        control = trainer.control
        if control.should_training_stop or control.should_epoch_stop or batches == loop["steps_in_epoch"]:
            loop["num_update_steps_per_epoch"] = batches // trainer.args.gradient_accumulation_steps
        elif batches:
            self._random_now = random_state()
            if self._batches is not None:
                pending = [decode(place.pending)] if place.pending is not None else []
                self._batches.replay_generators(batches, [*pending, self._random_now])
            self._order.put_back(decode(place.random))
        self._run_epoch(**loop)

    # The loader's interface for the checkpointer

    def state_dict(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored_here(self._restored)
        trainer = self._trainer
        return {
            "same": self._same(),
            "epoch_batches": None if (batches := self._epoch_batches()) is None else batches.as_dict(),
            "seed": self._order.seed,
            "place": vars(self._place) | {"pending": self._pending()},
            "state": {name: getattr(trainer.state, name) for name in STATE},
            "log_history": self._logged.text_of(trainer.state.log_history),
            "loss": {name: getattr(trainer, name) for name in LOSS},
            "ending": self._ending,
            "control": vars(trainer.control),
            "complete": trainer.state.global_step >= trainer.state.max_steps,
            "callbacks": [[type(item).__name__, item.state()] for item in _exportable(trainer)],
            "attributes": None if self._attributes is None else self._attributes.changed(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._refuse_other_place(state)
        epoch, num_epochs = state["place"]["epoch"], self._trainer.state.num_train_epochs
        if epoch >= num_epochs:
            raise RunMismatch(
                f"{self._run} is in epoch {epoch + 1}, and the script ends after {num_epochs}. Give it as many epochs,"
                " or begin another run."
            )
        self._restored = state

    def _refuse_other_place(self, state: dict[str, Any]) -> None:
        """Raise ``RunMismatch`` if the place of ``state`` means other batches here."""
        here, there = self._epoch_batches(), state.get("epoch_batches")
        if here is None or there is None or there["ranks"] == here.ranks:
            refuse_other_batches(state["same"], self._same(), self._run)
        else:
            here.refuse_unlike(EpochBatches(**there), self._run)

    def _epoch_batches(self) -> EpochBatches | None:
        """Return how an epoch is divided; None for an ``IterableDataset``, whose order may follow the processes."""
        if self._batches is None:
            return None
        args = self._trainer.args
        return EpochBatches.of(
            self._batches.inner,
            self._loader.dataset,
            ranks=args.world_size,
            accumulation=args.gradient_accumulation_steps,
        )

    def _same(self) -> dict[str, Any]:
        """Return the values that a position in the data depends on."""
        args, data = self._trainer.args, self._loader.dataset
        return {
            "processes": args.world_size,
            "batch_size": self._trainer._train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "dataset length": len(data) if has_length(data) else None,
        }

    def _pending(self) -> Any:
        """Return the generators before the batch that is already made but not trained on; None if there is none."""
        if self._batches is None or self._loader.num_workers:
            return None
        batch, state = self._batches.newest
        return encode(state) if batch == self._num_batches() else None

    def _num_batches(self, most: int = sys.maxsize) -> int:
        """Return the number of batches of the epoch that the recorded steps took, at most ``most``."""
        return min(self._place.updates * self._trainer.args.gradient_accumulation_steps, most)

    def _restore(self, found: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in found["state"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = self._logged.entries_of(found["log_history"])
        for name, value in found["loss"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = trainer._tr_loss.to(trainer.args.device)
        vars(trainer.control).update(found["control"])
        if found["complete"] and trainer.state.global_step < trainer.state.max_steps:
            trainer.control.should_training_stop = False  # the script now asks for more steps
        if self._checkpointer is not None and trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True  # the script now asks for fewer
        self._ending = found["ending"]
        self._order.seed = found["seed"]
        here = _exportable(trainer)
        for name, state in found["callbacks"]:
            match = next((item for item in here if type(item).__name__ == name), None)
            if match is not None:
                here.remove(match)
                if trainer.args.restore_callback_states_from_checkpoint:  # with its constructor arguments
                    vars(match).update(vars(type(match).from_state(state)))
                vars(match).update(state["attributes"])
        if self._attributes is not None and found.get("attributes"):
            self._attributes.restore(found["attributes"])

    def _restored_here(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the restored ``state`` as one of the present processes has it.

        What another number of processes had not logged yet, losses and operations, is divided: each process holds its
        own sums, and the log has their mean or total. These processes make other batches.
        """
        if not self.of_ranks:
            return state
        losses = [each["loss"] for each in self.of_ranks]
        operations = sum(each["current_flos"] for each in losses)
        unlogged = {
            "_tr_loss": torch.stack([each["_tr_loss"] for each in losses]).mean(),
            "current_flos": operations / self._trainer.args.world_size,
        }
        return {**state, "loss": state["loss"] | unlogged, "place": state["place"] | {"pending": None}}


@dataclass
class _Place:
    """The place of training: ``updates`` optimizer steps into ``epoch``. Generators are as ``encode`` returns them."""

    epoch: int
    random: Any
    """The generators at the beginning of the epoch, from which its order is drawn."""
    updates: int = 0
    pending: Any = None
    """The generators before the next batch, if that is already made."""


class _Logged:
    """``log_history`` as lines of JSON, each built once: a log record has those that were added."""

    def __init__(self) -> None:
        self._count, self._text = 0, ""

    def text_of(self, history: list[dict[str, Any]]) -> str:
        if len(history) < self._count:
            self._count, self._text = 0, ""
        for entry in history[self._count :]:
            self._text += json.dumps(encode(entry, "log_history")) + "\n"
        self._count = len(history)
        return self._text

    def entries_of(self, text: str) -> list[dict[str, Any]]:
        return [decode(json.loads(line)) for line in text.splitlines()]


def _rewards_of(trainer: Any) -> dict[str, Any]:
    """Return the reward functions of a trainer of TRL that are objects, by name."""
    return {
        f"reward {i} {type(each).__name__}": each
        for i, each in enumerate(getattr(trainer, "reward_funcs", ()))
        if hasattr(each, "__dict__") and not isinstance(each, nn.Module)
    }


def _whole(value: Any) -> Any:
    """Return ``value``; of a distributed tensor, as norms are under FSDP2, all of it. Collective then."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_transformers(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "transformers"


def _exportable(trainer: Trainer) -> list[Any]:
    return [item for item in trainer.callback_handler.callbacks if isinstance(item, ExportableState)]


def refuse_dispatched(trainer: Trainer) -> None:
    """Raise ``BadInput`` for ``dispatch_batches=True`` on a dataset with a length.

    accelerate's dispatcher does not set the sampler's epoch when it skips batches, so a resume in a later epoch would
    read them in the order of another one.
    """
    settings: Any = trainer.args.accelerator_config
    if settings.dispatch_batches and not isinstance(trainer.train_dataset, IterableDataset):
        raise BadInput(
            "dispatch_batches=True in accelerator_config lets the first process read all batches, and a resume could"
            " not continue at the same one: leave it out"
        )


def prefer_run(run: Path, checkpoint: Any) -> None:
    """Warn that the run is used instead of a ``checkpoint`` of the trainer's.

    Raises ``BadInput`` if there is no run yet.
    """
    commits = run / "commits"
    if not (commits.is_dir() and any(commits.iterdir())):
        raise BadInput(
            f"{run} has no step yet and cannot begin at the checkpoint {checkpoint}: begin without"
            " resume_from_checkpoint, from a model made by from_pretrained(checkpoint) if need be"
        )
    warnings.warn(
        f"resume_from_checkpoint={checkpoint} is not used: training goes on after the newest step of {run}",
        stacklevel=3,
    )
