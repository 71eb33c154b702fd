"""The parameters of model-parallel ranks, joined from the partitions of data-parallel ranks and then with one another.

1. All data-parallel ranks of a model-parallel rank must have equal dtypes and equal values, or the checkpoint is
   refused (``LocalParameter``).
2. Parameters that are divided over tensor-parallel ranks are joined as ``universal_checkpoint_info`` says (``Info``).
   It holds regular expressions that match from the start of a name. They list parameters that are replicated, averaged,
   divided along the second axis (all others: the first), fused from several, or padded. Pipeline stages have parameters
   of their own; a parameter of two stages has copies.

Only places are computed; of the data, single numbers are read. Called by the readers of ZeRO checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import BadInput, Damaged
from ...state.layout.fragments import Fragment, Fragments, flat
from ...state.layout.regions import Region
from ...state.layout.sharding import Average, Blocks, Replicate, Shard, Sharding, TensorLayout
from ...state.rules.expressions import Expression
from ...state.tensor_entries import DTYPE_BYTES, values_of
from ..source import ReadFiles
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
        self.archive, self.path, self.state = archive, archive.path, state

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


REPLICATED, AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
ROWS, VOCABULARY = "parameter_with_row_parallelism_patterns", "vocabulary_parameter_patterns"
HALVES, SEVERAL = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params"
TIED = "pipeline_replicated_parameter_patterns"
_REFUSED = (
    "autotp_unsupported_parameter_patterns",
    "affine_map",
    "ds_autoep_layers",
    "expert_parameter_patterns",
)

OVER = ("tensor",)


@dataclass
class PlacedParameter:
    """A parameter of the optimizer's ``group``, with the place of its elements by slot."""

    shape: Shape
    group: int
    slots: dict[str, TensorLayout] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    def add_copies(self, other: PlacedParameter) -> None:
        """Add the tensors of ``other`` as copies, which must be equal."""
        for slot, laid in other.slots.items():
            here = self.slots.get(slot)
            copies = laid.copies if here is None else (*here.copies, *laid.copies)
            self.slots[slot] = replace(here or laid, copies=copies)


class Info:
    """The ``universal_checkpoint_info`` of the file ``path``; without one, no parameter may be divided."""

    def __init__(self, info: dict[str, Any] | None, ranks: int, path: Path) -> None:
        """Check the info. Raises ``BadInput`` for what is unsupported."""
        if info is None and ranks > 1:
            raise BadInput(
                f"{path} is of {ranks} tensor-parallel ranks and has no universal_checkpoint_info, which says how they"
                " cut the parameters. Megatron-DeepSpeed and AutoTP write it."
            )
        self._info, self._path = info or {}, path
        for key in _REFUSED:
            if self._info.get(key):
                raise BadInput(f"{path} has {key}, which is not read")
        self._used: set[str] = set()

    def join(self, name: str, parts: Sequence[LocalParameter]) -> PlacedParameter:
        """Join a parameter from ``parts``, one for each rank in order. Raises ``Damaged`` if they do not fit."""
        first = parts[0]
        for part in parts[1:]:
            first.add_values(part.values, self._path)
            if part.dtypes != first.dtypes:
                raise Damaged(
                    f"{self._path}: ranks have {name} in other types or slots", path=str(self._path)
                )
        cut, widths = self._cut(name, parts)
        wholes = {slot: self._joined(name, slot, parts, cut, widths) for slot in first.pieces}
        shapes = {laid.shape for laid in wholes.values()} or {first.shape}
        return self._unpadded(name, PlacedParameter(shapes.pop(), first.group, wholes, first.values))

    def _cut(self, name: str, parts: Sequence[LocalParameter]) -> tuple[Sharding, list[list[int]]]:
        """Return how ``parts`` form one tensor, and the recorded widths of their sections."""
        kinds = [key for key in (REPLICATED, AVERAGED, ROWS, HALVES) if self._matches(key, name)]
        several = self._several(name)
        if len(kinds) + (several is not None) > 1:
            raise BadInput(f"{self._path}: {name} is matched by several of {kinds}: it says not what it is")
        if len(parts) == 1 or kinds == [REPLICATED]:
            return Replicate(OVER), []
        if kinds == [AVERAGED]:
            return Average(OVER), []
        if several is None and kinds != [HALVES]:
            return Shard(OVER, 1 if kinds == [ROWS] else 0), []
        axis, widths = several or (0, [[part.shape[0] // 2 for part in parts]] * 2)
        sizes = tuple(_number(sum(each)) for each in widths)
        return Blocks(OVER, axis, sizes, tuple(tuple(map(_number, each)) for each in widths)), widths

    def _joined(
        self, name: str, slot: str, parts: Sequence[LocalParameter], cut: Sharding, widths: list[list[int]]
    ) -> TensorLayout:
        """Join one slot of a parameter. Raises ``Damaged`` if the parts do not fit."""
        pieces = [Fragments.of(part.pieces[slot], len(part.shape)) for part in parts]
        laid = {
            rank: TensorLayout(part.shape, part.dtypes[slot], (pieces[rank],))
            for rank, part in enumerate(parts)
        }
        try:
            return cut.join(laid, len(parts), {})
        except ValueError as error:
            of = f" in parts of {widths}" if widths else ""
            raise Damaged(
                f"{self._path}: what ranks have of {name} does not go together, {cut}{of}: {error}",
                path=str(self._path),
            ) from error

    def is_tied(self, name: str) -> bool:
        """Return whether several pipeline stages have the parameter."""
        return self._matches(TIED, name)

    def check_used(self) -> None:
        """Raise ``BadInput`` if an expression matched nothing, as it then belongs to another model."""
        for key in (REPLICATED, AVERAGED, ROWS, HALVES, VOCABULARY):
            for pattern in self._info.get(key) or ():
                if pattern not in self._used:
                    raise BadInput(f"{self._path}: {pattern!r} of {key} matches no parameter")

    def _matches(self, key: str, name: str) -> bool:
        found = [pattern for pattern in self._info.get(key) or () if re.match(pattern, name)]
        if len(found) > 1:
            raise BadInput(f"{self._path}: {name} is matched by {len(found)} patterns of {key}: {found}")
        self._used.update(found)
        return bool(found)

    def _several(self, name: str) -> tuple[int, list[list[int]]] | None:
        """Return the axis of a fused parameter and the width of each of its parts in each rank; None if it is not
        fused.
        """
        for each in self._info.get(SEVERAL) or ():
            for pattern in each["patterns"]:
                if re.match(pattern, name):
                    widths = (self._info.get("sub_param_shard_widths") or {}).get(pattern)
                    if widths is None:
                        raise BadInput(
                            f"{self._path}: {name} is several parameters in one, and their widths by rank are not"
                            " recorded, which DeepSpeed does since version 0.4 of its universal_checkpoint_info"
                        )
                    return each["partition_dim"], widths
        return None

    def _unpadded(self, name: str, whole: PlacedParameter) -> PlacedParameter:
        """Return ``whole`` without the rows that pad the vocabulary."""
        rows = self._info.get("original_vocab_size")
        if not self._matches(VOCABULARY, name) or rows is None:
            return whole
        if not 0 < rows <= whole.shape[0]:
            raise Damaged(
                f"{self._path}: of {name} {list(whole.shape)}, {rows} rows are meant", path=str(self._path)
            )
        whole.shape = (rows, *whole.shape[1:])
        box = Region.whole(whole.shape)
        whole.slots = {
            slot: laid.changed(whole.shape, lambda pieces: pieces.within(box))
            for slot, laid in whole.slots.items()
        }
        return whole


def _number(value: int) -> Expression:
    return Expression(str(value), value)
