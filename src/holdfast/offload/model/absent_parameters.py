"""Parameters of a streamed embedding or head while they are not on the device.

A model may ask them for device, dtype and shape, which are those of the compute copy. Any computation with them is
refused: their values are elsewhere, and kernels would read other memory, or a gradient would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelNotSupported
from ..memory.block_states import BlockState, ParameterEntry
from .blocks import install


class AbsentParameter(nn.Parameter):
    """A parameter that can be described and not used."""

    full_name: str

    @classmethod
    def of(cls, member: ParameterEntry, device: torch.device) -> AbsentParameter:
        """Return a stand-in for ``member``, of one element's memory."""
        one = torch.empty((), dtype=member.copy_dtype, device=device)
        made = cls(one.expand(member.shape), member.trained)
        made.full_name = member.name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        name = next((leaf.full_name for leaf in leaves if isinstance(leaf, cls)), "")
        raise ModelNotSupported(
            f"the model uses {name} where it is not on the device. A streamed embedding is used by one call before the"
            " blocks, and what is registered after the blocks is used after them. Give"
            ' embedding_and_head="resident".'
        )


_DESCRIBING = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__, Tensor.layout.__get__, Tensor.is_leaf.__get__, Tensor.grad.__get__,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__, Tensor.is_cuda.__get__, Tensor.is_cpu.__get__, Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.numel, torch.numel, Tensor.is_floating_point, torch.is_floating_point,
    Tensor.__len__, Tensor.element_size, Tensor.is_complex, torch.is_complex, Tensor.get_device,
}  # fmt: skip


class AbsentParameters:
    """The stand-ins for the parameters of some units."""

    def __init__(self, units: Sequence[BlockState], device: torch.device) -> None:
        self._members = [member for unit in units for member in unit.members]
        self._made = {member.name: AbsentParameter.of(member, device) for member in self._members}

    def stand_in(self, member: ParameterEntry) -> nn.Parameter:
        """Return what the places of ``member`` hold while it is not on the device."""
        return self._made.get(member.name, member.owned.captured.parameter)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the stand-ins into the model inside the context, and the model's own parameters back on exit."""
        try:
            for member in self._members:
                install(member.owned, self._made[member.name])
            yield
        finally:
            for member in self._members:
                install(member.owned, member.owned.captured.parameter)
