"""Atoms: the tensors of a training state in consolidated form.

An atom is named by the model's own fully-qualified name and a slot (``param``, ``exp_avg``, ``step``,
``buffer``, ...). Shapes are global; dtypes are spelled as in safetensors. ``param`` is the fp32 master
where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element, by safetensors name: all that a payload file holds."""


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
