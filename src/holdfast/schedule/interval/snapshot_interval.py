"""The steps between snapshots, chosen so that failures cost least.

It is the optimum of ``waste.py`` over whole numbers, under limits of the user (time to recover, storage, memory,
bandwidth) or of the writer (the time it takes to make a snapshot). The limits that bind are named. Seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import NamedTuple

from ...errors import DoesNotFit
from ...quantities import GiB, counted
from .waste import (
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
    """Limits that the steps between snapshots must keep."""

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

    def __post_init__(self) -> None:
        for name in ("recovery_seconds", "host_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.storage_bytes is not None and not self.storage_bytes > 0:
            raise ValueError(f"storage_bytes must be positive, got {self.storage_bytes}")
        if not 0 < self.bandwidth_share <= 1:
            raise ValueError(f"bandwidth_share must lie above 0 and be at most 1, got {self.bandwidth_share}")
        if self.retain < 1:
            raise ValueError(f"retain must be at least 1, got {self.retain}")


class Bound(NamedTuple):
    """A limit's bound on the steps between snapshots: at least (``low``) or at most ``value``."""

    limit: str
    low: bool
    value: float


@dataclass(frozen=True)
class Optimum:
    """The best number of steps between snapshots under limits, and the limits that bind it."""

    steps: int
    waste: Waste
    binding: tuple[str, ...]
    """The limits without which another number would be better."""
    measured: MeasuredCosts
    limits: Limits


def bounds(measured: MeasuredCosts, limits: Limits) -> tuple[Bound, ...]:
    """Return the bound that each of ``limits`` sets."""
    m, spread = measured, measured.base_steps - 1
    left_seconds = limits.recovery_seconds - m.load_seconds
    left_bytes = storage_cap(m, limits) - (limits.retain + 1) * m.full_bytes - m.frozen_bytes
    spare = limits.bandwidth_share * m.write_bytes_per_second * m.step_seconds - m.record_bytes
    stored = _quotient(_quotient(left_bytes, m.record_bytes) - spread, limits.retain) - spread
    return (
        Bound("making a base", True, m.base_steps),
        Bound("bandwidth share", True, max(1, ceil(m.full_bytes / spare)) if spare > 0 else inf),
        Bound("recovery time", False, _quotient(left_seconds, m.replay_record_seconds) - spread),
        Bound("storage", False, stored),
    )


def storage_cap(measured: MeasuredCosts, limits: Limits) -> int:
    """Return the cap on storage in bytes."""
    full = measured.full_bytes + measured.frozen_bytes
    return STORAGE_FULLS * full if limits.storage_bytes is None else limits.storage_bytes


def optimum(measured: MeasuredCosts, limits: Limits | None = None) -> Optimum:
    """Return the number of steps of least waste under ``limits``.

    Raises ``DoesNotFit``, naming the limits, if they allow none.
    """
    limits = limits or Limits()
    found = bounds(measured, limits)
    low = max(bound.value for bound in found if bound.low)
    high = min(MOST_STEPS, *(bound.value for bound in found if not bound.low))
    if not low <= high or host_bytes(measured) > limits.host_bytes:
        raise DoesNotFit(_why_none(measured, limits, found, low, high))
    best, free = _best_of(measured, int(low), int(high)), _best_of(measured, 1, MOST_STEPS)
    binding = tuple(
        bound.limit
        for bound in found
        if (free < best < bound.value + 1 if bound.low else free > best > bound.value - 1)
    )
    return Optimum(best, waste(measured, best), binding, measured, limits)


# -- helpers ----------------------------------------------------------------------------------------


def _best_of(measured: MeasuredCosts, low: int, high: int) -> int:
    """Return the number of steps of least waste from ``low`` to ``high``."""

    def cost(steps: int) -> float:
        return waste(measured, steps).total

    def clamp(steps: float) -> int:
        return int(min(max(steps, low), high))

    at = clamp(closed_form(measured))
    stride = max(1, at // 4)
    while True:  # downhill from the closed form; the cost has one minimum
        best = min((at, clamp(at - stride), clamp(at + stride)), key=cost)
        if best == at and stride == 1:
            return at
        stride = stride * 2 if best != at else max(1, stride // 2)
        at = best


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
    least = int(low)
    enough = {
        "making a base": f"a base takes {counted(m.base_steps, 'step')}",
        "bandwidth share": f"within {limits.bandwidth_share:.1%} of the write bandwidth bases are at least {low} steps "
        "apart",
        "recovery time": f"recovery takes {recovery_seconds(m, least):.1f} s then, and "
        f"{limits.recovery_seconds:.1f} s are allowed",
        "storage": f"{storage_bytes(m, least, limits.retain)} bytes of storage are needed then, and "
        f"{storage_cap(m, limits)} are allowed",
    }
    said = [enough[b.limit] for b in found if low > high and b.value == (low if b.low else high)]
    if (needed := host_bytes(m)) > limits.host_bytes:
        said.append(f"{needed} bytes of host memory are needed, and {limits.host_bytes} are allowed")
    return f"no cadence keeps to its limits: {'; '.join(said)}."
