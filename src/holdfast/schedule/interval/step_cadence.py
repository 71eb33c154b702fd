"""The choice between records of every step, copies in memory and snapshots alone, by the time that each wastes.

With a record of every step a failure loses almost nothing, but each step pays for a copy and a write, which short steps
notice. Snapshots alone cost one copy of the state in so many steps, and a failure loses the steps since the last one.
Copies in memory cost less than a snapshot and can be made more often, but only snapshots outlive the machine.
``choose`` compares the three. ``StepCadence`` measures what ``choose`` needs, in rounds of blocks of steps:

1. *recorded*: steps with a record each;
2. *plain*: steps that are not kept;
3. *held*: a copy in memory at the end of each second step, where there can be copies;
4. *copied*: a snapshot is copied at the end of the first step, and written beside the others.

Both are pure and read no clock. ``StepCadence`` counts steps, so that ranks which adopt the same choices do the same at
the same step. Called by the snapshot scheduler. Seconds, bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from statistics import median
from typing import Any, NamedTuple

from ...quantities import counted, format_seconds
from .snapshot_interval import MOST_STEPS, Limits
from .tuner import COPY_BYTES_PER_SECOND, MEAN_SECONDS_BETWEEN_FAILURES, best_within, rarest
from .waste import HOUR, MeasuredCosts, waste

WORTH, WORTH_AGAIN = 0.05, 0.03
"""The share of the time that a record of every step may cost more than snapshots alone.

Up to ``WORTH`` records are kept, because each step is then recoverable. A run without records returns to them at
``WORTH_AGAIN``. The difference keeps the choice from changing with every measurement.
"""
WORTH_MEMORY, WORTH_MEMORY_AGAIN = 0.01, 0.0
"""The same shares where the alternative is copies in memory, which lose few steps when a process dies."""
WORTH_COPIES = 0.005
"""The share of the time that copies in memory must save over snapshots alone, so that records have to be as good as
copies. Any saving keeps them."""
FEW_LOST, FEW_LOST_AGAIN = 0.01, 0.015
"""The share of the time that copies in memory may cost more than snapshots alone where there are no records.

How often a process dies is a guess before it has died, and copies lose fewer steps. Present ones stay up to the second.
"""
INSURANCE, CLEAR_STEPS = 0.005, 100
"""The share of the time that copies may take however seldom failures are, and the fewest steps from one to the next for
that reason, so that of a hundred steps at most one has a copy."""
ENOUGH = 1.25
"""The factor by which the best number of steps must differ from the present one to replace it."""
WARM_STEPS = 10
"""The first steps of a process, which are slow and not counted."""
BLOCK_STEPS, UNCOUNTED_STEPS, COPIED_STEPS = 12, 4, 8
"""The steps of a recorded or plain block, those at its beginning in which the block before is still written, and the
steps of a copied block.
"""
HELD_STEPS, UNCOUNTED_HELD = 10, 2
"""The steps of a block with copies in memory, and those at its beginning that fault the memory in."""
NUM_ROUNDS = 3
"""The rounds of the first measurement. Medians are taken over that many rounds."""
LEAST_STEPS, LEAST_SECONDS = 1000, 1800.0
"""A choice is kept for as many steps and seconds, at least. Then one more round is measured."""
FAR_LONGER = 5.0
"""A step that trains longer than this multiple of the median of its block is not counted."""
RECORDED, PLAIN, HELD, COPIED = "recorded", "plain", "held", "copied"
"""Kinds of blocks."""


class StepRates(NamedTuple):
    """The measured seconds of a run's steps and snapshots."""

    plain_seconds: float
    """Seconds of a step of which nothing is kept."""
    recorded_seconds: float
    """Seconds of a step with a log record, writing included."""
    copy_seconds: float
    """Seconds that one snapshot, copied at the end of one step, adds to training: the copy, and the writing beside it.
    """
    held_seconds: float | None = None
    """Seconds that one copy in memory adds to training, hashing included; None where there can be none."""


@dataclass(frozen=True)
class CadenceChoice:
    """A choice of how steps are kept, and what it was made from."""

    every: int
    """1 for a log record of each step; else the steps from one snapshot to the next, with no records between."""
    recorded_waste: float
    """The share of the time that a record of each step would waste, failures included."""
    alone_waste: float
    """The share of the time that snapshots alone would waste, failures included."""
    lost_steps: float
    """The mean number of steps that a failure loses; with copies in memory, one that the machine survives."""
    rates: StepRates
    copies: int = 0
    """Steps from one copy in memory to the next; 0 for no copies."""
    copied_waste: float | None = None
    """The share of the time that copies in memory would waste, failures included; None where there can be none."""

    @property
    def about(self) -> dict[str, Any]:
        """The choice as JSON."""
        return {
            "every": self.every, "recorded_waste": self.recorded_waste, "alone_waste": self.alone_waste,
            "lost_steps": self.lost_steps, "copies": self.copies, "copied_waste": self.copied_waste,
            **self.rates._asdict(),
        }  # fmt: skip

    def describe(self) -> str:
        """Describe the choice, what it costs and what a failure loses, for a person."""
        recorded, alone = ("a record of every step", self.recorded_waste), ("bases alone", self.alone_waste)
        held = ("copies in memory", self.copied_waste)
        lost = counted(max(round(self.lost_steps), 1), "step")
        loses = f"A failure loses about {lost}."
        if self.every == 1:
            how, waste, others = recorded[0], recorded[1], (alone, held)
        else:
            how = f"a base every {self._apart(self.every)}, and no records between"
            waste, others = self.alone_waste, (recorded, held)
        if self.copies and self.copied_waste is not None:
            how = f"a copy in memory every {self._apart(self.copies)}, and a base every {self._apart(self.every)}"
            waste, others = self.copied_waste, (recorded, alone)
            loses = (
                f"The death of the process loses about {lost}, that of the machine about"
                f" {counted(round(self.every / 2), 'step')}."
            )
        instead = " and ".join(
            f"{name} would cost {share:.1%}" for name, share in others if share is not None
        )
        return f"{how}. Keeping steps, and failures, cost {waste:.1%} of the time; {instead}. {loses}"

    def _apart(self, steps: int) -> str:
        return f"{counted(steps, 'step')} ({format_seconds(steps * self.rates.plain_seconds)})"


def choose(
    measured: MeasuredCosts,
    limits: Limits,
    rates: StepRates,
    now: int = 1,
    now_copies: int = 0,
    machine_seconds: float = MEAN_SECONDS_BETWEEN_FAILURES,
) -> CadenceChoice:
    """Return what wastes least time, with a preference for records of every step, and for the present choice.

    Args:
        measured: What else the run has measured, among it the mean time between failures.
        limits: The limits of snapshots. Steps from one snapshot to the next take ``recovery_seconds`` at most.
        rates: The seconds of steps, snapshots and copies in memory.
        now: The present choice, as in ``CadenceChoice.every``.
        now_copies: The present choice, as in ``CadenceChoice.copies``.
        machine_seconds: Mean seconds between failures that memory does not survive.
    """
    recorded, num_pending = _with_records(measured, limits, rates)
    every, alone = _with_snapshots_alone(measured, limits, rates)
    held = _with_copies(measured, limits, rates, machine_seconds, now_copies)
    copied = None if held is None else held.share
    has_gain = held is not None and held.share < alone - (0.0 if now_copies else WORTH_COPIES)
    worth = (WORTH_MEMORY, WORTH_MEMORY_AGAIN) if has_gain else (WORTH, WORTH_AGAIN)
    least = held.share if held is not None and has_gain else alone
    if recorded - least <= worth[now != 1]:
        return CadenceChoice(1, recorded, alone, num_pending, rates, 0, copied)
    if held is not None and held.share <= alone + (FEW_LOST_AGAIN if now_copies else FEW_LOST):
        lost = held.copies / 2 + (rates.held_seconds or 0.0) / rates.plain_seconds
        return CadenceChoice(held.every, recorded, alone, lost, rates, held.copies, copied)
    if now > 1 and not now_copies and max(now, every) <= ENOUGH * min(now, every):
        every = now
        alone = waste(_alone(measured, rates), now, has_records=False).total / HOUR
    lost = every / 2 + measured.full_bytes / measured.write_bytes_per_second / rates.plain_seconds
    return CadenceChoice(every, recorded, alone, lost, rates, 0, copied)


def _with_records(measured: MeasuredCosts, limits: Limits, rates: StepRates) -> tuple[float, float]:
    """Return the share of the time that records of every step waste, and the mean number of steps lost."""
    costs = replace(
        measured, step_seconds=rates.plain_seconds, write_slowdown=0.0,
        record_stall_seconds=max(rates.recorded_seconds - rates.plain_seconds, 0.0),
    )  # fmt: skip
    best, _ = best_within(costs, limits)
    steps = rarest(costs, limits) if best is None else best.steps
    lost = 0.5 + costs.write_seconds / rates.recorded_seconds
    return waste(costs, steps).total / HOUR, lost


def _with_snapshots_alone(measured: MeasuredCosts, limits: Limits, rates: StepRates) -> tuple[int, float]:
    """Return the best number of steps between snapshots without records, and the share of the time that it wastes."""
    costs = _alone(measured, rates)
    writing = measured.full_bytes / (limits.bandwidth_share * measured.write_bytes_per_second)
    least = max(2, ceil(max(writing, 2 * costs.sync_seconds) / rates.plain_seconds))
    most = int(min(MOST_STEPS, (limits.recovery_seconds - costs.load_seconds) / rates.plain_seconds))
    young = sqrt(2 * rates.copy_seconds * measured.mean_seconds_between_failures) / rates.plain_seconds

    def total(steps: int) -> float:
        return waste(costs, steps, has_records=False).total / HOUR

    near = {max(least, min(most, round(young * 1.1**power))) for power in range(-12, 13)}
    best = min(sorted(near), key=total)
    return best, total(best)


def _alone(measured: MeasuredCosts, rates: StepRates) -> MeasuredCosts:
    """Return the costs of snapshots alone, whose writes take as long as their bytes."""
    return replace(
        measured, step_seconds=rates.plain_seconds, record_bytes=0, record_stall_seconds=0.0, write_slowdown=0.0,
        replay_seconds=0.0, base_stall_seconds=rates.copy_seconds, base_steps=1,
        sync_seconds=measured.full_bytes / measured.write_bytes_per_second,
    )  # fmt: skip


class _Held(NamedTuple):
    """Copies in memory every ``copies`` steps and snapshots every ``every``, which waste ``share`` of the time."""

    copies: int
    every: int
    share: float


def _with_copies(
    measured: MeasuredCosts, limits: Limits, rates: StepRates, machine_seconds: float, now: int
) -> _Held | None:
    """Return the best copies in memory, with the snapshots that a loss of the machine asks for; None without copies.

    They are no further apart than ``INSURANCE`` pays for. A number of steps close to the best stays as it is ``now``.
    """
    held, plain = rates.held_seconds, rates.plain_seconds
    if held is None:
        return None
    losses = replace(measured, mean_seconds_between_failures=machine_seconds)
    every, _ = _with_snapshots_alone(losses, limits, rates)
    snapshots = rates.copy_seconds / (every * plain) + every * plain / 2 / machine_seconds
    costs = replace(
        _alone(measured, rates), base_stall_seconds=held, sync_seconds=held, write_bytes_per_second=inf,
        read_bytes_per_second=max(measured.read_bytes_per_second, COPY_BYTES_PER_SECOND / 4),
    )  # fmt: skip
    young = sqrt(2 * held * measured.mean_seconds_between_failures) / plain

    def total(steps: int) -> float:
        return waste(costs, steps, has_records=False).total / HOUR

    near = {max(1, min(every, round(young * 1.1**power))) for power in range(-12, 13)}
    best = min(min(sorted(near), key=total), max(CLEAR_STEPS, ceil(held / plain / INSURANCE)))
    if now and max(now, best) <= ENOUGH * min(now, best) and now <= every:
        best = now
    return _Held(best, every, total(best) + snapshots)


class StepCadence:
    """The present way to keep steps: records, copies in memory, or snapshots alone.

    Args:
        every: 1 for a record of every step, k for a snapshot every k steps and no records; None to measure and choose.
        can_copy: True if copies in memory may be measured and chosen.
    """

    def __init__(self, every: int | None = 1, can_copy: bool = False) -> None:
        self.every = every or 1
        """The choice, as in ``CadenceChoice.every``. While a round is measured it does not hold."""
        self.records = self.every == 1
        """True if the next step gets a log record."""
        self.copies = 0
        """The choice, as in ``CadenceChoice.copies``. While a round is measured it does not hold."""
        self.is_auto = every is None
        """True if the choice is made here."""
        self._can_copy = can_copy and self.is_auto
        self._rounds: deque[StepRates] = deque(maxlen=NUM_ROUNDS)
        self._blocks: deque[_Block] = deque()
        self._measured: dict[str, _Mean] = {}
        """The results of the blocks of the round under way, by kind."""
        self._left = 0
        """The steps for which the choice is still kept."""
        if self.is_auto:
            self._measure(NUM_ROUNDS, WARM_STEPS)

    @property
    def is_measuring(self) -> bool:
        """True while a round is under way, or before the first choice."""
        return bool(self._blocks)

    @property
    def rates(self) -> StepRates | None:
        """The medians of the last rounds; None before there are enough for a choice."""
        if len(self._rounds) < NUM_ROUNDS:
            return None
        plain = median(found.plain_seconds for found in self._rounds)
        extra = median(found.recorded_seconds - found.plain_seconds for found in self._rounds)
        copied = median(found.copy_seconds for found in self._rounds)
        held = [found.held_seconds for found in self._rounds if found.held_seconds is not None]
        in_memory = median(held) if self._can_copy and len(held) == len(self._rounds) else None
        return StepRates(plain, max(plain + extra, plain), copied, in_memory)

    def is_due(self, step: int, begun_at: int, exactly: bool) -> bool:
        """Return whether a snapshot is due at the end of ``step``, while there are no records.

        Args:
            begun_at: The step of the last snapshot.
            exactly: Only at multiples of ``every``, as several ranks have to. Otherwise a snapshot that could not be
                made there is made up for.
        """
        if self._blocks:
            return self._blocks[0].kind == COPIED and not self._blocks[0].times
        return step % self.every == 0 if exactly else step // self.every > begun_at // self.every

    def is_copy_due(self, step: int) -> bool:
        """Return whether the state is to be copied into memory at the end of ``step``."""
        if self._blocks:
            return self._blocks[0].kind == HELD and len(self._blocks[0].times) % 2 == 0
        return self.copies > 0 and step % self.copies == 0

    def leave_copies(self) -> None:
        """Go on without copies in memory, which are neither measured nor chosen any more."""
        self._can_copy = False
        self._blocks = deque(block for block in self._blocks if block.kind != HELD)

    def stepped(self, seconds: float, stall: float, copied: bool = False) -> bool:
        """Note a step, and return whether a choice is to be made and adopted.

        Args:
            seconds: The time since the step before.
            stall: The part of it that training waited for keeping the step.
            copied: True if a snapshot was copied at the end of the step.
        """
        if not self.is_auto:
            return False
        if not self._blocks:
            self._left -= 1
            if self._left <= 0:
                self._measure(1)
            return False
        block = self._blocks[0]
        if block.kind == COPIED and not block.times and not copied:
            return False
        block.times.append((max(seconds - stall, 0.0), stall))
        if len(block.times) < block.most_steps:
            return False
        self._end(self._blocks.popleft())
        self.records = self._blocks[0].kind == RECORDED if self._blocks else self.every == 1
        return not self._blocks

    def adopt(self, choice: CadenceChoice) -> None:
        """Keep steps as chosen from here on."""
        self._blocks.clear()
        self.every, self.copies, self.records = choice.every, choice.copies, choice.every == 1
        self._left = max(LEAST_STEPS, ceil(LEAST_SECONDS / choice.rates.plain_seconds))

    def to_json(self) -> dict[str, Any]:
        """Return the choice and the measured rounds, for ``restore`` in a later process."""
        return {"every": self.every, "copies": self.copies, "rounds": [list(found) for found in self._rounds]}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue with what ``to_json`` returned in an earlier process. Rounds that are missing are measured."""
        self.every, self.copies = saved["every"], saved.get("copies", 0)
        self._rounds.extend(StepRates(*found) for found in saved["rounds"])
        self._blocks.clear()
        if len(self._rounds) < NUM_ROUNDS:
            self._measure(NUM_ROUNDS - len(self._rounds), WARM_STEPS)

    def _measure(self, num_rounds: int, warm_steps: int = 0) -> None:
        """Begin to measure ``num_rounds`` rounds, after ``warm_steps`` that are not counted."""
        warm = [_Block(RECORDED, warm_steps, warm_steps)] if warm_steps else []
        self._blocks = deque([*warm, *_rounds(num_rounds, self._can_copy)])
        self.records = True

    def _end(self, block: _Block) -> None:
        """Note the result of ``block``. A copied block ends a round."""
        times = block.counted
        count = max(len(times), 1)
        self._measured[block.kind] = _Mean(
            sum(map(sum, times)) / count, sum(stall for _, stall in times) / count
        )
        if block.kind == COPIED:
            found, self._measured = self._measured, {}
            plain = max(found[PLAIN].step, 1e-9)
            recorded = plain + found[RECORDED].added(plain)
            held = found.get(HELD)  # each second step of its block had a copy
            in_memory = None if held is None else max(2 * held.added(plain), 1e-6)
            self._rounds.append(StepRates(plain, recorded, count * found[COPIED].added(plain), in_memory))


class _Mean(NamedTuple):
    """The mean step of a block, and the part of it that training waited for what keeps the step. Seconds."""

    step: float
    stall: float

    def added(self, plain: float) -> float:
        """Return the seconds that keeping a step adds to one of ``plain`` seconds.

        They are no less than training waited, which is known exactly, while whole steps differ by chance.
        """
        return max(self.step - plain, self.stall)


@dataclass
class _Block:
    """Steps that are kept in one way."""

    kind: str
    most_steps: int
    uncounted: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)
    """The seconds of each step: of training, and of waiting for what keeps the step."""

    @property
    def counted(self) -> list[tuple[float, float]]:
        """The steps that count. A step far longer than the others had something else in it, such as an evaluation."""
        times = self.times[self.uncounted :]
        usual = median([training for training, _ in times] or [0.0])
        return [each for each in times if each[0] <= FAR_LONGER * usual]


def _rounds(count: int, can_copy: bool) -> Iterable[_Block]:
    """Yield the blocks of ``count`` rounds."""
    for _ in range(count):
        yield _Block(RECORDED, BLOCK_STEPS, UNCOUNTED_STEPS)
        yield _Block(PLAIN, BLOCK_STEPS, UNCOUNTED_STEPS)
        if can_copy:
            yield _Block(HELD, HELD_STEPS, UNCOUNTED_HELD)
        yield _Block(COPIED, COPIED_STEPS)
