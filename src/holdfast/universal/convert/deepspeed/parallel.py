"""Parameters that tensor-parallel ranks have parts of, put together by what ``universal_checkpoint_info`` says of them.

It has regular expressions, which have to match from the beginning of a name: parameters that all ranks have alike, that
are averaged, that are cut along the second axis (all others are along the first), that are several in one, whose
rows are padded. Pipeline stages have parameters of their own; what two of them have are copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....errors import BadInput, Damaged
from ....state.boxes import Box
from ....state.pieces import Pieces, joined
from .local import Local, Shape, Value

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

Cut = list[tuple[Box, Box]]
"""For a rank: boxes of the whole tensor, and where they are in the rank's."""


@dataclass
class Whole:
    """A parameter: by slot the dtype, where its elements are, and copies of them that are equal, or averaged."""

    shape: Shape
    group: int
    slots: dict[str, tuple[str, Pieces]] = field(default_factory=dict)
    copies: dict[str, list[Pieces]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    average: bool = False


class Info:
    """``universal_checkpoint_info`` of the file ``path``; without any, nothing can be cut."""

    def __init__(self, info: dict[str, Any] | None, ranks: int, path: Path) -> None:
        """Raises ``BadInput`` for what is not read."""
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

    def whole(self, name: str, parts: Sequence[Local]) -> Whole:
        """A parameter of which each of the ranks, in their order, has one of ``parts``."""
        first = parts[0]
        for part in parts[1:]:
            first.add_values(part.values, self._path)
            if part.dtypes != first.dtypes:
                raise Damaged(
                    f"{self._path}: ranks have {name} in other types or slots", path=str(self._path)
                )
        kinds = [key for key in (REPLICATED, AVERAGED, ROWS, HALVES) if self._matches(key, name)]
        several = self._several(name)
        if len(kinds) + (several is not None) > 1:
            raise BadInput(f"{self._path}: {name} is matched by several of {kinds}: it says not what it is")
        pieces = [{s: Pieces.of(p, len(part.shape)) for s, p in part.pieces.items()} for part in parts]
        if len(parts) == 1 or kinds in ([REPLICATED], [AVERAGED]):
            whole = _alike(name, parts, pieces, kinds == [AVERAGED], self._path)
        else:
            axis = 1 if kinds == [ROWS] else 0
            if several is not None:
                axis, widths = several
            elif kinds == [HALVES]:
                widths = [[part.shape[0] // 2 for part in parts]] * 2
            else:
                widths = [[part.shape[axis] if part.shape else 0 for part in parts]]
            whole = _joined(name, parts, pieces, axis, widths, self._path)
        return self._unpadded(name, whole)

    def is_tied(self, name: str) -> bool:
        """Whether several pipeline stages have it."""
        return self._matches(TIED, name)

    def check_used(self) -> None:
        """Raise ``BadInput`` if an expression matched nothing: it is of another model."""
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
        """The axis and, of each of several parameters in one, the width in each rank."""
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

    def _unpadded(self, name: str, whole: Whole) -> Whole:
        """Without the rows that fill the vocabulary up."""
        rows = self._info.get("original_vocab_size")
        if not self._matches(VOCABULARY, name) or rows is None:
            return whole
        if not 0 < rows <= whole.shape[0]:
            raise Damaged(
                f"{self._path}: of {name} {list(whole.shape)}, {rows} rows are meant", path=str(self._path)
            )
        whole.shape = (rows, *whole.shape[1:])
        box = Box.whole(whole.shape)
        whole.slots = {slot: (dtype, pieces.within(box)) for slot, (dtype, pieces) in whole.slots.items()}
        whole.copies = {slot: [each.within(box) for each in copies] for slot, copies in whole.copies.items()}
        return whole


def _alike(
    name: str, parts: Sequence[Local], pieces: list[dict[str, Pieces]], average: bool, path: Path
) -> Whole:
    first = parts[0]
    if any(part.shape != first.shape for part in parts):
        raise Damaged(
            f"{path}: {name} is said to be alike in all ranks, and has several shapes", path=str(path)
        )
    slots = {slot: (first.dtypes[slot], pieces[0][slot]) for slot in first.pieces}
    copies = {slot: [each[slot] for each in pieces[1:]] for slot in first.pieces}
    return Whole(first.shape, first.group, slots, copies, first.values, average)


def _joined(
    name: str,
    parts: Sequence[Local],
    pieces: list[dict[str, Pieces]],
    axis: int,
    widths: list[list[int]],
    path: Path,
) -> Whole:
    first = parts[0]
    shapes = [part.shape for part in parts]
    for rank, shape in enumerate(shapes):
        held = sum(each[rank] for each in widths if len(each) == len(parts))
        others = shape[:axis] + shape[axis + 1 :]
        if axis >= len(shape) or held != shape[axis] or others != shapes[0][:axis] + shapes[0][axis + 1 :]:
            raise Damaged(
                f"{path}: {name} is {list(shape)} in rank {rank}, which does not go together along axis {axis} in parts"
                f" of {widths}",
                path=str(path),
            )
    whole = (*shapes[0][:axis], sum(map(sum, widths)), *shapes[0][axis + 1 :])
    cuts = [list(_cut(whole, axis, widths, rank)) for rank in range(len(parts))]
    slots = {
        slot: (
            first.dtypes[slot],
            joined([each[slot].through(cut) for each, cut in zip(pieces, cuts, strict=True)], len(whole)),
        )
        for slot in first.pieces
    }
    return Whole(whole, first.group, slots, {}, first.values)


def _cut(shape: Shape, axis: int, widths: list[list[int]], rank: int) -> Iterator[tuple[Box, Box]]:
    """The boxes that a rank has, one of each of the parameters in one."""
    base = held = 0
    for each in widths:
        start = base + sum(each[:rank])
        low, high = [0] * len(shape), list(shape)
        low[axis], high[axis] = start, start + each[rank]
        there = Box(tuple(low), tuple(high))
        shift = [0] * len(shape)
        shift[axis] = held - start
        yield there, there.moved(tuple(shift))
        base += sum(each)
        held += each[rank]
