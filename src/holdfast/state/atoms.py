"""Atoms: the tensors of a training state in consolidated form.

An atom is named by the model's own fully-qualified name and a slot (``param``, ``exp_avg``, ``step``,
``buffer``, ...). Shapes are global; dtypes are spelled as in safetensors. ``param`` is the fp32 master
where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from .boxes import Box

_TYPES = {
    "BOOL": (1, "bool"), "U8": (1, "uint8"), "I8": (1, "int8"), "I16": (2, "int16"), "U16": (2, "uint16"),
    "I32": (4, "int32"), "U32": (4, "uint32"), "I64": (8, "int64"), "U64": (8, "uint64"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "F32": (4, "float32"), "F64": (8, "float64"), "C64": (8, "complex64"),
    "F8_E8M0": (1, "float8_e8m0fnu"), "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
}  # fmt: skip
DTYPE_BYTES = {name: nbytes for name, (nbytes, _) in _TYPES.items()}
"""Bytes of one element, by safetensors name: all that a payload file holds."""
TORCH_NAMES = {name: theirs for name, (_, theirs) in _TYPES.items()}
"""What torch calls them."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Those that are converted into one another, where that is asked for."""

STEP = "step"
"""The scalar slot that counts updates; an engine keeps it for every trained parameter, whether the optimizer has it or
not."""
SEED = "seed"
"""The scalar slot of a parameter's own seed."""
RESIDUAL = "residual"
"""The slot of what lossy gradients have not given yet."""
SUBSPACE = "subspace"
"""The slot of what PowerSGD, of an earlier version, began the next approximation of a gradient with."""
CARRIED = (RESIDUAL, SUBSPACE)
"""Slots of what one gradient leaves for the next, which no record brings forward."""

PENDING = "mezo"
"""In the progress of a commit of MeZO: the last update, which its files do not have yet."""

WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What wrappers of torch call the module inside; others call it ``module``."""


@dataclass(frozen=True, order=True)
class Atom:
    """One tensor of the state.

    >>> Atom("head.weight", "param", (256, 64), "F32").nbytes
    65536
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> str:
        """Its key in a payload file."""
        return f"{self.name}/{self.slot}"

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize

    def to_json(self) -> dict[str, Any]:
        """As an index describes it, but for its fragments."""
        return {"name": self.name, "slot": self.slot, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Atom:
        return cls(described["name"], described["slot"], tuple(described["shape"]), described["dtype"])


def fragment(unit: str, key: str, box: Box) -> dict[str, Any]:
    """As an index describes it: the region ``box`` of an atom is all of the tensor ``key`` of a unit's file."""
    local = Box.whole(box.shape)
    return {"unit": unit, "key": key, "global": box.to_json(), "local": local.to_json()}
