"""Reports: what a step did, for its event, and what moved."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Any

import torch

from .process import process_bytes
from .runtime import Runtime, Step

Traffic = dict[tuple[str, str], int]
"""Bytes moved, by (lane, kind of operation)."""


def traffic(run: Runtime) -> Traffic:
    """What has moved since the run was built."""
    moved = dict(run.moved)
    for (direction, kind, _), count in run.store.queue.counters().items():
        key = (f"ssd_{direction}", kind)
        moved[key] = moved.get(key, 0) + count
    return moved


def mean_loss(step: Step) -> float:
    """The step's loss, as its micro-batches are weighted."""
    losses = [batch.loss or 0.0 for batch in step.micro_batches]
    weights = [batch.weight for batch in step.micro_batches if batch.weight is not None]
    return sum(map(mul, losses, weights)) if weights else sum(losses) / len(losses)


def step_event(
    run: Runtime, step: Step, steps_done: int, micro_batches: Sequence[Any], seconds: float, before: Traffic
) -> dict[str, Any]:
    """What an event says of a step that is over; ``before`` is the traffic up to its beginning."""
    moved = {key: count - before.get(key, 0) for key, count in traffic(run).items()}
    return {
        "step": steps_done,
        "loss": mean_loss(step),
        "grad_norm": step.total_norm,
        "seconds": seconds,
        "tokens": sum(map(_count_tokens, micro_batches)),
        "learning_rate": [group["lr"] for group in step.hyper.groups] if step.hyper else [],
        "durable_step": run.durable_step,
        "read_bytes": sum(n for (lane, _), n in moved.items() if lane == "ssd_read"),
        "written_bytes": sum(n for (lane, _), n in moved.items() if lane == "ssd_write"),
        "host_bytes": process_bytes(),
        "skipped": step.reason if step.skipped else None,
    }


def _count_tokens(batch: Any) -> int:
    """Elements of a micro-batch's first integer tensor."""
    values = batch.values() if isinstance(batch, dict) else batch
    return next((v.numel() for v in values if isinstance(v, torch.Tensor) and not v.is_floating_point()), 0)
