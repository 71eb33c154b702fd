"""A script's own loop over batches, with Hugging Face's ``Accelerator``, whose optimizer steps the engine does.

The run is opened when the first pass over the training loader begins, or at the first call of the model. Each step is a
``LoopStep``. The engine finishes it when the loop clips, or else when it steps the optimizer, so that all that the
script says about a step is known before. Called by ``offloaded_accelerator``.
"""

from __future__ import annotations

import atexit
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils.operations import convert_to_fp32
from torch import nn

from ...errors import BadInput, EngineFailed, RunMismatch
from ...events import tell
from ...offload.api import offload
from ...offload.engine import Engine
from ...offload.model.microbatches import on_micro_batch
from ...offload.offload_options import Clipping
from ...offload.rng import give_up_left_step
from ...optim.mezo import MeZO
from ...state.progress import hyper_parameters
from ..shared.changed_attributes import innermost
from ..shared.epoch_batches import moves_of
from ..shared.position import Batches
from .loop_step import GradientUse, LoopStep
from .model_calls import ModelCall, settings_of
from .prepared_objects import EvaluationBatches, TrainingBatches, give_calls
from .script_model import (
    left_to_the_engine,
    names_outside_optimizer,
    precision_of,
    refuse_clipping_of_others,
    switch_off_checkpointing,
    weights_of,
)
from .several_processes import refuse_unlike_processes


class OffloadedLoop:
    """The training of one ``accelerator``. Its objects are noted as they are prepared, until ``open``."""

    def __init__(self, accelerator: Accelerator, run: Path, options: dict[str, Any]) -> None:
        self._accelerator, self._run, self._options = accelerator, run, options
        self._clip_norm = Clipping.of(options.get("clipping")).norm
        self.model: nn.Module | None = None
        self.batches: TrainingBatches | None = None
        self._evaluations: list[EvaluationBatches] = []
        self.engine: Engine | None = None
        self._is_opening = False
        self._step: LoopStep | None = None
        """The step that is under way."""
        self._failed = False
        self._is_early = False
        """True if the newest step was completed, to save it, before the loop asked for the next batches."""
        self._was_clipped = False
        """True from a call that clips to that of the optimizer: the engine has done the step."""
        self._hyper: list[dict[str, Any]] = []
        """The hyper-parameters that the engine has done the newest step with."""
        self._is_broken_off = False
        """True from an error amid the loop's code of the newest step, until the loop asks for more batches."""
        self._moves: int | None = None
        """The moves of schedules since the newest step; None before the first."""
        self._moves_after_steps: set[int] = set()
        """The numbers of moves that followed the steps before it."""
        self._gradients = GradientUse(self._refuse_use, "call optimizer.zero_grad() after optimizer.step()")
        self._outside_optimizer: list[str] = []
        """The parameters that require a gradient and are not in the optimizer."""

    # What prepare is given

    def take_model(self, model: nn.Module) -> nn.Module:
        """Let the engine answer calls of ``model``, which stays where it is."""
        if self.model is not None and self.model is not model:
            raise BadInput(
                "two models to train were prepared: prepare one, which may have several as parts. One that is not"
                " trained needs no prepare, or prepare_model(model, evaluation_mode=True)."
            )
        if self.model is None:
            self.model = model
            switch_off_checkpointing(model)
            give_calls(model, self)
        return model

    def take_loader(self, loader: Any) -> Any:
        """Return the batches to iterate over in the place of ``loader``: the first is that of training."""
        if self.batches is not None:
            self._evaluations.append(EvaluationBatches(loader))
            return self._evaluations[-1]
        if isinstance(loader, DataLoaderDispatcher):
            raise BadInput(
                "dispatched batches have no place that a run could keep: give dispatch_batches=False"
            )
        self.batches = TrainingBatches(
            loader,
            self._accelerator.num_processes,
            lambda: self._accelerator.gradient_accumulation_steps,
            self._between,
        )
        return self.batches

    def take_schedule(self, schedule: Any) -> None:
        """Leave ``schedule`` where it is in passes that the run has ended."""
        self.refuse_late("a schedule was prepared")
        own = schedule.step

        def step(*args: Any, **kwargs: Any) -> None:
            if self.batches is None or not self.batches.is_passing_over:
                own(*args, **kwargs)
                if self._moves is not None:
                    self._moves += 1

        vars(schedule)["step"] = step

    def refuse_late(self, what: str) -> None:
        """Raise ``BadInput`` if the run is open, which has restored the states that it has."""
        if self.engine is not None:
            raise BadInput(
                f"{what} when the run was open, which would not have its state. Prepare and register all before the"
                " first call of the model, the first pass over the loader, and accelerator.steps_done."
            )

    # The run

    def open(self) -> Engine:
        """Return the engine, which begins or resumes the run at the first call."""
        if self.engine is not None:
            return self.engine
        optimizers = self._accelerator._optimizers
        if self.model is None or len(optimizers) != 1 or self.batches is None:
            raise BadInput(
                f"the accelerator has prepared {int(self.model is not None)} models to train, {len(optimizers)}"
                f" optimizers and {int(self.batches is not None)} loaders: prepare one of each before training"
            )
        give_up_left_step()
        optimizer = innermost(optimizers[0])
        if isinstance(optimizer, MeZO):
            raise BadInput("MeZO computes the loss twice, and a loop does it once: use holdfast.offload")
        self._agree_on_batches()
        self._outside_optimizer = names_outside_optimizer(self.model, optimizer)
        vars(optimizer)["step"] = MethodType(left_to_the_engine(self._end_step), optimizer)
        vars(optimizer)["zero_grad"] = self.zero_grad
        usual: dict[str, Any] = {
            "device": str(self._accelerator.device),
            "precision": precision_of(self.model, mixed=self._accelerator.mixed_precision == "bf16"),
            "micro_batches": self._accelerator.gradient_accumulation_steps,
        }
        self._is_opening = True
        try:
            self.engine = offload(
                self.model, optimizer, self._run, loader=_State(self.batches.position, self._accelerator),
                normalize="sum", **(usual | self._options),
            )  # fmt: skip
        finally:
            self._is_opening = False
        self.engine.held.refuse_gradients(
            "clip by accelerator.clip_grad_norm_, and leave out what changes gradients"
        )
        self.batches.position.resumed()
        atexit.register(self._leave)  # before the engine's own hook, which waits for what is under way
        return self.engine

    def _agree_on_batches(self) -> None:
        """Give the place in the data its final counts. Raises ``BadInput`` for processes with unlike batches."""
        assert self.batches is not None
        place = self.batches.position.place
        place.accumulation = self._accelerator.gradient_accumulation_steps
        place.moves = moves_of(self._accelerator)  # of schedules that were prepared after the loader
        if self._accelerator.num_processes > 1:
            refuse_unlike_processes({"batches in an epoch": len(self.batches), **place.same()})

    def close(self) -> None:
        """Close the engine, which gives the model its values."""
        self.abandon()
        if self.engine is not None and not self.engine.is_closed:
            if self._is_broken_off:
                self._give_up()
            else:
                self.engine.complete_step(again=self._is_early)
                self.engine.close()
        atexit.unregister(self._leave)

    def save(self) -> None:
        """Make the newest step durable."""
        self._refuse_amid("save_state was called")
        self._end_left_pass()
        self._complete_early(self.open())
        self.open().save()

    def weights(self, is_kept: bool = True) -> dict[str, torch.Tensor] | None:
        """Return the weights of the model, with ``is_kept=False`` no values; None if they are in memory."""
        self._refuse_failed()
        if self.weights_are_here:
            return None
        self._refuse_amid("the model's weights were asked for")
        self._end_left_pass()
        assert self.engine is not None
        self._complete_early(self.engine)
        return weights_of(self.engine, self.model, is_kept)

    def _end_left_pass(self) -> None:
        """End a pass that a ``break`` left, as a script shows that saves after it; one that an error leaves goes on."""
        if self.batches is not None and sys.exc_info()[1] is None:
            self.batches.position.end_left_pass()

    # The loop

    def called(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the model's output for a call of the script's.

        Args:
            call: The model's own ``__call__``.
            args: The positional arguments.
            kwargs: The keywords.
        """
        self._refuse_failed()
        if self._is_opening or on_micro_batch() or (self.engine is not None and self.weights_are_here):
            return call(*args, **kwargs)
        engine = self.open()
        assert self.model is not None and self.batches is not None
        computes = self._computing(call)
        trains = self.model.training or self._step is not None or self.batches.has(args, kwargs)
        if not torch.is_grad_enabled() or not trains:
            return self._evaluate(engine, computes, args, kwargs)
        if self._step is None:
            self._step = self._begun(engine, computes)
        return self._taking(self._step.output)(args, kwargs)

    def backward(self, loss: Any) -> None:
        """Take the loss of the newest output, as accelerate divides it."""
        if self._step is None:
            raise BadInput("accelerator.backward was called without an output of the model in training mode")
        self._gradients.accumulated()
        self._taking(self._step.take_loss)(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Take the place of ``zero_grad`` of the optimizer and the model."""
        self._gradients.zeroed()

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Finish the step, and return the norm that its gradients had before they were clipped."""
        if self._step is None or not self._step.is_complete:
            self._refuse(
                "gradients were clipped before the last micro-batch of the step: ask sync_gradients before"
            )
        if float(max_norm) != self._clip_norm or float(norm_type) != 2.0:
            self._refuse(
                f"clip_grad_norm_ was called with the norm {max_norm} of order {norm_type}, and the engine clips to"
                f" {self._clip_norm} of order 2: give offloaded(Accelerator, ..., clipping={max_norm})"
            )
        self._refuse_some(parameters)
        self._finish()
        self._was_clipped = True
        assert self.engine is not None and self.engine.results is not None
        norm = self.engine.results["grad_norm"]
        return torch.tensor(math.nan if norm is None else norm, dtype=torch.float32)

    def _end_step(self, closure: Any = None) -> None:
        """Take the place of the optimizer's ``step``."""
        if closure is not None:
            self._refuse("optimizer.step(closure) computes the loss again: call it without")
        if not self._was_clipped:
            if self._step is None or not self._step.is_complete:
                self._refuse(
                    "optimizer.step() was called before accelerator.backward(loss) of the last micro-batch of the step:"
                    " accumulate by accelerator.accumulate(model)"
                )
            if self._clip_norm not in (None, math.inf):
                self._refuse(
                    f"clipping={self._clip_norm} was given, and the loop has not called accelerator.clip_grad_norm_:"
                    " call it if accelerator.sync_gradients, or leave clipping out"
                )
            self._finish()
        elif self._hyper_now() != self._hyper:
            self._give_up()
            raise BadInput(
                "the optimizer's param_groups were changed between clip_grad_norm_ and optimizer.step(), and the engine"
                " does the step when it clips: change them before clip_grad_norm_ or after optimizer.step()"
            )
        self._was_clipped = False
        self._gradients.stepped()

    def _hyper_now(self) -> list[dict[str, Any]]:
        return hyper_parameters(innermost(self._accelerator._optimizers[0]).param_groups)

    def _between(self) -> None:
        """Complete the step before, whose code in the loop is over. Called before batches are fetched."""
        if self._step is not None:
            self._refuse("the loop asked for more batches before it had stepped the optimizer")
        self._refuse_failed()
        self.open().complete_step(again=self._is_early)
        self._is_early = self._is_broken_off = False

    def _begun(self, engine: Engine, computes: Callable[..., Any]) -> LoopStep:
        assert self.batches is not None and self.model is not None
        if self._was_clipped:
            raise BadInput("gradients were clipped, and optimizer.step() was not called")
        return LoopStep(engine, computes, self.batches.group(), partial(settings_of, self.model))

    def _complete_early(self, engine: Engine) -> None:
        """Complete the newest step; what the loop changes before the next is committed with it again."""
        if self._is_broken_off:
            self._give_up()
            self._refuse_failed()
        self._is_early |= engine.complete_step()

    def _leave(self) -> None:
        """Complete the newest step at the end of the process, unless the process ended amid the code of the loop.

        ``sys.exit`` leaves no trace of where it was called. The loop was not at its end if fewer schedules have moved
        than after each step before.
        """
        self.abandon()
        has_failed = any(
            hasattr(sys, name) for name in ("last_exc", "last_value")
        )  # the first since Python 3.12
        usual = self._moves_after_steps
        lacks_moves = self._moves is not None and len(usual) == 1 and self._moves < min(usual)
        if self.engine is None or self.engine.is_closed or has_failed or self._is_broken_off:
            return
        if lacks_moves:
            tell(
                f"step {self.engine.steps_done} is left out: the script ended before its schedule moved. It is done"
                " again when the run is resumed. Call accelerator.end_training() at the end of a script."
            )
            return
        self.engine.complete_step(again=self._is_early)

    def _finish(self) -> None:
        assert self._step is not None and self.engine is not None
        self._taking(self.engine.take_hyper_parameters)()
        self._hyper = self._hyper_now()
        self._taking(self._step.finish)()
        self._step = None
        if self._moves is not None:
            self._moves_after_steps.add(self._moves)
        self._moves = 0

    def _evaluate(
        self, engine: Engine, computes: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        assert self.model is not None
        if self.model.training:
            raise BadInput(
                "the model was called without gradients in training mode: call model.eval() before"
            )
        self._refuse_amid("the model was called for an evaluation")

        def run(calls: list[ModelCall]) -> list[Any]:
            return engine.run_calls([partial(each.run, computes) for each in calls])

        for batches in self._evaluations:
            is_there, result = batches.answer(args, kwargs, run, engine.steps_done, self.model)
            if is_there:
                return result
        return run([ModelCall(args, kwargs)])[0]

    def _computing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, with outputs in fp32 where accelerate converts them."""
        if not self._accelerator.native_amp:
            return call
        return lambda *args, **kwargs: convert_to_fp32(call(*args, **kwargs))

    @property
    def weights_are_here(self) -> bool:
        """True before the engine has the model and after it was closed."""
        return self.engine is None or self.engine.is_closed

    def _taking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` of the step, which is over if that fails."""

        def called(*args: Any) -> Any:
            try:
                return method(*args)
            except BaseException:
                self.abandon()
                raise

        return called

    def abandon(self) -> None:
        """Give up the step that is under way, and the engine with it. The run is whole up to the step before."""
        step, self._step = self._step, None
        if step is not None:
            self._failed = True
            self._gradients.stepped()
            step.abandon()

    def break_off(self) -> None:
        """Note an error amid the loop's code. A step under way is given up; one that is done waits for the loop."""
        self.abandon()
        self._is_broken_off = True

    def _give_up(self) -> None:
        """Give up the newest step, which is done and not committed. The run is whole up to the step before."""
        assert self.engine is not None
        self._failed = True
        self.engine.give_up()

    def _refuse(self, text: str) -> NoReturn:
        self.abandon()
        raise BadInput(text)

    def _refuse_use(self, text: str) -> NoReturn:
        """Refuse a use of gradients; a step that was done to clip them is given up."""
        if self._was_clipped:
            self._give_up()
        self._refuse(text)

    def _refuse_failed(self) -> None:
        if self._failed:
            raise EngineFailed(
                f"a step was given up, and the engine is closed. Start the script again: {self._run} goes on after its"
                " newest step."
            )

    def _refuse_amid(self, what: str) -> None:
        if self._step is not None:
            self._refuse(f"{what} in the middle of an optimizer step: do it between steps")

    def _refuse_some(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise ``BadInput`` if the loop clips some trained parameters and not others, or some that are not trained."""
        assert self.engine is not None and self.model is not None
        given = {id(parameter) for parameter in parameters}
        named = {id(each): name for name, each in self.model.named_parameters()}
        names = {named[each] for each in given if each in named}
        try:
            refuse_clipping_of_others([name for name in self._outside_optimizer if name in names])
        except BadInput:
            self.abandon()
            raise
        held = self.engine.held.captured.parameters
        names |= {each.name for each in held if id(each.parameter) in given}
        left = [each.name for each in held if each.trained and not names.intersection(each.names)]
        if left:
            self._refuse(
                f"clip_grad_norm_ was not given {left[0]}, and the engine clips all trained parameters together"
            )


class _State:
    """The state of the loop and its objects after a step, which the engine takes for that of its loader."""

    is_late = True
    elastic = Batches.elastic
    schedule_advice = Batches.schedule_advice

    def __init__(self, batches: Batches, accelerator: Any) -> None:
        self._batches, self._objects = batches, [*accelerator._schedulers, *accelerator._custom_objects]

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self._batches.state_dict(),
            "objects": [each.state_dict() for each in self._objects],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        there = len(state["objects"])
        if there != len(self._objects):
            raise RunMismatch(
                f"the run has the states of {there} schedules and registered objects, and here are"
                f" {len(self._objects)}: prepare and register those that it was made with"
            )
        self._batches.load_state_dict(state["batches"])
        for each, saved in zip(self._objects, state["objects"], strict=True):
            each.load_state_dict(saved)


def warn_of_save_state(run: Path) -> None:
    warnings.warn(
        f"save_state writes no folder: the newest step of {run} is durable, and training goes on after it. Save the"
        " weights by save_pretrained or save_model.",
        stacklevel=3,
    )
