"""The steps between snapshots and the log records per write, chosen so that failures cost least.

It is the optimum of ``waste.py`` over whole numbers, under limits of the user (time to recover, storage, memory,
bandwidth) or of the writer (steps on their way, the time it takes to make a snapshot). Each limit bounds one of the two
numbers, so that the limits that bind can be named. Seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import NamedTuple

from ...errors import DoesNotFit
from ...quantities import GiB, counted
from .waste import (
    Cadence,
    MeasuredCosts,
    Waste,
    closed_form,
    host_bytes,
    recovery_seconds,
    storage_bytes,
    waste,
)

MOST_STEPS = 1_000_000
"""Most steps between snapshots, where no limit asks for fewer."""
STORAGE_FULLS = 20
"""Default cap on storage, in sizes of the state."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that a cadence must keep."""

    recovery_seconds: float = 300.0
    """Longest load and replay after a single failure."""
    storage_bytes: int | None = None
    """Most bytes of snapshots and log records; None is ``STORAGE_FULLS`` times the state."""
    host_bytes: int = 4 * GiB
    """Most bytes of the copies that wait to be written."""
    bandwidth_share: float = 0.5
    """Largest fraction of the write bandwidth, on the average."""
    retain: int = 2
    """Number of snapshots kept."""
    pending_steps: int = 8
    """Most steps that may not be durable yet; a write holds half of them at most."""
    delay_seconds: float = 1.0
    """Longest time that a log record waits for others to be written with."""

    def __post_init__(self) -> None:
        for name in ("recovery_seconds", "host_bytes", "delay_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.storage_bytes is not None and not self.storage_bytes > 0:
            raise ValueError(f"storage_bytes must be positive, got {self.storage_bytes}")
        if not 0 < self.bandwidth_share <= 1:
            raise ValueError(f"bandwidth_share must lie above 0 and be at most 1, got {self.bandwidth_share}")
        if self.retain < 1 or self.pending_steps < 2:
            raise ValueError(
                f"retain and pending_steps must be at least 1 and 2, got {self.retain}, {self.pending_steps}"
            )


class Bound(NamedTuple):
    """A limit's bound on ``steps`` or ``records`` (``axis``): at least (``low``) or at most ``value``."""

    limit: str
    axis: str
    low: bool
    value: float


@dataclass(frozen=True)
class Optimum:
    """The best cadence under limits, and the limits that bind it."""

    cadence: Cadence
    waste: Waste
    binding: tuple[str, ...]
    """The limits without which another cadence would be better."""
    measured: MeasuredCosts
    limits: Limits


def bounds(measured: MeasuredCosts, limits: Limits) -> tuple[Bound, ...]:
    """Return the bound that each of ``limits`` sets."""
    m, spread = measured, measured.base_steps - 1
    replay = m.replay_record_seconds + m.replay_write_seconds
    left_seconds = limits.recovery_seconds - m.load_seconds
    left_bytes = storage_cap(m, limits) - (limits.retain + 1) * m.full_bytes - m.frozen_bytes
    spare = limits.bandwidth_share * m.write_bytes_per_second * m.step_seconds - m.record_bytes
    copies = limits.host_bytes - max(limits.host_bytes / 4, ceil(m.full_bytes / m.base_steps))
    return (
        Bound("making a base", "steps", True, m.base_steps),
        Bound("bandwidth share", "steps", True, max(1, ceil(m.full_bytes / spare)) if spare > 0 else inf),
        Bound("recovery time", "steps", False, _quotient(left_seconds, replay) - spread),
        Bound(
            "storage",
            "steps",
            False,
            _quotient(_quotient(left_bytes, m.record_bytes) - spread, limits.retain) - spread,
        ),
        Bound("host memory", "records", False, _quotient(copies, 2 * m.staged_bytes)),
        Bound("steps on their way", "records", False, limits.pending_steps // 2),
        Bound("delay of a record", "records", False, _quotient(limits.delay_seconds, m.step_seconds) + 1),
    )


def storage_cap(measured: MeasuredCosts, limits: Limits) -> int:
    """Return the cap on storage in bytes."""
    full = measured.full_bytes + measured.frozen_bytes
    return STORAGE_FULLS * full if limits.storage_bytes is None else limits.storage_bytes


def optimum(measured: MeasuredCosts, limits: Limits | None = None) -> Optimum:
    """Return the cadence of least waste under ``limits``, among those where snapshots fall between writes.

    Raises ``DoesNotFit``, naming the limits, if they allow none.
    """
    limits = limits or Limits()
    found = bounds(measured, limits)
    low = max(bound.value for bound in found if bound.axis == "steps" and bound.low)
    high = min(MOST_STEPS, *(bound.value for bound in found if bound.axis == "steps" and not bound.low))
    most = min(bound.value for bound in found if bound.axis == "records")
    if not (low <= high and most >= 1):
        raise DoesNotFit(_why_none(measured, limits, found, low, high))
    best = min(
        (c for records in range(1, int(most) + 1) for c in _best_of(measured, records, int(low), int(high))),
        key=lambda cadence: waste(measured, cadence).total,
    )
    binding = tuple(dict.fromkeys(_binding(measured, best, found, int(low), int(high), int(most))))
    return Optimum(best, waste(measured, best), binding, measured, limits)


# -- helpers ----------------------------------------------------------------------------------------


def _best_of(measured: MeasuredCosts, records: int, low: int, high: int) -> Iterator[Cadence]:
    """Yield the best multiple of ``records`` from ``low`` to ``high``, if there is one."""
    least, most = -(-low // records), high // records
    if least > most:
        return

    def cost(groups: int) -> float:
        return waste(measured, Cadence(groups * records, records)).total

    def clamp(groups: float) -> int:
        return int(min(max(groups, least), most))

    at = clamp(closed_form(measured)[0] / records)
    stride = max(1, at // 4)
    while True:  # downhill from the closed form; the cost has one minimum
        best = min((at, clamp(at - stride), clamp(at + stride)), key=cost)
        if best == at and stride == 1:
            break
        stride = stride * 2 if best != at else max(1, stride // 2)
        at = best
    yield Cadence(at * records, records)


def _binding(
    measured: MeasuredCosts, best: Cadence, found: Sequence[Bound], low: int, high: int, most: int
) -> Iterator[str]:
    """Yield the limits that keep ``best`` from its better neighbours."""
    steps, records = best
    [free] = _best_of(measured, records, 1, MOST_STEPS)
    for bound in found:
        if bound.axis == "records" and records == most < bound.value + 1 <= most + 1:
            more = list(_best_of(measured, most + 1, low, high))
            if more and waste(measured, more[0]).total < waste(measured, best).total:
                yield bound.limit
        elif bound.axis == "steps" and (
            free.steps < steps < bound.value + records
            if bound.low
            else free.steps > steps > bound.value - records
        ):
            yield bound.limit


def _quotient(amount: float, each: float) -> float:
    """Return how often ``each`` goes into ``amount``: below 0 if ``amount`` is negative, inf without bound."""
    if amount < 0:
        return -1
    return inf if amount == inf or each == 0 else floor(amount / each)


def _why_none(
    measured: MeasuredCosts, limits: Limits, found: Sequence[Bound], low: float, high: float
) -> str:
    """Return the text of the error: which limits are too small, and what would be enough beside the others."""
    m = measured
    if low == inf:
        alone = m.record_bytes / (m.write_bytes_per_second * m.step_seconds)
        return (
            f"records alone take {alone:.1%} of the write bandwidth, and {limits.bandwidth_share:.1%} of it may "
            "be used. Record less in a step, allow a larger share, or write to something faster."
        )
    least = Cadence(int(low), 1)
    enough = {
        "making a base": f"a base takes {counted(m.base_steps, 'step')}",
        "bandwidth share": f"within {limits.bandwidth_share:.1%} of the write bandwidth bases are at least {low} steps "
        "apart",
        "recovery time": f"recovery takes {recovery_seconds(m, least):.1f} s then, and "
        f"{limits.recovery_seconds:.1f} s are allowed",
        "storage": f"{storage_bytes(m, least, limits.retain)} bytes of storage are needed then, and "
        f"{storage_cap(m, limits)} are allowed",
        "host memory": f"{host_bytes(m, least)} bytes of host memory are needed, and {limits.host_bytes} are allowed",
    }
    steps = [b for b in found if b.axis == "steps" and low > high and b.value == (low if b.low else high)]
    records = [b for b in found if b.axis == "records" and b.value < 1]
    return f"no cadence keeps to its limits: {'; '.join(enough[b.limit] for b in steps + records)}."
