"""A strategy of Lightning whose optimizer steps run in the out-of-core engine.

    trainer = L.Trainer(..., strategy=OffloadedStrategy("runs/x"))  # the argument that is added
    trainer.fit(module)  # begins the run, or goes on after its newest step

``OffloadedDDPStrategy`` is for several processes.

1. The loader's batches are fetched for a whole optimizer step. At the first of them the engine's step begins: each
   micro-batch runs the module's own ``training_step``, on a thread of its own.
2. Where ``training_step`` returns, the engine waits, and Lightning's loop goes on with this batch as ever. Backward,
   clipping and the optimizer's step are the engine's.
3. The state of the trainer is taken when the iteration has ended, with its validation; the commit waits for it.

Names are those of Lightning 2.6.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import torch
from fsspec.core import url_to_fs
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from ...errors import BadInput
from ...offload.api import offload
from ...offload.engine import Engine
from ...offload.model.microbatches import OwnCall, extract_loss
from ...optim.mezo import MeZO
from ..lightning_fit import Fit, FitCallback
from ..lightning_state import refuse_callbacks
from .loop_step import GradientUse, SharedStep
from .model_calls import tensors_of
from .prepared_objects import BatchesAhead
from .script_model import (
    do_nothing,
    left_to_the_engine,
    precision_of,
    refuse_other_norm,
    switch_off_checkpointing,
    weights_of,
)

GIVEN = ("model", "optimizer", "loader", "scheduler", "normalize", "loss_fn", "order", "clipping", "device")
"""Options of ``holdfast.offload`` that the trainer decides."""
PRECISIONS = ("32-true", "bf16-mixed")
OWN_CODE = (
    "backward", "configure_gradient_clipping", "on_before_batch_transfer", "transfer_batch_to_device",
    "on_after_batch_transfer",
)  # fmt: skip
"""Methods of a module that must be Lightning's own: the engine goes backward and clips, and fetches batches ahead."""


class OffloadedFitting(Strategy):
    """A mixin of strategies in whose ``fit`` the engine trains. It must be the first base class."""

    _callback: OffloadedFitCallback

    def _add_engine(self, run: str | Path, options: dict[str, Any]) -> None:
        if taken := sorted({*GIVEN} & options.keys()):
            raise BadInput(f"{taken[0]} follows from the trainer: leave it out of {type(self).__name__}()")
        self._callback = OffloadedFitCallback(run, options)

    @property
    def engine(self) -> Engine | None:
        """The engine that holds the module; None before ``fit`` has begun and after it has ended."""
        return None if self._fit is None else self._fit.engine

    @property
    def _fit(self) -> OffloadedFit | None:
        return self._callback.fit if self._is_fitting else None

    @property
    def _is_fitting(self) -> bool:
        module = self.lightning_module
        return (
            module is not None
            and module._trainer is not None
            and module.trainer.state.fn == TrainerFn.FITTING
        )

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        trainer: Any = model.trainer
        if self._is_fitting and self._callback not in trainer.callbacks:
            trainer.callbacks.insert(0, self._callback)  # so that it refuses what is beside it

    def model_to_device(self) -> None:
        """Leave the module where it is while it is trained: the engine brings one block at a time."""
        if not self._is_fitting:
            super().model_to_device()  # type: ignore[missing-attribute]

    def teardown(self) -> None:
        module = self.lightning_module
        if module is None or not any(parameter.is_meta for parameter in module.parameters()):
            super().teardown()  # else an error has come, and there is nothing to move

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._fit is not None
        return self._fit.next_output()

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the hooks around a backward pass, which is the engine's."""
        assert self.lightning_module is not None and self._fit is not None
        self._fit.goes_backward()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            return super().validation_step(*args, **kwargs)
        assert self._fit is not None and self.lightning_module is not None
        return self._fit.evaluated(partial(self.lightning_module.validation_step, *args, **kwargs))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save as the strategy does; a file that Lightning would put together in memory is written as it is read.

        Without ``optimizer_states``, which the run holds: Lightning refuses to resume from such a file.
        """
        checkpoint.pop("optimizer_states", None)
        if self.engine is None or type(self.checkpoint_io) is not TorchCheckpointIO or storage_options:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            files, path = url_to_fs(str(filepath))
            files.makedirs(os.path.dirname(path), exist_ok=True)
            with files.transaction, files.open(path, "wb") as file:
                torch.save(checkpoint, file)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an empty dict: the run holds the state of ``optimizer``."""
        return {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.engine is None:
            return super().lightning_module_state_dict()
        assert self._fit is not None
        return self._fit.weights()


class OffloadedStrategy(OffloadedFitting, SingleDeviceStrategy):
    """Training in the directory ``run`` by the out-of-core engine, one device, automatic optimization.

    ``options`` are those of ``holdfast.offload``: ``placement``, ``budget``, ``io``, ``source`` and others. Precision
    and clipping follow from the trainer, micro-batches from ``accumulate_grad_batches``. ``device`` is where blocks
    are computed; by default the first of the trainer's accelerator. When ``fit`` has ended, the module has its values
    back, if it had values.
    """

    strategy_name = "holdfast"

    def __init__(self, run: str | Path, *, device: str | torch.device | None = None, **options: Any) -> None:
        """Create the strategy. Raises ``BadInput`` for options that the trainer decides."""
        super().__init__(device="cpu" if device is None else device)
        self._follows_accelerator = device is None
        self._add_engine(run, options)

    def setup_environment(self) -> None:
        """Choose the device, which the accelerator knows only now."""
        if self._follows_accelerator and self.accelerator is not None:
            devices = self.accelerator.parse_devices(1)
            [self._root_device] = self.accelerator.get_parallel_devices(devices)
        super().setup_environment()


class OffloadedDDPStrategy(OffloadedFitting, DDPStrategy):
    """Data-parallel training in the directory ``run`` by the out-of-core engine, one process for each device.

    Processes, devices and batches are those of Lightning's ``DDPStrategy``. The module is not wrapped: the engine adds
    gradients up. All else is as with ``OffloadedStrategy``.
    """

    strategy_name = "holdfast_ddp"

    def __init__(self, run: str | Path, **options: Any) -> None:
        """Create the strategy. Raises ``BadInput`` for options that the trainer decides."""
        super().__init__()
        self._add_engine(run, options)

    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class OffloadedFitCallback(FitCallback):
    """The callback that the strategy adds to its trainer."""

    @property
    def fit(self) -> OffloadedFit | None:
        """The call of ``fit`` that is under way."""
        assert self._fit is None or isinstance(self._fit, OffloadedFit)
        return self._fit

    def _make_fit(self, trainer: Trainer) -> Fit:
        _refuse(trainer, self)
        return OffloadedFit(trainer, self)


class OffloadedFit(Fit):
    """One call of ``fit`` with its engine."""

    is_late = True
    """A flag for the engine: the state of a step is that after its iteration."""

    def __init__(self, trainer: Trainer, callback: FitCallback) -> None:
        super().__init__(trainer, callback)
        self._engine: Engine | None = None
        self._ahead: BatchesAhead | None = None
        self._step: SharedStep | None = None
        """The step that is under way."""
        self._next_batch = 0
        """The number, in its epoch, of the next batch of that step."""
        self._is_early = self._is_taken = False
        self._gradients = GradientUse(
            self._refuse, "let optimizer_zero_grad call optimizer.zero_grad() before the backward pass"
        )
        self._clip: float | None = None
        """The norm that the engine clips to, as the trainer had it."""
        self._stops = False
        """True if training was told to stop within a step: it does so after the step."""

    @property
    def engine(self) -> Engine | None:
        """The engine; None before it was opened and after it was closed."""
        return None if self._engine is None or self._engine.is_closed else self._engine

    # The run

    def _newest_progress(self) -> dict[str, Any]:
        return {}  # the engine restores it

    def _open(self) -> bool:
        trainer, module = self._trainer, self._trainer.lightning_module
        _refuse_optimizers(trainer)
        [optimizer] = trainer.optimizers
        switch_off_checkpointing(module)
        self._clip = trainer.gradient_clip_val
        vars(optimizer)["step"] = MethodType(left_to_the_engine(self._end_step), optimizer)
        vars(optimizer)["zero_grad"] = self._zero_grad
        self._put(trainer.precision_plugin, "clip_gradients", do_nothing)
        usual: dict[str, Any] = {
            "precision": precision_of(module, mixed=trainer.precision == "bf16-mixed"),
            "micro_batches": trainer.accumulate_grad_batches,
            "device": str(trainer.strategy.root_device),
            "clipping": self._clip or None,
        }
        engine = offload(
            module,
            optimizer,
            self._callback.run,
            loader=self,
            normalize="sum",
            **(usual | self._callback.options),
        )
        self._engine = engine
        self._checkpointer = _Records(self)
        engine.held.refuse_gradients(
            "give gradient_clip_val to the trainer, and leave out what changes gradients"
        )
        self._put(module, "zero_grad", self._zero_grad)
        return engine.resumed_from is not None

    def _grouped(self, loader: Any) -> Any:
        self._ahead = BatchesAhead(loader, self._group_size)
        return self._ahead

    def _group_size(self) -> int:
        left = self._trainer.num_training_batches - self._loop.batch_progress.current.ready
        return int(max(1, min(self._trainer.accumulate_grad_batches, left)))

    def complete(self, early: bool = False) -> None:
        """Take the state of the trainer, which the commit of the newest step waits for."""
        assert self._engine is not None
        self._is_taken = True
        try:
            completed = self._engine.complete_step(again=self._is_early and not early)
        finally:
            self._is_taken = False
        self._is_early = early and (completed or self._is_early)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the module."""
        assert self._engine is not None
        if self._is_taken:  # hooks see the state of the trainer without them
            return {}
        self._refuse_amid("the weights were asked for")
        self.complete(early=True)
        return weights_of(self._engine, self._trainer.lightning_module, self._trainer.is_global_zero)

    # Steps

    def next_output(self) -> Any:
        """Return what ``training_step`` of the module returned for the present batch."""
        assert self._engine is not None and self._ahead is not None
        first = self._loop.batch_idx
        if self._step is not None:
            if first != self._next_batch:
                self._refuse(
                    f"batch {self._next_batch} of the epoch is of an optimizer step that has begun, and was left out:"
                    " let hooks leave out batches where a step begins"
                )
            self._next_batch += 1
            return self._step.go_on(None)
        calls = [
            OwnCall(partial(self._call, batch, first + number), tensors_of(batch), {})
            for number, batch in enumerate(self._ahead.group)
        ]
        self._step, self._next_batch = SharedStep(self._engine, calls), first + 1
        return self._step.begin()

    def end_iteration(self, fetcher: Any) -> None:
        """End the iteration, and the step with its last one. Training that is to stop within a step stops after it."""
        is_amid = self._step is not None
        self._stops |= self._trainer.should_stop
        self._trainer.should_stop = self._stops and not is_amid
        self._stops &= is_amid
        super().end_iteration(fetcher)

    def evaluated(self, step: Callable[[], Any]) -> Any:
        """Return what ``step`` returns, whose calls of the model the engine takes."""
        assert self._engine is not None
        self._refuse_amid("a validation was to begin")
        return self._engine.run_calls([step])[0]

    def _call(self, batch: Any, number: int) -> torch.Tensor:
        """Return the loss of a micro-batch. Runs on the micro-batch's thread."""
        trainer, module, step = self._trainer, self._trainer.lightning_module, self._step
        assert step is not None
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        output = module.training_step(*self._loop._build_kwargs(OrderedDict(), batch, number).values())
        if output is None:
            raise BadInput("training_step returned None, and the engine has begun the step: return a loss")
        loss = extract_loss(output)
        step.hand_over(output)
        return loss / (trainer.accumulate_grad_batches * trainer.world_size)  # as DDP takes the mean

    def _end_step(self, closure: Any = None) -> Any:
        """Take the place of the optimizer's ``step``."""
        loss = None if closure is None else closure()
        if self._step is None:
            raise BadInput("the optimizer was stepped without training_step: leave its step to the trainer")
        assert self._engine is not None
        step, self._step = self._step, None
        self._gradients.stepped()
        try:
            refuse_other_norm("gradient_clip_val", self._clip, self._trainer.gradient_clip_val)
            self._engine.take_hyper_parameters()  # hooks may have changed them
            step.go_on(None)
        except BaseException:
            step.abandon()
            raise
        return loss

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Take the place of ``zero_grad`` of the optimizer and the module."""
        self._gradients.zeroed()

    def goes_backward(self) -> None:
        """Note a backward pass, which is the engine's. Raises ``BadInput`` for gradients of the step before."""
        self._gradients.accumulated()

    def refuse_end(self) -> NoReturn:
        """Raise ``BadInput``, because training has ended within a step, whose batches it has left out."""
        self._refuse(
            "training has ended in the middle of an optimizer step: let hooks leave out batches where one begins"
        )

    def abandon(self) -> None:
        """Give up the step that is under way, and the engine with it."""
        step, self._step = self._step, None
        if step is not None:
            step.abandon()

    def _refuse_amid(self, what: str) -> None:
        if self._step is not None:
            self._refuse(
                f"{what} in the middle of an optimizer step: let accumulate_grad_batches divide val_check_interval and"
                " every_n_train_steps"
            )

    def _refuse(self, text: str) -> NoReturn:
        self.abandon()
        raise BadInput(text)

    # The loader's interface for the engine

    def state_dict(self) -> dict[str, Any]:
        schedules = [config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs]
        return super().state_dict() | {"schedules": schedules}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for config, saved in zip(self._trainer.lr_scheduler_configs, state["schedules"], strict=True):
            config.scheduler.load_state_dict(saved)


class _Records:
    """The engine of ``fit``, as what records its steps."""

    def __init__(self, fit: OffloadedFit) -> None:
        self._fit = fit

    def step(self) -> None:
        """Complete the newest step at the end of an iteration, unless it goes on with the next batch."""
        if self._fit._step is None:
            self._fit.complete()

    def close(self, save: bool) -> None:
        """Close the engine, which gives the module its values; without ``save`` give up what is under way."""
        engine = self._fit.engine
        if engine is not None and save and self._fit._step is None:
            self._fit.complete()
            engine.close()
        elif engine is not None and save:
            self._fit.refuse_end()
        self._fit.abandon()
        if self._fit.engine is not None:
            self._fit.engine.give_up()


def _refuse(trainer: Any, own: FitCallback) -> None:
    """Raise ``BadInput`` for settings and code that the engine cannot keep to."""
    module, strategy = trainer.lightning_module, trainer.strategy
    processes = trainer._accelerator_connector.cluster_environment.world_size()
    if processes != trainer.world_size:
        raise BadInput(
            f"{type(strategy).__name__} trains in one process, and here are {processes}: give OffloadedDDPStrategy, or"
            " start the script by itself"
        )
    if trainer.world_size > 1 and strategy._layer_sync is not None:
        raise BadInput("sync_batchnorm=True does not work with several processes here: leave it out")
    if not module.automatic_optimization:
        raise BadInput(
            "manual optimization computes losses and steps as it likes: use holdfast.offload in a loop"
        )
    if trainer.precision not in PRECISIONS:
        raise BadInput(f'precision="{trainer.precision}" does not work: use "bf16-mixed", or "32-true"')
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        raise BadInput('the engine clips norms, not values: give gradient_clip_algorithm="norm"')
    if trainer.reload_dataloaders_every_n_epochs:
        raise BadInput("reload_dataloaders_every_n_epochs gives up the place in the data; leave it out")
    for name in OWN_CODE:
        for each in (module, trainer.datamodule):
            if each is not None and hasattr(type(each), name) and is_overridden(name, each):
                raise BadInput(
                    f"{type(each).__name__} has a {name} of its own, which the engine does not call"
                )
    for callback in trainer.callbacks:
        if isinstance(callback, (WeightAveraging, GradientAccumulationScheduler, BaseFinetuning)) or (
            isinstance(callback, FitCallback) and callback is not own
        ):
            raise BadInput(
                f"{type(callback).__name__} does not work with {type(strategy).__name__}: leave it out"
            )
    refuse_callbacks(trainer)


def _refuse_optimizers(trainer: Any) -> None:
    if len(trainer.optimizers) != 1 or isinstance(trainer.optimizers[0], MeZO):
        raise BadInput(
            f"configure_optimizers made {len(trainer.optimizers)} optimizers, and the engine takes one that"
            " goes by gradients"
        )
