"""Linear layers that torchao has quantised to int8, computed by torch.

torchao keeps such a weight in an object without memory of its own, around a tensor of values and one of scales. In the
files of a folder these are tensors of their own. An open layer has them as frozen parameters, under the names of the
files, and computes what torchao's weight-only product does, on any device: with one scale for each row, the product of
the values is scaled; with scales of groups within a row, the weight is unpacked first. What it keeps for the backward
pass is packed.

torchao is not needed. Opened by ``models.quantised_weights``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...state.capture import AS_STORED
from .quantised_layers import OpenLayer

VALUES, SCALE, ZERO_POINT = "_weight_qdata", "_weight_scale", "_weight_zero_point"
"""The names of a layer's tensors. Zero points are zero, and kept because they are in the files."""
GROUP_DTYPE = torch.bfloat16
"""The dtype that weights with scales of groups are rounded to, as torchao does for a model in this dtype."""


class OpenInt8(OpenLayer, nn.Linear):
    """A linear layer of int8 values with a scale for all of them, for each row, or for each group within a row."""

    packed = VALUES

    def close(self) -> None:
        """Become an ordinary linear layer, whose weight is set next."""
        for name in (VALUES, SCALE, ZERO_POINT):
            self._parameters.pop(name, None)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def give_back(self) -> None:
        """Stay open: torchao has no layer of its own, and this one computes the same."""

    def library_weight(self, weight: Any) -> torch.Tensor:
        """Return the unpacked weight in fp32, for PEFT, which creates adapters of its dtype."""
        return self.unpacked_from([weight.data, self._part(SCALE)])

    def parts(self) -> list[nn.Parameter]:
        return [self._parameters[VALUES], self._parameters[SCALE]]

    def unpacked_from(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        weight, scale = values
        return unpacked_int8(weight, scale, torch.float32)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        dtype, device = input.dtype, input.device.type
        if torch.is_autocast_enabled(device):  # torchao's product would be cast as any other
            input = input.to(torch.get_autocast_dtype(device))
        made: torch.Tensor = _Int8Linear.apply(input, self._parameters[VALUES], self._parameters[SCALE])  # type: ignore
        if (bias := self._parameters["bias"]) is not None:
            made = made + bias
        return made.to(dtype)


def open_int8(module: nn.Linear, tensors: Mapping[str, torch.Tensor]) -> None:
    """Turn a linear layer on ``meta`` into an open one of int8 values.

    Args:
        module: The layer.
        tensors: Its tensors by their names in the files: VALUES and SCALE, perhaps ZERO_POINT.

    Raises ``ValueError`` for tensors of other dtypes or shapes than the layer's.
    """
    shape, values, scale = (module.out_features, module.in_features), tensors[VALUES], tensors[SCALE]
    if values.dtype != torch.int8 or values.shape != shape:
        raise ValueError(f"values {[*values.shape]} in {values.dtype}, not {[*shape]} in int8")
    is_grid = scale.numel() > 0 and scale.dim() == 2 and scale.shape[0] == shape[0]
    fits = scale.numel() == 1 or (is_grid and shape[1] % scale.shape[1] == 0)
    if not fits or not scale.is_floating_point():
        raise ValueError(f"scales {[*scale.shape]} in {scale.dtype} for values {[*shape]}")
    del module._parameters["weight"]
    module.__class__ = OpenInt8
    for name in (VALUES, SCALE, ZERO_POINT):
        if name in tensors:
            part = nn.Parameter(tensors[name].to("meta"), requires_grad=False)
            setattr(part, AS_STORED, values.numel() if name == VALUES else 0)
            module._parameters[name] = part


class _Int8Linear(torch.autograd.Function):
    """A product with int8 values and their scales, in the dtype of the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore
        ctx.save_for_backward(values, scale)
        rows = x.reshape(-1, x.shape[-1])
        if _has_groups(scale):
            made = rows.mm(_rounded(values, scale, x.dtype).t())
        else:
            made = rows.mm(values.to(x.dtype).t()) * scale.to(x.dtype).flatten()
        return made.reshape(*x.shape[:-1], len(values))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        if not ctx.needs_input_grad[0]:
            return None, None, None
        values, scale = ctx.saved_tensors
        rows, dtype = gradient.reshape(-1, gradient.shape[-1]), gradient.dtype
        if _has_groups(scale):
            made = rows.mm(_rounded(values, scale, dtype))
        else:
            made = (rows * scale.to(dtype).flatten()).mm(values.to(dtype))
        return made.reshape(*gradient.shape[:-1], values.shape[1]), None, None


def unpacked_int8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values * scale``, computed in fp32 and rounded once to ``dtype``.

    Args:
        values: int8, [rows, columns].
        scale: One value; or [rows, groups], each for the columns of a group.
        dtype: Dtype of the result.
    """
    grid = scale.to(torch.float32).reshape(1, 1) if scale.numel() == 1 else scale.to(torch.float32)
    grouped = values.to(torch.float32).unflatten(1, (grid.shape[1], -1))
    return grouped.mul_(grid[:, :, None]).flatten(1).to(dtype)


def _has_groups(scale: torch.Tensor) -> bool:
    return scale.dim() == 2 and scale.shape[1] > 1


def _rounded(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return unpacked_int8(values, scale, GROUP_DTYPE).to(dtype)
