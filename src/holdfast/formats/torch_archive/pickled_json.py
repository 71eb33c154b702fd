"""The conversion of pickled objects to JSON, in the form of ``state.encoding``; an object becomes its arguments.

Nothing that a pickle names is imported or called. Tensors up to a limit are stored by value; larger ones are left out
and listed. Called by the readers of formats that hold values in pickles.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from math import prod
from typing import Any

import numpy as np

from ...errors import BadInput, Damaged
from ...quantities import MiB
from ...state.encoding import tensor_json
from ..fragment_reads import check_sum
from ..source import MOST_EXPANDED
from .archives import Archive
from .distributed_tensors import is_distributed
from .pickles import Key, PickledObject, Tensor

MOST_BEYOND = 16 * MiB
"""Limit for the bytes of tensors, counted each time that they are held, beyond the archive's own size."""
NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
"""NumPy's names of the number types that Python has as well."""


class Plain:
    """The converter for one archive.

    For tensors longer than ``longest`` bytes it writes shape and dtype alone and notes their place in ``left_out``.
    """

    def __init__(self, archive: Archive, longest: int | None = None) -> None:
        self._archive, self._longest = archive, longest
        self._room = archive.nbytes + MOST_BEYOND
        self.left_out: list[str] = []

    def __call__(self, value: Any, where: str = "") -> Any:
        """Return ``value`` as JSON.

        Raises ``Damaged`` if a tensor in it is damaged, ``BadInput`` for a distributed one.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, Key):
            return self(value.value, where)
        value = _bytes_in(value)
        if isinstance(value, PickledObject) and value.name.endswith(".multiarray.scalar"):
            return self._scalar(value, where)
        if isinstance(value, bytes | bytearray):
            return {"__bytes__": base64.b64encode(value).decode()}
        if isinstance(value, list | tuple):
            made = [self(item, f"{where}[{place}]") for place, item in enumerate(value)]
            return made if isinstance(value, list) else {"__tuple__": made}
        if isinstance(value, Counter):
            return {"__counter__": self(dict(value), where)}
        if isinstance(value, dict):
            plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
            items = [[self(key, where), self(item, f"{where}.{key}")] for key, item in value.items()]
            return dict(items) if plain else {"__dict__": items}
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        if is_distributed(value):
            raise BadInput(
                f"{self._archive.path} holds one rank's part of {where}, where only whole values are read. Save"
                " it as .full_tensor()."
            )
        if isinstance(value, set | frozenset):
            items = sorted((self(item, where) for item in value), key=json.dumps)
            return {"__object__": type(value).__name__, "args": [items]}
        if not isinstance(value, PickledObject):
            return {"__object__": type(value).__name__, "args": [str(value)[:1000]]}
        given = {"args": list(value.args), "fields": value.fields, "items": value.items}
        parts = {name: self(part, f"{where}.{name}") for name, part in given.items() if part}
        return {"__object__": value.name, **parts}

    def _scalar(self, value: PickledObject, where: str) -> Any:
        """Return a NumPy number as Python's; for a dtype that Python has no number for, the object."""
        kind, data = (*value.args, None, None)[:2]
        name, order = _dtype_of(kind)
        if name not in NUMBERS:
            return self._object(value, where)
        dtype, data = np.dtype(order + name), _bytes_in(data)
        if not isinstance(data, bytes) or len(data) != dtype.itemsize:
            raise Damaged(f"{self._archive.path}: {where} is a number of {name} and has other bytes")
        return np.frombuffer(data, dtype)[0].item()

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        part = self._archive.part(tensor.storage)
        nbytes = prod(tensor.shape) * part.itemsize
        if self._longest is not None and max(nbytes, part.nbytes) > self._longest:
            self.left_out.append(where)
            return {"__object__": "tensor", "shape": list(tensor.shape), "dtype": part.dtype}
        self._room -= nbytes
        if self._room < 0:
            raise Damaged(
                f"{part.path} holds its tensors so many times over that they are more than {MOST_BEYOND} bytes beyond"
                f" its own {self._archive.nbytes}",
                path=part.path,
            )
        return tensor_json(tensor.storage.dtype, tensor.shape, bytes_of(self._archive, tensor))


def _bytes_in(value: Any) -> Any:
    """Return the bytes that old protocols write as a record; anything else unchanged."""
    if isinstance(value, PickledObject) and value.name == "_codecs.encode" and value.args:
        return str(value.args[0]).encode("latin1")
    return value


def _dtype_of(kind: Any) -> tuple[str, str]:
    """Return name and byte order of a NumPy dtype that is a record; empty names if it is none."""
    if not isinstance(kind, PickledObject) or kind.name != "numpy.dtype" or not kind.args:
        return "", ""
    state = kind.args[-1]
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "<"
    return str(kind.args[0]), ">" if order == ">" else "<"


def bytes_of(archive: Archive, tensor: Tensor) -> bytes:
    """Return the elements of ``tensor`` in C order, after its storage was verified. Raises ``Damaged``."""
    part, elements = archive.part(tensor.storage), prod(tensor.shape)
    spans = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum(max(0, n - 1) * stride for n, stride in spans)
    outside = (
        last >= part.nbytes // part.itemsize or min(*tensor.shape, *tensor.strides, tensor.offset, 0) < 0
    )
    if elements and (outside or elements > max(part.nbytes, MOST_EXPANDED)):
        raise Damaged(f"a tensor {list(tensor.shape)} lies outside of what is stored", path=part.path)
    with open(part.path, "rb") as file:
        file.seek(part.offset)
        data = file.read(part.nbytes)
    check_sum(part, zlib.crc32(data))
    elements = np.frombuffer(data, dtype=f"V{part.itemsize}", count=part.nbytes // part.itemsize)[
        tensor.offset :
    ]
    strides = tuple(stride * part.itemsize for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(elements, tensor.shape, strides).tobytes()


def array_of_pickle(value: Any) -> np.ndarray:
    """Return the NumPy array that ``value`` describes. Raises ``ValueError`` if it describes none of numbers."""
    state = value.args[-1] if isinstance(value, PickledObject) and value.args else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("there is no array")
    _, shape, kind, fortran, data = state
    name, order = _dtype_of(kind)
    data = _bytes_in(data)
    if name not in NUMBERS or not isinstance(data, bytes):
        raise ValueError(f"an array of {name or 'objects'}")
    return np.frombuffer(data, np.dtype(order + name)).reshape(shape, order="F" if fortran else "C").copy()
