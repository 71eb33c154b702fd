"""Recovery of every optimizer step of an unmodified script with Hugging Face's ``Trainer``, bit for bit.

    trainer = Trainer(..., callbacks=[HoldfastCallback("runs/x")])
    trainer.train()  # begins the run, or goes on after its newest step

A callback alone cannot do this, for three reasons. It never gets the trainer, which keeps the running loss to itself.
Where the loop begins is fixed, in local variables, before ``on_train_begin``. The last event of a step comes before the
step is logged and evaluated. So the callback finds the trainer under construction when ``on_init_end`` is called, and
replaces its ``train``; while that runs, it replaces three more methods of this one object. No class is changed.
``attach`` does the same to an existing trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import Trainer, TrainerCallback

from ..checkpoint.options import Exactness, refuse_bad_resume
from ..errors import BadInput
from ..supervised.attempt import training_directory
from .out_of_core.offloaded_trainer import offloaded
from .shared.callback_options import refuse_callback_options
from .shared.changed_attributes import refuse_unless_torchs
from .trainer_run import Training, prefer_run, refuse_dispatched

__all__ = ["HoldfastCallback", "attach", "offloaded"]

COVERED = ("train", "_run_epoch", "_maybe_log_save_evaluate", "_load_rng_state")
"""Methods of a trainer that are replaced, on the object, while it trains; ``train`` permanently."""


class HoldfastCallback(TrainerCallback):
    """A callback that makes ``train`` of its trainer begin or continue the run in the directory ``run``.

    ``exactness`` is that of ``Checkpointer.resume``, ``options`` are of ``Checkpointer``: ``base_every``, ``keep``,
    ``memory`` and so on. Other callbacks are restored if they are ``ExportableState``. Not restored are further fields
    of a subclass of ``Trainer`` and, in mid-epoch, the generators of loader workers. The final loss is that of the
    whole run; the final rates divide all its steps by this process's time. Several processes must be those of
    DistributedDataParallel or FSDP2.
    """

    def __init__(self, run: str | Path, *, exactness: Exactness = "state", **options: Any) -> None:
        refuse_callback_options(options)
        refuse_bad_resume(None, None, exactness)
        self.run, self.exactness, self.options = training_directory(run), exactness, options
        self._covered = False

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = _trainer_above()
        if trainer is not None:
            self.cover(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._covered:
            raise BadInput(
                "HoldfastCallback was added to a trainer that was there already, so nothing would be recorded. Pass it"
                " as Trainer(callbacks=[...]), or call holdfast.integrations.transformers.attach(trainer, run)."
            )

    def cover(self, trainer: Trainer) -> None:
        """Make ``trainer.train`` record its steps. Raises ``BadInput`` for a trainer without the needed methods."""
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
                prefer_run(self.run, resume_from_checkpoint)
            with Training(trainer, self.run, self.options, self.exactness):
                output = train(None, *args, **kwargs)
            done = True
            return output

        trainer.train = train_and_record  # type: ignore[method-assign]


def attach(trainer: Trainer, run: str | Path, **options: Any) -> None:
    """Add ``HoldfastCallback`` to an existing trainer, whose ``train`` was not called yet."""
    callback = HoldfastCallback(run, **options)
    callback.cover(trainer)
    trainer.add_callback(callback)


def _trainer_above() -> Trainer | None:
    """Return the trainer whose ``__init__`` is running, found on the call stack; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    return None


def _refuse(trainer: Trainer) -> None:
    """Raise ``BadInput`` for settings under which no position can be stored."""
    refuse_unless_torchs(trainer.accelerator)
    refuse_dispatched(trainer)
    args = trainer.args
    for name in ("auto_find_batch_size", "ignore_data_skip"):
        if getattr(args, name):
            raise BadInput(f"{name}=True gives up the position in the data; leave it out")
    if getattr(args, "sync_ref_model", False):  # of TRL
        raise BadInput(
            "sync_ref_model=True changes the reference model between steps, unseen by the run. Leave it out, and in the"
            " place of HoldfastCallback(RUN) call attach(trainer, RUN, averages=trainer.ref_model, after_update=sync)"
            " before train(). There sync() counts steps in a buffer of the reference model, and calls"
            " SyncRefModelCallback.sync_target_model when it is due."
        )
