"""The kind of an optimizer class: how it updates a parameter, and so how it runs out of core.

*Elementwise* optimizers of torch update each element by itself, and can be sliced wherever torch's kernels give the
same bits. *Whole* ones need a whole tensor at once. Optimizers of this library (``ShapedStateOptimizer``) declare which
they are. All others are refused, because nothing shows that their bits would be those of a plain loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from ..errors import OptimizerNotSupported
from .adamw import AdamW8bit, AdamWBF16
from .declared_state import Form, ShapedStateOptimizer, Slots
from .low_rank import Apollo, Grass
from .mezo import MeZO

ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes of ``torch.optim`` whose update of an element depends on that element alone."""


def _muon(shape: tuple[int, ...]) -> Slots:
    return Slots({"momentum_buffer": Form(shape)})


def _adafactor(shape: tuple[int, ...]) -> Slots:
    if len(shape) < 2:
        return Slots({"variance": Form(shape)}, {"step": torch.float32})
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return Slots({"row_var": Form(rows), "col_var": Form(columns)}, {"step": torch.float32})


WHOLE: dict[str, Callable[[tuple[int, ...]], Slots]] = {"Adafactor": _adafactor, "Muon": _muon}
"""Classes of ``torch.optim`` whose update needs one whole tensor and no other, with the state they keep."""
REFUSED = {
    "LBFGS": "it evaluates the model several times within one step. Use AdamW or SGD.",
    "SparseAdam": "it takes sparse gradients, which are not summed. Use Adam, and embeddings with sparse=False.",
}
"""Classes of ``torch.optim`` that are refused, with the reason and an alternative."""
FORMED = (AdamW8bit, AdamWBF16, Apollo, Grass)
"""Optimizer classes of this library."""
IMPLEMENTATION = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a parameter group that hold its parameters or choose the implementation; they are not copied from
a source.
"""
ELEMENTS = 10_000
"""The number of elements of the parameter that optimizers are tried on."""


@dataclass(frozen=True)
class Kind:
    """The way in which the parameters of one group are updated.

    ``makes_state`` is true if the first update must create the state itself instead of finding zeros.
    """

    of: type[torch.optim.Optimizer]
    cut: bool
    makes_state: bool
    slots: Callable[[tuple[int, ...]], Slots]

    @property
    def temporary_bytes(self) -> int:
        """Extra bytes of an update for each element of a tensor that is not sliced.

        Measured: up to 12.7 for Muon, 5.0 for APOLLO, 4.0 for Adafactor, 4.0 for Grass.
        """
        return 0 if self.cut else 13 if self.of is torch.optim.Muon else 5


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` is known to update every element by itself."""
    return _of_torch(type(optimizer)) in ELEMENTWISE


def kind_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Kind:
    """Return the kind of ``optimizer`` for ``group``, whose hyper-parameters are arguments of its constructor.

    Raises ``OptimizerNotSupported`` if it cannot be run out of core, or gives other bits on slices here.
    """
    cls = type(optimizer)
    name = _of_torch(cls)
    if isinstance(optimizer, MeZO):  # no update by a gradient could be tried
        return Kind(cls, True, False, lambda shape: optimizer.forms(group, shape))
    if isinstance(optimizer, ShapedStateOptimizer):
        kind = Kind(cls, optimizer.cut, False, lambda shape: optimizer.forms(group, shape))
    elif name in WHOLE:
        kind = Kind(cls, False, True, WHOLE[name])
    elif name in ELEMENTWISE:
        kind = Kind(cls, True, True, _found(cls, group))
    else:
        raise OptimizerNotSupported(_refusal(cls, name))
    (_check_slices if kind.cut else _check_whole)(kind, group)
    return kind


def class_named(name: str) -> type[torch.optim.Optimizer] | None:
    """Return the class that ``name_of_class`` names; None unless torch or this library has it and it updates
    parameters singly. Earlier runs name this library's classes by modules that are no more.
    """
    module, _, own = name.rpartition(".")
    if module.startswith("torch.optim") and (own in ELEMENTWISE or own in WHOLE):
        return getattr(torch.optim, own)
    return next((cls for cls in FORMED if module.startswith("holdfast.") and cls.__name__ == own), None)


def name_of_class(cls: type[torch.optim.Optimizer]) -> str:
    """Return the name of an optimizer's class as a run stores it: a module's, but ``holdfast.optim`` for our own."""
    return f"holdfast.optim.{cls.__name__}" if cls in FORMED else f"{cls.__module__}.{cls.__qualname__}"


@cache
def arguments_of(cls: type[torch.optim.Optimizer]) -> frozenset[str]:
    """Return the names of the constructor's arguments, except for the parameters."""
    return frozenset(inspect.signature(cls.__init__).parameters) - {"self", "params"}


def kept_slots(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: int
) -> frozenset[str] | None:
    """Return the state names that an optimizer of this class holds for a parameter of ``dims`` dimensions in ``group``.

    This library's optimizers declare them; one of torch's is tried with a step. None for other classes, or if the trial
    fails.
    """
    kind = type(optimizer)
    if isinstance(optimizer, ShapedStateOptimizer):
        return frozenset(optimizer.forms(group, (2,) * dims).names)
    if not _of_torch(kind):
        return None
    arguments = arguments_of(kind) - IMPLEMENTATION
    parameter = nn.Parameter(torch.ones([2] * dims, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    try:
        private = kind([parameter], **{name: value for name, value in group.items() if name in arguments})
        private.step()
    except Exception:  # any kind: a failed trial tells nothing
        return None
    return frozenset(slot for slot, value in private.state[parameter].items() if value is not None)


def _of_torch(cls: type) -> str:
    """Return the name of a class of ``torch.optim``; empty for others, also if they derive from one."""
    return cls.__name__ if cls.__module__.startswith("torch.optim") else ""


def _refusal(cls: type, name: str) -> str:
    if name in REFUSED:
        return f"{name} cannot be run out of core: {REFUSED[name]}"
    own = f"{cls.__name__} of {cls.__module__.partition('.')[0]}"  # not torch's AdamW
    return (
        f"{own} is not known to be elementwise: its update of a slice may differ from the slice of its update."
        f" Elementwise ones are {', '.join(ELEMENTWISE)} of torch.optim; {' and '.join(WHOLE)} of it are run tensor by"
        " tensor, and so are those of holdfast.optim."
    )


def _found(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> Callable[[tuple[int, ...]], Slots]:
    """Return the state of an elementwise optimizer, found by stepping a small parameter.

    Raises ``OptimizerNotSupported`` for state that is neither a scalar nor one value for each element.
    """
    state = _trial(cls, group, [slice(0, ELEMENTS)])
    del state["param"]
    odd = [name for name, value in state.items() if value.numel() not in (1, ELEMENTS)]
    if odd:
        raise OptimizerNotSupported(
            f"{cls.__name__} keeps {odd}, neither a scalar nor one value per element."
        )
    tensors = [name for name, value in state.items() if value.numel() > 1]
    scalars = {name: value.dtype for name, value in state.items() if value.numel() == 1}
    return lambda shape: Slots({name: Form(shape) for name in tensors}, scalars)


def _check_slices(kind: Kind, group: Mapping[str, Any]) -> None:
    """Raise ``OptimizerNotSupported`` unless updates of slices equal the update of the whole."""
    whole = _trial(kind.of, group, [slice(0, ELEMENTS)])
    sliced = _trial(kind.of, group, [slice(0, 4096), slice(4096, ELEMENTS)])
    for name, value in whole.items():
        if not torch.equal(value, sliced[name]):
            raise OptimizerNotSupported(
                f"{kind.of.__name__} with {group} gives other bits in {name!r} on slices of a tensor than on "
                "the whole, so it cannot be run out of core. Use another optimizer or other options."
            )


def _trial(
    cls: type[torch.optim.Optimizer], group: Mapping[str, Any], slices: list[slice]
) -> dict[str, torch.Tensor]:
    """Return parameter and state after three steps from fixed values, computed slice by slice."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(ELEMENTS, generator=generator, device="cpu")
    grads = [torch.randn(ELEMENTS, generator=generator, device="cpu") for _ in range(3)]
    results: list[dict[str, torch.Tensor]] = []
    for part in slices:
        param = nn.Parameter(start[part].clone())
        private = cls([param], **group)
        for grad in grads:
            param.grad = grad[part].clone()
            private.step()
        state = {k: v for k, v in private.state[param].items() if isinstance(v, torch.Tensor)}
        results.append({"param": param.detach(), **state})
    return {
        name: torch.cat([r[name] for r in results]) if value.dim() else value
        for name, value in results[0].items()
    }


def _check_whole(kind: Kind, group: Mapping[str, Any]) -> None:
    """Raise ``OptimizerNotSupported`` unless the optimizer keeps the expected state; torch's may change."""
    param = nn.Parameter(torch.ones(5, 7, device="cpu"))
    param.grad = torch.ones(5, 7, device="cpu")
    private = kind.of([param], **group)
    private.step()
    slots = kind.slots((5, 7))
    wanted = {name: (form.shape, form.dtype) for name, form in slots.tensors.items()}
    wanted |= {name: ((), dtype) for name, dtype in slots.scalars.items()}
    kept = {k: (tuple(v.shape), v.dtype) for k, v in private.state[param].items() if v is not None}
    if kept != wanted:
        raise OptimizerNotSupported(
            f"{kind.of.__name__} of torch {torch.__version__} keeps {kept} for a matrix of 5 x 7, where {wanted} is"
            " known. Use another optimizer, or the version of torch that Holdfast was made with."
        )
