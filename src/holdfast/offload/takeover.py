"""Taking a model over: its own parameters leave memory, and what stays on the device is put in their place.

Every parameter says meanwhile who has taken it, so that nobody else takes an empty one for a fresh one.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import BadInput
from ..state.capture import Captured
from .blocks import install
from .runtime import Runtime

MARK = "_holdfast_taken"


@dataclass
class Taken:
    """Set on a parameter, as ``MARK``: the run that it was handed over to."""

    directory: str
    open: bool = True
    """An engine is training it. If not, and it is still on ``meta``, the directory alone has its values."""


def refuse_open(model: nn.Module) -> None:
    """Raises ``BadInput`` naming a parameter that another engine is training."""
    for name, parameter in model.named_parameters():
        taken = getattr(parameter, MARK, None)
        if taken is not None and taken.open:
            raise BadInput(
                f"parameter {name} is being trained by another engine, in {taken.directory}. Close that engine first."
            )


def refuse_emptied(model: Captured) -> None:
    """Raises ``BadInput`` naming a parameter that an engine has emptied: a fresh run would start without it."""
    for captured in model.parameters:
        taken = getattr(captured.parameter, MARK, None)
        if taken is not None:
            raise BadInput(
                f"parameter {captured.name} has no values: an engine that failed had taken them to {taken.directory}. "
                "Resume that directory, or build the model anew."
            )


def refuse_held(model: Captured) -> None:
    """Raises ``BadInput`` naming a parameter that cannot be emptied, because something else holds on to it."""
    for captured in model.parameters:
        parameter = captured.parameter
        held = weakref.getweakrefcount(parameter) or parameter._use_count() > 2  # type: ignore[attr-defined]
        if held and not parameter.is_meta:
            raise _held(captured.name)


def _held(name: str) -> BadInput:
    return BadInput(
        f"parameter {name} cannot be moved out of memory, because something else holds on to it. Let go of earlier "
        "outputs of the model, and of weak references to its parameters (nn.LSTM, nn.GRU and nn.RNN hold some)."
    )


def install_resident(run: Runtime, taken: Taken) -> None:
    """Give the prologue and epilogue parameters to compute with, whose gradients are summed in fp32."""
    for member in run.resident.members:
        view = run.device.upload(run.resident.copy_view(run.resident_copy, member))
        parameter = run.residency.leaf(run.resident, member, view, lambda: run.residency.resident_grads)
        setattr(parameter, MARK, taken)
        run.resident_leaves[member.name] = parameter
        install(member.owned, parameter)


def empty_originals(model: Captured, taken: Taken) -> None:
    """Move the model's own parameters to ``meta``: their values live in the store now. The objects stay the
    same, so the optimizer's groups still refer to them, and keep their attributes. Either all are moved or none.

    Raises ``BadInput`` naming a parameter that something else holds on to.
    """
    moved: list[tuple[nn.Parameter, nn.Parameter]] = []
    for captured in model.parameters:
        parameter = captured.parameter
        if parameter.is_meta:
            setattr(parameter, MARK, taken)
            continue
        parameter.grad = None
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        empty.__dict__.update(parameter.__dict__, **{MARK: taken})
        try:
            torch.utils.swap_tensors(parameter, empty)
        except BaseException as error:
            for original, real in moved:
                torch.utils.swap_tensors(original, real)
            raise _held(captured.name) if isinstance(error, RuntimeError) else error from error
        moved.append((parameter, empty))


def switch_off_cache(model: nn.Module) -> None:
    """A key-value cache is an input that changes; training does not need it."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
        warnings.warn(
            "model.config.use_cache was switched off: out-of-core blocks keep no cache", stacklevel=3
        )


def let_go(model: Captured, taken: Taken, were_real: set[str]) -> None:
    """The engine is closed. Parameters that were on ``meta`` before are as they were."""
    taken.open = False
    for captured in model.parameters:
        if captured.name not in were_real:
            captured.parameter.__dict__.pop(MARK, None)


def give_back(model: Captured, values: dict[str, torch.Tensor]) -> None:
    """Give those of the model's own parameters that ``values`` names their trained values, in their own dtype."""
    for captured in model.parameters:
        if captured.name in values:
            parameter = captured.parameter
            value = values[captured.name].to(parameter.dtype)
            real = nn.Parameter(value, requires_grad=parameter.requires_grad)
            real.__dict__.update({k: v for k, v in parameter.__dict__.items() if k != MARK})
            torch.utils.swap_tensors(parameter, real)
