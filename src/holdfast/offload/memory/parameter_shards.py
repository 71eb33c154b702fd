"""Parameter fragments: one rank's part of a unit's parameters, and its place in the unit's layout.

Offsets are bytes. A process that trains by itself has every parameter whole, and its shard is the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...optim.state_forms import Form
from ...quantities import PAGE, round_up
from ...state.layout.regions import Region
from .rank_shares import RowRange

if TYPE_CHECKING:
    from .block_states import ParameterEntry


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """Elements ``start`` to ``stop`` of a parameter, which are whole rows.

    ``copy_at`` is their offset in this rank's shard of the compute copy, ``grad_at`` that in its shard of the
    gradients; -1 for a frozen parameter.
    """

    member: ParameterEntry
    start: int
    stop: int
    copy_at: int
    grad_at: int

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def group(self) -> int:
        return self.member.group

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.elements == self.member.elements

    @property
    def box(self) -> Region:
        """The fragment's region of the parameter."""
        shape = self.member.shape
        if self.is_whole:
            return Region.whole(shape)
        width = prod(shape[1:])
        return Region((self.start // width, *(0 for _ in shape[1:])), (self.stop // width, *shape[1:]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape

    def box_in(self, form: Form) -> Region:
        """Return the fragment's region of an optimizer state tensor, given the tensor's form for the whole
        parameter."""
        if self.is_whole:
            return Region.whole(tuple(form.shape))
        if form.every == 1:
            return self.box
        return Region((self.start // form.every,), (-(-self.stop // form.every),))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fragment's part of a tensor that is shaped like the parameter."""
        return tensor if self.is_whole else tensor[self.box.slices]


class CopyPart(NamedTuple):
    """A contiguous range of a rank's shard of the compute copy.

    It begins at ``at`` in the shard, and goes from ``start`` to ``stop`` in the whole copy. It consists of whole pages,
    so both ends may contain bytes of neighbours, which are ignored.
    """

    at: int
    start: int
    stop: int

    @property
    def end(self) -> int:
        return self.at + self.stop - self.start


def range_of(
    members: Sequence[ParameterEntry],
    parts: Sequence[RowRange],
    offset: Callable[[ParameterEntry], int],
    itemsize: int,
) -> tuple[int, int]:
    """Return the byte range from the first to the last of ``parts``, given each member's ``offset``."""
    if not parts:
        return 0, 0
    first, last = parts[0], parts[-1]
    return (
        offset(members[first.index]) + first.start * itemsize,
        offset(members[last.index]) + last.stop * itemsize,
    )


def copy_parts(ranges: Sequence[tuple[int, int]]) -> list[CopyPart]:
    """Return the whole pages that hold ``ranges``, one after another."""
    found, at = [], 0
    for start, stop in ranges:
        first = start // PAGE * PAGE
        end = round_up(stop) if stop > start else first
        found.append(CopyPart(at, first, end))
        at += end - first
    return found
