"""Capture: what a model and its optimizer hold, by name.

Names are the model's own with wrapper prefixes stripped. Optimizer parameters are matched to model
parameters by object, so groups may be built in any way; an unknown one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..errors import OptimizerNotSupported

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

TO_NAME = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
FROM_NAME = {name: dtype for dtype, name in TO_NAME.items()}


@dataclass(frozen=True, eq=False)
class CapturedParameter:
    """One parameter of the model. ``group`` is the index of its optimizer group, None if it has none.

    ``names`` are all the places it is known by; the first is its name. It is trained when it requires
    grad and the optimizer knows it, at the time of the capture; otherwise it is frozen.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    group: int | None
    requires_grad: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def trained(self) -> bool:
        return self.group is not None and self.requires_grad

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)


BufferPlace = tuple[nn.Module, str]
"""A module, and the name under which it holds a buffer."""


@dataclass(frozen=True)
class Captured:
    """Parameters in the model's order, each once, and where each persistent buffer is: a module may rebind it."""

    parameters: tuple[CapturedParameter, ...]
    buffers: dict[str, BufferPlace]


def plain_name(name: str) -> str:
    """``name`` without the prefixes that wrappers add.

    >>> plain_name("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace("." + wrapper, ".").removeprefix(wrapper)
    return name


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> Captured:
    """Parameters, buffers and groups of ``model`` and ``optimizer``.

    Raises ``OptimizerNotSupported`` when the optimizer holds a tensor that is no parameter of the model.
    """
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
        parameters[id(parameter)] = parameter
    for index, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if id(p) not in parameters:
                raise OptimizerNotSupported(
                    f"parameter {position} of optimizer group {index}, shape {tuple(p.shape)}, is not a parameter "
                    "of the model. Build the optimizer from model.parameters() of the very model you pass."
                )
    return Captured(
        tuple(
            CapturedParameter(tuple(names[i]), p, group_of.get(i), p.requires_grad)
            for i, p in parameters.items()
        ),
        persistent_buffers(model),
    )


def persistent_buffers(model: nn.Module) -> dict[str, BufferPlace]:
    """Where the buffers are that a ``state_dict`` would hold, by plain name."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[plain_name(f"{prefix}.{name}" if prefix else name)] = (module, name)
    return found


def buffer_at(place: BufferPlace) -> torch.Tensor:
    """The buffer that is there now."""
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None, f"{type(module).__name__}.{name} was a buffer and is None now"
    return buffer
