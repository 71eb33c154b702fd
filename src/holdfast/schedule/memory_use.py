"""The most memory that a schedule can hold, from its list alone. Bytes.

For each class of buffers it is the sum of its largest buffers, as many as the class has slots. That holds for lanes of
any speed (``step_builder``). What stays in memory for good is added. A budget is checked against ``predict``: an upper
bound that a run with a slow SSD reaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from .operations import COMPUTE, Key, Op
from .step_builder import REDO_SLOTS, RESIDENT_GRAD_SLOTS, STATE_SLOTS, UPDATED_SLOTS
from .vertical import forward_only, vertical
from .work import BlockPlacement, StepShape, TileWork, Work

MakesOps = Callable[[Work, BlockPlacement, StepShape], list[Op]]
"""Function that returns the operation list of a schedule."""
Parts = dict[tuple[str, str], int]
"""Bytes by (place, class of buffer)."""
MOST_TILES = max(STATE_SLOTS, UPDATED_SLOTS, REDO_SLOTS, RESIDENT_GRAD_SLOTS)
"""The most tiles of one unit that any class of buffers holds at once."""
CROSSING = (
    "params",
    "params_on_host",
    "displaced_resident",
    "grads",
    "kept_grads",
    "tied_params",
    "tied_grads",
    "inputs",
    "kept_inputs",
    "input_grads",
    "resident_grads",
    "resident_params",
    "expert_staging",
)
"""Classes of buffers in host memory that a separate device copies from or to."""


@dataclass(frozen=True)
class Memory:
    """The most bytes that can be held at once, by (place, what): buffers by their class, and what stays."""

    parts: Parts

    def at(self, place: str) -> dict[str, int]:
        """Return the bytes held at ``place``, by class, the largest first."""
        found = {what: size for (where, what), size in self.parts.items() if where == place and size}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def host_bytes(self) -> int:
        return sum(self.at("host").values())

    @property
    def device_bytes(self) -> int:
        return sum(self.at("device").values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that is pinned, because a separate device copies from or to it."""
        return sum(size for what, size in self.at("host").items() if what in CROSSING)


def predict(
    work: Work,
    placement: BlockPlacement,
    shape: StepShape,
    schedule: MakesOps = vertical,
    evaluation_batches: int = 0,
) -> Memory:
    """Return the memory of a run of ``schedule`` that also evaluates ``evaluation_batches`` micro-batches at once.

    At each place it is that of the steps or of the evaluations, whichever is more. 0 is a run that never evaluates.
    """
    work = _with_fewer_tiles(work)
    training = schedule(work, placement, shape)
    parts = step = buffers(training)
    if evaluation_batches:
        made = forward_only(work, placement, StepShape(micro_batches=evaluation_batches))
        parts = _larger(step, _beside(buffers(made), step, _outlasting(training)))
    memory = {**parts, **resident(work, placement)}
    setup = work.expert_setup_bytes - sum(size for (place, _), size in parts.items() if place == "host")
    if setup > 0:  # as long as the run begins, there is nothing of a step
        memory["host", "setup"] = setup
    return Memory(memory)


def _with_fewer_tiles(work: Work) -> Work:
    """Return ``work`` with only those tiles of each unit that can be the largest in memory: a shorter list.

    No class of buffers holds more than ``MOST_TILES`` tiles at once, so no other tile counts.
    """
    large = {id(block): block for block in work.blocks if len(block.cut) > MOST_TILES}
    made = {key: replace(block, cut=_largest(block.cut)) for key, block in large.items()}
    blocks = tuple(made.get(id(block), block) for block in work.blocks)
    return replace(work, blocks=blocks, resident_cut=_largest(work.resident_cut))


def _largest(tiles: Sequence[TileWork]) -> tuple[TileWork, ...]:
    """Return the ``MOST_TILES`` largest ``tiles`` by each of their sizes, in their order."""
    sizes = (
        [getattr(tile, size) for tile in tiles]
        for size in ("state_bytes", "trained_param_bytes", "grad_bytes")
    )
    kept = {number for each in sizes for number in nlargest(MOST_TILES, range(len(tiles)), each.__getitem__)}
    return tuple(tiles[number] for number in sorted(kept))


def _larger(one: Parts, other: Parts) -> Parts:
    """Return, for each place, the part that holds more there."""

    def total(parts: Parts, place: str) -> int:
        return sum(size for (where, _), size in parts.items() if where == place)

    chosen = {place: max((one, other), key=lambda p: total(p, place)) for place in ("host", "device")}
    return {key: size for place, parts in chosen.items() for key, size in parts.items() if key[0] == place}


def _beside(evaluation: Parts, step: Parts, outlasting: set[str]) -> Parts:
    """Return the memory of an evaluation, with what the step before it still holds."""
    tail = {key: size for key, size in step.items() if key[1] in outlasting}
    return {key: max(evaluation.get(key, 0), tail.get(key, 0)) for key in {**evaluation, **tail}}


def _outlasting(ops: list[Op]) -> set[str]:
    """Return the classes of buffers that a step may still hold when its last computation is over.

    Updates and their writes run beside what comes next.
    """
    by_key = {op.key: op for op in ops}
    waiting = [next(op for op in reversed(ops) if op.lane == COMPUTE)]
    over: set[Key] = set()
    while waiting:
        op = waiting.pop()
        if op.key not in over:
            over.add(op.key)
            waiting += [by_key[key] for key in op.needs]
    return {name[0] for op in ops if op.key not in over for name in op.gives}


def largest_fitting(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, by bisection between ``least``, which does, and ``most``, which may."""
    if fits(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def buffers(ops: Iterable[Op]) -> Parts:
    """Return the most bytes of each class, by (place, class), whatever the speeds of the lanes."""
    sizes: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for op in ops:
        for hold in op.takes:
            sizes[hold.place, hold.kind, hold.slots].append(hold.nbytes)
    return {
        (place, kind): sum(sorted(found, reverse=True)[: slots or None])
        for (place, kind, slots), found in sizes.items()
    }


def resident(work: Work, placement: BlockPlacement) -> Parts:
    """Return the bytes that stay for good, by (place, what)."""
    device = "host" if work.unified else "device"
    workspace = work.workspace_bytes if placement.loads_ahead(work) else work.usual_workspace_bytes

    def chosen(stays: tuple[bool, ...], size: str) -> int:
        return sum(getattr(block, size) for block, here in zip(work.blocks, stays) if here)

    return {
        ("host", "updates"): work.update_bytes,
        ("host", "resident_state"): work.resident_state_bytes if placement.saving.resident_state else 0,
        ("host", "params_on_host"): chosen(placement.params, "kept_param_bytes"),
        ("host", "optimizer_on_host"): chosen(placement.optimizer, "state_bytes"),
        ("host", "expert_staging"): work.expert_staging_bytes,
        (device, "experts"): work.expert_bytes,
        (device, "resident_working_copy"): work.resident_param_bytes,
        (device, "resident_sums"): work.resident_grad_bytes,
        (device, "workspace"): workspace,
    }
