"""The parameters and buffers of a model and its optimizer, by name.

Names are the model's own without the prefixes of wrappers around it. Optimizer parameters are matched to model
parameters by object, so groups may be built in any way; an unknown parameter is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import ModelNotSupported, OptimizerNotSupported
from .layout.regions import FlatRange
from .plain_tensors import TO_NAME, repeats_itself, unsupported_kind
from .tensor_entries import WRAPPED

AS_STORED = "_holdfast_as_stored"
"""Attribute of a frozen parameter that is kept, moved and computed with in its own dtype.

Its value is the number of weights that it stands for.
"""
FSDP1_INSIDE = "_fsdp_wrapped_module"
"""The name by which FSDP1's wrapper holds the module inside."""


@dataclass(frozen=True, eq=False)
class CapturedParameter:
    """One parameter of the model.

    ``group`` is the index of its optimizer group, None if it has none. ``names`` are all the places it is known by;
    the first is its name. It is trained when it requires grad and the optimizer knows it, at the time of the capture;
    otherwise it is frozen. Of a parameter that ZeRO has flattened, this process holds only the ``stretch``.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    group: int | None
    requires_grad: bool
    stretch: FlatRange | None = None
    stored: torch.dtype | None = None
    """The dtype in which a source has the values of a parameter on ``meta``, if that is known."""

    @cached_property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def trained(self) -> bool:
        return self.group is not None and self.requires_grad

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(self.parameter.shape) if self.stretch is None else self.stretch.whole

    @property
    def as_stored(self) -> bool:
        """True if it is kept and computed with in its own dtype, as the parts of a quantised weight are."""
        return hasattr(self.parameter, AS_STORED)

    @property
    def weights(self) -> int:
        """The number of weights that it stands for: its elements, if it is not packed."""
        return getattr(self.parameter, AS_STORED, self.parameter.numel())

    def held(self) -> torch.Tensor:
        """Return the values that this process holds."""
        return self.parameter.detach()


BufferPlace = tuple[nn.Module, str]
"""A module, and the name under which it holds a buffer."""


@dataclass(frozen=True)
class Captured:
    """The parameters in the model's order, each once, and the place of each persistent buffer.

    Buffers are given by place because a module may rebind them. ``absent`` holds the places of buffers that are None.
    """

    parameters: tuple[CapturedParameter, ...]
    buffers: dict[str, BufferPlace]
    absent: dict[str, BufferPlace]
    passing: dict[str, BufferPlace] = field(default_factory=dict)
    """The places of the buffers that are not persistent."""


def aliases_of(parameters: Iterable[CapturedParameter]) -> dict[str, str]:
    """Return the first name of each tied parameter, by every further name."""
    return {alias: parameter.name for parameter in parameters for alias in parameter.names[1:]}


class PipelineStages(nn.ModuleList):
    """The stages of one model that a rank has under an interleaved pipeline schedule.

    Tensors keep the names of the whole model.
    """


def plain_paths(model: nn.Module) -> dict[str, str]:
    """Return the path of each module without the wrappers on the way, by its real path.

    A wrapper holds one module and nothing else; a module called ``module`` beside others is the model's own.

    >>> plain_paths(nn.DataParallel(nn.Sequential(nn.ReLU())))
    {'': '', 'module': '', 'module.0': '0'}
    """
    paths = {"": ""}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in list(modules)[1:]:
        above, _, name = path.rpartition(".")
        paths[path] = paths[above] if wraps(modules[above], name) else join(paths[above], name)
    return paths


def wraps(module: nn.Module, name: str) -> bool:
    """Return whether ``module`` is a wrapper of its submodule ``name``, whose path leaves the name out."""
    alone = len(module._modules) == 1 and not module._parameters and not module._buffers
    return name in WRAPPED or (name == "module" and alone) or isinstance(module, PipelineStages)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def capture(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Captured:
    """Return the parameters, buffers and groups of ``model`` and ``optimizer``, if there is one.

    Raises:
        OptimizerNotSupported: The optimizer holds a tensor that is no parameter of the model.
        ModelNotSupported: Something cannot be stored by name and value.
    """
    _refuse_extra_state(model)
    _refuse_fsdp1(model)
    groups = optimizer.param_groups if optimizer is not None else []
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    plain, known = plain_paths(model), _Known()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and is_lazy(parameter):
                raise ModelNotSupported(
                    f"parameter {join(path, name)} has no shape yet. Run the model once before this, or give its layer"
                    " its sizes."
                )
            if parameter is not None:
                _refuse_unsupported_parameter(join(path, name), parameter)
                known.add(join(plain[path], name), join(path, name), parameter)
                names.setdefault(id(parameter), []).append(join(plain[path], name))
                parameters[id(parameter)] = parameter
    for index, group in enumerate(groups):
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
        *_persistent_buffers(model, plain, known),
    )


def _persistent_buffers(
    model: nn.Module, plain: dict[str, str], known: _Known
) -> tuple[dict[str, BufferPlace], dict[str, BufferPlace], dict[str, BufferPlace]]:
    """Return the places of the buffers of a ``state_dict``, of those that are None, and of the non-persistent ones.

    All are by plain name.
    """
    found: dict[str, BufferPlace] = {}
    absent: dict[str, BufferPlace] = {}
    passing: dict[str, BufferPlace] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise ModelNotSupported(
                    f"buffer {join(path, name)} is on meta, so it has no values. Build the model in "
                    'holdfast.empty_parameters() instead of torch.device("meta"): it leaves buffers real.'
                )
            if name in module._non_persistent_buffers_set:
                known_as = join(plain[path], name)
                # several stages of a pipeline may have a buffer of this name: later ones keep their real path
                passing[join(path, name) if known_as in passing else known_as] = (module, name)
                continue
            if buffer is not None:
                _refuse_unstorable(join(path, name), buffer)
                known.add(join(plain[path], name), join(path, name), buffer)
            (absent if buffer is None else found)[join(plain[path], name)] = (module, name)
    return found, absent, passing


def _refuse_fsdp1(model: nn.Module) -> None:
    """Raise ``ModelNotSupported`` for a model that FSDP1 wraps, or for the inside of such a wrapper."""
    for path, module in model.named_modules():
        own = module._parameters.items()
        found = [join(path, name) for name, each in own if getattr(each, "_fsdp_flattened", False)]
        if FSDP1_INSIDE in module._modules:
            found = [path or "the model"]
        for where in found:
            raise ModelNotSupported(
                f"{where} is of FullyShardedDataParallel (FSDP1), whose ranks hold parts of flattened parameters. Wrap"
                " the model by fully_shard (FSDP2), or give it without a wrapper. What FSDP1 has saved can be gone on"
                " from: a run of an earlier version as it is, a torch.distributed.checkpoint folder by"
                " resume(source=)."
            )


class _Known:
    """The tensor of each plain name."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[torch.Tensor, str]] = {}

    def add(self, plain: str, name: str, tensor: torch.Tensor) -> None:
        """Register a tensor. Raises ``ModelNotSupported`` if another tensor has this plain name."""
        other, its_name = self._tensors.setdefault(plain, (tensor, name))
        if other is not tensor:
            raise ModelNotSupported(
                f"{its_name} and {name} would both be stored as {plain}, since names are stored without those of "
                "wrappers. Give one of them another name."
            )


def _refuse_extra_state(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ModelNotSupported(
                f"{path or 'the model'} ({type(module).__name__}) keeps state by get_extra_state(), which commits do "
                "not hold. Keep it in buffers: self.register_buffer(name, tensor)."
            )


def storable(buffer: torch.Tensor) -> bool:
    """Return whether commits can hold such a buffer."""
    try:
        _refuse_unstorable("", buffer)
    except ModelNotSupported:
        return False
    return True


def _refuse_unsupported_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raise ``ModelNotSupported`` for a parameter whose value no file can hold, or not so that it could be restored."""
    if kind := unsupported_kind(parameter):
        raise ModelNotSupported(
            f"parameter {name} is {kind}, which commits do not hold. Make it a plain tensor (.to_dense(),"
            f" .dequantize()). If the script makes the same values anew and nothing trains them, keep it as a buffer:"
            f" del module.{name.rpartition('.')[2]}, then module.register_buffer(..., persistent=False)."
        )
    if parameter.dtype not in TO_NAME:
        raise ModelNotSupported(
            f"parameter {name} is {parameter.dtype}, which commits do not hold. Convert it to another type"
            " (torch.view_as_real of complex numbers)."
        )
    if repeats_itself(parameter):
        raise ModelNotSupported(
            f"parameter {name} has several elements that are one in memory (strides {parameter.stride()}), so it cannot"
            " be put back. Make it nn.Parameter(parameter.detach().clone())."
        )


def _refuse_unstorable(name: str, buffer: torch.Tensor) -> None:
    if kind := unsupported_kind(buffer):
        raise ModelNotSupported(
            f"buffer {name} is {kind}, which commits do not hold. Register it with persistent=False if the model makes"
            " it anew, or register the plain tensors that it is made of (indices() and values() of a sparse one)."
        )
    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        raise ModelNotSupported(
            f"buffer {name} is expanded: several of its elements are one in memory, so it cannot be put back. Register"
            " it as buffer.clone(), or with persistent=False."
        )
    if buffer.dtype not in TO_NAME:
        raise ModelNotSupported(
            f"buffer {name} is {buffer.dtype}, which commits do not hold. Register it with persistent=False if the "
            "model makes it anew, or keep it as another type (torch.view_as_real of complex numbers)."
        )


def buffer_at(place: BufferPlace) -> torch.Tensor:
    """Return the buffer that is at ``place`` now."""
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None, f"{type(module).__name__}.{name} was a buffer and is None now"
    return buffer


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for a tensor of inference mode, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version
