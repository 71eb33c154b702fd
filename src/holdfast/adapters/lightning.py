"""Lightning: every optimizer step of an unmodified ``Trainer`` script can be recovered, bit for bit.

    trainer = L.Trainer(..., callbacks=[HoldfastCallback("runs/x")])
    trainer.fit(model)  # begins the run, or goes on after its newest step

The run is resumed in ``on_fit_start``, when optimizers are there and no loader is. A step is recorded when its
iteration has ended, its validation included, for which no callback is called: ``on_advance_end`` of the loop over an
epoch is covered, and ``process_dataloader`` of the strategy, through which the loader comes; both on the objects of
this trainer, until it is torn down.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage

from ..checkpointer import Checkpointer
from ..errors import BadInput, RunMismatch
from ..regular import home_path
from ..state.encoding import decode, encode
from ..state.progress import random_state, restore_random_state
from ..watch.recovery import progress_bar
from .position import Place

SYNC = "require_forward_param_sync"
"""Of DDP: whether the next forward pass begins with the first rank's buffers. Under manual optimization only the first
one of a process does."""


class HoldfastCallback(Callback):
    """Makes ``fit`` of its trainer begin or continue the run in the directory ``run``.

    ``options`` are those of ``Checkpointer``. Other callbacks and the datamodule are brought back by their
    ``state_dict``. Sums that Lightning keeps of what is logged ``on_epoch`` begin anew. As many processes as there were
    go on.
    """

    def __init__(self, run: str | Path, **options: Any) -> None:
        self.run, self.options = home_path(run), options
        self._fit: Fit | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse(trainer)
        self._fit = Fit(trainer, self)
        self._fit.resume()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.go_on()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and self._fit.place is not None:
            self._fit.place.leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.close(save=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.close(save=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._fit is not None:
            self._fit.close(save=True)
            self._fit = None


class Fit:
    """One call of ``fit``. To its checkpointer it is the loader, whose state is all that the trainer holds; ``elastic``
    is true since another number of processes is refused here."""

    elastic = True

    def __init__(self, trainer: Trainer, callback: HoldfastCallback) -> None:
        self._trainer: Any = trainer
        model: Any = trainer.model
        self._callback = callback
        self._loop: Any = trainer.fit_loop.epoch_loop
        self.place: Place | None = None
        self.random: dict[str, Any] | None = None
        """The generators as the run had them, if there was one."""
        self._found: dict[str, Any] = {}
        self._first_closures = [each.register_step_pre_hook(_closure_first) for each in trainer.optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._checkpointer = Checkpointer(
            callback.run,
            model=model,
            optimizer=trainer.optimizers,
            scheduler=next(iter(schedulers), None),
            loader=self,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            also={f"scheduler {i}": each for i, each in enumerate(schedulers) if i},
            **callback.options,
        )
        self._process, self._end_iteration = trainer.strategy.process_dataloader, self._loop.on_advance_end
        vars(trainer.strategy)["process_dataloader"] = self.process_dataloader
        vars(self._loop)["on_advance_end"] = self.end_iteration

    def resume(self) -> None:
        if self._checkpointer.resume(show=progress_bar() if self._trainer.is_global_zero else None):
            self.random = random_state()

    def go_on(self) -> None:
        """Training is about to."""
        if self.random is not None:
            restore_random_state(self.random)
            self._metrics().update(self._found["metrics"])
            # or schedules by a metric would pass over this epoch's end
            self._trainer.fit_loop._restarting = False

    def close(self, save: bool) -> None:
        """Durable, with ``save``, and nothing is left on the trainer. A second call does nothing."""
        vars(self._trainer.strategy).pop("process_dataloader", None)
        vars(self._loop).pop("on_advance_end", None)
        for hook in self._first_closures:
            hook.remove()
        if self.place is not None:
            self.place.close()
        self._checkpointer.close(save)

    # In the place of the trainer's methods

    def process_dataloader(self, loader: Any) -> Any:
        """The loader of training gets a state, which Lightning saves with its loop and loads before it is read."""
        loader = self._process(loader)
        if self._trainer.state.stage == RunningStage.TRAINING:
            if self.place is not None:
                raise BadInput("several loaders are trained from, or one is made anew: give one DataLoader")
            self.place = Place(loader, self._trainer.world_size)
            vars(loader)["state_dict"] = lambda: self._place_now()
            vars(loader)["load_state_dict"] = self._find_place
        return loader

    def end_iteration(self, fetcher: Any) -> None:
        """The iteration with which a resumed epoch begins only leaves out a validation that the run has behind it."""
        if self._loop.restarting and self._loop._skip_next_val:
            self._loop._skip_next_val = False
            return
        self._end_iteration(fetcher)
        self._checkpointer.step()

    def _place_now(self) -> dict[str, Any]:
        """As JSON, since it is in checkpoints of Lightning's too, which hold no arrays of NumPy."""
        assert self.place is not None
        return encode(self.place.state(self._loop.batch_progress.current.completed))

    def _find_place(self, found: dict[str, Any]) -> None:
        assert self.place is not None and self.random is not None
        state = decode(found)
        self.place.check(state)
        self.place.set_epoch(self._trainer.fit_loop.epoch_progress.current.processed)
        self.place.load(state, self.random)

    # What it is to the checkpointer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        datamodule = getattr(trainer, "datamodule", None)
        return {
            "processes": trainer.world_size,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "loop": trainer.fit_loop.state_dict(),
            "callbacks": {each.state_key: each.state_dict() for each in self._others()},
            "metrics": dict(self._metrics()),
            "sync": getattr(trainer.model, SYNC, None),
            "datamodule": {} if datamodule is None else datamodule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        here = {"processes": trainer.world_size, "accumulate_grad_batches": trainer.accumulate_grad_batches}
        for key, value in here.items():
            if state[key] != value:
                raise RunMismatch(
                    f"{self._callback.run} was trained with {key} {state[key]}, now it is {value}, so that its place in"
                    f" the data means nothing. Set it to {state[key]}, or begin another run."
                )
        for each in self._others():
            if state["callbacks"].get(each.state_key):
                each.load_state_dict(copy.deepcopy(state["callbacks"][each.state_key]))
        if state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if state["sync"] is not None:
            setattr(trainer.model, SYNC, state["sync"])
        trainer.fit_loop.load_state_dict(state["loop"])
        self._found = state

    def _metrics(self) -> dict[str, Any]:
        """What was logged last, by name, for callbacks that monitor it."""
        return self._trainer._logger_connector._callback_metrics

    def _others(self) -> list[Callback]:
        return [each for each in self._trainer.callbacks if each is not self._callback]


def _closure_first(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lightning hands forward and backward to ``step`` as a closure, which all but LBFGS call at once. It is called
    here, so that the gradients are there when a step is recorded."""
    closure = kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        closure()
    return args, {**kwargs, "closure": None}


def _refuse(trainer: Any) -> None:
    """Raise ``BadInput`` for settings under which no step can be recorded, or no place kept."""
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise BadInput(
            f"{type(trainer.strategy).__name__} is not a strategy whose state this callback knows: train on one device"
            ' or with strategy="ddp"'
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
        raise BadInput("LBFGS computes several gradients in a step, which records do not hold")
    if trainer.ckpt_path is not None:
        raise BadInput(
            f"ckpt_path={trainer.ckpt_path!r} would be loaded over the run. Leave it out; a run begins from such"
            " weights by load_from_checkpoint"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise BadInput("reload_dataloaders_every_n_epochs gives up the place in the data; leave it out")
