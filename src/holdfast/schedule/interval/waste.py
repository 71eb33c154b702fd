"""The part of an hour of training that failures, and preparing for them, cost.

After Young, Daly and LowDiff. More snapshots cost stalls and bandwidth all the time; fewer make every recovery replay
more. Counted are the seconds of a wall-clock hour that do not end as kept training. Stalls are *measured* on the
training thread: a background write costs what training loses by it, not its bytes over the bandwidth. Failures are
Poisson in wall-clock time, in recovery too. Seconds, bytes.

Symbols of LowDiff: M -> mean_seconds_between_failures, S / W -> base_stall_seconds, R_F -> full_bytes /
read_bytes_per_second, R_D -> replay_record_seconds, 1/f -> steps between snapshots.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from math import ceil, exp, expm1, inf, sqrt

HOUR = 3600.0
_MAY_BE_INFINITE = ("write_bytes_per_second", "read_bytes_per_second")
_NOT_ZERO = ("step_seconds", "base_steps", "mean_seconds_between_failures")


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """The measured costs of a run."""

    step_seconds: float
    """Seconds of training alone, with nothing recorded."""
    full_bytes: int
    """Bytes that every snapshot writes."""
    record_bytes: int
    write_bytes_per_second: float
    read_bytes_per_second: float
    base_stall_seconds: float
    """Seconds that the training thread waits for one snapshot, over all the steps at whose ends a part is copied."""
    base_steps: int = 1
    """Number of steps over which a snapshot is copied."""
    record_stall_seconds: float = 0.0
    """Seconds that the training thread waits in every step, such as for copies into the log record."""
    sync_seconds: float = 0.0
    """Seconds of one write of log records, besides those for its bytes."""
    write_slowdown: float = 0.0
    """Seconds that training loses in the background for each second of writing."""
    replay_seconds: float
    """Seconds to apply one log record. Reading it happens beside that."""
    restart_seconds: float = 60.0
    """Seconds from the failure to the beginning of the load."""
    mean_seconds_between_failures: float = 24 * HOUR
    frozen_bytes: int = 0
    """Bytes of frozen parameters, which are written once and loaded with every snapshot."""
    captured_bytes: int = 0
    """Bytes of a log record in memory, where rows of zeros are still in it; 0 if that is ``record_bytes``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in _MAY_BE_INFINITE:
                ok, rule = value > 0, "must be positive"
            elif name in _NOT_ZERO:
                ok, rule = 0 < value < inf, "must be positive and finite"
            else:
                ok, rule = 0 <= value < inf, "must be finite and not negative"
            if not ok:
                raise ValueError(f"{name} {rule}, got {value}")

    @property
    def replay_record_seconds(self) -> float:
        return max(self.replay_seconds, self.record_bytes / self.read_bytes_per_second)

    @property
    def load_seconds(self) -> float:
        """Seconds until all of a snapshot is of one step.

        On the average half of the snapshot takes the log records since its first part.
        """
        record = max(self.replay_seconds / 2, self.record_bytes / self.read_bytes_per_second)
        loaded = self.full_bytes + self.frozen_bytes
        return loaded / self.read_bytes_per_second + (self.base_steps - 1) * record

    @property
    def staged_bytes(self) -> int:
        """The bytes of host memory that one log record takes."""
        return max(self.record_bytes, self.captured_bytes)

    @property
    def write_seconds(self) -> float:
        """Seconds until a log record is durable."""
        return self.sync_seconds + self.record_bytes / self.write_bytes_per_second


@dataclass(frozen=True)
class Waste:
    """Expected seconds of a wall-clock hour that do not end as kept training."""

    lost: float
    """Training that was done and not yet durable when a failure came."""
    restart: float
    load: float
    replay: float
    base_stall: float
    """The training thread waiting for snapshots, failures or not."""
    record_stall: float
    """The training thread waiting for log records and their writes, failures or not."""
    contention: float
    """Training slower because of background writes, or held to the pace of the disk."""

    @property
    def total(self) -> float:
        return sum(astuple(self))


def waste(measured: MeasuredCosts, steps: int, has_records: bool = True) -> Waste:
    """Return the cost of a snapshot every ``steps`` steps.

    Exact to the first order in (recovery / time between failures), and with repeated failures in recovery. Without
    records a failure loses the steps since the last snapshot, and nothing is replayed; ``record_bytes`` is 0 then.
    """
    m = measured
    base_stall, record_stall, contention = pace(m, steps, has_records)
    step_wall = m.step_seconds + base_stall + record_stall + contention
    mean = m.mean_seconds_between_failures
    # records let training continue within an interval, so a failure comes on the average in its middle
    replay = (steps - 1) / 2 * m.replay_record_seconds if has_records else 0.0
    lost = lost_seconds(step_wall * (1 if has_records else steps), m.write_seconds, mean)
    down = m.restart_seconds + m.load_seconds + replay
    again = expm1(min(down / mean, 500.0)) / (down / mean) if down else 1.0
    per_failure = HOUR / (mean + down * again)
    per_step = (mean - lost) / step_wall
    return Waste(
        lost=lost * per_failure,
        restart=m.restart_seconds * again * per_failure,
        load=m.load_seconds * again * per_failure,
        replay=replay * again * per_failure,
        base_stall=base_stall * per_step * per_failure,
        record_stall=record_stall * per_step * per_failure,
        contention=contention * per_step * per_failure,
    )


def lost_seconds(interval: float, write: float, mean: float) -> float:
    """Return the mean seconds of training that are not durable when a failure comes.

    Training is durable ``write`` seconds after the end of each ``interval``, and begins an interval after a failure.
    Failures are ``mean`` seconds apart, exponentially distributed. So the kept training up to one is interval * sum
    over k >= 1 of exp(-(k * interval + write) / mean). For short intervals half of one and ``write`` are lost.

    >>> round(lost_seconds(60.0, 1.0, 86400.0), 2), round(lost_seconds(60.0, 1.0, 30.0), 2)
    (31.0, 20.92)
    """
    x, y = interval / mean, write / mean
    part = x / 2 - x * x / 12 if x < 1e-3 else 1 - x / expm1(min(x, 500.0))
    return mean * (part * exp(-y) - expm1(-y))


def pace(measured: MeasuredCosts, steps: int, has_records: bool = True) -> tuple[float, float, float]:
    """Return the seconds per step of stalls for snapshots, of stalls for log records, and of contention."""
    m = measured
    writes = 1.0 if has_records else 1 / steps
    base_stall = m.base_stall_seconds / steps
    nbytes = m.record_bytes + m.full_bytes / steps
    writing = nbytes / m.write_bytes_per_second + m.sync_seconds * writes
    behind = writing - (m.step_seconds + base_stall + m.record_stall_seconds)
    return base_stall, m.record_stall_seconds, max(m.write_slowdown * writing, behind)


def closed_form(measured: MeasuredCosts) -> float:
    """Return the best number of steps between snapshots as a real number.

    It holds where failures are rare, the disk keeps pace and nothing limits.

    >>> m = MeasuredCosts(
    ...     step_seconds=0.1, full_bytes=1_500_000_000, record_bytes=0, write_bytes_per_second=5e8,
    ...     read_bytes_per_second=5e8, base_stall_seconds=3.0, replay_seconds=0.05,
    ...     mean_seconds_between_failures=3600.0,
    ... )
    >>> round(closed_form(m))
    2078
    """
    m = measured
    if not m.replay_record_seconds:
        return inf
    of_base = m.base_stall_seconds + m.write_slowdown * m.full_bytes / m.write_bytes_per_second
    return max(
        1.0, sqrt(2 * m.mean_seconds_between_failures * of_base / m.step_seconds / m.replay_record_seconds)
    )


def recovery_seconds(measured: MeasuredCosts, steps: int) -> float:
    """Return the longest load and replay. A failure while a snapshot is made puts that snapshot off."""
    m = measured
    return m.load_seconds + (steps + m.base_steps - 1) * m.replay_record_seconds


def storage_bytes(measured: MeasuredCosts, steps: int, retain: int = 2) -> int:
    """Return the most bytes of snapshots, one of them being made, and of log records since the oldest."""
    spread = measured.base_steps - 1
    num_records = retain * (steps + spread) + spread
    return (retain + 1) * measured.full_bytes + measured.frozen_bytes + num_records * measured.record_bytes


def host_bytes(measured: MeasuredCosts) -> int:
    """Return the host memory that a Checkpointer needs.

    It holds a log record that waits and one that is being written. For the snapshot it holds a quarter of the whole, or
    the part of a snapshot that one step copies, if that is more.
    """
    records = 2 * measured.staged_bytes
    return records + max(ceil(records / 3), ceil(measured.full_bytes / measured.base_steps))
