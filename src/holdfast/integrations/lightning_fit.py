"""One call of ``fit`` of a Lightning ``Trainer`` as a run: its state, its place in the data, and its recorded steps.

The run is restored where Lightning restores its own checkpoints:

1. callbacks, before there are optimizers;
2. everything else, when every ``on_fit_start`` has been called and no loader exists yet;
3. attributes, after every ``on_train_start``.

A step is recorded when its iteration has ended, with its validation. No callback is called at these times, so nine
methods are replaced (``Fit.__init__`` names them), on the objects of this trainer only, until it is torn down.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import nn

from ..checkpoint.capture.closures import ComputedClosure
from ..checkpoint.options import Exactness
from ..checkpointer import Checkpointer
from ..errors import BadInput, RunMismatch
from ..monitor.progress_bar import progress_bar
from ..state.encoding import decode, encode
from ..state.progress import random_state, restore_random_state
from ..supervised.attempt import training_directory
from .lightning_state import HostState, averages_of, restore_sums, sums_of, sums_of_ranks
from .shared.changed_attributes import set_up_again
from .shared.collective_commit import newest_progress
from .shared.position import LoaderPlace

LOADER = "loader"
"""The name by which a ``Checkpointer`` knows a ``Fit``."""
SYNC = "require_forward_param_sync"
"""The attribute of DDP that tells whether the next forward pass begins with the first rank's buffers.

Under manual optimization only the first forward pass of a process does.
"""


class FitCallback(Callback):
    """A callback that makes ``fit`` of its trainer begin or continue the run in the directory ``run``."""

    def __init__(self, run: str | Path, options: dict[str, Any], exactness: Exactness = "state") -> None:
        self.run, self.options, self.exactness = training_directory(run), options, exactness
        self._fit: Fit | None = None

    def _make_fit(self, trainer: Trainer) -> Fit:
        """Return the call of ``fit`` that begins. Raises ``BadInput`` for what the run could not hold."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit = self._make_fit(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and self._fit.place is not None:
            self._fit.place.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.close(save=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._fit is not None:
            self._fit.close(save=True)
            self._fit = None


class RecordsSteps(Protocol):
    """An object that records the steps of a fit."""

    def step(self) -> object: ...
    def close(self, save: bool) -> None: ...


class Fit:
    """One call of ``fit``, which its checkpointer treats as the loader; its state is all that the trainer holds.

    ``elastic`` is true because ``place`` refuses another number of processes where it would mean another, ``has_loop``
    because what is restored here does not move the trainer's loop. Order of calls: ``restore_callbacks``, ``begin``,
    ``process_dataloader``, ``begin_training``, then ``end_iteration`` for each batch, ``end_training``, ``close``.
    """

    elastic = True
    has_loop = True
    schedule_advice = "Let configure_optimizers return it."

    def __init__(self, trainer: Trainer, callback: FitCallback) -> None:
        self._trainer: Any = trainer
        self._callback = callback
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._host = HostState(trainer, callback)
        self.place: LoaderPlace | None = None
        self.random: dict[str, Any] | None = None
        """The generators as the run had them; None for a new run."""
        self._newest: dict[str, Any] = {}
        """The progress of the newest commit, as JSON, until the run is resumed."""
        self._restored: dict[str, Any] = {}
        self.of_ranks: list[dict[str, Any]] = []
        """The states of all processes of the run, where another number of them continues it."""
        self._found: dict[str, Any] | None = None
        """The place of the run, if Lightning loads it before the run is resumed."""
        self._has_place = False
        """True once the place of the run was found again."""
        self._began = False
        """True once the loop over epochs has begun."""
        self._accumulates = trainer.accumulate_grad_batches
        """The value from the script, before any hook changed it."""
        self._first_closures: list[Any] = []
        self._checkpointer: Checkpointer | RecordsSteps | None = None
        connector: Any = trainer._checkpoint_connector
        strategy: Any = trainer.strategy
        self._covered: list[tuple[Any, str, Callable[..., Any]]] = []
        self._restore_modules = self._cover(
            connector, "_restore_modules_and_callbacks", self.restore_callbacks
        )
        self._restore_training = self._cover(connector, "restore_training_state", self.begin)
        self._process = self._cover(strategy, "process_dataloader", self.process_dataloader)
        self._run_epochs = self._cover(trainer.fit_loop, "run", self.run_epochs)
        self._begin_epoch = self._cover(trainer.fit_loop, "on_advance_start", self.begin_epoch)
        self._advance = self._cover(trainer.fit_loop, "advance", self.advance)
        self._begin_run = self._cover(trainer.fit_loop, "on_run_start", self.begin_training)
        self._end_run = self._cover(trainer.fit_loop, "on_run_end", self.end_training)
        self._end_iteration = self._cover(self._loop, "on_advance_end", self.end_iteration)

    def close(self, save: bool) -> None:
        """Close the run (durable, with ``save``) and restore the trainer's methods. A second call does nothing."""
        for owner, name, method in self._covered:
            if vars(owner).get(name) == method:
                del vars(owner)[name]
        for hook in self._first_closures:
            hook.remove()
        if self.place is not None:
            self.place.close()
        if self._checkpointer is not None:
            self._checkpointer.close(save)

    def _cover(self, owner: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Replace the method ``name`` of ``owner`` by ``method``, and return the original."""
        own = getattr(owner, name)
        self._put(owner, name, method)
        return own

    def _put(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Set ``method`` on ``owner`` until ``close``."""
        vars(owner)[name] = method
        self._covered.append((owner, name, method))

    # Replacements of the trainer's methods

    def restore_callbacks(self, checkpoint: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load the state of callbacks from the newest commit, before there are optimizers, as Lightning does.

        Some callbacks build optimizer groups from their state. Raises ``BadInput`` for a ``ckpt_path``.
        """
        if checkpoint is not None:
            raise BadInput(
                f"ckpt_path={checkpoint!r} would be loaded over the run. Leave it out; a run begins from such weights"
                " by load_from_checkpoint"
            )
        self._restore_modules(checkpoint, *args, **kwargs)
        self._newest = self._newest_progress()
        found = decode(self._newest.get("things", {}).get(LOADER))
        if found is not None:
            self._host.load_callbacks(found)

    def _newest_progress(self) -> dict[str, Any]:
        return newest_progress(self._callback.run)

    def begin(self) -> None:
        """Begin or continue the run, when every ``on_fit_start`` has been called.

        Callbacks that search a batch size or learning rate call this during their search, with their own checkpoint.
        """
        trainer = self._trainer
        if trainer._checkpoint_connector._loaded_checkpoint:
            self._restore_training()
            return
        self._first_closures = [each.register_step_pre_hook(_closure_first) for each in trainer.optimizers]
        set_up_again(self._newest, LOADER, self._parameters(), trainer.optimizers)
        if self._open():
            self.random = random_state()
            if self._found is not None:
                self._find_place(self._found)
                iter(trainer.fit_loop._data_fetcher)  # its batches are others now

    def _open(self) -> bool:
        """Open the run, and return whether it was resumed."""
        trainer = self._trainer
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        options, averages = dict(self._callback.options), averages_of(trainer)
        if isinstance(own := options.pop("averages", None) or {}, nn.Module):
            own = {"own_average" if averages else "average": own}
        further = {f"scheduler {i}": each for i, each in enumerate(schedulers) if i}
        self._checkpointer = Checkpointer(
            self._callback.run,
            model=trainer.model,
            optimizer=trainer.optimizers,
            scheduler=next(iter(schedulers), None),
            loader=self,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            also={**further, **options.pop("also", {})},
            averages={**averages, **own} or None,
            **options,
        )
        show = progress_bar() if trainer.is_global_zero else None
        return self._checkpointer.resume(exactness=self._callback.exactness, show=show) > 0

    def begin_training(self) -> None:
        """Restore the run's position, when every ``on_train_start`` has been called."""
        self._begin_run()
        if self._checkpointer is None:
            return
        if self.place is None:
            raise BadInput(
                "the loader of training was made before fit began, so that there is no place in it: give it to fit, or"
                " let the module or datamodule make it. trainer.estimated_stepping_batches in configure_optimizers"
                " makes it early: count the steps of the schedule otherwise, or give max_steps alone"
            )
        self._began = True
        self._refuse_no_place()
        self._host.watch()
        if self.random is not None:
            restore_random_state(self.random)
            self._metrics().update(self._restored["metrics"])
            if "sums" in self._restored:
                restore_sums(self._trainer, self._sums())
            self._host.restore_attributes(self._restored)
            # or schedules by a metric would skip the end of this epoch
            self._trainer.fit_loop._restarting = False

    def run_epochs(self) -> None:
        """Repeat what follows the last step, also where Lightning skips a training that has all its steps."""
        self._run_epochs()
        loop = self._trainer.fit_loop
        if self.random is not None and self.place is not None and not self._began:
            loop.reset()
            self.begin_training()
            if loop.epoch_progress.current.processed < loop.epoch_progress.current.started:
                loop.on_advance_end()
            self.end_training()

    def begin_epoch(self) -> None:
        self._host.begin_epoch(self._begin_epoch)

    def advance(self) -> None:
        """Advance the loop; a training that was told to stop stops again."""
        self._trainer.should_stop |= self._restored.pop("should_stop", False)
        self._advance()

    def end_training(self) -> None:
        """Close the run before callbacks exchange weights, as some do in ``on_train_end``."""
        if self._checkpointer is not None:
            self.close(save=True)
        self._end_run()

    def process_dataloader(self, loader: Any) -> Any:
        """Add a state to the training loader, which Lightning saves with its loop and loads before it reads."""
        loader = self._process(loader)
        if self._checkpointer is not None and self._trainer.state.stage == RunningStage.TRAINING:
            if self.place is not None:
                raise BadInput("several loaders are trained from, or one is made anew: give one DataLoader")
            self.place = LoaderPlace(loader, self._trainer.world_size, self._accumulates)
            loader = self._grouped(loader)
            self._put(loader, "state_dict", self._place_now)
            self._put(loader, "load_state_dict", self._find_place)
        return loader

    def _grouped(self, loader: Any) -> Any:
        """Return what the trainer iterates over for ``loader``."""
        return loader

    def end_iteration(self, fetcher: Any) -> None:
        """Record the step of the iteration.

        The iteration that begins a resumed epoch only skips a validation that was already done; it is no step.
        """
        if self._loop.restarting and self._loop._skip_next_val:
            self._loop._skip_next_val = False
            return
        self._end_iteration(fetcher)
        if self._checkpointer is not None:
            self._checkpointer.step()

    def _place_now(self) -> dict[str, Any]:
        """Return the place in the data as JSON: Lightning's checkpoints contain it, and hold no NumPy arrays."""
        assert self.place is not None
        return encode(self.place.state(self._loop.batch_progress.current.completed))

    def _find_place(self, found: dict[str, Any]) -> None:
        assert self.place is not None
        state = decode(found)
        self.place.check(state)
        if self.random is None:  # the run is being resumed
            self._found = found
            return
        self.place.set_epoch(self._trainer.fit_loop.epoch_progress.current.processed)
        # limit_train_batches= may end the epoch where the loader has more
        self.place.load(state, self.random, self._trainer.fit_loop._combined_loader.limits[0])
        self._has_place = True

    # The loader's interface for the checkpointer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if self._restored and not self._began:  # some of it is set when training begins
            sums = {"sums": self._sums()} if "sums" in self._restored else {}
            return {**self._restored, **sums, "processes": trainer.world_size}
        return {
            "processes": trainer.world_size,
            "accumulate_grad_batches": self._accumulates,
            "loop": trainer.fit_loop.state_dict(),
            "metrics": dict(self._metrics()),
            "sums": sums_of(trainer),
            "should_stop": trainer.should_stop,
            "sync": getattr(trainer.model, SYNC, None),
            **self._host.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        accumulated = state["accumulate_grad_batches"]
        if accumulated != self._accumulates:
            raise RunMismatch(
                f"{self._callback.run} was trained with accumulate_grad_batches {accumulated}, now it is"
                f" {self._accumulates}, so that its place in the data means nothing. Set it to {accumulated}, or begin"
                " another run."
            )
        self._host.load_state_dict(state)
        if state["sync"] is not None and hasattr(trainer.model, SYNC):
            setattr(trainer.model, SYNC, state["sync"])
        trainer.fit_loop.load_state_dict(state["loop"])
        # else what follows the last batch is left out, and all epochs with it, where this trainer has run a fit before
        self._loop.val_loop._has_run = False
        self._restored = state
        if (
            self._checkpointer is not None
            and state.get("processes", trainer.world_size) != trainer.world_size
        ):
            self._look_for_place(state["processes"])

    def _look_for_place(self, num_processes: int) -> None:
        """Raise ``RunMismatch`` if the run of ``num_processes`` has no place in the data for the present number.

        Called before anything is written. Lightning makes the loader here, and then not again when training begins.
        """
        self._trainer.fit_loop.setup_data()
        if self.place is not None and self._found is None:
            raise self._no_place(num_processes)

    def _refuse_no_place(self) -> None:
        """Raise ``RunMismatch`` if another number of processes would continue without a place in the data."""
        there = self._restored.get("processes", self._trainer.world_size)
        if there != self._trainer.world_size and not self._has_place:
            raise self._no_place(there)

    def _no_place(self, num_processes: int) -> RunMismatch:
        return RunMismatch(
            f"{self._callback.run} has no place in the data that another number of processes could find, as it was"
            f" trained by {num_processes}. Resume with {num_processes}, or begin another run."
        )

    def _sums(self) -> dict[str, Any]:
        """Return the running sums of the epoch with which this process continues."""
        own, each = self._restored["sums"], [state["sums"] for state in self.of_ranks if "sums" in state]
        return sums_of_ranks(own, each, self._trainer.global_rank) if each else own

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._trainer.lightning_module.named_parameters())

    def _metrics(self) -> dict[str, Any]:
        """Return the latest logged values, by name, for callbacks that monitor them."""
        return self._trainer._logger_connector._callback_metrics


def _closure_first(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the closure before the optimizer's step, and pass on one that only returns the loss.

    Lightning hands forward and backward to ``step`` as a closure, which most optimizers call once, at once. Calling it
    here makes the gradients available when a step is recorded. The new closure refuses any other call.
    """
    closure = kwargs.get("closure")
    if closure is None or isinstance(closure, ComputedClosure):
        return None
    return args, {**kwargs, "closure": ComputedClosure(optimizer, closure)}
