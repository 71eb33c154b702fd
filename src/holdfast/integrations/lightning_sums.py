"""Saves and restores Lightning's running sums of values logged per epoch, which callbacks and schedules monitor.

Lightning saves none of them, because it begins an epoch anew. A sum is stored with its reduction and the way it is
logged: both follow from the call of ``log``, which may not come again in the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric

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
