"""The base of this library's optimizers: ordinary ``torch.optim`` optimizers that declare their state beforehand.

``forms`` gives names, shapes and dtypes of the tensors for a parameter of some shape. The engine uses them to lay out a
block's file before anything is computed, and to slice state with its parameter. Each parameter is updated by itself,
with the same bits in any order of parameters; DTensors are refused. The host optimizer describes torch's own optimizers
by the same ``Slots``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..errors import OptimizerNotSupported
from ..state.layout.regions import is_distributed
from ..state.tensor_entries import SEED, STEP

State = dict[str, torch.Tensor]
"""The optimizer state of one parameter, by name."""
Group = Mapping[str, Any]
"""A parameter group: its hyper-parameters by name."""


class ShapedStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose state starts as zeros of known ``forms``, which ``update`` changes in place.

    Each parameter is updated by itself, with the same bits in any order of parameters.
    """

    cut: ClassVar[bool]
    """True if an update of a slice equals the slice of the update, for slices at multiples of 4096 elements."""

    @staticmethod
    @abstractmethod
    def forms(group: Group, shape: tuple[int, ...]) -> Slots:
        """Return the state that is kept for a parameter of ``shape`` in ``group``."""

    @abstractmethod
    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        """Do one step for one parameter, in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do one step for every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                self._refuse(param)
                state = self.state[param]
                slots = self.forms(group, tuple(param.shape))
                if not slots.names <= state.keys():
                    state.update({**slots.zeros(param.device), **state})
                self.update(param, param.grad, state, group)
        return loss

    def _refuse(self, param: torch.Tensor) -> None:
        name = type(self).__name__
        if param.grad is not None and param.grad.is_sparse:
            raise OptimizerNotSupported(
                f"{name} does not take sparse gradients. Use embeddings with sparse=False."
            )
        if is_distributed(param):
            raise OptimizerNotSupported(
                f"{name} does not take parameters that are sharded over ranks (DTensor, here of {tuple(param.shape)}):"
                " its blocks and matrices are those of whole tensors. Use DistributedDataParallel, or AdamW of torch."
            )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state dict as torch does, but keep dtypes: torch would cast every tensor to the parameter's."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for param, number in zip(params, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype != self.state[param][name].dtype:
                    self.state[param][name] = value.to(param.device if value.dim() else "cpu", copy=True)


@dataclass(frozen=True)
class Form:
    """A tensor of an optimizer's state.

    Where updates are sliced, it has one entry for ``every`` so many elements of the parameter, and a last one for the
    rest. Otherwise its shape is free.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    every: int = 1


@dataclass(frozen=True)
class Slots:
    """The state that an optimizer keeps for one parameter: tensors, and scalars by their dtype."""

    tensors: Mapping[str, Form]
    scalars: Mapping[str, torch.dtype] = field(default_factory=dict)
    master_bits: int = 32
    """Bits that an update leaves in an fp32 parameter: 24 if the 8 lowest are zeros."""

    @property
    def names(self) -> set[str]:
        return {*self.tensors, *self.scalars}

    def zeros(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the whole state as zeros; scalars are in host memory."""
        made = {
            name: torch.zeros(form.shape, dtype=form.dtype, device=device)
            for name, form in self.tensors.items()
        }
        return made | {
            name: torch.zeros((), dtype=dtype, device="cpu") for name, dtype in self.scalars.items()
        }


def master_bits_of(group: Group) -> int:
    """Return the bits of the masters of a parameter group; 32 for an optimizer without the option."""
    return group.get("master_bits", 32)


def anew(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that remains of ``held`` when optimizer state begins anew: a seed, if there was one."""
    return {STEP: torch.tensor(0.0, device="cpu"), SEED: held[SEED]} if SEED in held else {}


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the result of ``closure``, called with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
