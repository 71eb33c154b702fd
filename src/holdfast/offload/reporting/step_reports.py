"""The events of an engine: what a run will take, what a step did, and what moved.

Bytes are those that really moved, counted by the queue and the device, so that a report can compare them with the
schedule. Called by the engine. Bytes, seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ... import accelerators
from ..loss_scaling import mean_of
from ..model.microbatches import OwnCall
from ..runtime import Runtime, Step
from ..setup.preflight import Preflight
from ..setup.process_settings import process_bytes
from ..setup.step_planning import RunPlan

Traffic = dict[tuple[str, str], int]
"""Bytes moved, by (lane, kind of operation)."""


def traffic(run: Runtime) -> Traffic:
    """Return the bytes moved since the run was built."""
    moved = dict(run.moved)
    for (direction, kind, _), count in run.store.queue.counters().items():
        key = (f"ssd_{direction}", kind)
        moved[key] = moved.get(key, 0) + count
    return moved


def difference(now: Traffic, before: Traffic) -> Traffic:
    """Return the bytes moved since ``before``."""
    return {key: count - before.get(key, 0) for key, count in now.items()}


def by_lane(moved: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Return ``moved`` grouped as in an event: by lane, and within a lane by kind of operation.

    >>> by_lane({("ssd_read", "load_state"): 4096, ("upload", "upload_params"): 0})
    {'ssd_read': {'load_state': 4096}}
    """
    found: dict[str, dict[str, int]] = {}
    for (lane, kind), count in sorted(moved.items()):
        if count:
            found.setdefault(lane, {})[kind] = count
    return found


def mean_loss(step: Step) -> float:
    """Return the step's loss, as the micro-batches of all ranks are weighted.

    For a zeroth-order step it is the mean of both of its streams.
    """
    if step.delta is not None:
        return sum(step.mean_losses()) / 2
    return mean_of([loss for loss, _ in step.losses], [weight for _, weight in step.losses])


def engine_event(run: Runtime, plan: RunPlan, preflight: Preflight, first_step: int) -> dict[str, Any]:
    """Return the fields of the event for an engine that begins after ``first_step``."""
    memory = plan.memory
    return {
        "first_step": first_step,
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "directory": preflight.directory,
        "device": str(run.device.torch_device),
        "unified": run.device.unified,
        "blocks": len(run.blocks),
        "block_names": [preflight.block_names[0], preflight.block_names[-1]],
        "parameters": preflight.parameters,
        "streamed_parameters": preflight.streamed_parameters,
        "state_bytes": preflight.state_bytes,
        "host_budget": preflight.host_budget,
        "device_budget": preflight.device_budget,
        "host_bytes_predicted": preflight.host_bytes_predicted,
        "device_bytes_predicted": preflight.device_bytes_predicted,
        "process_bytes": plan.held_bytes,
        "on_host": plan.placement.shares,
        "memory_predicted": memory and {place: memory.at(place) for place in ("host", "device")},
    }


def step_event(
    run: Runtime, step: Step, steps_done: int, tokens: int, seconds: float, moved: Traffic
) -> dict[str, Any]:
    """Return the fields of the event for a step that is over.

    ``tokens`` counts those of all ranks; ``moved`` is this rank's traffic since the event of the step before.
    """
    event = {
        "step": steps_done,
        "loss": mean_loss(step),
        "grad_norm": step.total_norm,
        "seconds": seconds,
        "tokens": tokens,
        "learning_rate": [group["lr"] for group in step.hyper.groups] if step.hyper else [],
        "durable_step": run.durable_step,
        "read_bytes": sum(n for (lane, _), n in moved.items() if lane == "ssd_read"),
        "written_bytes": sum(n for (lane, _), n in moved.items() if lane == "ssd_write"),
        "host_bytes": process_bytes(),
        "skipped": step.reason if step.skipped else None,
        "left_out": sorted(step.left_out) or None,
        "loss_scale": step.loss_scale and step.loss_scale.scale,
        "micro_batches": step.shape.micro_batches,
        "commit": step.shape.commit,
        "moved": by_lane(moved),
        "buffers": dict(run.residency.pool.most_by_kind),
    }
    if accelerators.is_accelerator(run.device.torch_device):
        event["device_bytes"] = accelerators.most_bytes(run.device.torch_device)
        event["pinned_bytes"] = run.residency.pool.pinned_bytes
    return event


def count_tokens(micro_batches: Sequence[Any]) -> int:
    """Return the number of elements of the first integer tensor of each micro-batch, summed."""
    return sum(map(_count_tokens, micro_batches))


def _count_tokens(batch: Any) -> int:
    batch = batch.inputs if isinstance(batch, OwnCall) else batch
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((v.numel() for v in values if isinstance(v, torch.Tensor) and not v.is_floating_point()), 0)
