"""A script's model as the engine of an offloaded trainer or loop needs it, and its weights as scripts save them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...offload.engine import Engine


def weights_of(engine: Engine, model: Any, keep: bool = True) -> dict[str, torch.Tensor]:
    """Return the weights in the dtypes of ``model``, in host memory; of one with adapters, what PEFT saves of it.

    A process that does not ``keep`` them gets none. Collective: every process must call this.
    """
    values = engine.state_dict(trained=hasattr(model, "peft_config"), keep=keep)
    for each in engine.held.captured.parameters:  # one by one, so that no two copies of all exist
        if each.name in values:
            values |= dict.fromkeys(each.names, values[each.name].to(each.parameter.dtype))
    return values


def precision_of(model: Any, mixed: bool) -> str:
    """Return the dtype to compute in: bf16 if the script has asked for it (``mixed``) or loaded the model so."""
    short = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return "bf16" if mixed or short else "fp32"


def switch_off_checkpointing(model: Any) -> None:
    """Switch off activation checkpointing, which would call blocks again in the backward pass."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False


def do_nothing(*_: Any, **__: Any) -> None:
    """Take the place of a method whose work is the engine's."""


def left_to_the_engine(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for an optimizer that calls ``step``; schedules take it for one that they have wrapped."""

    def method(optimizer: Any, closure: Any = None) -> Any:
        return step(closure)

    method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return method
