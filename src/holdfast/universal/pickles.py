"""Pickles of others, read as data: no class of theirs is imported, no function of theirs is called.

A pickle is a program. What it may name here is a list (``ALLOWED``); what it makes of those names are ``Record``s,
plain holders of the arguments and attributes that it gives them, and tensors that say where their bytes lie. Anything
else is refused by name. The interpreter is Python's own in Python, whose memory is bounded by the size of the pickle.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import Damaged

STORAGES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "UntypedStorage": "U8",
}  # fmt: skip
DTYPES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Names of safetensors, by those of torch."""


MOST_ELEMENTS = 1 << 62
"""More than any tensor has along an axis."""


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
        plain = [value for value in self.fields.values() if isinstance(value, (str, int, tuple))]
        return hash((self.name, len(self.args), *plain))

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


PLAIN: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
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


def load(data: bytes, where: str) -> Any:
    """What the pickle ``data`` of ``where`` describes. Raises ``Damaged`` if it names what is not on the list, or is no
    pickle."""
    try:
        return _Reader(io.BytesIO(data), where).load()
    except Damaged:
        raise
    except Exception as error:  # of any kind, as the bytes are anybody's
        raise Damaged(
            f"{where} holds no pickle that can be read: {type(error).__name__}: {error}", path=where
        ) from error


def _refuse_bytearray(_: Any) -> None:
    raise ValueError("a bytearray of a length that is only claimed")


class _Reader(pickle._Unpickler):  # in Python: the one in C allocates what a pickle tells it to
    dispatch = pickle._Unpickler.dispatch | {pickle.BYTEARRAY8[0]: _refuse_bytearray}

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="utf-8")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in PLAIN:
            return PLAIN[full]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if full in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
            return _tensor
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
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(elements, int) or elements < 0:
            raise ValueError("a persistent id that is no storage of torch")
        return Storage(str(key), dtype, elements)


def _tensor(storage: Storage, offset: int, shape: Any, strides: Any, *_: Any) -> Tensor:
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without a storage")
    made = Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))
    if not all(0 <= number < MOST_ELEMENTS for number in (made.offset, *made.shape, *made.strides)):
        raise ValueError(f"a tensor of {made.shape}, strides {made.strides}, from {made.offset} on")
    return made


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
