"""Retention: which commits are kept. Pure: names in, names out.

A commit is kept by its manifest alone, so retiring one is unlinking one small file. The newest ``retain``
of the current lineage are kept. Those of a line that was left by resuming from an earlier step are kept
too, until the current one has ``retain`` commits of its own or the room is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.store.manifest import CommitRef, Timeline


def lineage(commits: Collection[CommitRef], timelines: Mapping[int, Timeline], tip: int) -> list[CommitRef]:
    """The commits that led to the newest step of the timeline ``tip``, newest first.

    >>> lineage([CommitRef(1, 1), CommitRef(1, 2), CommitRef(2, 2)], {2: Timeline(2, 1, 1)}, 2)
    [CommitRef(timeline=2, step=2), CommitRef(timeline=1, step=1)]
    """
    line: list[CommitRef] = []
    for timeline, limit in ancestry(timelines, tip):
        own = [ref for ref in commits if ref.timeline == timeline and (limit is None or ref.step <= limit)]
        line += sorted(own, reverse=True)
    return line


def ancestry(timelines: Mapping[int, Timeline], tip: int) -> list[tuple[int, int | None]]:
    """The timelines that ``tip`` continues, itself first, each with the last step that it takes over (None: all).

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


def dropped(
    commits: Collection[CommitRef],
    timelines: Mapping[int, Timeline],
    tip: int,
    *,
    retain: int,
    room: int,
) -> list[CommitRef]:
    """The commits to retire, oldest first, so that at most ``room`` (>= ``retain``) stay.

    Called with the timeline ``tip`` open, after each of its commits and before its first.
    """
    line = lineage(commits, timelines, tip)
    kept = line[:retain]
    own = [ref for ref in kept if ref.timeline == tip]
    abandoned = sorted(set(commits) - set(line), reverse=True)
    if len(own) < retain:
        kept += abandoned[: max(0, room - len(kept))]
    return sorted(set(commits) - set(kept))
