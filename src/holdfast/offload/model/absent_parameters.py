"""Parameters that are not in memory. They can be described, and nothing can be computed with them.

A unit's parameters are on the device while the unit computes. Code outside of the unit must not use them: kernels take
parameters on ``meta`` and read other memory, and gradients would be lost.
These objects therefore raise an error with the parameter's name:

1. Stand-ins, which the places in the modules hold in a step or an evaluation while the unit does not compute. Their
   device and dtype are those of the compute copy. Those of experts that are read one by one stay while it computes.
2. The script's own parameters, from the takeover of the model to its release. The places hold them between steps, and
   the optimizer's groups and the script's variables at all times. They are on ``meta``. They may be changed in place,
   which the next step refuses (``model_values``).
3. The parameters of a pass that is over: their memory belongs to the next unit.

The class of an existing parameter is changed in place, so that it remains the same object. Used by the
engine's runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import ModelNotSupported
from ..memory.block_states import BlockState
from ..memory.expert_reader import ExpertReader
from ..memory.parameter_shards import ParameterEntry
from .blocks import Blocks, install

BETWEEN = "between steps"
AS_TENSORS = torch._C.DisableTorchFunctionSubclass
"""Context in which this thread may use absent parameters as what they are: tensors without values."""


@dataclass
class Place:
    """The code that runs at present, as a text for error messages."""

    text: str = BETWEEN
    gradients: str = ""
    """The way out for code that reads gradients, which the engine has; empty if reading one returns None."""


@dataclass(frozen=True, eq=False)
class Absence:
    """Why a parameter is not in memory."""

    name: str
    why: str
    """A sentence with the way out."""
    place: Place

    def refuse_gradient(self) -> None:
        """Raise ``ModelNotSupported`` if gradients must not be read."""
        if self.place.gradients:
            raise ModelNotSupported(
                f"the gradient of {self.name} was read, and the engine has it: {self.place.gradients}"
            )

    def refusal(self) -> ModelNotSupported:
        """Return the error about a use of the parameter at the present place."""
        return ModelNotSupported(
            f"parameter {self.name} was used {self.place.text}: {self.why} engine.state_dict() has all values, between"
            " steps."
        )


class AbsentParameter(nn.Parameter):
    """A parameter that can be described and not used."""

    absence: Absence

    @classmethod
    def make_absent(cls, parameter: nn.Parameter, absence: Absence) -> None:
        """Change the class of ``parameter`` to this one; ``absence`` says why it cannot be used."""
        parameter.__dict__["absence"] = absence
        parameter.__class__ = cls

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        with AS_TENSORS():
            if func == _GRADIENT:
                args[0].absence.refuse_gradient()
            if func in _DESCRIBING:
                return func(*args, **(kwargs or {}))
            leaves = pytree.tree_leaves((args, kwargs))
            absent = next(leaf for leaf in leaves if isinstance(leaf, cls))
            if leaves[0] is absent and absent.is_meta and _is_in_place(func):
                return func(*args, **(kwargs or {}))
            if func in _SAME:
                alias = func(*args, **(kwargs or {})).as_subclass(cls)
                alias.__dict__.update(absent.__dict__)  # of experts, also what reads their rows
                return alias
        raise absent.absence.refusal()

    def __reduce_ex__(self, proto: Any) -> Any:
        raise self.absence.refusal()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AbsentParameter({self.absence.name}, {[*self.shape]}, {self.dtype})"


class RoutedParameter(AbsentParameter):
    """A parameter of experts: ``parameter[expert]`` has the rows of one expert, while its block computes."""

    rows: Callable[[int], torch.Tensor | None]
    """Returns the rows of an expert; None if they cannot be had now."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], cls):
            expert = _whole_number(args[1])
            rows = None if expert is None else args[0].rows(expert)
            if rows is not None:
                return rows
        return super().__torch_function__(func, types, args, kwargs)


def _whole_number(index: Any) -> int | None:
    """Return an index as a number, if it is one: not a slice, a mask or several."""
    if isinstance(index, Tensor):
        is_number = index.dim() == 0 and not (index.is_floating_point() or index.dtype == torch.bool)
        return int(index) if is_number else None
    return index if type(index) is int else None


def _is_in_place(func: Any) -> bool:
    """Return whether a function of torch changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = {"__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
_DESCRIBING = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf", "grad", "grad_fn", "is_meta",
            "is_cuda", "is_cpu", "is_xpu", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes",
            "retains_grad",
        )
    ),
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, torch.numel, Tensor.nelement, Tensor.__len__,
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.element_size,
    Tensor.get_device, Tensor.__format__,
}  # fmt: skip
_GRADIENT = Tensor.grad.__get__  # type: ignore[attr-defined]
_SAME = {Tensor.data.__get__, Tensor.detach, torch.detach}  # type: ignore[attr-defined]
"""Functions that return the same values without a gradient; their result is absent too."""


class AbsentParameters:
    """The parameters of an engine's units while they are not in memory."""

    def __init__(
        self,
        units: Sequence[BlockState],
        resident: BlockState,
        blocks: Blocks,
        device: torch.device,
        experts: ExpertReader,
    ) -> None:
        """Make the stand-ins.

        Args:
            units: The streamed units, those of embedding and head included.
            resident: The unit that stays on the device.
            blocks: The blocks of the model.
            device: The device that computes.
            experts: The reader of experts that are read one by one.
        """
        self._place = Place()
        self._units, self._last = units, len(blocks.modules) - 1
        self._streamed = [member for unit in units for member in unit.all_members]
        self._members = [*self._streamed, *resident.members]
        self._absences = {m.name: Absence(m.name, _OF_RESIDENT, self._place) for m in resident.members}
        for number, unit in enumerate(units):
            is_block = blocks.embeddings <= number <= self._last
            why = _OF_BLOCK.format(unit=unit.name) if is_block else _OF_ENDS
            self._absences |= {m.name: Absence(m.name, why, self._place) for m in unit.members}
            why = _OF_EXPERTS.format(unit=unit.name)
            self._absences |= {m.name: Absence(m.name, why, self._place) for m in unit.routed}
        dtypes = {member.copy_dtype for member in self._streamed}
        memory = {dtype: _no_value(dtype, device) for dtype in dtypes}
        self._stand_ins: dict[str, nn.Parameter] = {}
        for member in self._streamed:  # all in the memory of one element
            made = nn.Parameter(memory[member.copy_dtype].expand(member.shape), member.trained)
            AbsentParameter.make_absent(made, self._absences[member.name])
            self._stand_ins[member.name] = made
        for number, unit in enumerate(units):
            for member in unit.routed:
                made = self._stand_ins[member.name]
                RoutedParameter.make_absent(made, self._absences[member.name])
                made.__dict__["rows"] = partial(experts.rows, number, member.name)
        self._turned: list[tuple[nn.Parameter, type]] = []

    # Where the model's code is

    def enter(self, block: int) -> None:
        """Note that the code of a block runs from here on."""
        self._place.text = f"in {self._units[block].name}"

    def leave(self, block: int) -> None:
        """Note that the code after a block runs from here on: the code before the first one, if -1."""
        if block < 0:
            self._place.text = f"before {self._units[0].name}"
        else:
            last = ", the last block" if block == self._last else ""
            self._place.text = f"after {self._units[block].name}{last}"

    def enter_backward(self, block: int) -> None:
        """Note that the backward pass of a block runs from here on."""
        self._place.text = f"in the backward pass of {self._units[block].name}"

    # What cannot be used

    def stand_in(self, member: ParameterEntry) -> nn.Parameter:
        """Return what the places of ``member`` hold while its unit does not compute."""
        return self._stand_ins[member.name]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the stand-ins into the model inside the context, and the model's own parameters back on exit."""
        try:
            for member in self._streamed:
                install(member.owned, self._stand_ins[member.name])
            yield
        finally:
            self._place.text = BETWEEN
            for member in self._streamed:
                install(member.owned, member.owned.captured.parameter)

    def refuse_leaves(self, unit: BlockState, leaves: Sequence[nn.Parameter]) -> None:
        """Make the ``leaves`` of a pass that is over absent: their memory is the next unit's."""
        for member, leaf in zip(cycle(unit.members), leaves):
            AbsentParameter.make_absent(leaf, self._absences[member.name])

    def refuse_own(self) -> None:
        """Make the model's own parameters absent, which have no values now. Undone by ``allow_own``."""
        for member in self._members:
            own = member.owned.captured.parameter
            self._turned.append((own, type(own)))
            AbsentParameter.make_absent(own, self._absences[member.name])

    def refuse_gradients(self, way_out: str) -> None:
        """Make reading a gradient of a parameter that is not in memory an error, which ends with ``way_out``."""
        self._place.gradients = way_out

    def allow_own(self) -> None:
        """Make the model's own parameters what they were before."""
        for own, kind in self._turned:
            if isinstance(own, AbsentParameter):
                own.__class__ = kind
                del own.__dict__["absence"]
        self._turned.clear()


def _no_value(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a scalar that makes a loss NaN if it is read all the same, by a function of ``torch.jit`` for example."""
    made = torch.zeros((), dtype=dtype, device=device)
    return made.fill_(math.nan) if dtype.is_floating_point else made


_OF_BLOCK = (
    "its values are on the device only while {unit} computes. Use it in that block, whose output can bring the result"
    " along, or leave the block out of blocks=, and it stays on the device."
)
_OF_EXPERTS = (
    "its experts are read one by one, where {unit} takes parameter[expert]. Leave expert_slots out of the placement,"
    " and the block has all of its experts while it computes."
)
_OF_ENDS = (
    "a streamed embedding is used by one call before the blocks, and what is registered after the blocks is used after"
    ' them. Give embedding_and_head="resident".'
)
_OF_RESIDENT = (
    "it was taken from the model before offload(), and has no values in training. Read it from the model where it is"
    " needed, which holds another object now."
)
