"""Writer of folders that ``torch.distributed.checkpoint.load`` reads.

One file holds all entries, large tensors in chunks of a few MiB. Several threads read, wrap and write chunks, each in
its own memory. ``.metadata`` is written last: without it the folder is no checkpoint. It is a pickle, because the
format demands one; no file of this library's own formats is.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...errors import BadInput
from ...quantities import KiB, MiB
from ...state.encoding import decode
from ...state.layout.fragments import row_major
from ...state.layout.regions import Region
from ...state.plain_tensors import FROM_NAME
from ...store.disk import TEMPORARY, Disk, alone_in, write_durably, written_durably
from ..entry_keys import EXTRA, PROGRESS
from ..entry_matching import groups_of, refuse_quantised
from ..load import in_threads, read_flat, tensor_of
from ..source import Source, SourceTensor
from .dcp_reader import METADATA

FILE = "__0_0.distcp"
_MARK = ".holdfast-conversion"
"""A file that exists until ``.metadata`` does; while it exists, ``FILE`` belongs to an interrupted conversion."""
_OF_CHECKPOINT = re.compile(rf".*\.distcp|(__\d+)?{re.escape(METADATA)}", re.DOTALL)
CHUNK = 16 * MiB
OVERHEAD = 8 * KiB
"""An upper limit for the bytes of an archive beside its tensor."""

Keys = dict[str, tuple[tuple[Any, ...], Any]]
"""The path to each key, and its value: a ``SourceTensor``, a tensor or any other value."""


def write_dcp(
    source: Source,
    folder: Path,
    *,
    model: str = "model",
    optimizer: str = "optim",
    report: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Write all of ``source`` into ``folder`` as ``dcp.save`` would write the result of ``get_state_dict``.

    Hyper-parameters are written by group and by parameter, as readers ask for either. Durable on return.

    Args:
        source: The state to write.
        folder: The folder to write to.
        model: The key of the model; "" writes parameters at the top level.
        optimizer: The key of the optimizer.
        report: Called with the number of bytes read.

    Raises ``BadInput`` if the folder holds a checkpoint, or part of one that an interrupted conversion did not leave,
    or if two values would have one key; ``RunLocked`` if another conversion writes there.
    """
    refuse_quantised(source, "torch.distributed.checkpoint")
    keys = keys_of(source, model, optimizer)
    disk = Disk(folder)
    with alone_in(disk):
        _refuse_others(disk)
        write_durably(disk, _MARK, b"", why="conversion")
        _write(source, disk, keys, report)
        disk.unlink(_MARK)
    return folder


def _refuse_others(disk: Disk) -> None:
    there = {name for name in disk.listdir("") if _OF_CHECKPOINT.fullmatch(name)}
    if others := sorted(there - ({FILE} if disk.exists(_MARK) else set())):
        raise BadInput(
            f"{disk.root} has a checkpoint already, or a part of one: {others[0]}. Give another folder."
        )


def _write(source: Source, disk: Disk, keys: Keys, report: Callable[[int], None]) -> None:
    sizes = [
        value.atom.nbytes if isinstance(value, SourceTensor) else len(_saved(value))
        for _, value in keys.values()
    ]
    chunks = sum(1 + size // CHUNK * 2 for size in sizes)
    with written_durably(disk, FILE, sum(sizes) + chunks * OVERHEAD, why="payload") as file:
        writing = _Writing(source, file)
        in_threads(writing.jobs(keys), report)
        source.refuse_rewritten()
        disk.cut(FILE + TEMPORARY, writing.end)
    write_durably(disk, METADATA, pickle.dumps(writing.metadata(disk.root, keys)), why="metadata")


def keys_of(source: Source, model: str, optimizer: str) -> Keys:
    """Return the path and the value of every key that is written."""
    keys: Keys = {}

    def put(path: tuple[Any, ...], value: Any) -> None:
        key = ".".join(map(str, path))
        if key in keys:
            raise BadInput(f"{source.path}: {key} would be in the checkpoint twice")
        keys[key] = path, value

    top = (model,) if model else ()
    for stored in source.atoms.values():
        name, slot = stored.atom.name, stored.atom.slot
        if slot in ("param", "buffer"):
            put((*top, name), stored)
        else:
            put((name,) if slot == EXTRA else (optimizer, "state", name, slot), stored)
    for alias, name in source.aliases.items():
        key = ".".join((*top, alias))
        if key not in keys:
            put((*top, alias), keys[".".join((*top, name))][1])
    rest = dict(source.progress)
    for name, slots in rest.pop("values", {}).items():
        for slot, value in slots.items():
            put((optimizer, "state", name, slot), decode(value))
    for path, value in _groups(groups_of(rest), optimizer):
        put(path, value)
    for path, value in _flattened(("scheduler",), decode(rest.get("things", rest).get("scheduler", {}))):
        put(path, value)
    for key, value in rest.pop("extra", {}).items():
        put((key,), decode(value))
    said = {"roots"} | ({"scheduler"} if "things" not in rest else set())
    said |= {"groups", "group_parameters"} if "group_parameters" in rest else set()
    rest = {name: value for name, value in rest.items() if name not in said}
    if rest:
        put((PROGRESS,), json.dumps(rest))
    return keys


def _groups(
    groups: list[tuple[dict[str, Any], list[str]]], optimizer: str
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield hyper-parameters, both as a list of groups and by parameter."""
    for number, (group, members) in enumerate(groups):
        options = {option: decode(value) for option, value in group.items()}
        for option, value in (options | {"params": members}).items():
            yield (optimizer, "param_groups", number, option), value
        for name in members:
            for option, value in options.items():
                yield (optimizer, f"param_groups.{name}.{option}"), value


def _flattened(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Flatten ``value`` as ``dcp.save`` does: dictionaries, and lists that contain dictionaries or tensors.

    Keys of dictionaries become texts.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flattened((*path, str(name)), item)
    elif isinstance(value, list) and any(map(_has_parts, value)):
        for place, item in enumerate(value):
            yield from _flattened((*path, place), item)
    else:
        yield path, value


def _has_parts(value: Any) -> bool:
    return isinstance(value, (dict, torch.Tensor)) or (
        isinstance(value, list) and any(map(_has_parts, value))
    )


def boxes_of(shape: tuple[int, ...], most: int) -> Iterator[Region]:
    """Divide ``shape`` into regions of at most ``most`` elements, each contiguous in C order.

    >>> [box.to_json() for box in boxes_of((2, 5), 3)]
    [[[0, 0], [1, 3]], [[0, 3], [1, 5]], [[1, 0], [2, 3]], [[1, 3], [2, 5]]]
    """
    if prod(shape) <= most:
        yield Region.whole(shape)
        return
    row = prod(shape[1:])
    if row > most:
        for index in range(shape[0]):
            for box in boxes_of(shape[1:], most):
                yield Region((index, *box.start), (index + 1, *box.stop))
        return
    for start in range(0, shape[0], most // row):
        stop = min(start + most // row, shape[0])
        yield Region((start, *[0] * len(shape[1:])), (stop, *shape[1:]))


@dataclass
class _Writing:
    """The file that is being written; ``end`` is its current length.

    Entries follow in the order in which they are ready.
    """

    source: Source
    file: Any
    end: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    placed: dict[tuple[str, tuple[int, ...] | None], tuple[int, int]] = field(default_factory=dict)

    def jobs(self, keys: Keys) -> Iterator[Callable[[], int]]:
        for key, (_, value) in keys.items():
            if isinstance(value, SourceTensor):
                for box in boxes_of(value.atom.shape, CHUNK // value.atom.itemsize):
                    yield partial(self._write_box, key, value, box)
            else:
                start = (0,) * value.dim() if isinstance(value, torch.Tensor) else None
                yield partial(self._write, key, start, _saved(value), 0)

    def _write_box(self, key: str, stored: SourceTensor, box: Region) -> int:
        strides = row_major(stored.atom.shape)
        first = sum(a * stride for a, stride in zip(box.start, strides, strict=True))
        values = read_flat(self.source, stored, first, first + box.elements)
        tensor = tensor_of(values, stored.atom.dtype).reshape(box.shape)
        return self._write(key, box.start, _saved(tensor), values.nbytes)

    def _write(self, key: str, start: tuple[int, ...] | None, archive: memoryview, nbytes: int) -> int:
        with self.lock:
            offset, self.end = self.end, self.end + len(archive)
            self.placed[key, start] = offset, len(archive)
        self.file.write(archive, offset)
        return nbytes

    def metadata(self, folder: Path, keys: Keys) -> Any:
        """Return torch's object that ``.metadata`` holds."""
        from torch.distributed.checkpoint import metadata as theirs
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        def about(value: Any) -> Any:
            if isinstance(value, SourceTensor):
                shape, dtype = value.atom.shape, FROM_NAME[value.atom.dtype]
                boxes = list(boxes_of(shape, CHUNK // value.atom.itemsize))
            elif isinstance(value, torch.Tensor):
                shape, dtype, boxes = tuple(value.shape), value.dtype, [Region.whole(tuple(value.shape))]
            else:
                return theirs.BytesStorageMetadata()
            chunks = [
                theirs.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in boxes
            ]
            return theirs.TensorStorageMetadata(theirs.TensorProperties(dtype), torch.Size(shape), chunks)

        return theirs.Metadata(
            {key: about(value) for key, (_, value) in keys.items()},
            {key: path for key, (path, _) in keys.items()},
            {theirs.MetadataIndex(*which): _StorageInfo(FILE, *place) for which, place in self.placed.items()},
            theirs.StorageMeta(checkpoint_id=str(folder), save_id=str(uuid.uuid4())),
            "1.0.0",
        )  # fmt: skip


def _saved(value: Any) -> memoryview:
    """Return ``value`` as an archive of ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()
