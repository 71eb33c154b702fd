"""A reader of foreign pickles that never imports a class or calls a function that a pickle names.

A pickle is a program. The names that it may use are listed (``ALLOWED``); each becomes a ``PickledObject``, which holds
the arguments and attributes that the pickle gives it, or a tensor that says where its bytes lie. Any other name is
refused. The interpreter is Python's own, written in Python; the size of the pickle bounds its memory and the work of
walking through the result.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from ...errors import Damaged
from ...state.tensor_entries import DTYPE_BYTES, QUANTISED, QUANTISED_CLASSES, TORCH_NAMES

STORAGES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "UntypedStorage": "U8",
}  # fmt: skip
"""Safetensors dtype names by torch's storage class."""
DTYPES = {theirs: ours for ours, theirs in TORCH_NAMES.items()}
_TYPE = re.compile(r"\w+Storage|(q?u?int|float|complex|bits)\d\w*")
"""Torch's names of element types."""
MOST_ELEMENTS = 1 << 62
"""A limit that no axis of a tensor reaches."""
MOST_SHARED = 1 << 20
"""The number of values that a pickle may expand to, beyond 16 for each of its bytes: one value may be held many times.
"""
MOST_DEPTH = 100
"""The limit for nesting."""
MOST_IN_KEY = 256
"""The limit for values in one dictionary key or set member: each lookup compares all of them."""
MOST_BITS = 4096
"""The limit for the bits of a number in such a key."""
MOST_ALIKE = 32
"""The limit for keys of one dictionary, or members of one set, with equal hashes.

Each such key is compared with all before it. Hashes of texts are salted in each process, but the writer of a file can
choose those of numbers and tuples. Keys beyond the limit become a ``Key`` each.
"""
DISTRIBUTED = "torch.distributed.tensor.DTensor"
"""The name of the ``PickledObject`` of a distributed tensor, whichever version of torch wrote it.

``distributed_tensors`` tells what it means.
"""
_DISTRIBUTED_CLASS = re.compile(r"torch\.distributed\.(_tensor\.api|_tensor|tensor\._api|tensor)\.DTensor")
_MESH, _OTHER_MESHES = "torch.distributed.device_mesh.DeviceMesh", ("_root_mesh", "_flatten_mapping")
"""A mesh, and its attributes that are other meshes, which may hold one another. They are not kept."""


@dataclass(frozen=True)
class Storage:
    """The bytes of the archive entry ``key``: ``elements`` elements of ``dtype``."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of a pickle: the position of its elements in its storage, counted in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class PickledObject:
    """The arguments and attributes of an object of class or function ``name``, which is never created."""

    name: str
    args: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    items: dict[Any, Any] = field(default_factory=dict)
    """The items, if the class is a dictionary."""

    def __setstate__(self, state: Any) -> None:
        plain, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        for part in (plain, slots):
            if isinstance(part, dict):
                self.fields.update(part)
            elif part is not None:
                self.args += (part,)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.items[len(self.items)] = value

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.append(value)

    def __hash__(self) -> int:
        return _drawn_hash(self)

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


def quantised_parts(value: Any) -> dict[str, Tensor]:
    """Return the tensors of which ``value`` of a pickle, optimizer state that torchao quantised, is made; else none."""
    if not isinstance(value, PickledObject) or value.name not in QUANTISED_CLASSES:
        return {}
    return {part: each for part, each in value.fields.items() if isinstance(each, Tensor)}


def quantised_class(value: PickledObject) -> dict[str, Any]:
    """Return as JSON what ``state.quantised_slots`` needs to make such state of its parts."""
    arguments: list[dict[str, Any] | None] = []
    for name in QUANTISED_CLASSES[value.name]:
        if name is None:
            arguments.append(None)
            continue
        each = value.get(name)
        is_dtype = name == "dtype" and each in TORCH_NAMES
        arguments.append({"value": {"__torch__": ["dtype", TORCH_NAMES[each]]} if is_dtype else bool(each)})
    return {QUANTISED: [value.name.rpartition(".")[2], arguments]}


def is_distributed(value: Any) -> bool:
    """Return whether ``value`` of a pickle is the description of a distributed tensor."""
    return isinstance(value, PickledObject) and value.name == DISTRIBUTED


@dataclass(frozen=True, eq=False)
class Key:
    """A dictionary key or set member that replaces a ``value`` whose hash many others share."""

    value: Any

    def __hash__(self) -> int:
        return _drawn_hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.value == other.value

    def __str__(self) -> str:
        return str(self.value)


def _drawn_hash(value: Any) -> int:
    """Return a hash of ``value`` that the writer of a file cannot foresee.

    It is built on text hashes, which are salted in each process.
    """
    if value is None or isinstance(value, str | bytes | float | bool):
        return hash(value)
    if isinstance(value, PickledObject):
        return _drawn_hash((value.name, *value.args, *value.fields.values(), *value.items.values()))
    if isinstance(value, list | tuple):
        return hash(tuple(map(_drawn_hash, value)))
    if isinstance(value, set | frozenset):
        return hash(frozenset(map(_drawn_hash, value)))
    return len(value) if isinstance(value, dict) else hash(repr(value))


PLAIN: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": lambda given: _counter(given),
    "collections.defaultdict": lambda *_: {},
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.tuple": tuple,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytes": lambda *given: _empty_bytes(given),
    "builtins.complex": complex,
    "builtins.slice": slice,
    "torch.Size": lambda *sizes: tuple(*sizes),
    "torch.device": lambda *given: ":".join(map(str, given)),
}
"""Callables that are really called: they only hold what they are given."""
ALLOWED = frozenset({
    # torch
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor", "torch.serialization._get_layout", "torch.storage._load_from_bytes",
    "torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter", "torch.Tensor",
    # torch.distributed.checkpoint
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.distributed.checkpoint._extension.StreamTransformExtension",
    # distributed tensors, by the names of several versions of torch
    *(f"torch.distributed.{module}.DTensor" for module in ("tensor", "tensor._api", "_tensor", "_tensor.api")),
    *(f"torch.distributed.{module}.{name}" for module in (
        "tensor._dtensor_spec", "tensor.placement_types", "_tensor._dtensor_spec", "_tensor.placement_types")
        for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry", "Shard", "Replicate", "Partial", "_Partial",
                     "_StridedShard")),
    "torch.distributed.device_mesh.DeviceMesh", "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
    # DeepSpeed
    "deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.utils.tensor_fragment.tensor_fragment",
    # Megatron, whose own classes are all allowed
    "argparse.Namespace", "signal.Signals", "_io.BytesIO", "torch._C.Generator", "numpy.dtypes.UInt32DType",
    *(f"torch.distributed.checkpoint.planner.{name}" for name in (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    # libraries that these use
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode", "pathlib.Path",
    "pathlib.PosixPath", "pathlib._local.PosixPath", "types.SimpleNamespace", "copy_reg._reconstructor",
    "copyreg._reconstructor", "builtins.object", "builtins.getattr", "builtins.bytearray", "datetime.timedelta",
})  # fmt: skip
"""Names that become a ``PickledObject``. None of them is ever imported."""


def _empty_bytes(given: tuple[Any, ...]) -> bytes:
    """Return empty bytes, which old pickle protocols build by a call; other bytes come as text."""
    if given:
        raise ValueError("bytes that are made of something")
    return b""


def _counter(given: Any) -> Counter[Any]:
    if not isinstance(given, dict):
        raise TypeError("a Counter of what was not counted")
    return Counter(given)


def load(data: bytes, where: str) -> Any:
    """Return what the pickle ``data`` of ``where`` describes, without executing any of it.

    Raises ``Damaged`` if the pickle names something that is not listed, is malformed, contains itself, or repeats a few
    values so often that nobody could walk through them.
    """
    try:
        most = MOST_SHARED + 16 * len(data)
        value = _Reader(io.BytesIO(data), where, most).load()
        if _written_out(value) > most:
            raise ValueError(f"{len(data)} bytes hold one another so often that they are over {most} values")
        return value
    except Damaged:
        raise
    except Exception as error:  # any kind: the bytes may be hostile
        raise Damaged(
            f"{where} holds no pickle that can be read: {type(error).__name__}: {error}", path=where
        ) from error


def _refuse_bytearray(_: Any) -> None:
    raise ValueError("a bytearray of a length that is only claimed")


def _written_out(value: Any) -> int:
    """Return how many values ``value`` expands to, counting each as often as it is held and texts by their length.

    Raises ``ValueError`` if ``value`` contains itself or is nested too deep.
    """
    counts: dict[int, tuple[int, int]] = {}
    begun: set[int] = set()
    stack = [value]
    while stack:
        top = stack[-1]
        if id(top) in counts:
            stack.pop()
            continue
        count, depth, left = len(top) if isinstance(top, str | bytes | bytearray) else 1, 1, []
        for each in _inside(top):
            if (found := counts.get(id(each))) is None:
                left.append(each)
            else:
                count, depth = count + found[0], max(depth, found[1] + 1)
        if left and id(top) in begun:
            raise ValueError("it holds itself")
        if left:
            begun.add(id(top))
            stack += left
            continue
        stack.pop()
        counts[id(top)] = count, depth
        if depth > MOST_DEPTH:
            raise ValueError(f"it is more than {MOST_DEPTH} deep")
    return counts[id(value)][0]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, PickledObject):
        return [*value.args, value.fields, value.items]
    if isinstance(value, Key):
        return [value.value]
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _refuse_long_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        if isinstance(key, str):
            continue
        stack, count = [key], 0
        while stack:
            each = stack.pop()
            count += len(each) if isinstance(each, list | tuple | set | frozenset | dict) else 1
            if count > MOST_IN_KEY:
                raise ValueError(f"a key of more than {MOST_IN_KEY} values")
            if isinstance(each, int) and each.bit_length() > MOST_BITS:
                raise ValueError(f"a number of more than {MOST_BITS} bits as a key")
            stack += _inside(each)


def _is_spread(key: Any) -> bool:
    """Return whether keys like ``key`` that differ rarely share a hash, even if a file's writer chose them."""
    if type(key) is int:
        return -(1 << 60) < key < 1 << 60
    return key is None or isinstance(key, str | bytes | bool | float | PickledObject | Key)


def _spread(keys: Iterable[Any], known: dict[int, list[Any]]) -> list[Any]:
    """Return ``keys`` with a ``Key`` in place of each whose hash many others share.

    ``known`` holds the keys seen so far by hash, with those that are in the dictionary already.
    """
    found = []
    for key in keys:
        if not _is_spread(key):
            alike = known.setdefault(hash(key), [])
            if key not in alike and len(alike) >= MOST_ALIKE:
                key = Key(key)
            elif key not in alike:
                alike.append(key)
        found.append(key)
    return found


def _with_short_keys(load: Callable[[Any], None], keys: slice, into: int | None) -> Callable[[Any], None]:
    """Wrap ``load``, an operation that looks up the keys at ``keys`` of the stack, with a check of these keys.

    ``into`` is the stack position of the dictionary or set that gets the keys; -1 is the one below the mark, None a new
    one.
    """

    def checked(reader: Any) -> None:
        found = reader.stack[keys]
        _refuse_long_keys(found)
        if not all(map(_is_spread, found)):
            known: dict[int, list[Any]] = {}
            if into is not None:
                target = reader.metastack[-1][-1] if into == -1 else reader.stack[into]
                known = reader.alike.setdefault(id(target), (target, known))[1]
            reader.stack[keys] = _spread(found, known)
        load(reader)

    return checked


def _build(reader: Any) -> None:
    """Set attributes on a ``PickledObject`` only: other objects were checked when they were built, and stay."""
    state = reader.stack.pop()
    made = reader.stack[-1]
    if isinstance(made, PickledObject):
        if made.name == _MESH and isinstance(state, dict):
            state = {key: value for key, value in state.items() if key not in _OTHER_MESHES}
        made.__setstate__(state)
    elif not isinstance(made, OrderedDict):  # torch keeps the versions of modules as attributes of one
        raise ValueError(f"attributes of a {type(made).__name__}, which has none")


_DISPATCH: dict[int, Any] = pickle._Unpickler.dispatch
_KEYS = {
    pickle.SETITEMS: (slice(0, None, 2), -1), pickle.DICT: (slice(0, None, 2), None),
    pickle.SETITEM: (slice(-2, -1), -3), pickle.ADDITEMS: (slice(None), -1), pickle.FROZENSET: (slice(None), None),
}  # fmt: skip


class _Reader(pickle._Unpickler):  # in Python: the one in C allocates whatever size a pickle names
    dispatch = _DISPATCH | {
        pickle.BYTEARRAY8[0]: _refuse_bytearray,
        pickle.BUILD[0]: _build,
        **{code[0]: _with_short_keys(_DISPATCH[code[0]], *keys) for code, keys in _KEYS.items()},
    }

    def __init__(self, file: io.BytesIO, where: str, most: int) -> None:
        super().__init__(file, encoding="utf-8")
        self._where, self._left = where, most
        self.alike: dict[int, tuple[Any, dict[int, list[Any]]]] = {}
        """The keys with choosable hashes of each dictionary and set, by its identity."""

    def _made(self, kind: Callable[..., Any], *given: Any) -> Any:
        """Call ``kind`` of ``PLAIN``, which may copy what it is given; total copies and key lengths are bounded."""
        self._left -= sum(len(each) for each in given if hasattr(each, "__len__"))
        for each in given:
            if kind in (set, frozenset):
                _refuse_long_keys(each)
                given = (_spread(each, {}),)
            elif kind in (dict, OrderedDict) and isinstance(each, list | tuple):
                _refuse_long_keys(key for key, _ in each)
                keys = _spread((key for key, _ in each), {})
                given = ([(key, value) for key, (_, value) in zip(keys, each, strict=True)],)
        if self._left < 0:
            raise ValueError("it copies what it holds more often than it has bytes")
        return kind(*given)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in PLAIN:
            return partial(self._made, PLAIN[full])
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module in ("torch", "torch.storage") and _TYPE.fullmatch(name):
            raise Damaged(
                f"{self._where} holds a tensor of {name}, and supported are {', '.join(DTYPES)}. Load it with torch and"
                " save it as one of these.",
                path=self._where,
            )
        if full in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
            return _tensor
        if full == "torch._utils._rebuild_tensor_v3":
            return _tensor_of_bytes
        if full in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return lambda data, *_: data
        if full == "torch._tensor._rebuild_from_type_v2":
            return _typed
        if full == "torch._utils._rebuild_wrapper_subclass":
            return _wrapper
        if full in ALLOWED or full in QUANTISED_CLASSES or module.startswith("megatron."):
            return _maker(full)
        raise Damaged(
            f"{self._where} names {full}, which is none of the classes that checkpoints are known to hold, and a pickle"
            " can run anything. Nothing was executed. If you trust the file, load it with its own library and save its"
            " tensors as safetensors.",
            path=self._where,
        )

    def persistent_load(self, pid: Any) -> Storage:
        """Return the storage of a persistent id of torch: ("storage", type, key, device, elements)."""
        kind, dtype, key, _, elements = pid
        if kind != "storage" or dtype not in DTYPE_BYTES or not isinstance(elements, int) or elements < 0:
            raise ValueError("a persistent id that is no storage of torch")
        return Storage(str(key), dtype, elements)


def _tensor(
    storage: Storage, offset: int, shape: Any, strides: Any, _: Any = None, __: Any = None, kept: Any = None
) -> Tensor:
    """Build a tensor. ``kept`` holds what torch keeps beside the bytes."""
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without a storage")
    if isinstance(kept, dict) and (kept.get("conj") or kept.get("neg")):
        raise ValueError(
            "a tensor that torch keeps as a view to be conjugated or negated when it is read, which is not supported."
            " Load the file with torch and save the tensor with .resolve_conj().resolve_neg()"
        )
    made = Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))
    sizes = made.offset, *made.shape, *made.strides
    fits = all(0 <= number < MOST_ELEMENTS for number in sizes) and prod(made.shape) < MOST_ELEMENTS
    if not fits or len(made.shape) != len(made.strides):
        raise ValueError(f"a tensor of {made.shape}, strides {made.strides}, from {made.offset} on")
    return made


def _tensor_of_bytes(
    storage: Storage, offset: int, shape: Any, strides: Any, _: Any, __: Any, dtype: Any, kept: Any = None
) -> Tensor:
    """Build a tensor of a dtype that has no storage class in torch."""
    made = _tensor(storage, offset, shape, strides, kept=kept)
    elements = storage.elements // DTYPE_BYTES[dtype]
    return Tensor(Storage(storage.key, dtype, elements), made.offset, made.shape, made.strides)


def _typed(rebuild: Any, _: Any, args: Any, state: Any = None, *__: Any) -> Tensor | PickledObject:
    """Build a tensor that has attributes or a class of its own; both are dropped, except for a distributed tensor."""
    if rebuild is _wrapper and isinstance(args, tuple):
        wrapped = _wrapper(*args)
        wrapped.__setstate__(state)
        return wrapped
    if rebuild is not _tensor or not isinstance(args, tuple):
        raise TypeError("a tensor that is made in a way that is not known")
    return _tensor(*args)


def _wrapper(kind: Any, dtype: Any, shape: Any, *_: Any) -> PickledObject:
    """Build the description of a tensor without bytes of its own, whose state has the rest."""
    described = getattr(kind, "described", "")
    if described in QUANTISED_CLASSES:
        return PickledObject(described, fields={"dtype": dtype, "shape": shape})
    if _DISTRIBUTED_CLASS.fullmatch(described) is None:
        raise TypeError("a tensor without bytes of its own, of a class that is not known")
    return PickledObject(DISTRIBUTED, fields={"dtype": dtype, "shape": shape})


def _maker(name: str) -> type[PickledObject]:
    """Return a class that stands for the class ``name`` and builds a ``PickledObject`` when called or created."""

    class Made(PickledObject):
        described = name

        def __new__(cls, *args: Any, **fields: Any) -> Any:
            made = object.__new__(PickledObject)
            PickledObject.__init__(made, name, args, fields)
            return made

    return Made
