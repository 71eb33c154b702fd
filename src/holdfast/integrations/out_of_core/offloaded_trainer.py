"""A ``Trainer`` of Hugging Face whose optimizer steps run in the out-of-core engine.

    Trainer = offloaded(Trainer)  # the line that is added; the rest of the script stays as it was

``offloaded`` makes a subclass of any ``Trainer``. Arguments, callbacks, loss, log, evaluation and saving are those of
the class that it is given. All micro-batches of an optimizer step go through the blocks together. The training state
is in a run directory, and the same script goes on there after a kill. Where the class has a method that would compute
with the parameters, which are not in memory, the engine computes instead. Names are those of transformers 5.23.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer

from ...accelerators import free_bytes, is_accelerator
from ...errors import BadInput
from ...offload.engine import Engine
from ...offload.model.microbatches import on_micro_batch
from ...offload.model.quantised_layers import is_quantised
from ...supervised.attempt import training_directory
from ..trainer_run import prefer_run, refuse_dispatched
from .generation import generates, refuse_generation
from .model_on_host import computing_on
from .offloaded_run import OffloadedTraining, references, refuse_reference
from .prepared_objects import AHEAD, BatchesAhead
from .script_model import switch_off_checkpointing, weights_of
from .several_processes import ends_noted, refuse_processes

USED = (
    "train", "_prepare_for_training", "get_batch_samples", "training_step", "evaluation_loop", "prediction_step",
    "_save", "_clip_grad_norm", "_get_grad_norm", "_save_optimizer_and_scheduler", "_load_best_model", "_run_epoch",
    "_maybe_log_save_evaluate", "_load_rng_state", "_inner_training_loop",
)  # fmt: skip
"""The methods of ``Trainer`` that this module replaces or depends on."""

OF_ENGINE = "_clip_grad_norm", "_get_grad_norm", "_prepare_for_training"
"""The methods that the engine replaces without calling those of the class."""


def offloaded(trainer_class: type[Trainer], run: str | Path | None = None, **options: Any) -> type[Any]:
    """Return a subclass of ``trainer_class`` whose optimizer steps run in the out-of-core engine.

    The script uses it in the place of ``trainer_class``. ``train`` begins a run, or goes on after its newest step.

    Args:
        trainer_class: ``transformers.Trainer`` or a subclass, TRL's ``SFTTrainer`` for one.
        run: The run directory; None is ``_holdfast`` in ``args.output_dir``, which no push to the Hub takes along.
        options: Options of ``holdfast.offload``: ``placement``, ``budget``, ``io``, ``source`` and others. Precision,
            clipping and device follow from the arguments of the trainer.

    Raises ``BadInput`` for a class that is no ``Trainer``, or has a loop of its own. The subclass raises it, before
    anything is written to the run, for what the engine cannot do: fp16, DeepSpeed, ``torch_compile``.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise BadInput(f"offloaded({trainer_class!r}) is for subclasses of transformers.Trainer")
    if absent := [name for name in USED if not hasattr(trainer_class, name)]:
        raise BadInput(
            f"Trainer of transformers {transformers.__version__} has no {absent[0]}; install transformers 5.23"
        )
    if taken := sorted({"model", "optimizer", "loader", "scheduler", "normalize"} & options.keys()):
        raise BadInput(f"{taken[0]} is given to the engine by the trainer: leave it out of offloaded()")
    _refuse_other_loops(trainer_class)
    name = f"Offloaded{trainer_class.__name__}"
    made: dict[str, Any] = {
        "_run_directory": run,
        "_engine_options": options,
        "__doc__": trainer_class.__doc__,
    }
    return type(name, (OffloadedSteps, trainer_class), made | {"__module__": trainer_class.__module__})


class OffloadedSteps(Trainer):
    """The methods that ``offloaded`` puts before those of a trainer's class.

    Before ``train`` and after the engine is closed, the model is in memory and they are the class's own. ``engine``
    stays open after ``train``, for evaluation and saving. ``engine.close()`` gives the model back.
    """

    _run_directory: str | Path | None
    _engine_options: dict[str, Any]
    _offloaded: OffloadedTraining | None = None
    """The call of ``train``; None before."""
    _has_trained = False
    """True once a call of ``train`` has come to its end."""
    _ahead: BatchesAhead | None = None
    """The batches of the evaluation that is under way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)

    @property
    def engine(self) -> Engine | None:
        """The engine that holds the model; None before ``train`` and after it was closed."""
        engine = None if self._offloaded is None else self._offloaded.engine
        return None if engine is None or engine.is_closed else engine

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the class does; a run that has steps goes on, before any ``resume_from_checkpoint``."""
        run = training_directory(self._run_directory or os.path.join(self.args.output_dir or "", "_holdfast"))
        if self._offloaded is not None and (self._has_trained or self.engine is not None):
            raise BadInput(
                f"{run} holds the training that has ended; make another trainer, with another directory"
            )
        if (args and args[0] is not None) or kwargs.get("trial") is not None:
            raise BadInput(
                "a search for hyper-parameters begins many trainings; offloaded() does one in one run"
            )
        _refuse(self)
        if resume_from_checkpoint:
            prefer_run(run, resume_from_checkpoint)
        self.args.activation_checkpointing = False  # the engine computes blocks again by itself
        self._offloaded = OffloadedTraining(self, run, self._engine_options)
        with self._offloaded:
            output = super().train(None, *args, **kwargs)
        self._has_trained = True
        return output

    # Steps

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        """Create optimizer and schedule, and open the engine in the place of accelerate's preparation."""
        assert self._offloaded is not None and self.model is not None
        if self._created_lr_scheduler:
            self.lr_scheduler = None  # type: ignore[bad-override]
            self._created_lr_scheduler = False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = self.model
        switch_off_checkpointing(self.model)
        self._offloaded.open(train_dataloader)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self._offloaded is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        self._offloaded.before_step()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._offloaded.fetched(batches, num_items, is_whole=len(batches) == num_batches)
        return batches, num_items

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """The number of micro-batches that were fetched together, by which losses are divided."""
        here = None if self._offloaded is None else self._offloaded.fetched_with
        return self._fetched_together if here is None else here

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, count: int) -> None:
        self._fetched_together = count

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the next micro-batch; at the first, the engine does the whole step."""
        if self._offloaded is None:
            return super().training_step(*args, **kwargs)
        return self._offloaded.loss(super().training_step, super()._prepare_inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the inputs of the loss; those with generated texts exist before a pass of the engine."""
        is_made = self.engine is not None and on_micro_batch() and generates(type(self))
        return inputs if is_made else super()._prepare_inputs(inputs)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        assert self._offloaded is not None
        return self._offloaded.gradient_norm if grad_norm is None else grad_norm

    # Evaluation

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the class does, with several batches in one pass of the engine."""
        prepared: list[Any] = self.accelerator._models
        if added := not prepared:
            prepared.append(self.model)  # accelerate would wrap its forward in autocast
        self._ahead = BatchesAhead(dataloader, AHEAD)
        try:
            with self._computing_in_memory() if self.engine is None else nullcontext():
                return super().evaluation_loop(self._ahead, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            del self._ahead
            if added:
                prepared.clear()

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the class returns for ``inputs``, from a pass over all batches that are at hand."""
        engine, step = self.engine, super().prediction_step
        # each call of the model is a pass then
        if engine is None or _calls_model_repeatedly(self, *args, **kwargs):
            return step(model, inputs, *args, **kwargs)
        ahead = self._ahead or BatchesAhead([], 1)
        if id(inputs) not in ahead.results:
            group = ahead.group if any(each is inputs for each in ahead.group) else [inputs]
            with references(self, engine, group):
                given = [self._prepare_inputs(each) for each in group] if generates(type(self)) else group
                calls = [partial(step, model, each, *args, **kwargs) for each in given]
                with ends_noted(self.model, calls, ahead) as noted:  # type: ignore[arg-type]
                    made = engine.run_calls(noted)
            ahead.results = {id(each): result for each, result in zip(group, made, strict=True)}
        return ahead.results.pop(id(inputs))

    # Saving

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.engine is not None and state_dict is None:
            state_dict = weights_of(self.engine, self.model, is_kept=self.args.should_save)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the schedule alone: the optimizer's state is in the run, from where training goes on."""
        if self.engine is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))  # type: ignore[union-attr]
        return None

    def _load_best_model(self) -> None:
        if self.engine is not None:
            self.engine.close()  # gives the model back, into which the weights are loaded
        super()._load_best_model()

    # The model in memory

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: the engine brings one block at a time."""

    @contextmanager
    def _computing_in_memory(self) -> Iterator[None]:
        """Compute with the model before ``train`` or after the engine is closed: one block at a time comes to the
        device, from host memory or from the folder of ``source``."""
        model, source = self.model, self._engine_options.get("source")
        assert model is not None
        has: Any = (
            getattr(source, "has", None) if self._offloaded is None else None
        )  # a folder is as before training
        is_quantised_model = any(map(is_quantised, model.modules()))  # they come to a device in their own way
        is_whole = is_quantised_model or _fits(model, self.args.device)
        absent = [parameter for parameter in model.parameters() if parameter.is_meta]
        if absent and (is_quantised_model or has is None or not all(map(has, absent))):
            raise BadInput("the model has no values in memory: evaluate after train(), with the engine open")
        with ExitStack() as there:
            if source is not None and absent:
                there.enter_context(computing_on(self.args.device, model, source.read))
            elif self.place_model_on_device and is_whole:
                super()._move_model_to_device(model, self.args.device)  # type: ignore[arg-type]
            elif self.place_model_on_device:
                there.enter_context(computing_on(self.args.device, model))
            yield

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the reference's log-probabilities as TRL does, with the model in memory."""
        with self._computing_in_memory():
            return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]


def _fits(model: nn.Module, device: torch.device) -> bool:
    """Return whether ``model`` may be on ``device`` as a whole: if it takes at most half of what is free there."""
    nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return is_accelerator(device) and 2 * nbytes <= free_bytes(device)


def _refuse_other_loops(trainer_class: type[Trainer]) -> None:
    """Raise ``BadInput`` for a class that trains by a loop of its own."""
    for name in ("_inner_training_loop", "_run_epoch"):
        if getattr(trainer_class, name) is not getattr(Trainer, name):
            raise BadInput(
                f"{trainer_class.__name__} has a training loop of its own ({name}), which is not supported"
            )
    for name in OF_ENGINE:
        if getattr(trainer_class, name) is not getattr(Trainer, name):
            raise BadInput(
                f"{trainer_class.__name__} has a {name} of its own, which the engine does not call"
            )


def _refuse(trainer: Any) -> None:
    """Raise ``BadInput`` for settings that the engine cannot keep to."""
    args = trainer.args
    if args.n_gpu > 1:
        raise BadInput(
            f"offloaded() trains on one device in each process, and here are {args.n_gpu}: start the script by"
            " torchrun, or with one device in CUDA_VISIBLE_DEVICES"
        )
    refuse_processes(trainer)
    refuse_dispatched(trainer)
    if (
        trainer.is_deepspeed_enabled
        or trainer.is_fsdp_enabled
        or args.fsdp
        or args.parallelism_config is not None
    ):
        raise BadInput("DeepSpeed, FSDP and other parallelism lay the state out themselves: leave them out")
    for name, instead in {
        "fp16": "use bf16, or neither for fp32",
        "fp16_full_eval": "leave it out: evaluation computes as training does",
        "bf16_full_eval": "leave it out: evaluation computes as training does",
        "torch_compile": "leave it out",
        "use_liger_kernel": "leave it out",
        "auto_find_batch_size": "give a batch size",
        "ignore_data_skip": "leave it out: it gives up the position in the data",
        "activation_offloading": "leave it out: the engine keeps block inputs out of memory itself",
        "use_vllm": "leave it out: the engine generates",
        "use_transformers_paged": "leave it out: the engine generates",
        "sync_ref_model": "leave it out: the weights are not in memory",
    }.items():
        if getattr(args, name, False):
            raise BadInput(f"{name}=True does not work with offloaded(): {instead}")
    if (optim := getattr(args.optim, "value", args.optim)).endswith("_layerwise"):
        raise BadInput(
            f"optim={optim!r} updates layers in the backward pass, which is the engine's: use an optimizer of torch, or"
            " holdfast.optim.Apollo"
        )
    if any(type(each).__module__.startswith("holdfast.") for each in trainer.callback_handler.callbacks):
        raise BadInput(
            "HoldfastCallback records training in memory: leave it out, the engine keeps every step"
        )
    refuse_reference(trainer)
    refuse_generation(trainer)
    _refuse_second_call(trainer)
    if args.load_best_model_at_end and any(parameter.is_meta for parameter in trainer.model.parameters()):
        raise BadInput(
            "load_best_model_at_end needs a model in memory, and its parameters are on meta: leave it out"
        )


def _calls_model_repeatedly(trainer: Any, prediction_loss_only: bool, *_: Any, **__: Any) -> bool:
    """Return whether the trainer's ``prediction_step`` calls the model more than once."""
    generates_texts = getattr(trainer.args, "predict_with_generate", False)
    return not prediction_loss_only and (generates_texts or _has_loss_of_sft(trainer))


def _has_loss_of_sft(trainer: Any) -> bool:
    """Return whether the loss is that of TRL's ``SFTTrainer``, which computes its metrics apart."""
    return type(trainer).compute_loss.__module__ == "trl.trainer.sft_trainer"


def _refuse_second_call(trainer: Any) -> None:
    """Raise ``BadInput`` if a loss calls the model a second time, or an evaluation calls parts of it by themselves."""
    args, model = trainer.args, trainer.model
    smooths = trainer.label_smoother is not None and getattr(args, "loss_type", "nll") == "nll"
    if _has_loss_of_sft(trainer) and (smooths or trainer.compute_loss_func is not None):
        raise BadInput(
            f"SFTTrainer with {'label_smoothing_factor' if smooths else 'compute_loss_func'} calls the model a second"
            " time for its metrics, and the engine calls it once: leave it out, or override compute_loss in a subclass"
        )
    if not getattr(args, "predict_with_generate", False):
        return
    if model.config.is_encoder_decoder or args.world_size > 1:
        raise BadInput(
            "predict_with_generate=True works with offloaded() in one process, and not for models with an encoder,"
            " which generate() calls by itself: leave it out, and generate after trainer.engine.close()"
        )
