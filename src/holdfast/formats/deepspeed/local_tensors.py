"""The parameters of one model-parallel rank, joined from the partitions of its data-parallel ranks.

All ranks must have equal dtypes and equal values, or the checkpoint is refused. Only places are computed; of the data,
single numbers are read. Called by the readers of ZeRO checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import BadInput, Damaged
from ...state.layout.fragments import Fragment, flat
from ...state.tensor_entries import DTYPE_BYTES, values_of
from ..fragment_reads import ReadFiles
from ..torch_archive.archives import Archive
from ..torch_archive.pickles import PickledObject, Tensor

Shape = tuple[int, ...]
Number = bool | int | float


class Value(NamedTuple):
    """One value for a whole parameter: ``data`` of ``dtype`` at ``offset`` of a part, or a Python number."""

    data: bytes = b""
    dtype: str = ""
    part: int = -1
    offset: int = 0
    number: Number = 0

    def same(self, other: Value) -> bool:
        return (self.data, self.dtype, self.number) == (other.data, other.dtype, other.number)


@dataclass
class LocalParameter:
    """A parameter of ``shape`` in the optimizer's ``group``.

    ``pieces`` are the fragments of each elementwise tensor by slot; ``values`` are single values for the whole
    parameter.
    """

    shape: Shape
    group: int
    pieces: dict[str, list[Fragment]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    @property
    def steps(self) -> float | None:
        """The optimizer's step count; None if it has none."""
        value = self.values.get("step")
        if value is None or not value.dtype:
            return None if value is None else value.number
        return values_of(np.frombuffer(value.data, np.uint8), value.dtype).item()

    def add(self, slot: str, dtype: str, pieces: list[Fragment], path: Path) -> None:
        """Add the fragments of one rank. Raises ``Damaged`` if the other ranks have another dtype."""
        if self.dtypes.setdefault(slot, dtype) != dtype:
            raise Damaged(
                f"{path}: {slot} is {dtype}, and in other ranks {self.dtypes[slot]}", path=str(path)
            )
        self.pieces.setdefault(slot, []).extend(pieces)

    def add_values(self, values: dict[str, Value], path: Path) -> None:
        """Add the values of one rank. Raises ``Damaged`` if they differ from those of the ranks before."""
        for slot, value in values.items():
            if not self.values.setdefault(slot, value).same(value):
                raise Damaged(
                    f"{path}: {slot!r} of group {self.group} is not what it is in other ranks: the files are of two"
                    " checkpoints. Take all of them from one.",
                    path=str(path),
                )


class Rank:
    """The optimizer file of a data-parallel rank; ``state`` is its optimizer's state dict."""

    def __init__(self, archive: Archive, state: dict[str, Any]) -> None:
        self.archive, self.state = archive, state

    @property
    def path(self) -> Path:
        return self.archive.path

    def value(self, contents: ReadFiles, value: Tensor | Number) -> Value:
        """Read a single number of the file."""
        if not isinstance(value, Tensor):
            return Value(number=value)
        part, size = self.archive.part_in(contents, value.storage), DTYPE_BYTES[value.storage.dtype]
        data = bytearray(size)
        if value.offset < 0 or (value.offset + 1) * size > contents.parts[part].nbytes:
            raise Damaged(f"{self.path}: a number lies outside of what is stored", path=str(self.path))
        contents.read(part, value.offset * size, memoryview(data))
        return Value(bytes(data), value.storage.dtype, part, value.offset)

    def stretch(
        self, contents: ReadFiles, tensor: Tensor, shape: Shape, within: tuple[int, int], at: int
    ) -> list[Fragment]:
        """Return a range of a flattened parameter as fragments.

        Args:
            contents: The source that gets the part.
            tensor: The flat tensor.
            shape: The shape of the parameter.
            within: The first element of the parameter and the one after the last.
            at: The offset in ``tensor``, in elements.
        """
        start, stop = within
        if tensor.strides != (1,) or not 0 <= at <= at + stop - start <= tensor.shape[0]:
            raise Damaged(
                f"{self.path}: {stop - start} elements from {at} on are not in a flat tensor of {list(tensor.shape)}",
                path=str(self.path),
            )
        return flat(shape, start, stop, self.archive.part_in(contents, tensor.storage), tensor.offset + at)


def split_state(
    rank: Rank, contents: ReadFiles, state: Mapping[str, Any], sizes: tuple[int, ...]
) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """Divide an optimizer's state of a flat tensor into tensors of a length in ``sizes``, and numbers.

    Raises ``BadInput`` for other state, which could not be moved to another partition.
    """
    flats: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    for slot, value in state.items():
        if isinstance(value, Tensor) and len(value.shape) == 1 and value.shape[0] in sizes:
            flats[slot] = value
        elif isinstance(value, bool | int | float) or (
            isinstance(value, Tensor) and value.shape in ((), (1,))
        ):
            values[slot] = rank.value(contents, value)
        elif value is not None:
            what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {_kind(value)}"
            raise BadInput(
                f"{rank.path}: the optimizer keeps {slot!r}, {what}, for {sizes[0]} elements together. State that is"
                " neither of each element nor one number cannot be given to another partition."
            )
    return flats, values


def _kind(value: Any) -> str:
    return value.name if isinstance(value, PickledObject) else type(value).__name__


def shapes_of(value: Any, path: Path) -> list[dict[str, Shape]]:
    """Return ``param_shapes`` by group: the shape of each parameter. Raises ``Damaged``."""
    try:
        shapes = [{str(name): tuple(map(int, shape)) for name, shape in group.items()} for group in value]
    except (TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{path}: param_shapes is no list of shapes: {error}", path=str(path)) from error
    if any(n < 0 for group in shapes for shape in group.values() for n in shape):
        raise Damaged(f"{path}: param_shapes has a negative size", path=str(path))
    names = [name for group in shapes for name in group]
    if len(set(names)) < len(names):
        raise Damaged(f"{path}: param_shapes has a parameter in two groups", path=str(path))
    return shapes
