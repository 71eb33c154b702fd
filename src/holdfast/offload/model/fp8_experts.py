"""Experts in fp8, all of a layer in one tensor: computed with one unpacked expert at a time.

transformers holds them in a module of its own, whose kernels are those of its fp8 layers. An open module computes each
expert that tokens were sent to as an open fp8 layer does, with the module's own loop over experts, whatever
implementation is configured. Its parameters are frozen, and have the names that the module gives them.

transformers is not imported here. Opened by ``models.quantised_weights``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...state.capture import AS_STORED
from .quantised_layers import FP8_LIBRARY, UnpackedLinear, unpacked

SCALES_END = "_scale_inv"
"""The end of the name of the scales of a parameter: gate_up_proj has gate_up_proj_scale_inv."""


def is_fp8_experts(module: nn.Module) -> bool:
    """Return whether ``module`` is transformers' module of experts in fp8, and not open."""
    return type(module).__module__ == FP8_LIBRARY and type(module).__name__ == "FP8Experts"


def open_experts(module: Any, found: Mapping[str, torch.Tensor]) -> None:
    """Open a module of experts on ``meta``.

    Args:
        module: The module.
        found: Its tensors in the folder by their names in it, on ``meta``.

    Raises ``ValueError`` for tensors of other dtypes or shapes than the module's, and for tiles that reach over the
    border between gate and up projection.
    """
    tile = module.block_size
    if tile is None or module.intermediate_dim % tile[0]:
        raise ValueError(
            f"tiles of {tile} do not divide {module.intermediate_dim} rows of an expert's projection"
        )
    own = {name: each for name, each in module._parameters.items() if each is not None}
    for name, parameter in own.items():
        tensor, is_scale = found[name], name.endswith(SCALES_END)
        fits = tensor.is_floating_point() if is_scale else tensor.dtype == torch.float8_e4m3fn
        if tensor.shape != parameter.shape or not fits:
            raise ValueError(
                f"{name} {[*tensor.shape]} in {tensor.dtype}, not {[*parameter.shape]} in float8_e4m3fn"
            )
    for name in own:
        made = nn.Parameter(found[name].to("meta"), requires_grad=False)
        setattr(made, AS_STORED, 0 if name.endswith(SCALES_END) else made.numel())
        module._parameters[name] = made
    module.__class__ = _open_class(type(module))


def unpacked_experts(weight: torch.Tensor, scales: torch.Tensor, tile: Any) -> torch.Tensor:
    """Return the weights of all experts of a layer in fp32, from fp8 values [experts, rows, columns]."""
    pairs = zip(weight, scales, strict=True)
    return torch.stack([unpacked(values, each, tile, torch.float32) for values, each in pairs])


@cache
def _open_class(kind: type) -> type:
    return type(kind.__name__, (_OpenExperts, kind), {})


class _OpenExperts:
    """The methods of an open module."""

    _parameters: dict[str, Any]
    block_size: Any
    has_gate: bool
    act_fn: Any
    _apply_gate: Any

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        if isinstance(states, FakeTensor):
            return self._traced(states, chosen, shares)
        loop: Any = inspect.unwrap(type(self).__bases__[1].forward)  # type: ignore[attr-defined]
        return loop(self, states, chosen, shares)

    def _traced(self, states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return a result without values, as if one expert got all tokens: with as many rows as of any experts."""
        names, count = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"), chosen.shape[-1]
        pairs = [(self._parameters[name][0], self._parameters[name + SCALES_END][0]) for name in names]
        made = self.linear(states.repeat_interleave(count, 0), *pairs[0])
        made = self.linear(self._apply_gate(made) if self.has_gate else self.act_fn(made), *pairs[1])
        made = (made * shares.reshape(-1, 1).to(made.dtype)).float().unflatten(0, (-1, count)).sum(1)
        return made.to(states.dtype)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, activation_scale: None = None
    ) -> torch.Tensor:
        return UnpackedLinear.apply(x, weight, scales, None, self.block_size)  # type: ignore[no-any-return]
