"""The one way from a tensor to its bytes, and the test whether a tensor's value can be stored.

A plain tensor has strides, and no class or transform that computes instead of torch. A direct view as bytes would need
a stride of 1 even for a single element, and would ignore conjugate and negative views, so everything that writes, sends
or digests a tensor takes its bytes from here. Dtypes are named as in safetensors.
"""

from __future__ import annotations

import numpy as np
import torch

from .tensor_entries import TORCH_NAMES

_DEFAULT_DISPATCH = torch.Tensor.__torch_dispatch__


def unsupported_kind(tensor: torch.Tensor) -> str | None:
    """Return a description of ``tensor`` if its value is no plain array of elements, else None.

    >>> unsupported_kind(torch.eye(2).to_sparse())
    'sparse (torch.sparse_coo)'
    """
    if type(tensor).__torch_dispatch__ is not _DEFAULT_DISPATCH:
        if hasattr(tensor, "to_local"):  # the local part of a DTensor may be of any kind
            return unsupported_kind(tensor._local_tensor) if hasattr(tensor, "_local_tensor") else None
        return "nested" if tensor.is_nested else f"of the tensor class {type(tensor).__name__}"
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return f"{'of the layout' if tensor.is_mkldnn else 'sparse'} ({tensor.layout})"
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype})"
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "of a transform of torch.func"
    return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether ``unsupported_kind`` is None for ``tensor``, in a fraction of its time.

    Transforms of torch.func are not noticed.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is _DEFAULT_DISPATCH and tensor.layout is torch.strided:
        return not (tensor.is_nested or tensor.is_quantized)
    return unsupported_kind(tensor) is None


def repeats_itself(tensor: torch.Tensor) -> bool:
    """Return whether several elements of ``tensor`` are one in memory, as in an expanded tensor or a sliding window."""
    if tensor.numel() < 2 or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return False
    reach, is_sure = 0, True
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride == 0:
            return True
        is_sure &= stride > reach
        reach += stride * (size - 1)
    if is_sure:
        return False
    taken = torch.zeros(reach + 1, dtype=torch.bool, device="cpu")
    taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(taken.sum()) < tensor.numel()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor`` in C order, flat, on its device.

    The result shares the tensor's memory if that is in C order, else it is a copy.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # contiguous() keeps any stride along a dimension of one element
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of ``tensor`` in C order, flat, on the host."""
    return flat_bytes(tensor.detach().cpu()).numpy()


def tensor_of(raw: torch.Tensor, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Return the tensor whose bytes ``flat_bytes`` returned, in the memory of ``raw``."""
    return raw.view(dtype).view(shape)


FROM_NAME: dict[str, torch.dtype] = {name: getattr(torch, theirs) for name, theirs in TORCH_NAMES.items()}
TO_NAME = {dtype: name for name, dtype in FROM_NAME.items()}
