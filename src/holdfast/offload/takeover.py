"""Taking a model over: its own parameters leave memory, and what stays on the device is put in their place."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..errors import BadInput
from ..state.capture import Captured
from .blocks import install
from .runtime import Runtime


def take_over(run: Runtime, model: Captured) -> None:
    """From here on the model computes with what ``run`` holds. Raises ``BadInput`` if it cannot be emptied."""
    _empty_originals(model)
    _install_resident(run)
    run.device.take_buffers(run.model)


def _install_resident(run: Runtime) -> None:
    """Give the prologue and epilogue parameters to compute with, whose gradients are summed in fp32."""
    for member in run.resident.members:
        view = run.device.upload(run.resident.copy_view(run.resident_copy, member))
        parameter = run.residency.leaf(run.resident, member, view, lambda: run.residency.resident_grads)
        run.resident_leaves[member.name] = parameter
        install(member.owned, parameter)


def _empty_originals(model: Captured) -> None:
    """Move the model's own parameters to ``meta``: their values live in the store now. The objects stay the
    same, so the optimizer's groups still refer to them. Either all are moved or none.

    Raises ``BadInput`` naming a parameter that something else holds on to.
    """
    moved: list[tuple[nn.Parameter, nn.Parameter]] = []
    for captured in model.parameters:
        parameter = captured.parameter
        if parameter.is_meta:
            continue
        parameter.grad = None
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        try:
            torch.utils.swap_tensors(parameter, empty)
        except RuntimeError as error:
            for original, real in moved:
                torch.utils.swap_tensors(original, real)
            raise BadInput(
                f"parameter {captured.name} cannot be moved out of memory, because something else holds on to it: "
                f"{error}. Let go of earlier outputs of the model, and of weak references to its parameters."
            ) from error
        moved.append((parameter, empty))


def switch_off_cache(model: nn.Module) -> None:
    """A key-value cache is an input that changes; training does not need it."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
        warnings.warn(
            "model.config.use_cache was switched off: out-of-core blocks keep no cache", stacklevel=3
        )


def give_back(model: Captured, values: dict[str, torch.Tensor]) -> None:
    """Give those of the model's own parameters that ``values`` names their trained values, in their own dtype."""
    for captured in model.parameters:
        if captured.name in values:
            parameter = captured.parameter
            value = values[captured.name].to(parameter.dtype)
            real = nn.Parameter(value, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, real)
