"""Models as numbers, and ways to look at operation lists, for the tests of ``plan``.

Block sizes are all different and prime to each other's multiples, so that a formula with the wrong block,
the wrong kind of bytes or the wrong count gives another number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from combined import one_in
from holdfast.schedule.horizontal import horizontal
from holdfast.schedule.mezo_schedule import zeroth
from holdfast.schedule.operations import Key, Op
from holdfast.schedule.planner.machine_rates import Machine
from holdfast.schedule.step_builder import STAYING_BYTES
from holdfast.schedule.vertical import vertical
from holdfast.schedule.work import (
    CLIPPING,
    MEMORY_SAVINGS,
    BlockPlacement,
    BlockWork,
    MemorySaving,
    StepShape,
    TileWork,
    Work,
)

SCHEDULES = {"vertical": vertical, "horizontal": horizontal}
LISTS = {**SCHEDULES, "zeroth": lambda *step: zeroth(*whole(step))}
Step = tuple[Work, BlockPlacement, StepShape]
LARGE = STAYING_BYTES + 1
"""Bytes of a block input that does not stay on a separate device."""


def uneven(count: int, unified: bool = True) -> Work:
    """``count`` blocks, each of its own size."""
    blocks = tuple(
        BlockWork(
            elements=1009 + 10 * i,
            param_bytes=20011 + 100 * i,
            trained_param_bytes=19001 + 101 * i,
            state_bytes=120011 + 103 * i,
            grad_bytes=40009 + 109 * i,
            forward_flop=5.0e6 + i,
            activation_bytes=30011 + 107 * i,
        )
        for i in range(count)
    )
    return Work(
        blocks=blocks,
        input_bytes=3001,
        resident_state_bytes=66001,
        resident_param_bytes=11003,
        resident_grad_bytes=22003,
        resident_trained_param_bytes=10007,
        resident_elements=5501,
        workspace_bytes=9001,
        head_flop=7.0e6,
        unified=unified,
    )


def tiled(work: Work, counts: Sequence[int] = (1, 2, 3)) -> Work:
    """``work`` with the state of blocks in so many tiles, by turns, and outside of the blocks in ``counts[1]``."""
    tiles = zip(itertools.cycle(counts), work.blocks)
    blocks = (
        replace(b, cut=_tiles(n, b.elements, b.state_bytes, b.trained_param_bytes, b.grad_bytes))
        for n, b in tiles
    )
    return replace(
        work,
        blocks=tuple(blocks),
        resident_cut=_tiles(
            counts[1], work.resident_elements, work.resident_state_bytes, 0, work.resident_grad_bytes
        ),
    )


def _tiles(count: int, *sizes: int) -> tuple[TileWork, ...]:
    """The first is larger than the others by what cannot be divided."""
    parts = [[size // count + (size % count if i == 0 else 0) for size in sizes] for i in range(count)]
    names = ("elements", "state_bytes", "trained_param_bytes", "grad_bytes")
    return tuple(TileWork(**dict(zip(names, part))) for part in parts)


def loud(work: Work) -> Work:
    """``work`` whose first and last unit take more memory to compute than the others."""
    first, *others = work.blocks
    *others, last = [replace(first, extra_workspace_bytes=3001), *others]
    return replace(work, blocks=(*others, replace(last, extra_workspace_bytes=5001)))


def split(work: Work) -> Work:
    """``work`` with masters in parts, of which one is the compute copy."""

    def in_parts(b: BlockWork) -> BlockWork:
        tiles = (
            replace(t, rest_bytes=t.state_bytes - t.trained_param_bytes - 7 - i)
            for i, t in enumerate(b.tiles)
        )
        return replace(b, is_split=True, cut=tuple(tiles))

    return replace(work, blocks=tuple(map(in_parts, work.blocks)))


def whole(step: Step) -> Step:
    """The same step as MeZO has it: without tiles, and with the state outside of the blocks in host memory."""
    work, placement, shape = step
    blocks = tuple(replace(block, cut=(), is_split=False) for block in work.blocks)
    return (
        replace(work, blocks=blocks, resident_cut=(), tied_block=None),
        replace(placement, saving=MemorySaving(placement.saving.grad_slots)),
        shape,
    )


def equal_blocks(
    count: int, params: int, tokens: int, *, unified: bool = True, input_bytes: int = 4096
) -> Work:
    """``count`` blocks of ``params`` trained parameters in bf16, their state 12 bytes each."""
    block = BlockWork(
        elements=params,
        param_bytes=2 * params,
        trained_param_bytes=2 * params,
        state_bytes=12 * params,
        grad_bytes=4 * params,
        forward_flop=2.0 * params * tokens,
    )
    return Work(
        blocks=(block,) * count,
        input_bytes=input_bytes,
        resident_state_bytes=0,
        resident_param_bytes=0,
        resident_elements=0,
        unified=unified,
    )


WAYS = [
    ("plain", 0.0, 1.0),
    ("plain", 0.5, 0.0),
    ("plain", 1.0, 1.0),
    ("snake", 0.0, 1.0),
    ("snake", 0.25, 0.5),
]
"""Orders, how much of the update is delayed, and how much is computed again."""


def grid(counts: Sequence[int] = (1, 2, 3, 6)) -> Iterator[tuple[Work, BlockPlacement, StepShape]]:
    """A step for every combination of what can vary.

    Outside a campaign it is every fourth, among which are all combinations of three.
    """
    on_off = (False, True)
    varied = one_in(4, counts, (1, 2, 3, 5), on_off, CLIPPING, on_off, WAYS, (0.0, 0.5, 1.0))
    for count, micro_batches, unified, clipping, commit, (order, delayed, again), fraction in varied:
        if clipping == "speculate" and not commit:  # there would be nothing to undo from
            continue
        shape = StepShape(
            micro_batches=micro_batches,
            clipping=clipping,
            commit=commit,
            order=order,
            delayed_fraction=delayed,
            recomputed_fraction=again,
        )
        placement = BlockPlacement.fractions(
            count, params=fraction, optimizer=fraction, activations=fraction, gradients=fraction
        )
        work = uneven(count, unified)
        yield replace(work, input_bytes=LARGE) if fraction == 0.5 else work, placement, shape


@st.composite
def steps(draw: st.DrawFn, most_blocks: int = 6) -> tuple[Work, BlockPlacement, StepShape]:
    """A step of any placement, block by block."""
    count = draw(st.integers(1, most_blocks))

    def any_blocks() -> tuple[bool, ...]:
        return tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count)))

    placement = BlockPlacement(
        params=any_blocks(),
        optimizer=any_blocks(),
        activations=any_blocks(),
        gradients=any_blocks(),
        saving=draw(st.sampled_from(MEMORY_SAVINGS)),
    )
    clipping = draw(st.sampled_from(CLIPPING))
    shape = StepShape(
        micro_batches=draw(st.integers(1, 6)),
        clipping=clipping,
        commit=draw(st.booleans()) or clipping == "speculate",
        order=draw(st.sampled_from(("plain", "snake"))),
        delayed_fraction=draw(st.sampled_from((0.0, 0.0, 0.25, 0.5, 0.8, 1.0))),
        recomputed_fraction=draw(st.sampled_from((1.0, 1.0, 0.7, 0.3, 0.0))),
    )
    work = uneven(count, draw(st.booleans()))
    if count > 2 and draw(st.booleans()):
        work = replace(work, tied_block=0)
    work = tiled(work) if draw(st.booleans()) else work
    work = loud(work) if draw(st.booleans()) else work
    work = replace(work, input_bytes=LARGE) if draw(st.booleans()) else work
    return split(work) if draw(st.booleans()) else work, placement, shape


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Any lane may be any bottleneck."""

    def rate(unit: float) -> float:
        return unit * 10 ** draw(st.floats(-2, 2))

    return Machine(
        ssd_read_bytes_per_second=rate(1e6),
        ssd_write_bytes_per_second=rate(1e6),
        upload_bytes_per_second=rate(1e7),
        download_bytes_per_second=rate(1e7),
        compute_flop_per_second=rate(1e8),
        update_elements_per_second=rate(1e5),
        commit_seconds=draw(st.floats(0, 1)),
        shared_ssd=draw(st.booleans()),
    )


class Order:
    """What is over before what starts, in consecutive steps, whatever the speeds of the lanes."""

    def __init__(self, *lists: Sequence[Op]) -> None:
        self._index: dict[tuple[int, Key], int] = {}
        self._before: list[int] = []  # for each operation, a bit for every one before it
        latest: dict[Key, int] = {}
        for step, ops in enumerate(lists):
            for op in ops:
                needed = [self._index[step, key] for key in op.needs]
                needed += [latest[key] for key in op.needs_previous if key in latest]
                bits = 0
                for other in needed:
                    bits |= self._before[other] | 1 << other
                self._index[step, op.key] = len(self._before)
                self._before.append(bits)
            latest.update({op.key: self._index[step, op.key] for op in ops})

    def before(self, first: tuple[int, Key], second: tuple[int, Key]) -> bool:
        """Is ``first`` (step, key) always over when ``second`` starts?"""
        return bool(self._before[self._index[second]] >> self._index[first] & 1)


def keys(ops: Sequence[Op], *kinds: str) -> list[Key]:
    """The keys of some kinds, in list order."""
    return [op.key for op in ops if op.key.kind in kinds]
