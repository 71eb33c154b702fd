"""Pieces: what one rank has of a unit's parameters, and where that lies in what is laid out for all of them.

Offsets are bytes. A process that trains by itself has every parameter whole, and its share is the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..state.boxes import Box
from ..units import PAGE, round_up
from ..update.forms import Form
from .shares import Part

if TYPE_CHECKING:
    from .units import Member


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter, whole rows. ``copy_at`` is where they lie in this rank's share of
    the working copy, ``grad_at`` in that of the gradients; -1 for a frozen one."""

    member: Member
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
    def box(self) -> Box:
        """Its region of the parameter."""
        shape = self.member.shape
        if self.is_whole:
            return Box.whole(shape)
        width = prod(shape[1:])
        return Box((self.start // width, *(0 for _ in shape[1:])), (self.stop // width, *shape[1:]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape

    def box_in(self, form: Form) -> Box:
        """Its region of a tensor of the optimizer's state, whose form for the whole parameter is given."""
        if self.is_whole:
            return Box.whole(tuple(form.shape))
        if form.every == 1:
            return self.box
        return Box((self.start // form.every,), (-(-self.stop // form.every),))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor that is shaped like the parameter."""
        return tensor if self.is_whole else tensor[self.box.slices]


class CopyPart(NamedTuple):
    """What of a share of the working copy lies in one run: from ``at`` on in the share, ``start`` to ``stop`` in the
    whole. Whole pages, so at both ends there may be bytes of the neighbours, which mean nothing."""

    at: int
    start: int
    stop: int

    @property
    def end(self) -> int:
        return self.at + self.stop - self.start


def range_of(
    members: Sequence[Member], parts: Sequence[Part], offset: Callable[[Member], int], itemsize: int
) -> tuple[int, int]:
    """The bytes from the first to the last of ``parts``, where members lie at ``offset``."""
    if not parts:
        return 0, 0
    first, last = parts[0], parts[-1]
    return (
        offset(members[first.index]) + first.start * itemsize,
        offset(members[last.index]) + last.stop * itemsize,
    )


def copy_parts(ranges: Sequence[tuple[int, int]]) -> list[CopyPart]:
    """The whole pages that hold ``ranges``, one after another."""
    found, at = [], 0
    for start, stop in ranges:
        first = start // PAGE * PAGE
        end = round_up(stop) if stop > start else first
        found.append(CopyPart(at, first, end))
        at += end - first
    return found
