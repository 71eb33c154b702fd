"""An ``Accelerator`` of Hugging Face whose script trains in the out-of-core engine.

    Accelerator = offloaded(Accelerator, "runs/x", clipping=1.0)  # the line that is added

``offloaded`` makes a subclass. What the script prepares, its loop, ``accumulate``, ``backward`` and the steps of
optimizer and schedule stay as they are. All micro-batches of an optimizer step go through the blocks together. The
training state is in a run directory, and the same script goes on there after a kill. Names are those of accelerate
1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn

from ...errors import BadInput
from ...offload.engine import Engine
from ...supervised.attempt import training_directory
from .offloaded_loop import OffloadedLoop, warn_of_save_state
from .several_processes import refuse_other_count

GIVEN = ("model", "optimizer", "loader", "scheduler", "normalize", "loss_fn", "order")
"""Options of ``holdfast.offload`` that the loop decides."""


def offloaded(accelerator_class: type[Accelerator], run: str | Path, **options: Any) -> type[Any]:
    """Return a subclass of ``accelerator_class`` whose script trains in the out-of-core engine.

    The script uses it in the place of ``accelerate.Accelerator``. Training begins a run, or goes on after its newest
    step: earlier passes over the training loader, which is the first that is prepared, are empty.

    Args:
        accelerator_class: ``accelerate.Accelerator`` or a subclass.
        run: The run directory.
        options: Options of ``holdfast.offload``: ``placement``, ``budget``, ``io``, ``source`` and others. ``clipping``
            is the norm that the loop gives to ``clip_grad_norm_``. Precision and device follow from the accelerator.

    Raises ``BadInput`` for a class that is no ``Accelerator``. The subclass raises it, before anything is written to
    the run, for what the engine cannot do: FSDP, fp16, compilation.
    """
    if not (isinstance(accelerator_class, type) and issubclass(accelerator_class, Accelerator)):
        raise BadInput(f"offloaded({accelerator_class!r}) is for accelerate.Accelerator and its subclasses")
    if taken := sorted({*GIVEN} & options.keys()):
        raise BadInput(f"{taken[0]} follows from the loop: leave it out of offloaded()")
    made: dict[str, Any] = {
        "_run_directory": training_directory(run),
        "_engine_options": options,
        "__doc__": accelerator_class.__doc__,
        "__module__": accelerator_class.__module__,
    }
    return type(f"Offloaded{accelerator_class.__name__}", (OffloadedSteps, accelerator_class), made)


class OffloadedSteps(Accelerator):
    """The methods that ``offloaded`` puts before those of an accelerator's class.

    ``end_training`` closes the engine, which gives the model its values back, if it had values.
    """

    _run_directory: Path
    _engine_options: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)
        self._loop = OffloadedLoop(self, self._run_directory, self._engine_options)

    @property
    def engine(self) -> Engine | None:
        """The engine that holds the model; None before training and after it was closed."""
        engine = self._loop.engine
        return None if engine is None or engine.is_closed else engine

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps that the run has done. Opens the run, if all is prepared."""
        return self._loop.open().steps_done

    # What is prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if model not in self._models:
            self._models.append(model)
        return self._loop.take_model(model)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        return self._loop.take_loader(super().prepare_data_loader(data_loader, *args, **kwargs))

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        self._loop.take_schedule(prepared)
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        self._loop.refuse_late("an object was registered for checkpointing")
        super().register_for_checkpointing(*objects)

    # The loop

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:  # type: ignore[override]
        try:
            with super().accumulate(*models):
                yield
        except BaseException:
            self._loop.break_off()
            raise

    def backward(self, loss: Any, **kwargs: Any) -> None:
        if kwargs:
            raise BadInput(f"accelerator.backward(..., {next(iter(kwargs))}=) does not work: leave it out")
        share = self.gradient_accumulation_steps * self.num_processes  # DDP takes the mean
        self._loop.backward(loss / share)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        return self._loop.clip(parameters, max_norm, norm_type)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        if self.num_processes > 1:
            raise BadInput(
                "join_uneven_inputs is for DistributedDataParallel: leave it out, batches are made even"
            )
        return super().join_uneven_inputs(joinables, even_batches)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise BadInput("the engine clips norms, not values: use clip_grad_norm_")

    # Saving

    def save_state(  # type: ignore[override]
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str | None:
        """Make the newest step of the run durable. No folder is written."""
        self._loop.save()
        warn_of_save_state(self._run_directory)
        return output_dir

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        raise BadInput(
            f"load_state({input_dir!r}) would load over {self._run_directory}, which goes on by itself after its newest"
            " step: leave it out"
        )

    def save_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        writes = self.is_local_main_process and (
            self.is_main_process or self.project_configuration.save_on_each_node
        )
        if self.engine is not None and model is self._loop.model and not writes:
            self._loop.weights(is_kept=False)  # all processes gather them, and those that write keep them
            return
        if self.engine is None:
            super().save_model(model, *args, **kwargs)
            return
        weights = _Weights(model)
        super().save_model(weights, *args, **kwargs)
        if model is self._loop.model and not weights.were_asked_for:  # as where a file is in the way
            self._loop.weights(is_kept=False)  # which the other processes wait for

    def free_memory(self, *objects: Any) -> Any:
        self._loop.close()
        self._loop = OffloadedLoop(self, self._run_directory, self._engine_options)
        return super().free_memory(*objects)

    def end_training(self) -> None:
        self._loop.close()
        super().end_training()


class _Weights(nn.Module):
    """A module without parameters whose ``state_dict`` is that of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._state_of = model.state_dict
        self.were_asked_for = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.were_asked_for = True
        return self._state_of()


def _refuse(accelerator: Any) -> None:
    """Raise ``BadInput`` for settings that the engine cannot keep to."""
    kind, state = accelerator.distributed_type.value, accelerator.gradient_state
    refuse_other_count(accelerator.num_processes, "accelerate", "Accelerator")
    if not (kind == "NO" or kind.startswith("MULTI_")) or accelerator.parallelism_config is not None:
        raise BadInput(
            f"offloaded() trains data-parallel on one device in each process, and accelerate is set up for {kind}"
            f"{'' if accelerator.parallelism_config is None else ' with a parallelism_config'} here: leave DeepSpeed,"
            " FSDP and other parallelism out, for the engine divides the state itself"
        )
    if accelerator.num_processes > 1 and not accelerator.even_batches:
        raise BadInput(
            "even_batches=False may give a process fewer batches than the others, which would wait for it: leave it"
            " out, or give the DataLoader drop_last=True instead"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise BadInput(
            f'mixed_precision="{accelerator.mixed_precision}" does not work: use "bf16", or "no" for fp32'
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise BadInput("compilation by dynamo_backend does not work with offloaded(): leave it out")
    if not state.sync_with_dataloader:
        raise BadInput(
            "sync_with_dataloader=False lets a step go over two passes, which does not work: leave it out"
        )
