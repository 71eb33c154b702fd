"""Pickles of others, read as data: no class of theirs is imported, no function of theirs is called.

A pickle is a program. What it may name here is a list (``ALLOWED``); what it makes of those names are ``Record``s,
plain holders of the arguments and attributes that it gives them, and tensors that say where their bytes lie. Anything
else is refused by name. The interpreter is Python's own in Python, whose memory is bounded by the size of the pickle;
so is what it takes to go through all that it describes.
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

from ..errors import Damaged
from ..state.atoms import DTYPE_BYTES, TORCH_NAMES

STORAGES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "UntypedStorage": "U8",
}  # fmt: skip
"""Names of safetensors, by the kinds of storage in files of torch."""
DTYPES = {theirs: ours for ours, theirs in TORCH_NAMES.items()}
_TYPE = re.compile(r"\w+Storage|(q?u?int|float|complex|bits)\d\w*")
"""What torch calls types of elements."""

MOST_ELEMENTS = 1 << 62
"""More than any tensor has along an axis."""
MOST_SHARED = 1 << 20
"""Values, written out one by one, that a pickle may hold beyond 16 for each of its bytes: what is there once may be
held by many."""
MOST_DEPTH = 100
"""Of what is inside of one another."""
MOST_IN_KEY = 256
"""Values in a key of a dictionary or a member of a set: all are looked at each time that it is looked up."""
MOST_BITS = 4096
"""Of a number in such a key."""
MOST_ALIKE = 32
"""Keys of one dictionary, or members of one set, that may have one hash: each is compared with all before it. Hashes of
texts are drawn anew in each process, those of numbers and tuples can be computed by whoever writes a file; further ones
become a ``Key`` each."""


@dataclass(frozen=True)
class Storage:
    """The bytes of the entry ``key`` of an archive, which are ``elements`` of ``dtype``."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of a pickle: where its elements lie in its storage, in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class Record:
    """An object of the class or function ``name``, which was not made: what it was given."""

    name: str
    args: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    items: dict[Any, Any] = field(default_factory=dict)
    """Of a class that is a dictionary."""

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


@dataclass(frozen=True, eq=False)
class Key:
    """A key of a dictionary, or a member of a set, in place of a ``value`` whose hash others have too."""

    value: Any

    def __hash__(self) -> int:
        return _drawn_hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.value == other.value

    def __str__(self) -> str:
        return str(self.value)


def _drawn_hash(value: Any) -> int:
    """Return a hash of ``value`` that nobody can foresee who does not know those of texts in this process."""
    if value is None or isinstance(value, str | bytes | float | bool):
        return hash(value)
    if isinstance(value, Record):
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
"""What is made as it is: it holds what it is given, and does nothing."""

ALLOWED = frozenset({
    # torch's own
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor", "torch.serialization._get_layout", "torch.storage._load_from_bytes",
    "torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter", "torch.Tensor",
    # of torch.distributed.checkpoint
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.distributed.checkpoint._extension.StreamTransformExtension",
    # of DeepSpeed
    "deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.utils.tensor_fragment.tensor_fragment",
    # of Megatron, whose own classes all are
    "argparse.Namespace", "signal.Signals", "_io.BytesIO", "torch._C.Generator", "numpy.dtypes.UInt32DType",
    *(f"torch.distributed.checkpoint.planner.{name}" for name in (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    # beside them
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode", "pathlib.Path",
    "pathlib.PosixPath", "pathlib._local.PosixPath", "types.SimpleNamespace", "copy_reg._reconstructor",
    "copyreg._reconstructor", "builtins.object", "builtins.getattr", "builtins.bytearray", "datetime.timedelta",
})  # fmt: skip
"""What becomes a ``Record``. No name here is ever imported."""


def _empty_bytes(given: tuple[Any, ...]) -> bytes:
    """As old protocols have them; others come as text."""
    if given:
        raise ValueError("bytes that are made of something")
    return b""


def _counter(given: Any) -> Counter[Any]:
    if not isinstance(given, dict):
        raise TypeError("a Counter of what was not counted")
    return Counter(given)


def load(data: bytes, where: str) -> Any:
    """What the pickle ``data`` of ``where`` describes. Raises ``Damaged`` if it names what is not on the list, is no
    pickle, or holds itself or a few values so many times over that nobody could go through them."""
    try:
        most = MOST_SHARED + 16 * len(data)
        value = _Reader(io.BytesIO(data), where, most).load()
        if _written_out(value) > most:
            raise ValueError(f"{len(data)} bytes hold one another so often that they are over {most} values")
        return value
    except Damaged:
        raise
    except Exception as error:  # of any kind, as the bytes are anybody's
        raise Damaged(
            f"{where} holds no pickle that can be read: {type(error).__name__}: {error}", path=where
        ) from error


def _refuse_bytearray(_: Any) -> None:
    raise ValueError("a bytearray of a length that is only claimed")


def _written_out(value: Any) -> int:
    """How many values ``value`` is, texts by their length, where each is counted as often as it is held. Raises
    ``ValueError`` if it holds itself, or too deep."""
    counts: dict[int, tuple[int, int]] = {}
    begun: set[int] = set()
    stack = [value]
    while stack:
        top = stack[-1]
        if id(top) in counts:
            stack.pop()
            continue
        inside, own = _inside(top), len(top) if isinstance(top, str | bytes | bytearray) else 1
        left = [each for each in inside if id(each) not in counts]
        if left and id(top) in begun:
            raise ValueError("it holds itself")
        if left:
            begun.add(id(top))
            stack += left
            continue
        stack.pop()
        found = [counts[id(each)] for each in inside]
        counts[id(top)] = own + sum(count for count, _ in found), 1 + max((d for _, d in found), default=0)
        if counts[id(top)][1] > MOST_DEPTH:
            raise ValueError(f"it is more than {MOST_DEPTH} deep")
    return counts[id(value)][0]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Record):
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
    """Return whether keys like ``key`` that differ have few hashes in common, whoever chose them."""
    if type(key) is int:
        return -(1 << 60) < key < 1 << 60
    return key is None or isinstance(key, str | bytes | bool | float | Record | Key)


def _spread(keys: Iterable[Any], known: dict[int, list[Any]]) -> list[Any]:
    """Return ``keys`` with a ``Key`` in place of each that has the hash of many others. ``known`` has the first of each
    hash, also those that are in the dictionary already."""
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
    """``load`` of an operation that looks up what is at ``keys`` of the stack. ``into`` is where on the stack the
    dictionary or set is that they go to, of -1 on the one below; None of a new one."""

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
    """Attributes are for a ``Record`` alone: what else there is was checked when it was made, and stays as it is."""
    state = reader.stack.pop()
    made = reader.stack[-1]
    if isinstance(made, Record):
        made.__setstate__(state)
    elif not isinstance(made, OrderedDict):  # torch keeps the versions of modules as attributes of one
        raise ValueError(f"attributes of a {type(made).__name__}, which has none")


_DISPATCH: dict[int, Any] = pickle._Unpickler.dispatch
_KEYS = {
    pickle.SETITEMS: (slice(0, None, 2), -1), pickle.DICT: (slice(0, None, 2), None),
    pickle.SETITEM: (slice(-2, -1), -3), pickle.ADDITEMS: (slice(None), -1), pickle.FROZENSET: (slice(None), None),
}  # fmt: skip


class _Reader(pickle._Unpickler):  # in Python: the one in C allocates what a pickle tells it to
    dispatch = _DISPATCH | {
        pickle.BYTEARRAY8[0]: _refuse_bytearray,
        pickle.BUILD[0]: _build,
        **{code[0]: _with_short_keys(_DISPATCH[code[0]], *keys) for code, keys in _KEYS.items()},
    }

    def __init__(self, file: io.BytesIO, where: str, most: int) -> None:
        super().__init__(file, encoding="utf-8")
        self._where, self._left = where, most
        self.alike: dict[int, tuple[Any, dict[int, list[Any]]]] = {}
        """By identity each dictionary and set, and those of its keys whose hashes others could have chosen."""

    def _made(self, kind: Callable[..., Any], *given: Any) -> Any:
        """One of ``PLAIN``, which may be a copy of what is given: of so much altogether, and of no long keys."""
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
        if full in ALLOWED or module.startswith("megatron."):
            return _maker(full)
        raise Damaged(
            f"{self._where} names {full}, which is none of the classes that checkpoints are known to hold, and a pickle"
            " can run anything. Nothing was executed. If you trust the file, load it with its own library and save its"
            " tensors as safetensors.",
            path=self._where,
        )

    def persistent_load(self, pid: Any) -> Storage:
        """Of torch: ("storage", type, key, device, elements)."""
        kind, dtype, key, _, elements = pid
        if kind != "storage" or dtype not in DTYPE_BYTES or not isinstance(elements, int) or elements < 0:
            raise ValueError("a persistent id that is no storage of torch")
        return Storage(str(key), dtype, elements)


def _tensor(
    storage: Storage, offset: int, shape: Any, strides: Any, _: Any = None, __: Any = None, kept: Any = None
) -> Tensor:
    """``kept`` is what torch keeps of it beside its bytes."""
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
    """Of a type for which torch has no kind of storage."""
    made = _tensor(storage, offset, shape, strides, kept=kept)
    elements = storage.elements // DTYPE_BYTES[dtype]
    return Tensor(Storage(storage.key, dtype, elements), made.offset, made.shape, made.strides)


def _typed(rebuild: Any, _: Any, args: Any, *__: Any) -> Tensor:
    """A tensor that has attributes, or is of a class of its own: those are left out."""
    if rebuild is not _tensor or not isinstance(args, tuple):
        raise TypeError("a tensor that is made in a way that is not known")
    return _tensor(*args)


def _maker(name: str) -> type[Record]:
    """What is called, or made without a call, in place of the class ``name``: a class, as a pickle may ask for one."""

    class Made(Record):
        def __new__(cls, *args: Any, **fields: Any) -> Any:
            made = object.__new__(Record)
            Record.__init__(made, name, args, fields)
            return made

    return Made
