"""The state of Lightning itself: what its ``Trainer`` and hooks have beside model and optimizers.

It is in three places: ``state_dict`` of callbacks, plugins and the datamodule; ``on_save_checkpoint`` of callbacks and
the module, which write into a checkpoint; and attributes set by hooks that are not called when training resumes in
mid-epoch. Running sums of values logged per epoch are stored here too, since Lightning begins an epoch anew. Averaged
weights of ``WeightAveraging`` are buffers of the run, because they are large. A callback whose state could not be
restored is refused. Called by ``integrations.lightning``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import nn
from torchmetrics import Metric

from ..checkpoint.user_state import MOST_BYTES, tensor_bytes
from ..errors import BadInput
from ..quantities import format_bytes, shown
from .shared.changed_attributes import OF_MODULES, ChangedAttributes, datasets_of, modules_of, names_in

LEFT_OUT: dict[type, frozenset[str]] = {
    nn.Module: OF_MODULES - {"training"},
    LightningModule: frozenset(vars(LightningModule())) - {"training"},
    LightningDataModule: frozenset(vars(LightningDataModule())),
}
"""Attributes that belong to the libraries and are no state."""
HOOKS_MAY_SET = frozenset(("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"))
"""Attributes of a ``Trainer`` that are stored if a hook has changed them."""
NOT_RESUMED: dict[type, str] = {
    StochasticWeightAveraging: (
        "exchanges the schedule, and sets up its average, in hooks that are not called in mid-epoch: take"
        " lightning.pytorch.callbacks.WeightAveraging, or EMAWeightAveraging"
    ),
    ModelPruning: (
        "makes other parameters of those of the model, so that a new process has none of these names: prune after"
        " training"
    ),
    LearningRateFinder: (
        "trains in on_fit_start, again in every process: call Tuner(trainer).lr_find(model) in a script of its own, and"
        " give the module what it finds"
    ),
    BatchSizeFinder: (
        "trains in on_fit_start, again in every process: call Tuner(trainer).scale_batch_size(model) in a script of its"
        " own, and give the loader what it finds"
    ),
}
"""Callbacks whose state cannot be restored, with the reason and the way out."""


class HostState:
    """The state of ``trainer`` except for its model and optimizers; ``ours`` is excluded from its callbacks."""

    def __init__(self, trainer: Any, ours: Callback) -> None:
        self._trainer, self._ours = trainer, ours
        self._attributes: ChangedAttributes | None = None
        self._weighed = False

    def watch(self) -> None:
        """Treat the current attributes as set by the script, because the hooks of the beginning are over."""
        trainer, model = self._trainer, self._trainer.lightning_module
        own = [each for each in self._others() if type(each) not in _of_lightning(each)]
        of_callbacks = {kind: names_in(kind) for each in own for kind in _of_lightning(each)}
        objects: dict[str, Any] = {"trainer": trainer, **modules_of(model, type(model).__name__)}
        objects |= {f"callback {i} {type(each).__name__}": each for i, each in enumerate(own)}
        if trainer.datamodule is not None:
            objects["datamodule"] = trainer.datamodule
        objects |= datasets_of(trainer.train_dataloader)
        of_the_trainer = frozenset(vars(trainer)) - HOOKS_MAY_SET
        self._attributes = ChangedAttributes(
            objects, model, {**LEFT_OUT, **of_callbacks, Trainer: of_the_trainer}
        )

    def begin_epoch(self, begin: Callable[[], None]) -> None:
        """Call the hooks of the beginning of an epoch by ``begin``, and warn of set-up that cannot be stored."""
        if self._attributes is None:
            begin()
            return
        self._attributes.begin_epoch(begin, "on_train_epoch_start")

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            "callbacks": {each.state_key: each.state_dict() for each in self._others()},
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
            "hooks": self._saved_by_hooks(),
            "attributes": None if self._attributes is None else self._attributes.changed(),
        }
        if not self._weighed:
            self._weighed = True
            _refuse_large(state)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load everything but attributes, in Lightning's order. Model and optimizers must be restored already."""
        trainer = self._trainer
        checkpoint = self._checkpoint_again(state.get("hooks"))
        if checkpoint is not None:
            trainer.lightning_module.on_load_checkpoint(checkpoint)
        if state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if checkpoint is not None:
            for each in self._with_hook("on_load_checkpoint"):
                each.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        self.load_callbacks(state)
        if state.get("precision"):
            trainer.precision_plugin.load_state_dict(state["precision"])

    def load_callbacks(self, state: Mapping[str, Any]) -> None:
        """Load the ``state_dict`` of callbacks alone."""
        for each in self._others():
            if state["callbacks"].get(each.state_key):
                each.load_state_dict(copy.deepcopy(state["callbacks"][each.state_key]))

    def restore_attributes(self, state: Mapping[str, Any]) -> None:
        """Set the attributes that hooks had set. Called when the hooks of the beginning are over."""
        if self._attributes is not None and state.get("attributes"):
            self._attributes.restore(state["attributes"])

    def _saved_by_hooks(self) -> dict[str, Any] | None:
        """Return what ``on_save_checkpoint`` of callbacks and the module adds; None if nothing overrides it."""
        trainer, model = self._trainer, self._trainer.lightning_module
        callbacks = self._with_hook("on_save_checkpoint")
        own = type(model).on_save_checkpoint is not LightningModule.on_save_checkpoint
        if not callbacks and not own:
            return None
        checkpoint = self._checkpoint()
        tensors = dict(checkpoint["state_dict"])
        before = dict(checkpoint)
        for each in callbacks:
            each.on_save_checkpoint(trainer, model, checkpoint)
        if own:
            model.on_save_checkpoint(checkpoint)
        weights = checkpoint.pop("state_dict", {})
        others = {name: value for name, value in weights.items() if tensors.get(name) is not value}
        added = {name: value for name, value in checkpoint.items() if before.get(name) is not value}
        return {"added": added, "state_dict": others}

    def _checkpoint_again(self, saved: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return a checkpoint of the current state with what hooks had added; None if no hook reads one."""
        own = (
            type(self._trainer.lightning_module).on_load_checkpoint is not LightningModule.on_load_checkpoint
        )
        if saved is None or not (own or self._with_hook("on_load_checkpoint")):
            return None
        checkpoint = {**self._checkpoint(), **saved["added"]}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **saved["state_dict"]}
        return checkpoint

    def _checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint of Lightning's, as hooks get one."""
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        made = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": pl.__version__,
            "state_dict": connector._get_lightning_module_state_dict(),
            "loops": connector._get_loops_state_dict(),
            "callbacks": {each.state_key: each.state_dict() for each in self._others()},
            "optimizer_states": [_state_of(each, trainer) for each in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
        for each in (trainer.lightning_module, trainer.datamodule):
            if each is not None and each.hparams:
                made[each.CHECKPOINT_HYPER_PARAMS_KEY] = dict(each.hparams)
        return made

    def _with_hook(self, name: str) -> list[Callback]:
        """Return the callbacks that override the hook ``name``. Averages are stored elsewhere."""
        usual = (getattr(Callback, name), getattr(WeightAveraging, name))
        return [each for each in self._others() if getattr(type(each), name) not in usual]

    def _others(self) -> list[Callback]:
        return [each for each in self._trainer.callbacks if each is not self._ours]


def _state_of(optimizer: torch.optim.Optimizer, trainer: Any) -> dict[str, Any]:
    """Return this rank's state of ``optimizer``; an empty one while an engine holds it."""
    if getattr(trainer.strategy, "engine", None) is not None:
        return {"state": {}, "param_groups": []}
    return optimizer.state_dict()


def refuse_callbacks(trainer: Any) -> None:
    """Raise ``BadInput`` for a callback whose state could not be restored."""
    for callback in trainer.callbacks:
        for kind, why in NOT_RESUMED.items():
            if isinstance(callback, kind):
                raise BadInput(f"{type(callback).__name__} {why}.")


def averages_of(trainer: Any) -> dict[str, nn.Module]:
    """Return the averaged models of callbacks, by name.

    Each is a module with all its tensors as buffers, which are in every log record.
    """
    found = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]
    return {
        f"average{i or ''}": _AsBuffers(each._average_model)
        for i, each in enumerate(found)
        if each._average_model is not None
    }


class _AsBuffers(nn.Module):
    """The parameters and buffers of ``module``, as buffers in the same memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in named.items():
            self.register_buffer(name.replace(".", "__"), tensor.detach())


def _of_lightning(callback: Callback) -> list[type]:
    """Return Lightning's own classes of a callback, which keep what they need in ``state_dict``."""
    return [kind for kind in type(callback).__mro__ if kind.__module__.startswith("lightning.pytorch.")]


def _refuse_large(state: Mapping[str, Any]) -> None:
    """Raise ``BadInput`` if tensors that every log record stores as text would slow training too much."""
    sizes = {f"callback {name}": tensor_bytes(each) for name, each in state["callbacks"].items()}
    sizes |= {"the datamodule": tensor_bytes(state["datamodule"])}
    sizes |= {"what on_save_checkpoint adds": tensor_bytes(list((state["hooks"] or {}).values()))}
    if sum(sizes.values()) > MOST_BYTES:
        name = max(sizes, key=lambda each: sizes[each])
        raise BadInput(
            f"{name} has {format_bytes(sizes[name])} of tensors in its state, which would be text in every record,"
            f" {format_bytes(MOST_BYTES)} at most. Register large tensors as buffers of the module; average weights by"
            " lightning.pytorch.callbacks.WeightAveraging."
        )


PLAIN = tuple(each.name for each in fields(_Metadata) if each.name not in ("reduce_fx", "_sync"))
"""Plain fields of the metadata of a logged value."""
COUNTS = ("has_reset", "_update_count")


def sums_of(trainer: Any) -> dict[str, Any]:
    """Return the running sums of the training epoch, by key, and the position of logging in the epoch."""
    connector = trainer._logger_connector
    kept = {key: _about(each) for key, each in trainer.fit_loop.epoch_loop._results.items() if _is_kept(each)}
    return {"kept": kept, "first": connector._first_loop_iter, "fx": connector._current_fx}


def restore_sums(trainer: Any, sums: Mapping[str, Any]) -> None:
    """Restore what ``sums_of`` returned. Metrics of the module have their own state."""
    results = trainer.fit_loop.epoch_loop._results
    modules = dict(trainer.lightning_module.named_modules())
    for key, about in sums["kept"].items():
        metric = modules.get(about["plain"]["metric_attribute"] or "")
        if about["value"] is None and not isinstance(metric, Metric):
            continue
        results[key] = _made(trainer, about, metric)
    connector = trainer._logger_connector
    connector._first_loop_iter, connector._current_fx = sums["first"], sums["fx"]


def sums_of_ranks(
    own: Mapping[str, Any], all_ranks: Sequence[Mapping[str, Any]], rank: int
) -> dict[str, Any]:
    """Return the sums with which ``rank`` continues an epoch that another number of ranks has begun.

    The first rank gets what all of them had of a value that is reduced over ranks. Metrics of torchmetrics, which
    exchange their own state, cannot be divided: a warning names them.

    Args:
        own: The result of ``sums_of`` that this rank would restore.
        all_ranks: The results of all ranks of the run.
        rank: This rank.
    """
    kept = dict(own["kept"])
    for key, about in own["kept"].items():
        each = [sums["kept"][key] for sums in all_ranks if key in sums["kept"]]
        if about["sync"][0] and about["value"] is not None:
            kept[key] = {**about, **_joined(each, about["reduction"], is_first=rank == 0)}
    metrics = [about["plain"]["name"] for about in kept.values() if about["value"] is None]
    if metrics and rank == 0:
        warnings.warn(
            f"{shown(sorted(metrics))} of this epoch will not count what each process of the run saw once, since"
            " another number of processes continues it. Log numbers instead, with sync_dist=True.",
            stacklevel=2,
        )
    return {**own, "kept": kept}


def _joined(each: Sequence[Mapping[str, Any]], reduction: str, is_first: bool) -> dict[str, Any]:
    """Return the running value, and its weight, of what ``each`` rank has of a value."""
    values = torch.stack([about["value"] for about in each])
    if reduction in ("max", "min"):
        return {"value": values.amax(0) if reduction == "max" else values.amin(0)}
    total = {"value": values.sum(0)}
    if each[0]["batches"] is not None:
        total["batches"] = torch.stack([torch.as_tensor(about["batches"]) for about in each]).sum(0)
    return total if is_first else {name: torch.zeros_like(value) for name, value in total.items()}


def _is_kept(result: _ResultMetric) -> bool:
    meta = result.meta
    return (
        meta.on_epoch and meta.sync.group is None and (result.is_tensor or meta.metric_attribute is not None)
    )


def _about(result: _ResultMetric) -> dict[str, Any]:
    meta = result.meta
    return {
        "plain": {name: getattr(meta, name) for name in PLAIN},
        "reduction": getattr(meta.reduce_fx, "__name__", "mean"),
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "value": result.value if result.is_tensor else None,
        "batches": getattr(result, "cumulated_batch_size", None) if result.is_tensor else None,
        "counts": {name: getattr(result, name) for name in COUNTS},
    }


def _made(trainer: Any, about: Mapping[str, Any], metric: Any) -> _ResultMetric:
    meta = _Metadata(**about["plain"], reduce_fx=getattr(torch, about["reduction"]))
    should, rank_zero_only = about["sync"]
    meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    is_tensor = about["value"] is not None
    result = _ResultMetric(meta, is_tensor)
    result.value = about["value"] if is_tensor else metric
    if about["batches"] is not None:
        result.cumulated_batch_size = about["batches"]
    for name, value in about["counts"].items():
        setattr(result, name, value)
    return result.to(trainer.strategy.root_device)
