"""What entries and files of ``torch.save`` hold beside tensors, as JSON."""

from __future__ import annotations

import base64
import zlib
from math import prod
from typing import Any

import numpy as np

from ...errors import Damaged
from ...units import KiB
from ..archives import Archive
from ..pickles import Record, Tensor
from ..small import tensor_json
from ..source import check_sum
from .dcp_metadata import Entry

REMEMBERED = 64 * KiB
"""Bytes at most of an entry without tensors whose content is kept, as the same comes again and again."""
MOST_EXPANDED = 1 << 20
"""Elements at most of a tensor that has more of them than are stored."""


class Values:
    """Entries that are no tensors, as JSON."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def read(self, key: str, entry: Entry) -> Any:
        """Raises ``Damaged``, naming ``key``."""
        with open(entry.path, "rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.nbytes) if entry.nbytes <= REMEMBERED else b""
        if data and data in self._known:
            return self._known[data]
        try:
            archive = Archive(entry.path, entry.offset, entry.nbytes)
            value = plain(archive, archive.content)
        except (Damaged, RecursionError) as error:
            raise Damaged(
                f"{key}, in {entry.path} from {entry.offset} on: {error}", path=str(entry.path), atoms=(key,)
            ) from error
        if data:
            self._known[data] = value
        return value


def plain(archive: Archive, value: Any) -> Any:
    """``value``, read from a pickle, as ``state.progress.encode`` has it; an object as what it was given."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return tensor_json(value.storage.dtype, value.shape, bytes_of(archive, value))
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"__tuple__": [plain(archive, item) for item in value]}
    if isinstance(value, list):
        return [plain(archive, item) for item in value]
    if isinstance(value, dict):
        simple = all(isinstance(key, str) and not key.startswith("__") for key in value)
        items = [[plain(archive, key), plain(archive, item)] for key, item in value.items()]
        return dict(items) if simple else {"__dict__": items}
    if isinstance(value, Record) and value.name == "_codecs.encode":  # how bytes are pickled
        return {"__bytes__": base64.b64encode(str(value.args[0]).encode("latin1")).decode()}
    if isinstance(value, Record):
        given = {"args": list(value.args), "fields": value.fields, "items": value.items}
        return {"__object__": value.name} | {
            name: plain(archive, part) for name, part in given.items() if part
        }
    return {"__object__": type(value).__name__, "args": [str(value)]}


def bytes_of(archive: Archive, tensor: Tensor) -> bytes:
    """The elements of ``tensor`` in C order, once its storage is known to be whole."""
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
