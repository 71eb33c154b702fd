"""The encoding of values other than model tensors: plain JSON and back, with the same type and value.

One encoder serves hyper-parameters, optimizer state that is no tensor, schedules, data positions and user state. It
accepts a closed list: a value comes back with the same type and the same value, or it is refused by name when it is
first seen. There is no pickle and nothing is imported, so an object whose state is code is refused.

``joined`` makes the progress of several ranks one. A log record has only the new end of a long text (``shorten``), so
that reading one (``lengthen``) needs all records since the snapshot.
"""

from __future__ import annotations

import base64
import datetime
import enum
import io
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath
from typing import Any

import numpy as np

from ..errors import BadInput
from .tensor_entries import TORCH_NAMES

_NUMPY_NAMES = {**TORCH_NAMES, "C128": "complex128"}
_NUMPY_NAMES = {
    name: theirs for name, theirs in _NUMPY_NAMES.items() if hasattr(np, theirs) or name == "BOOL"
}
ARRAYS = {np.dtype(theirs): name for name, theirs in _NUMPY_NAMES.items()}
"""The NumPy types of arrays and numbers that can be stored, each with its name."""
Known = Callable[[Any], Any]
"""A function that returns JSON for a value that the caller stores itself, such as a parameter by name.

It returns None for all other values.
"""
Resolve = Callable[[dict[str, Any]], Any]
"""The inverse of ``Known``: a function that returns the value of a JSON dict, or None if the dict is not its own."""
_FACTORIES = {kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}
"""The factories that a ``defaultdict`` may have."""
_OF_TORCH = ("dtype", "layout", "memory_format")
"""The kinds of torch constants, each stored by the name that torch gives it."""
_MOST_JSON_INT = 2**63
_STORED_AS_IS = {type(None), bool, float, str}
"""Types whose values are stored as they are."""


def encode(value: Any, where: str = "progress", known: Known | None = None) -> Any:
    """Return ``value`` as JSON-able data.

    Args:
        value: What is to be stored.
        where: Its name in errors.
        known: Asked first about everything that is neither a number, text nor a plain container.

    Raises:
        BadInput: For the first thing in it that would not come back with its own type and value.
    """
    try:
        return _encode(value, where, known)
    except RecursionError as error:
        raise _refused(where, f"{type(value).__name__} that holds itself, or is nested too deep") from error


def _encode(value: Any, where: str, known: Known | None) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is str:
        return value
    if kind is int:
        return value if -_MOST_JSON_INT <= value < _MOST_JSON_INT else {"__int__": hex(value)}
    if kind is list:
        return _encode_items(value, where, known)
    if kind is tuple:
        return {"__tuple__": _encode_items(value, where, known)}
    if kind is dict:
        return _encode_dict(value, where, known)
    if known is not None and (found := known(value)) is not None:
        return found
    if kind in _SCALARS:
        mark, to_json, _ = _SCALARS[kind]
        return {mark: to_json(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(value, where)
    if isinstance(value, enum.Enum):
        return _encode_member(value, where)
    return _encode_container(value, where, known) or _encode_of_torch(value, where)


def _encode_items(items: Any, where: str, known: Known | None) -> list[Any]:
    """Return each item as JSON-able data. Many numbers or texts alone, as an order of samples, are copied at once."""
    kinds = {*map(type, items)}
    is_short = kinds == {int} and min(items) >= -_MOST_JSON_INT and max(items) < _MOST_JSON_INT
    if is_short or kinds <= _STORED_AS_IS:
        return [*items]
    return [_encode(item, f"{where}[{i}]", known) for i, item in enumerate(items)]


def _encode_dict(value: dict, where: str, known: Known | None) -> dict[str, Any]:
    if all(type(key) is str and not key.startswith("__") for key in value):
        return {
            key: item if type(item) in _STORED_AS_IS else _encode(item, f"{where}[{key!r}]", known)
            for key, item in value.items()
        }
    return {"__dict__": _encode_pairs(value, where, known)}


def _encode_pairs(value: dict, where: str, known: Known | None) -> list[list[Any]]:
    return [
        [_encode(key, f"a key of {where}", known), _encode(item, f"{where}[{_said(key)}]", known)]
        for key, item in value.items()
    ]


def _said(key: Any) -> str:
    """Return a key of a dictionary as an error names it; a tensor only by its shape."""
    shape = getattr(key, "shape", None)
    return repr(key) if shape is None else f"a {type(key).__name__} of shape {tuple(shape)}"


def _encode_container(value: Any, where: str, known: Known | None) -> dict[str, Any] | None:
    """Return the JSON of a standard container other than list, tuple and dict; None for other values."""
    kind = type(value)
    if kind is set or kind is frozenset:
        return {f"__{kind.__name__}__": _encode_items(value, where, known)}
    if kind is deque:
        return {"__deque__": _encode_items(value, where, known), "maxlen": value.maxlen}
    if kind is Counter:
        return {"__counter__": _encode(dict(value), where, known)}
    if kind is defaultdict:
        factory = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and _FACTORIES.get(name) is not factory:
            raise _refused(where, f"defaultdict of {name or factory!r}")
        return {"__defaultdict__": name or None, "items": _encode_pairs(value, where, known)}
    if kind is OrderedDict:
        made: dict[str, Any] = {"__ordered__": _encode_pairs(value, where, known)}
        if more := vars(value):  # nn.Module.state_dict() keeps versions in the attributes
            made["attributes"] = _encode(more, f"{where}.__dict__", known)
        return made
    return None


def _encode_array(value: Any, where: str) -> dict[str, Any]:
    native = value.dtype.newbyteorder("=")
    if native not in ARRAYS or not (type(value) is np.ndarray or isinstance(value, np.generic)):
        raise _refused(where, f"{type(value).__name__} of {value.dtype}")
    plain = np.array(value, dtype=native, order="C")
    data = tensor_json(ARRAYS[native], plain.shape, plain.tobytes())
    if isinstance(value, np.generic):
        return {"__number__": data}
    made: dict[str, Any] = {"__array__": data}
    if value.dtype != native:
        made["order"] = value.dtype.byteorder
    if value.flags.f_contiguous and not value.flags.c_contiguous:
        made["fortran"] = True
    return made


def _encode_member(value: enum.Enum, where: str) -> dict[str, Any]:
    kind = type(value)
    name = value.name if value.name in kind.__members__ else None
    found = {"__enum__": [kind.__module__, kind.__qualname__, name]}
    if name is None or _member(found["__enum__"]) is not value:
        raise _refused(
            where, f"member of {kind.__qualname__}, an enumeration that its module does not have by that name"
        )
    return found


def _member(told: Sequence[Any]) -> enum.Enum | None:
    """Return the member of an enumeration in a module that has been imported here; None if there is none."""
    module, path, name = told
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_one = isinstance(found, type) and issubclass(found, enum.Enum)
    return found.__members__.get(name) if is_one else None


def _encode_of_torch(value: Any, where: str) -> Any:
    import torch  # not at the top, so that commands which read a progress start without torch

    if type(value) is torch.Size:
        return {"__size__": list(value)}
    if type(value) is torch.device:
        return {"__device__": str(value)}
    for kind in _OF_TORCH:
        if type(value) is getattr(torch, kind):
            return {"__torch__": [kind, str(value).removeprefix("torch.")]}
    if not isinstance(value, torch.Tensor):
        raise _refused(where, type(value).__name__)
    return _encode_tensor(value, where)


def _encode_tensor(value: Any, where: str) -> dict[str, Any]:
    import torch

    from .plain_tensors import TO_NAME, host_bytes, unsupported_kind

    kind = "on meta" if value.is_meta else unsupported_kind(value)
    if kind is None and type(value) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"of the class {type(value).__name__}"
    if kind:
        raise _refused(where, f"tensor that is {kind}")
    if value.dtype not in TO_NAME:
        raise _refused(where, f"tensor of {value.dtype}")
    held = value.detach().resolve_conj().resolve_neg()
    raw = host_bytes(held).tobytes()
    made = tensor_json(TO_NAME[value.dtype], value.shape, raw)
    if held.stride() != torch.empty(held.shape, device="meta").stride():
        made["strides"] = list(held.stride())
    if type(value) is torch.nn.Parameter:
        made["parameter"] = value.requires_grad
    elif value.requires_grad:
        made["requires_grad"] = True
    return made


def tensor_json(dtype: str, shape: Sequence[int], data: bytes) -> dict[str, Any]:
    """Return the JSON of a tensor by value."""
    return {"__tensor__": dtype, "shape": list(shape), "bytes": base64.b64encode(data).decode()}


def _refused(where: str, what: str) -> BadInput:
    return BadInput(
        f"{where} holds a {what}, which cannot be stored by value. Leave it out and make it anew on resume, or make"
        " plain numbers, tensors, lists and dicts of it."
    )


def decode(value: Any, resolve: Resolve | None = None, strict: bool = True) -> Any:
    """Return the value that ``encode`` was given.

    Args:
        value: The result of ``encode``.
        resolve: Called first for every dict that encodes another value; its result is used unless it is None.
        strict: Whether a member of an enumeration that is not imported here is an error; else its JSON stays.

    Raises:
        BadInput: A member belongs to no enumeration of a module imported here.
    """
    if isinstance(value, list):
        return [decode(item, resolve, strict) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("__"):
        return {key: decode(item, resolve, strict) for key, item in value.items()}
    if resolve is not None and (found := resolve(value)) is not None:
        return found
    if mark in _FROM_SCALARS:
        return _FROM_SCALARS[mark](value[mark])
    if mark in _FROM_JSON:
        return _FROM_JSON[mark](value)
    if mark == "__enum__":
        member = _member(value[mark])
        if member is None and strict:
            raise BadInput(
                "{1} of {0} has no member {2} here: import what defines it first".format(*value[mark])
            )
        return value if member is None else member
    if mark in _FROM_ITEMS:
        return _FROM_ITEMS[mark](value, lambda item: decode(item, resolve, strict))
    return {key: decode(item, resolve, strict) for key, item in value.items()}


def _decode_array(told: dict[str, Any], key: str = "__array__") -> Any:
    data = told[key]
    raw, dtype = bytearray(base64.b64decode(data["bytes"])), np.dtype(_NUMPY_NAMES[data["__tensor__"]])
    made = np.frombuffer(raw, dtype=dtype) if raw else np.empty(0, dtype=dtype)
    made = made.reshape(data["shape"])
    if "order" in told:
        made = made.astype(dtype.newbyteorder(told["order"]))
    return np.asfortranarray(made) if told.get("fortran") else made


def _decode_tensor(told: dict[str, Any]) -> Any:
    import torch

    from .plain_tensors import FROM_NAME

    dtype, raw = FROM_NAME[told["__tensor__"]], bytearray(base64.b64decode(told["bytes"]))
    made = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
    made = made.reshape(told["shape"])
    if "strides" in told:
        made = laid_out(made, told["strides"])
    if "parameter" in told:
        return torch.nn.Parameter(made, requires_grad=told["parameter"])
    return made.requires_grad_() if told.get("requires_grad") else made


def laid_out(tensor: Any, strides: Sequence[int]) -> Any:
    """Return a copy of ``tensor`` with these ``strides``, in elements. Axes of stride 0 have one element in memory."""
    import torch

    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    made[first].copy_(tensor[first])
    return made


def _decode_constant(told: Sequence[str]) -> Any:
    import torch

    kind, name = told
    found = getattr(torch, name)
    if kind not in _OF_TORCH or type(found) is not getattr(torch, kind):
        raise ValueError(f"torch.{name} is no {kind}")
    return found


def _decode_size(told: Sequence[int]) -> Any:
    import torch

    return torch.Size(told)


def _decode_device(told: str) -> Any:
    import torch

    return torch.device(told)


def _decode_ordered(told: dict[str, Any], inner: Callable[[Any], Any]) -> Any:
    made = OrderedDict((inner(key), inner(item)) for key, item in told["__ordered__"])
    vars(made).update(inner(told.get("attributes", {})))
    return made


def _decode_default(told: dict[str, Any], inner: Callable[[Any], Any]) -> Any:
    name = told["__defaultdict__"]
    factory = None if name is None else _FACTORIES[name]
    return defaultdict(factory, [(inner(key), inner(item)) for key, item in told["items"]])


def _from_iso(kind: Any) -> Callable[[Any], Any]:
    def made(told: Any) -> Any:
        found = kind.fromisoformat(told[0])
        return found.replace(fold=1) if told[1] else found

    return made


def _to_iso(value: Any) -> list[Any]:
    zone = value.tzinfo
    if zone is not None and (
        type(zone) is not datetime.timezone
        or repr(type(value).fromisoformat(value.isoformat()).tzinfo) != repr(zone)
    ):
        raise _refused("a time", f"{type(value).__name__} of the time zone {zone!r}")
    return [value.isoformat(), value.fold]


def _plain_numbers(*values: Any) -> list[int | None]:
    for value in values:
        if value is not None and not (type(value) is int and -_MOST_JSON_INT <= value < _MOST_JSON_INT):
            raise _refused("a slice", type(value).__name__)
    return list(values)


def _bytes_io(data: str, position: int) -> io.BytesIO:
    made = io.BytesIO(base64.b64decode(data))
    made.seek(position)
    return made


_SCALARS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("__bytes__", lambda v: base64.b64encode(v).decode(), base64.b64decode),
    bytearray: (
        "__bytearray__",
        lambda v: base64.b64encode(v).decode(),
        lambda t: bytearray(base64.b64decode(t)),
    ),
    complex: ("__complex__", lambda v: [v.real, v.imag], lambda t: complex(*t)),
    range: ("__range__", lambda v: [v.start, v.stop, v.step], lambda t: range(*t)),
    Decimal: ("__decimal__", str, Decimal),
    Fraction: ("__fraction__", str, Fraction),
    PosixPath: ("__path__", str, PosixPath),
    uuid.UUID: ("__uuid__", str, uuid.UUID),
    slice: ("__slice__", lambda v: _plain_numbers(v.start, v.stop, v.step), lambda t: slice(*t)),
    io.BytesIO: (
        "__bytesio__",
        lambda v: [base64.b64encode(v.getbuffer()).decode(), v.tell()],
        lambda t: _bytes_io(*t),
    ),
    datetime.date: ("__date__", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("__time__", _to_iso, _from_iso(datetime.time)),
    datetime.datetime: ("__datetime__", _to_iso, _from_iso(datetime.datetime)),
    datetime.timedelta: (
        "__timedelta__",
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda t: datetime.timedelta(*t),
    ),
}
"""The mark of each type, how it becomes JSON, and how it comes back."""
_FROM_SCALARS: dict[str, Callable[[Any], Any]] = {mark: back for mark, _, back in _SCALARS.values()} | {
    "__int__": lambda told: int(told, 16),
    "__torch__": _decode_constant,
    "__size__": _decode_size,
    "__device__": _decode_device,
}
_FROM_JSON: dict[str, Callable[[dict[str, Any]], Any]] = {
    "__tensor__": _decode_tensor,
    "__array__": _decode_array,
    "__number__": lambda told: _decode_array(told, "__number__")[()],
}
_FROM_ITEMS: dict[str, Callable[[dict[str, Any], Callable[[Any], Any]], Any]] = {
    "__tuple__": lambda told, inner: tuple(inner(told["__tuple__"])),
    "__dict__": lambda told, inner: {inner(key): inner(item) for key, item in told["__dict__"]},
    "__set__": lambda told, inner: set(inner(told["__set__"])),
    "__frozenset__": lambda told, inner: frozenset(inner(told["__frozenset__"])),
    "__deque__": lambda told, inner: deque(inner(told["__deque__"]), told["maxlen"]),
    "__counter__": lambda told, inner: Counter(inner(told["__counter__"])),
    "__ordered__": _decode_ordered,
    "__defaultdict__": _decode_default,
}


def joined(progress: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the progress of several ranks that trained together.

    It is the first rank's, with the values and aliases that each rank knew of its own parameters, since each rank
    stores some and each stage of a pipeline has its own. ``ranks`` is their number.
    """
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
        first["groups"] = joined_groups([e["groups"] for e in progress])
    return first


def joined_members(ranks: Sequence[list[list[list[str]]]]) -> list[list[list[str]]]:
    """Return the parameter names of all ``ranks`` by optimizer and group, each once.

    Ranks with stages of a pipeline may have unlike numbers of either.

    >>> joined_members([[[["a"], ["b"]]], [[["c"]], [["d"]]]])
    [[['a', 'c'], ['b']], [['d']]]
    """
    members: list[list[dict[str, None]]] = []
    for groups_of_rank in ranks:
        members += [[] for _ in groups_of_rank[len(members) :]]
        for known, groups in zip(members, groups_of_rank, strict=False):
            known += [{} for _ in groups[len(known) :]]
            for names, more in zip(known, groups, strict=False):
                names.update(dict.fromkeys(more))
    return [[list(names) for names in groups] for groups in members]


def joined_groups(ranks: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """Return the parameter groups of all ``ranks`` by optimizer: each as the first rank that has it says.

    >>> joined_groups([[["g0", "g1"]], [["other"], ["h0"]]])
    [['g0', 'g1'], ['h0']]
    """
    found: list[list[Any]] = []
    for groups_of_rank in ranks:
        found += [[] for _ in groups_of_rank[len(found) :]]
        for known, groups in zip(found, groups_of_rank, strict=False):
            known += groups[len(known) :]
    return found


LONG_TEXT = 4096
ADDED, TO = "__added__", "to"
"""The keys of a shortened text: its end, and the number of characters before that."""


def shorten(progress: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``progress``, as JSON, with only the new ends of long texts, for the record that follows ``before``.

    A log that a script keeps is the same in every record except for its end, so storing it whole would take the square
    of the run's length. This covers texts of ``LONG_TEXT`` characters or more that are directly in the user state. The
    addition joins the text of the record before, and in the end that of a snapshot, which has all of it.

    ``before`` is whole as well; None means that there is no such record, or that it is unknown.

    >>> before, now = ({"things": {"loader": {"log": text}}} for text in ("a" * 5000, "a" * 5000 + "b"))
    >>> shorten(now, before)
    {'things': {'loader': {'log': {'__added__': 'b', 'to': 5000}}}}
    >>> lengthen([before, shorten(now, before)]) == now
    True
    """
    if before is None or "things" not in progress:
        return progress
    were = before.get("things", {})
    things = {name: _shortened(state, were.get(name)) for name, state in progress["things"].items()}
    return {**progress, "things": things}


def _shortened(state: Any, before: Any) -> Any:
    if not isinstance(state, dict) or not isinstance(before, dict):
        return state
    return {key: _end_of(value, before.get(key)) for key, value in state.items()}


def _end_of(text: Any, before: Any) -> Any:
    both = isinstance(text, str) and isinstance(before, str)
    if both and len(before) >= LONG_TEXT and text.startswith(before) and _has_whole_characters(text):
        return {ADDED: text[len(before) :], TO: len(before)}
    return text


def _has_whole_characters(text: str) -> bool:
    """Return whether ``text`` has no halves of characters.

    JSON gives two such halves back as one character.
    """
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def lengthen(progress: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last ``progress`` as it was before ``shorten``.

    ``progress`` holds those of a snapshot and of all log records after it. Raises ``ValueError`` if these do not
    belong together.
    """
    last = progress[-1]
    things = {
        name: {
            key: _whole_text(progress, name, key) if _is_end(value) else value for key, value in state.items()
        }
        for name, state in last.get("things", {}).items()
        if isinstance(state, dict) and any(map(_is_end, state.values()))
    }
    return {**last, "things": {**last["things"], **things}} if things else last


def _is_end(value: Any) -> bool:
    return isinstance(value, dict) and ADDED in value


def _whole_text(progress: Sequence[dict[str, Any]], name: str, key: str) -> str:
    states = [each.get("things", {}).get(name) for each in progress]
    values: list[Any] = [state.get(key) if isinstance(state, dict) else None for state in states]
    first = max((i for i, value in enumerate(values) if isinstance(value, str)), default=0)
    parts: list[str] = []
    length = 0
    for value in values[first:]:
        part, to = (value[ADDED], value[TO]) if _is_end(value) else (value, 0)
        if not isinstance(part, str) or to != length:
            raise ValueError(f"{name}[{key!r}] goes on a text of {to} characters, and there are {length}")
        parts.append(part)
        length += len(part)
    return "".join(parts)
