"""The choice of what a run keeps: commits, timelines, log segments and copies of weights, and the space that they take.

Mostly pure: names in, names out. A commit is kept by its manifest alone, so retiring one means unlinking one small
file. The newest ``retain`` commits of the current line are kept. Those of a line that was abandoned by resuming from an
earlier step are kept too, until the current one has ``retain`` commits of its own or the room is needed. A segment
stays as long as a commit needs a record in it.

Commits are ranked by a metric that the script measured at their steps. A commit records its metrics in its manifest, so
the ranking is the same after a resume and in a copy of the run. NaN has no rank, and of equal values the older commit
is better. With ``Keep(best=k, metric=name)`` a step becomes a snapshot if no ``k`` retained ones of the run's line are
better (``is_among_best``).

A copy of weights is one file of safetensors, ``weights/step-000000001000.t0001.safetensors``, named by the step and the
timeline in which it was made. No commit needs it, it needs nothing, and it is kept for good. Called by the writers of
commits, by pruning, by ``saved_weights`` and by ``Checkpointer.step``. Sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isnan
from typing import TYPE_CHECKING, Any, Literal

from holdfast.errors import BadInput, RankFailed
from holdfast.events import is_log
from holdfast.store.disk import TEMPORARY, AnyDisk
from holdfast.store.drive_links import data_paths
from holdfast.store.format.manifest import CommitRef, Manifest, Timeline
from holdfast.store.log.segments import steps_of_segments, streams

if TYPE_CHECKING:
    from holdfast.distributed import Ranks
    from holdfast.store.run_store import LocalStore

HOUR = 3600.0


@dataclass(frozen=True)
class Keep:
    """The rules for which snapshots of a run are kept.

    >>> Keep(last=2, every=1000)
    Keep(last=2, every=1000, hours=None, best=None, metric=None, mode='min', weights=None)
    """

    last: int = 2
    """The number of newest snapshots to keep, with the log records since the oldest of them."""
    every: int | None = None
    """Keep the first snapshot of every so many steps for good, without the log records since."""
    hours: float | None = None
    """Keep the first snapshot of every so many hours for good, without the log records since."""
    best: int | None = None
    """Keep as many snapshots of the best steps by ``metric``, without the log records since."""
    metric: str | None = None
    """The name of a value that is given to ``Checkpointer.step(metrics={...})`` at some steps."""
    mode: Mode = "min"
    """The better values: "min" for smaller ones, "max" for larger ones."""
    weights: int | None = None
    """Keep a copy of the weights alone of every so many steps for good, in a file of its own."""

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 1), ("hours", 0), ("best", 1), ("weights", 1)):
            value = getattr(self, name)
            whole = name == "hours" or isinstance(value, int)
            if value is not None and not (whole and least <= value < inf and value > 0):
                raise BadInput(f"Keep({name}={value!r}) must be a positive number{' of whole steps' * whole}")
        if self.last is None:
            raise BadInput("Keep(last=None): at least the newest base is kept, so give 1 or more")
        if (self.best is None) != (self.metric is None) or not isinstance(self.metric, str | None):
            raise BadInput(
                f'Keep(best={self.best!r}, metric={self.metric!r}): give both, such as best=3, metric="eval_loss"'
            )
        if self.mode not in ("min", "max"):
            raise BadInput(f"Keep(mode={self.mode!r}) is neither 'min' nor 'max'")

    @property
    def for_good(self) -> bool:
        """True if any snapshots are kept for good."""
        return self.every is not None or self.hours is not None or self.best is not None


def refuse_best(keep: Keep, what: str) -> None:
    """Raise ``BadInput`` if the best snapshots are to be kept, since ``what`` has no metrics."""
    if keep.best is not None:
        raise BadInput(
            f"Keep(best={keep.best}) ranks by metrics of Checkpointer.step(metrics=), and {what} has none: leave out"
            " best= and metric="
        )


def refuse_weights(keep: Keep, what: str) -> None:
    """Raise ``BadInput`` if copies of weights are to be kept, which ``what`` does not make."""
    if keep.weights is not None:
        raise BadInput(
            f"Keep(weights={keep.weights}) is for a Checkpointer of one process, and not for {what}"
        )


def dropped(
    commits: Collection[CommitRef],
    timelines: Mapping[int, Timeline],
    tip: int,
    *,
    retain: int,
    room: int,
    for_good: Collection[CommitRef] = (),
    damaged: Collection[CommitRef] = (),
) -> list[CommitRef]:
    """Return the commits to retire, oldest first, so that at most ``room`` (>= ``retain``) stay.

    The commits in ``for_good`` stay besides. Those in ``damaged`` are worth nothing: they do not count and are
    retired. Called with the timeline ``tip`` open, after each of its commits and before its first.
    """
    commits = set(commits) - set(damaged)
    line = lineage(commits, timelines, tip)
    kept = line[:retain]
    own = [ref for ref in kept if ref.timeline == tip]
    abandoned = sorted(commits - set(line), reverse=True)
    if len(own) < retain:
        kept += abandoned[: max(0, room - len(kept))]
    return sorted((commits | set(damaged)) - set(kept) - set(for_good))


def kept_for_good(line: Collection[Manifest], keep: Keep) -> set[CommitRef]:
    """Return the commits of ``line`` that stay although newer ones follow.

    These are the first of every ``every`` steps and of every ``hours``, and the ``best``. None of the steps before the
    first ``every`` counts.
    """
    first: dict[tuple[str, float], CommitRef] = {}
    for manifest in sorted(line, key=lambda manifest: manifest.step):
        if keep.every is not None and manifest.step >= keep.every:
            first.setdefault(("every", manifest.step // keep.every), manifest.ref)
        if keep.hours is not None:
            first.setdefault(("hours", manifest.created // (keep.hours * HOUR)), manifest.ref)
    return {*first.values(), *best_of(line, keep)}


def kept_on_lines(
    commits: Mapping[CommitRef, Manifest], timelines: Mapping[int, Timeline], tip: int, keep: Keep
) -> set[CommitRef]:
    """Return the ``commits`` that stay although newer ones follow.

    They are on the line of the timeline ``tip``, or on an abandoned one beyond the newest step of that line.
    """

    def kept(line: Collection[CommitRef]) -> set[CommitRef]:
        return kept_for_good([commits[ref] for ref in line], keep)

    line = lineage(commits, timelines, tip)
    reached = line[0].step if line else 0
    left = set().union(*(kept(lineage(commits, timelines, other)) for other in timelines if other != tip))
    return kept(line) | {ref for ref in left if ref.step > reached}


def certified_in(line: Sequence[Manifest]) -> set[CommitRef]:
    """Return the newest certified commit of ``line``, newest first, as the newest one says; none without a guard.

    A guard certifies the step that it is at. So what it has certified since the newest commit is that commit.
    """
    step = line[0].certified_step if line else None
    return set([manifest.ref for manifest in line if step is not None and manifest.step <= step][:1])


def best_of(line: Collection[Manifest], keep: Keep) -> list[CommitRef]:
    """Return the commits of ``line`` that are kept as the best ones, best first."""
    if keep.best is None or keep.metric is None:
        return []
    return ranked(line, keep.metric, keep.mode)[: keep.best]


def lineage(commits: Collection[CommitRef], timelines: Mapping[int, Timeline], tip: int) -> list[CommitRef]:
    """Return the commits that led to the newest step of the timeline ``tip``, newest first.

    >>> lineage([CommitRef(1, 1), CommitRef(1, 2), CommitRef(2, 2)], {2: Timeline(2, 1, 1)}, 2)
    [CommitRef(timeline=2, step=2), CommitRef(timeline=1, step=1)]
    """
    line: list[CommitRef] = []
    for timeline, limit in ancestry(timelines, tip):
        own = [ref for ref in commits if ref.timeline == timeline and (limit is None or ref.step <= limit)]
        line += sorted(own, reverse=True)
    return line


def newest_tip(commits: Collection[CommitRef], timelines: Mapping[int, Timeline]) -> int:
    """Return the newest timeline that is begun and whose line has commits; 0 if there is none."""
    begun = (t for t in sorted(timelines, reverse=True) if is_begun(commits, timelines[t]))
    return next((t for t in begun if lineage(commits, timelines, t)), 0)


def is_begun(commits: Collection[CommitRef], timeline: Timeline) -> bool:
    """Return whether the run is on ``timeline``. A save that was refused or killed leaves one that is not begun."""
    return not timeline.by_saves or any(ref.timeline == timeline.id for ref in commits)


def ancestry(timelines: Mapping[int, Timeline], tip: int) -> list[tuple[int, int | None]]:
    """Return the timelines that ``tip`` continues, itself first, each with the last step it contributes.

    None as the last step means all.

    >>> ancestry({1: Timeline(1), 2: Timeline(2, 1, 7)}, 2)
    [(2, None), (1, 7)]
    """
    found: list[tuple[int, int | None]] = [(tip, None)]
    while True:
        timeline, limit = found[-1]
        record = timelines.get(timeline)
        if record is None or record.parent is None or record.parent >= timeline:
            return found
        fork_step = record.fork_step or 0
        found.append((record.parent, fork_step if limit is None else min(limit, fork_step)))


def writer_of(timelines: Mapping[int, Timeline], tip: int, step: int) -> int:
    """Return the timeline in which ``step`` of the line of ``tip`` was made.

    >>> [writer_of({1: Timeline(1), 2: Timeline(2, 1, 7)}, 2, step) for step in (7, 8)]
    [1, 2]
    """
    line = ancestry(timelines, tip)[::-1]
    return next(timeline for timeline, limit in line if limit is None or step <= limit)


ANCESTORS_KEPT = 4
"""The number of timelines of the newest line whose records always stay.

A replica may hold a step of one of them in memory.
"""


def unneeded_timelines(
    timelines: Mapping[int, Timeline], used: Collection[int], newest: int, present: int = 0
) -> list[int]:
    """Return the timelines whose records nothing needs, lowest first.

    Args:
        timelines: The records, by number.
        used: Timelines that have a commit or a segment: these are needed, and so is what leads to them.
        newest: The highest number, which is needed since it may not be given again, and the newest it continues.
        present: The timeline that the run is on, needed likewise; 0 if that is ``newest``. The two differ while a save
            that began a timeline is not finished.

    >>> line = {1: Timeline(1), 2: Timeline(2, 1, 7), 3: Timeline(3, 2, 9), 4: Timeline(4, 3, 9), 5: Timeline(5, 3, 9)}
    >>> unneeded_timelines(line, {3}, 5), unneeded_timelines({**line, 9: Timeline(9, 5, 9)}, {9}, 9)
    ([4], [1, 4])
    >>> unneeded_timelines(line, {3}, 5, present=4)
    []
    """
    kept = [
        timeline for tip in (newest, present) for timeline, _ in ancestry(timelines, tip)[:ANCESTORS_KEPT]
    ]
    needed = {*used, *kept}
    for tip in needed.copy():
        line = [timeline for timeline, _ in ancestry(timelines, tip)]
        oldest = max(place for place, timeline in enumerate(line) if timeline in needed)
        needed.update(line[:oldest])
    return sorted(timelines.keys() - needed)


Need = tuple[int, int | None]
"""The step after which a commit needs log records, and the last step that it needs (None: all since)."""


def needs(manifests: Collection[Manifest | None], alone: Collection[CommitRef]) -> list[Need]:
    """Return the log records that each commit needs.

    A commit in ``alone`` needs the records of its own steps only; any other also needs the later ones.
    """
    return [
        (manifest.oldest_step, manifest.step if manifest.ref in alone else None)
        for manifest in manifests
        if manifest is not None
    ]


def unneeded_segments(disk: AnyDisk, needed: Collection[Need], timeline: int | None) -> Iterator[str]:
    """Yield the segments without a record that is ``needed``, oldest first.

    The segment that ``timeline`` appends to is left out.
    """
    for stream in streams(disk):
        found = steps_of_segments(disk, stream)
        appended_to = max((ref for ref, _ in found if ref.timeline == timeline), default=None)
        for ref, last in found:
            used = any(
                last > oldest and (newest is None or ref.first_step <= newest) for oldest, newest in needed
            )
            if not used and ref != appended_to:
                yield ref.path


SMALL = ("index", "commits", "timelines")
"""The directories of small files."""
WEIGHTS = "weights"
"""The directory of the copies of weights."""


def used_bytes(
    disk: AnyDisk, is_mine: Callable[[str], bool] = lambda unit: True, small: Collection[str] | None = None
) -> int:
    """Return the bytes of all files of a run, reserved space and the log of events included.

    For one of several ranks, count only its units and logs (by ``is_mine``) and the files in ``small``; None counts
    all small files, the copies of weights and the log of events.
    """
    paths = [path for path in data_paths(disk) if is_mine(path.rpartition("/")[2])]
    for stream in streams(disk):
        if is_mine(f"{stream}."):
            paths += [f"journal/{stream}/{name}" for name in disk.listdir(f"journal/{stream}")]
    if small is None:
        small = [f"{folder}/{name}" for folder in (*SMALL, WEIGHTS) for name in disk.listdir(folder)]
        small += filter(is_log, disk.listdir(""))
    total = 0
    for path in (*paths, *small):
        with suppress(FileNotFoundError):
            total += disk.size(path)
    return total


Mode = Literal["min", "max"]


def ranked(line: Collection[Manifest], metric: str, mode: Mode) -> list[CommitRef]:
    """Return the commits of ``line`` that have a value of ``metric``, best first.

    A step that a resume made a commit of again counts once.
    """
    found: dict[int, tuple[float, int, CommitRef]] = {}
    for manifest in sorted(line, key=lambda manifest: manifest.ref):
        value = value_of(manifest, metric)
        if value is not None:
            found.setdefault(manifest.step, (_signed(value, mode), manifest.step, manifest.ref))
    return [ref for *_, ref in sorted(found.values())]


def is_better(line: Collection[Manifest], metric: str, mode: Mode, count: int, value: float) -> bool:
    """Return whether a new commit with ``value`` would be one of the best ``count`` of ``line``."""
    if isnan(value):
        return False
    best = ranked(line, metric, mode)[:count]
    if len(best) < count:
        return True
    worst = next(value_of(manifest, metric) for manifest in line if manifest.ref == best[-1])
    return worst is not None and _signed(value, mode) < _signed(worst, mode)


def value_of(manifest: Manifest, metric: str) -> float | None:
    """Return the value of ``metric`` at the commit's step; None if it has none, or NaN."""
    value = manifest.metrics.get(metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or isnan(value):
        return None
    return float(value)


def _signed(value: float, mode: Mode) -> float:
    return value if mode == "min" else -value


_NAME = re.compile(r"step-(\d{12,})\.t(\d{4,})\.safetensors")


def copy_path(ref: CommitRef) -> str:
    """Return the place of the copy of a step.

    >>> copy_path(CommitRef(1, 1000))
    'weights/step-000000001000.t0001.safetensors'
    """
    return f"{WEIGHTS}/step-{ref.step:012d}.t{ref.timeline:04d}.safetensors"


def copies_in(disk: AnyDisk) -> list[CommitRef]:
    """Return the steps with a copy of the weights, oldest first."""
    matches = (_NAME.fullmatch(name) for name in disk.listdir(WEIGHTS))
    found = [CommitRef(int(match[2]), int(match[1])) for match in matches if match]
    return sorted(found, key=lambda ref: (ref.step, ref.timeline))


def is_on_line(ref: CommitRef, timelines: Mapping[int, Timeline], tip: int) -> bool:
    """Return whether the step of a copy led to the newest step of the timeline ``tip``."""
    return any(
        ref.timeline == timeline and (limit is None or ref.step <= limit)
        for timeline, limit in ancestry(timelines, tip)
    )


def copies_bytes(disk: AnyDisk) -> int:
    """Return the bytes of all copies."""
    total = 0
    for ref in copies_in(disk):
        with suppress(FileNotFoundError):
            total += disk.size(copy_path(ref))
    return total


def remove_unfinished(disk: AnyDisk) -> None:
    """Remove what a killed process left of a copy in the making."""
    for name in disk.listdir(WEIGHTS):
        if name.endswith(TEMPORARY) and _NAME.fullmatch(name.removesuffix(TEMPORARY)):
            disk.unlink(f"{WEIGHTS}/{name}")


def checked_metrics(metrics: Mapping[str, Any], keep: Keep) -> dict[str, float]:
    """Return ``metrics`` as plain numbers, tensors and arrays of one element among them.

    Raises ``BadInput`` for other values, and if the metric that ``keep`` ranks by is not among them.
    """
    if not isinstance(metrics, Mapping):
        raise BadInput(f'metrics = {metrics!r} is no dictionary, such as {{"eval_loss": 2.31}}')
    found: dict[str, float] = {}
    for name, value in metrics.items():
        number = _number(value)
        if not isinstance(name, str) or number is None:
            raise BadInput(f"metrics has {name!r}: {value!r}, and takes a number by its name")
        found[name] = number
    if keep.best is not None and keep.metric not in found:
        raise BadInput(
            f"metrics has {', '.join(map(repr, found)) or 'nothing'}, and Keep(best={keep.best}) ranks by"
            f" {keep.metric!r}: give that as well, or leave out metrics= at this step"
        )
    return found


def _number(value: Any) -> float | None:
    """Return a number, or the one in a tensor or an array of one element, as Python's; None for anything else."""
    with suppress(RuntimeError, ValueError):  # of several elements
        found = value.item() if hasattr(value, "item") else value
        return found if type(found) in (int, float) else None
    return None


def is_among_best(metrics: Mapping[str, float], keep: Keep, store: LocalStore, ranks: Ranks) -> bool:
    """Return whether the current step is to be kept as one of the best.

    Collective: every rank must call this. Raises ``BadInput``, on all ranks, unless all have the same ``metrics``.
    """
    try:
        found = ranks.everyone(dict(metrics))
    except RankFailed as error:
        raise RankFailed(
            f"{error} If that rank is still training, it may have called step() without metrics=: rank {ranks.rank} was"
            " given some at this step, and every rank has to give the same at the same steps."
        ) from error
    # as text, NaN is equal to itself; a rank without metrics= may be in another exchange by now
    gathered = [repr(sorted(each.items()) if isinstance(each, dict) else each) for each in found]
    if len(set(gathered)) > 1:
        raise BadInput(
            f"metrics is not the same on all ranks (rank {ranks.rank} has {dict(metrics)}). Average it over the ranks"
            " before step()."
        )
    if keep.best is None or keep.metric is None:
        return False
    value = metrics[keep.metric]
    return ranks.first_does(lambda: store.is_among_best(value))
