"""Closures that training frameworks pass to ``optimizer.step`` to compute loss and gradients in it.

A log record holds the gradients of one computation. So a step can be recorded if its closure is called once, before
anything is updated: the gradients are computed before the step, and the optimizer gets a closure that only returns the
loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...errors import BadInput
from ...state.encoding import decode, encode
from ...state.plain_tensors import TO_NAME

WAY_OUT = (
    "Take an optimizer whose step() needs no closure and computes the gradients in the loop, such as"
    " torch.optim.AdamW, or keep whole states now and then with torch.save."
)


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``BadInput`` for an optimizer whose ``step`` requires a closure, such as LBFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    if parameter is None or parameter.default is not inspect.Parameter.empty:
        return
    kind = type(optimizer).__name__
    out_of_core = " MeZO is durable out of core (holdfast.offload)." if kind == "MeZO" else ""
    raise BadInput(
        f"{kind}.step() needs a closure, which computes several gradients in a step, and a record holds those of one"
        f" computation: its steps cannot be recorded. {WAY_OUT}{out_of_core}"
    )


class ComputedClosure:
    """A closure of one step of ``optimizer`` that returns the loss which ``closure`` computed before the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> None:
        self._optimizer, self._called = optimizer, False
        with torch.enable_grad():
            self.loss = closure()
        self._versions = self._versions_now()

    def __call__(self) -> Any:
        """Return the loss. Raises ``BadInput`` where the gradients are not those that the closure had computed."""
        if self._called or self._versions != self._versions_now():
            kind = type(self._optimizer).__name__
            raise BadInput(
                f"{kind} calls its closure more than once in a step, or after it has changed parameters, so that a step"
                f" consumes several gradients, and a record holds those of one. {WAY_OUT}"
            )
        self._called = True
        return self.loss

    def about(self) -> Any:
        """Return as JSON what a replay needs: nothing for torch's own optimizers, which ignore the loss."""
        if type(self._optimizer).__module__.startswith("torch.optim."):
            return None
        if not isinstance(self.loss, torch.Tensor) or self.loss.dtype not in TO_NAME:
            return {"loss": None}
        return {"loss": encode(self.loss.detach(), "the loss")}

    def _versions_now(self) -> list[int]:
        return [p._version for group in self._optimizer.param_groups for p in group["params"]]


def closure_again(about: dict[str, Any]) -> Callable[[], Any]:
    """Return a closure for the replay of a step. ``about`` describes the step's own closure."""
    loss = decode(about["loss"])
    return lambda: loss
