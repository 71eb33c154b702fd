"""Encoding: what the progress of a training holds, as plain JSON and back, and that of several ranks as one.

Tensors are base64. There is no pickle, so an object whose state is code is refused by name.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import BadInput
from .atoms import TORCH_NAMES

ARRAYS = {
    np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8")
}
"""What arrays may be of: what torch has too."""

_NAMES = {theirs: name for name, theirs in TORCH_NAMES.items()}


def encode(value: Any, where: str = "progress") -> Any:
    """``value`` as JSON-able data. Raises ``BadInput`` naming the first thing that cannot be stored."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.newbyteorder("=") not in ARRAYS:
            raise _refused(where, f"{type(value).__name__} of {array.dtype}")
        native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        key = "__array__" if isinstance(value, np.ndarray) else "__number__"
        return {key: tensor_json(_NAMES[native.dtype.name], native.shape, native.tobytes())}
    if type(value) is tuple:
        return {"__tuple__": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Counter):
        return {"__counter__": encode(dict(value), where)}
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        items = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
        return dict(items) if plain else {"__dict__": items}
    return _encode_of_torch(value, where)


def _encode_of_torch(value: Any, where: str) -> Any:
    import torch  # here alone, so that verbs which read a progress begin without it

    from .dtypes import TO_NAME
    from .plain import host_bytes, odd_kind

    if isinstance(value, torch.Size):
        return encode(tuple(value), where)
    if not isinstance(value, torch.Tensor):
        raise _refused(where, type(value).__name__)
    if value.dtype not in TO_NAME:
        raise _refused(where, f"tensor of {value.dtype}")
    if kind := "on meta" if value.is_meta else odd_kind(value):
        raise _refused(where, f"tensor that is {kind}")
    return tensor_json(TO_NAME[value.dtype], value.shape, host_bytes(value).tobytes())


def tensor_json(dtype: str, shape: Sequence[int], data: bytes) -> dict[str, Any]:
    """A tensor by value."""
    return {"__tensor__": dtype, "shape": list(shape), "bytes": base64.b64encode(data).decode()}


def _refused(where: str, what: str) -> BadInput:
    return BadInput(
        f"{where} holds a {what}, which cannot be stored by value. Leave it out of state_dict() and rebuild it on"
        " resume, or make plain numbers, lists and dicts of it."
    )


def decode(value: Any) -> Any:
    """The inverse of ``encode``."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        import torch

        from .dtypes import FROM_NAME

        dtype, raw = FROM_NAME[value["__tensor__"]], bytearray(base64.b64decode(value["bytes"]))
        made = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return made.reshape(value["shape"])
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        return decode(value["__array__"]).numpy()
    if "__number__" in value:
        return decode(value["__number__"]).numpy()[()]
    if "__counter__" in value:
        return Counter(decode(value["__counter__"]))
    if "__tuple__" in value:
        return tuple(decode(item) for item in value["__tuple__"])
    if "__dict__" in value:
        return {decode(key): decode(item) for key, item in value["__dict__"]}
    return {key: decode(item) for key, item in value.items()}


def joined(progress: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """That of several ranks which trained together: the first one's, with what each knew of its own parameters alone,
    since each stores some, and each stage of a pipeline has its own. ``ranks`` is how many they were."""
    first: dict[str, Any] = {"ranks": len(progress), **progress[0]}
    if all("values" in each for each in progress):
        first["values"] = {
            name: values for each in reversed(progress) for name, values in each["values"].items()
        }
    if aliases := {alias: name for each in progress for alias, name in each.get("aliases", {}).items()}:
        first["aliases"] = aliases
    if all("replay" in each for each in progress):
        first["replay"] = {
            **first["replay"],
            "parameters": joined_members([e["replay"]["parameters"] for e in progress]),
        }
    return first


def joined_members(ranks: Sequence[list[list[list[str]]]]) -> list[list[list[str]]]:
    """By optimizer and group the names of the parameters of all ``ranks``, each once."""
    members = [[dict.fromkeys(names) for names in groups] for groups in ranks[0]]
    for other in ranks[1:]:
        for mine, theirs in zip(members, other, strict=True):
            for known, names in zip(mine, theirs, strict=True):
                known.update(dict.fromkeys(names))
    return [[list(names) for names in groups] for groups in members]
