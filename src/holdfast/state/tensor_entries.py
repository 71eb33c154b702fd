"""Tensor entries: the tensors of a training state in consolidated form, as every format of the library names them.

An entry is named by the model's own fully-qualified name and a slot (``param``, ``exp_avg``, ``step``, ``buffer``,
...). Shapes are global; dtypes are spelled as in safetensors. ``param`` is the fp32 master where there is one. The
constants name the slots with a meaning of their own. ``values_of`` reads elements of any dtype as NumPy numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from .layout.regions import Region

_TYPES = {
    "BOOL": (1, "bool"), "U8": (1, "uint8"), "I8": (1, "int8"), "I16": (2, "int16"), "U16": (2, "uint16"),
    "I32": (4, "int32"), "U32": (4, "uint32"), "I64": (8, "int64"), "U64": (8, "uint64"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "F32": (4, "float32"), "F64": (8, "float64"), "C64": (8, "complex64"),
    "F8_E8M0": (1, "float8_e8m0fnu"), "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
}  # fmt: skip
DTYPE_BYTES = {name: nbytes for name, (nbytes, _) in _TYPES.items()}
"""Bytes of one element by safetensors name, for every type that a payload file holds."""
TORCH_NAMES = {name: theirs for name, (_, theirs) in _TYPES.items()}
"""torch's name of each type, by safetensors name."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""The types that are converted into one another on request."""
STEP = "step"
"""The scalar slot that counts updates.

An engine keeps it for every trained parameter, even if the optimizer does not.
"""
SEED = "seed"
"""The scalar slot of a parameter's own seed."""
RESIDUAL = "residual"
"""The slot of the error feedback: what lossy gradients have not passed on yet."""
SUBSPACE = "subspace"
"""The slot of the start value of PowerSGD's next approximation, written by earlier versions."""
CARRIED = (RESIDUAL, SUBSPACE)
"""Slots that one gradient leaves for the next, which no log record advances."""
PENDING = "mezo"
"""The key, in the progress of a MeZO commit, of the last update, which the commit's files lack."""
QUANTISED = "__quantised__"
"""The key, among a parameter's values, of the class of optimizer state that is stored in parts, and its arguments."""
QUANTISED_CLASSES = {
    "torchao.optim.subclass_8bit.OptimState8bit": ("signed", "dtype"),
    "torchao.optim.subclass_4bit.OptimState4bit": ("signed", None, "dtype"),
    "torchao.optim.subclass_fp8.OptimStateFp8": ("dtype",),
}
"""torchao's classes of such state, with the arguments of each beside its tensors; None stands for the shape."""
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The names by which torch's wrappers hold the module inside; other wrappers call it ``module``."""


@dataclass(frozen=True, order=True)
class TensorEntry:
    """One tensor entry of the state.

    >>> TensorEntry("head.weight", "param", (256, 64), "F32").nbytes
    65536
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def key(self) -> str:
        """The key of the tensor in a payload file."""
        return f"{self.name}/{self.slot}"

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize

    def to_json(self) -> dict[str, Any]:
        """Return the entry as an index describes it, without its fragments."""
        return {"name": self.name, "slot": self.slot, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> TensorEntry:
        return cls(described["name"], described["slot"], tuple(described["shape"]), described["dtype"])


def is_quantised_class(value: Any) -> bool:
    """Return whether ``value``, as JSON, is the class of optimizer state that is stored in parts."""
    return isinstance(value, dict) and QUANTISED in value


def quantised_in(values: Mapping[str, Any]) -> list[str]:
    """Return the slots of a parameter whose state is stored in parts; ``values`` are its values, as JSON."""
    return [slot for slot, value in values.items() if is_quantised_class(value)]


def fragment(unit: str, key: str, box: Region) -> dict[str, Any]:
    """Return a fragment as an index describes it.

    The region ``box`` of an entry is all of the tensor ``key`` of a unit's file.
    """
    local = Region.whole(box.shape)
    return {"unit": unit, "key": key, "global": box.to_json(), "local": local.to_json()}


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
