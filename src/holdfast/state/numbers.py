"""Numbers: the elements of any type as NumPy numbers, with torch's help only for 8-bit floats."""

from __future__ import annotations

import numpy as np

from .tensor_entries import TORCH_NAMES


def values_of(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return the elements of ``dtype`` whose bytes are ``data``, with exact values.

    bfloat16 becomes float32, 8-bit floats become float64.

    >>> values_of(np.array([0x80, 0x3F], np.uint8), "BF16")
    array([1.], dtype=float32)
    """
    if dtype == "BF16":
        return (data.view("<u2").astype("<u4") << 16).view("<f4")
    if dtype.startswith("F8"):
        import torch

        return torch.from_numpy(data).view(getattr(torch, TORCH_NAMES[dtype])).double().numpy()
    return data.view("u1" if dtype == "BOOL" else TORCH_NAMES[dtype])
