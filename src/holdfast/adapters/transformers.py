"""Hugging Face ``Trainer``: every optimizer step of an unmodified script can be recovered, bit for bit.

    trainer = Trainer(..., callbacks=[HoldfastCallback("runs/x")])
    trainer.train()  # begins the run, or goes on after its newest step

A callback alone cannot do this. It is never handed the trainer, which keeps the running loss to itself. Where the loop
begins is fixed, in local variables, before ``on_train_begin``. And the last event of a step comes before the step is
logged and evaluated. So the callback finds the trainer that is being made, when ``on_init_end`` is called, and covers
its ``train``; while that runs, three more methods of this one object. No class is changed, and ``attach`` does the same
to a trainer that is there already.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import transformers
from transformers import Trainer, TrainerCallback

from ..errors import BadInput
from ..regular import home_path
from .training import Training
from .wrapped import refuse_unless_torchs

COVERED = ("train", "_run_epoch", "_maybe_log_save_evaluate", "_load_rng_state")
"""Methods of a trainer that are replaced, on the object, while it trains; ``train`` for good."""


class HoldfastCallback(TrainerCallback):
    """Makes ``train`` of the trainer that it is given to begin or continue the run in the directory ``run``.

    ``options`` are those of ``Checkpointer``: ``base_every``, ``keep``, ``memory`` and so on. Of other callbacks
    those that are ``ExportableState`` are brought back. What a subclass of ``Trainer`` keeps beside is not, nor, in
    mid-epoch, are the generators of loader workers. The final loss is that of the whole run; the final rates count all
    its steps against this process's time. Several processes are those of DistributedDataParallel; as many go on as
    there were.
    """

    def __init__(self, run: str | Path, **options: Any) -> None:
        self.run, self.options = home_path(run), options
        self._covered = False

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = _trainer_above()
        if trainer is not None:
            self.cover(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._covered:
            raise BadInput(
                "HoldfastCallback was added to a trainer that was there already, so nothing would be recorded. Pass it"
                " as Trainer(callbacks=[...]), or call holdfast.adapters.transformers.attach(trainer, run)."
            )

    def cover(self, trainer: Trainer) -> None:
        """Let ``trainer.train`` record. Raises ``BadInput`` for a trainer that it cannot be done for."""
        absent = [name for name in COVERED if not hasattr(trainer, name)]
        if absent:
            raise BadInput(
                f"Trainer of transformers {transformers.__version__} has no {absent[0]}; install transformers 5.23"
            )
        self._covered = True
        train, done = trainer.train, False

        def train_and_record(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done:
                raise BadInput(
                    f"{self.run} holds the training that has ended; make another trainer, with another directory"
                )
            _refuse(trainer)
            if resume_from_checkpoint:
                _prefer(self.run, resume_from_checkpoint)
            with Training(trainer, self.run, self.options):
                output = train(None, *args, **kwargs)
            done = True
            return output

        trainer.train = train_and_record  # type: ignore[method-assign]


def attach(trainer: Trainer, run: str | Path, **options: Any) -> None:
    """As ``HoldfastCallback``, for a trainer that is there already. ``trainer.train`` has not been called."""
    callback = HoldfastCallback(run, **options)
    callback.cover(trainer)
    trainer.add_callback(callback)


def _trainer_above() -> Trainer | None:
    """The trainer whose ``__init__`` is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    return None


def _refuse(trainer: Trainer) -> None:
    """Raise ``BadInput`` for settings under which no position can be kept."""
    refuse_unless_torchs(trainer.accelerator)
    args = trainer.args
    for name in ("auto_find_batch_size", "ignore_data_skip"):
        if getattr(args, name):
            raise BadInput(f"{name}=True gives up the position in the data; leave it out")


def _prefer(run: Path, checkpoint: Any) -> None:
    """The run goes before a ``checkpoint`` of the trainer's own. Raises ``BadInput`` if there is no run yet."""
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
