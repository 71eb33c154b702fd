"""The search for a placement and for delayed and recomputed fractions, for a measured model on a measured machine.

1. For several delayed fractions, the linear program proposes a placement, and so does the greedy choice by traffic
   saved per byte (``placement``).
2. Each proposal becomes whole blocks that fit, by the exact memory of the operation list that the engine will run.
3. The simulator plays that list, and the fastest choice is taken.
4. The choice is improved while memory is left, for which activations compete.

Of equally fast choices, the one that recomputes most is taken, because it needs least memory, and then the one that
wears the SSD least. Called by ``automatic_placement``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, inf

from ...config import Fraction
from ...errors import BadInput, DoesNotFit
from ...profiles import MachineProfile
from ...quantities import GiB
from ..horizontal import horizontal
from ..memory_use import MakesOps, Memory, predict
from ..operation_lists import machine_of
from ..operations import SSD_READ, SSD_WRITE, Op, as_guessed, lane_bytes
from ..simulate import Simulation, simulate
from ..work import BlockPlacement, StepShape, Work, kept_blocks
from .formulas import FRACTIONS, PROCESS_BYTES
from .linear_program import load_highs, solve
from .placement import ORDER, checked, choose, savings_of
from .training_setting import CARRY_BYTES, MeasuredModel, Method, Setting

DELAYED = (0.0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Delayed fractions that are tried, rounded to whole blocks."""
RECOMPUTED = (0.0, 1 / 4, 1 / 2, 3 / 4)
"""Recomputed fractions that are tried after 1, rounded to whole blocks."""
SAME = 5e-3
"""Relative difference of step times below which two choices are equally fast."""
STEPS = 4
"""Number of times that a list is played; the step time is the mean of the later half."""
PLAYED = 400_000
"""Most operations that are played in one search: about ten seconds."""
TRIES = 4
"""Number of times that the linear program is run with less memory, until whole blocks fit."""
NO_LIMIT = 1024 * 1024 * GiB
"""Host memory assumed where there is no budget."""


def answer(question: Question, most_played: int = PLAYED) -> Answer:
    """Return the best choice. The search plays ``most_played`` operations at most.

    Raises ``DoesNotFit`` if no choice fits with what was stated, and ``BadInput`` for a value that is no fraction.
    """
    search, with_program = _Search(question, most_played), has_highs()
    for shape in search.shapes():
        for placement in search.proposals(shape, with_program):
            search.play(placement, shape)
    if not search.played:
        assert search.refusal is not None
        raise search.refusal
    for shape in search.less_recomputed(search.best.shape):
        for placement in search.proposals(shape, with_program):
            if search.fits(placement, shape):
                search.play(placement, shape)
    search.improve()
    return Answer(search.best, len(search.played), with_program)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The problem for which a choice is made. Bytes."""

    work: Work
    """The model's work, with floating-point operations that ``machine`` does at its rate."""
    shape: StepShape
    """Shape of the usual step. Its delayed and recomputed fractions are chosen unless the fields below state them."""
    machine: MachineProfile
    schedule: MakesOps
    host_budget: int | None
    """Budget of the whole process."""
    held_bytes: int
    """Bytes that the process holds besides what the plan counts."""
    evaluation_batches: int
    asked: Mapping[str, Fraction]
    """Fractions of params, optimizer and activations; "auto" is to be chosen."""
    delayed_fraction: Fraction
    recomputed_fraction: Fraction = 1.0
    device_budget: int | None = None
    """Budget of a separate device's memory."""

    @property
    def stated(self) -> dict[str, float]:
        """The fractions that are stated. Raises ``BadInput`` for a value that is no fraction."""
        found = {kind: checked(kind, value) for kind, value in self.asked.items()}
        return {kind: value for kind, value in found.items() if value is not None}

    @property
    def all_wait(self) -> bool:
        """True if all updates wait for the norm or the last micro-batch, whatever delayed fraction is stated."""
        return self.shape.clipping == "defer" or self.schedule is horizontal

    def operations(self, placement: BlockPlacement, shape: StepShape) -> list[Op]:
        """Return the operations of a step in which every guess is right."""
        return as_guessed(self.schedule(self.work, placement, shape))


@dataclass(frozen=True)
class Choice:
    """One placement and shape, with the result of playing it."""

    placement: BlockPlacement
    shape: StepShape
    simulation: Simulation
    written_bytes: int
    read_bytes: int

    @cached_property
    def step_seconds(self) -> float:
        return self.simulation.seconds_per_step

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Seconds of a step during which each lane works."""
        return {lane: seconds for lane, seconds in self.simulation.busy_seconds().items() if seconds}

    @property
    def fractions(self) -> dict[str, float]:
        """Fractions of ``placement``."""
        return self.placement.shares


@dataclass(frozen=True)
class Answer:
    """The best of the choices that were tried."""

    best: Choice
    tried: int
    by_linear_program: bool
    """False if HiGHS is not installed."""


def play(question: Question, placement: BlockPlacement, shape: StepShape) -> Choice:
    """Simulate one placement and shape."""
    operations = question.operations(placement, shape)
    moved = lane_bytes(operations)
    found = simulate([operations] * STEPS, machine_of(question.machine, operations))
    return Choice(placement, shape, found, moved[SSD_WRITE], moved[SSD_READ])


class _Search:
    """The choices played so far."""

    def __init__(self, question: Question, most_played: int) -> None:
        self.question, self.blocks = question, len(question.work.blocks)
        self.played: dict[tuple[BlockPlacement, StepShape], Choice] = {}
        self._predicted: dict[tuple[BlockPlacement, StepShape], Memory] = {}
        self.refusal: DoesNotFit | None = None
        """The error of the greedy placement (most traffic saved per byte), if that does not fit."""
        once = STEPS * len(question.operations(BlockPlacement.fractions(self.blocks), question.shape))
        self.most = max(most_played // once, 3)
        """Number of choices that may be played."""

    def shapes(self) -> list[StepShape]:
        """Return shapes with the delayed fractions to try, in whole blocks.

        There are as many as may be played, with two proposals each.
        """
        given = self.question.recomputed_fraction
        again = 1.0 if given == "auto" else given
        return [
            replace(self.question.shape, delayed_fraction=delayed, recomputed_fraction=again)
            for delayed in self._delays()
        ]

    def less_recomputed(self, shape: StepShape) -> list[StepShape]:
        """Return ``shape`` with smaller recomputed fractions; empty where they may not be chosen."""
        if not self._may_keep:
            return []
        counts = {round(part * (self.blocks - 1)) for part in RECOMPUTED} - {self.blocks - 1}
        return [replace(shape, recomputed_fraction=count / (self.blocks - 1)) for count in sorted(counts)]

    @property
    def _may_keep(self) -> bool:
        """True if activations may stay, which needs a budget of the memory that they would take."""
        q = self.question
        budget = q.host_budget if q.work.unified else q.device_budget
        return q.recomputed_fraction == "auto" and budget is not None and self.blocks > 1

    def _delays(self) -> list[float]:
        question = self.question
        if question.delayed_fraction != "auto":
            return [question.delayed_fraction]
        if question.all_wait:
            return [0.0]
        counts = sorted({round(part * self.blocks) for part in DELAYED})
        every = max(-(-len(counts) * 3 // self.most), 1)
        return [count / self.blocks for count in counts[::every]]

    def proposals(self, shape: StepShape, with_program: bool) -> Iterator[BlockPlacement]:
        """Yield placements that fit in host memory."""
        found = self._program(shape) if with_program else None
        if found is not None:
            yield found
        if found is not None and self.played:  # one of the other kind is enough to begin with
            return
        q = self.question
        try:
            yield choose(
                q.work,
                shape,
                q.host_budget,
                schedule=q.schedule,
                evaluation_batches=q.evaluation_batches,
                held_bytes=q.held_bytes,
                order=ORDER,
                device_budget_bytes=q.device_budget,
                savings=savings_of(q.work, q.shape, q.schedule),
                waiting_bytes=inf,
                **q.asked,
            )
        except DoesNotFit as error:
            self.refusal = self.refusal or error

    def play(self, placement: BlockPlacement, shape: StepShape) -> None:
        key = (placement, shape)
        if key not in self.played and len(self.played) < self.most:
            self.played[key] = play(self.question, placement, shape)

    @property
    def best(self) -> Choice:
        """The fastest choice.

        Of equally fast ones, the one that recomputes most, then the one that writes and reads least, then the one that
        delays least.
        """
        choices = self.played.values()
        fastest = min(choice.step_seconds for choice in choices)
        close = [choice for choice in choices if choice.step_seconds <= fastest * (1 + SAME)]
        return min(
            close,
            key=lambda c: (
                -c.shape.recomputed_fraction,
                c.written_bytes + 0.01 * c.read_bytes,
                c.shape.delayed_fraction,
            ),
        )

    def improve(self) -> None:
        """Try neighbours of the best choice as long as the result improves.

        A neighbour keeps a block more of one kind, perhaps a block less of another, or delays or recomputes a block
        more or less.
        """
        before = None
        while before is not (best := self.best) and len(self.played) < self.most:
            before = best
            for placement, shape in self._neighbours(best):
                fitting = next(
                    (each for each in self._variants(placement, shape) if self.fits(each, shape)), None
                )
                if fitting is not None:
                    self.play(fitting, shape)

    def _neighbours(self, choice: Choice) -> Iterator[tuple[BlockPlacement, StepShape]]:
        counts = {kind: round(part * self._rows(kind)) for kind, part in choice.fractions.items()}
        free = [kind for kind in FRACTIONS if kind not in self.question.stated]
        for more in free:
            for less in (None, *(kind for kind in free if kind != more)):
                changed = dict(counts)
                changed[more] += 1
                if less is not None:
                    changed[less] -= 1
                if all(0 <= count <= self._rows(kind) for kind, count in changed.items()):
                    yield self._whole(changed), choice.shape
        turned = {"delayed_fraction": self.blocks} if len(self._delays()) > 1 else {}
        if self._may_keep:
            turned["recomputed_fraction"] = self.blocks - 1
        for name, count in turned.items():
            now = round(getattr(choice.shape, name) * count)
            for other in (now - 1, now + 1):
                if 0 <= other <= count:
                    yield choice.placement, replace(choice.shape, **{name: other / count})

    def _program(self, shape: StepShape) -> BlockPlacement | None:
        """Return the linear program's placement in whole blocks that fit; None if it finds none."""
        q = self.question
        budget = NO_LIMIT if q.host_budget is None else q.host_budget
        memory = budget - q.held_bytes + PROCESS_BYTES
        for _ in range(TRIES):
            solution = solve(self._setting(memory, shape), q.stated)
            if solution is None:
                return None
            counts = {kind: floor(solution.fractions[kind] * self._rows(kind) + 1e-6) for kind in FRACTIONS}
            variants = self._variants(self._whole(counts), shape)
            over = []
            for placement in variants:
                over.append(self._memory(placement, shape).host_bytes + q.held_bytes - budget)
                if over[-1] <= 0:
                    return placement
            memory -= min(over)
            if memory <= 0:
                return None
        return None

    def _setting(self, memory: int, shape: StepShape) -> Setting:
        q, kept = self.question, kept_blocks(shape, self.blocks)
        blocks = zip(q.work.blocks, kept)
        model = MeasuredModel(
            replace(
                q.work,
                blocks=tuple(
                    replace(b, backward_flop=b.backward_work - stays * b.forward_flop) for b, stays in blocks
                ),
            )
        )
        return Setting(
            machine=replace(
                q.machine, host_memory_bytes=memory, ssd_capacity_bytes=sys.maxsize
            ),  # the files exist
            model=model,
            method=Method(
                clipping=q.shape.clipping,
                commit_every=int(q.shape.commit),
                order="snake" if q.shape.order == "snake" else "plain",
                param_bytes=model.param_bytes_each,
                state_bytes=model.state_bytes_each - CARRY_BYTES * model.is_split,
                is_split=model.is_split,
            ),
            micro_batches=q.shape.micro_batches,
            delayed_fraction=1.0 if q.all_wait else shape.delayed_fraction,
        )

    def _whole(self, counts: Mapping[str, int]) -> BlockPlacement:
        stated = self.question.stated
        return BlockPlacement.fractions(
            self.blocks, **{kind: stated.get(kind, n / self._rows(kind)) for kind, n in counts.items()}
        )

    def _variants(self, placement: BlockPlacement, shape: StepShape) -> list[BlockPlacement]:
        """Return ``placement`` with each saving that fits on the device; with all if none does."""
        q = self.question
        made = [replace(placement, saving=each) for each in savings_of(q.work, q.shape, q.schedule)]
        if q.work.unified or q.device_budget is None:
            return made
        return [p for p in made if self._memory(p, shape).device_bytes <= q.device_budget] or made

    def _rows(self, kind: str) -> int:
        """Return the number of blocks that a fraction refers to: the last block's own inputs never leave."""
        return max(self.blocks - (kind == "activations"), 1)

    def fits(self, placement: BlockPlacement, shape: StepShape) -> bool:
        """Return whether the choice fits in host memory.

        On a separate device, also whether the activations that stay fit there.
        """
        q = self.question
        host = q.host_budget
        if host is not None and q.held_bytes + self._memory(placement, shape).host_bytes > host:
            return False
        device = None if q.work.unified or shape.recomputed_fraction == 1 else q.device_budget
        return device is None or self._memory(placement, shape).device_bytes <= device

    def _memory(self, placement: BlockPlacement, shape: StepShape) -> Memory:
        """Return the memory of a choice. Rounds of ``improve`` ask for the same ones again."""
        q, found = self.question, self._predicted.get((placement, shape))
        if found is None:
            found = predict(q.work, placement, shape, q.schedule, q.evaluation_batches)
            self._predicted[placement, shape] = found
        return found


def has_highs() -> bool:
    """Return whether the linear program can be solved here."""
    try:
        load_highs()
    except BadInput:
        return False
    return True
