"""Recovery of every optimizer step of a script with Hugging Face's ``Accelerator``, bit for bit.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ckpt = AcceleratedCheckpointer("runs/x", accelerator, loader)
    ckpt.resume()
    for epoch in range(ckpt.batches.epoch, 3):
        for batch in ckpt.batches:
            ...  # as ever: accumulate, backward, clip_grad_norm_, step
            ckpt.step()
    ckpt.close()

The objects that were prepared or registered for checkpointing come from the accelerator. Its ``save_state`` also writes
a snapshot of the run. ``load_state`` of such a folder, in place of ``resume``, restores the run at its step.
``offloaded`` makes an ``Accelerator`` that trains out of core.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from torch import nn

from ..checkpoint.loss_guard import LossGuard
from ..checkpointer import Checkpointer
from ..errors import BadInput
from ..quantities import shown
from .out_of_core.offloaded_accelerator import offloaded
from .shared.changed_attributes import innermost, refuse_unless_torchs
from .shared.epoch_batches import moves_of
from .shared.position import Batches

__all__ = ["AcceleratedCheckpointer", "offloaded"]

_NO_ROLLBACK = (
    "the accelerator counts batches and accumulated gradients of its own, which could not go back. Stop, and resume in"
    " a new process with resume(before=...), or use holdfast.Checkpointer in a loop without accelerate."
)
TAKEN = ("model", "optimizer", "scheduler", "loader", "scaler", "also")
"""Options of a ``Checkpointer`` that come from the accelerator."""


class AcceleratedCheckpointer(Checkpointer):
    """The run in ``run`` of one model that ``accelerator`` trains.

    Created after ``prepare`` and ``register_for_checkpointing``. ``loader`` is the training loader that ``prepare``
    returned; training iterates over ``batches`` in its place. A ``holdfast.loader`` needs no ``prepare`` and is used as
    it is. Call ``step`` once for each batch, last in the iteration. ``options`` are those of ``Checkpointer``.
    """

    def __init__(self, run: str | Path, accelerator: Accelerator, loader: Any, **options: Any) -> None:
        """Create the checkpointer. Raises ``BadInput`` and its subclasses, with nothing written."""
        model = _model_of(accelerator, options)
        self.batches = _batches_of(loader, accelerator)
        """The batches to iterate over. ``batches.epoch`` counts the passes that have ended."""
        super().__init__(
            run,
            model=model,
            optimizer=[innermost(optimizer) for optimizer in accelerator._optimizers],
            scheduler=next(iter(accelerator._schedulers), None),
            loader=self.batches,
            scaler=accelerator.scaler,
            also=_also(accelerator, self.batches),
            **options,
        )
        _tell_of_hooks(accelerator)
        self._accelerator, self._mark = accelerator, _Mark(self)
        accelerator.register_for_checkpointing(self._mark)
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._before_save),
            accelerator.register_load_state_pre_hook(self._before_load),
        ]

    def resume(self, *args: Any, **options: Any) -> int:
        done = super().resume(*args, **options)
        if done:  # no batches since the update; load_state sets a count by the accumulation of the run
            self._accelerator.step = 0
        if isinstance(self.batches, Batches):
            self.batches.resumed()
        return done

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        if isinstance(self.batches, Batches):
            self.batches.refuse_other_loop()
        super().step(metrics)

    def rollback(self, step: int | None = None) -> int:
        """Raise ``BadInput``: the accelerator counts steps and batches of its own, which no run holds."""
        raise BadInput(_NO_ROLLBACK)

    def guard(self, **options: Any) -> LossGuard:
        """Raise ``BadInput``, as ``rollback``."""
        raise BadInput(_NO_ROLLBACK)

    def close(self, save: bool = True) -> None:
        if isinstance(self.batches, Batches):
            self.batches.place.close()
        for hook in self._hooks:
            hook.remove()
        if self._mark in self._accelerator._custom_objects:
            self._accelerator._custom_objects.remove(self._mark)
        super().close(save)

    def _before_save(self, models: Any, weights: Any, folder: str) -> None:
        self.save()

    def _before_load(self, models: list[nn.Module], folder: str) -> None:
        """Empty ``models``, because the run restores the model. Raises ``BadInput`` after ``resume``."""
        if self._backend.begun:
            raise BadInput(
                f"resume() has brought the run to step {self.steps_done}, and load_state({folder!r}) would go"
                " elsewhere. Call one of them."
            )
        models.clear()


class _Mark:
    """The mark in a folder of ``save_state`` that holds the step of the run. Loaded last, it restores that step."""

    def __init__(self, checkpointer: AcceleratedCheckpointer) -> None:
        self._checkpointer = checkpointer

    def state_dict(self) -> dict[str, int]:
        return {"step": self._checkpointer.steps_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._checkpointer.resume(step=state["step"])


class _Moves:
    """The moves of the schedule in an optimizer step, which may be one for each process."""

    def __init__(self, moves: int) -> None:
        self._moves = moves

    def state_dict(self) -> dict[str, int]:
        return {"moves": self._moves}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["moves"] != self._moves:
            warnings.warn(
                f"a step of the run moved the schedule {state['moves']} times, once by each process, and here"
                f" {self._moves} times, so learning rates change otherwise. Use"
                " DataLoaderConfiguration(split_batches=True), or register the schedule for checkpointing instead of"
                " preparing it.",
                stacklevel=2,
            )


def _model_of(accelerator: Accelerator, options: dict[str, Any]) -> nn.Module:
    """Return the one prepared model.

    Raises ``BadInput`` for options that are the accelerator's, or for several models.
    """
    for name in TAKEN:
        if name in options:
            raise BadInput(f"{name}= is the accelerator's; give it to prepare or register_for_checkpointing")
    refuse_unless_torchs(accelerator)
    if len(accelerator._models) != 1:
        raise BadInput(
            f"the accelerator has prepared {len(accelerator._models)} models: prepare one, before this; several as"
            " parts of one nn.Module"
        )
    return accelerator._models[0]


def _tell_of_hooks(accelerator: Accelerator) -> None:
    """Warn about the script's hooks around ``save_state``, which write state into its folder."""
    hooks = list(accelerator._save_model_state_pre_hook.values())
    if hooks:
        names = sorted({getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks})
        warnings.warn(
            f"{shown(names)} of register_save_state_pre_hook is called by save_state alone: what it writes, such as an"
            " average of the weights, is in no step of the run. Register what has a state by"
            " register_for_checkpointing, or keep it in buffers of the model.",
            stacklevel=4,
        )


def _batches_of(loader: Any, accelerator: Accelerator) -> Any:
    if isinstance(loader, DataLoaderDispatcher):
        raise BadInput(
            "the batches are read by the first process and dispatched, so that the others know no place in them:"
            " prepare the loader with dispatch_batches=False"
        )
    own = hasattr(loader, "state_dict") and not hasattr(loader, "base_dataloader")
    if own:
        return loader
    return Batches(
        loader,
        accelerator.num_processes,
        accelerator.gradient_accumulation_steps,
        moves_of(accelerator),
    )


def _also(accelerator: Accelerator, batches: Any) -> dict[str, Any]:
    """Return further objects with a state, by name."""
    schedulers = {f"scheduler {i}": each for i, each in enumerate(accelerator._schedulers) if i}
    objects = {f"{type(each).__name__} {i}": each for i, each in enumerate(accelerator._custom_objects)}
    moves = {}
    if accelerator._schedulers and not isinstance(batches, Batches):  # which refuse another number of moves
        moves = {"moves of the schedule": _Moves(moves_of(accelerator))}
    return {**schedulers, **objects, **moves}
