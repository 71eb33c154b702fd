"""Lines: which line of a run has a step. A resume from an earlier step leaves one behind, which stays for a while.

The present line goes first. A step of one that was left is another than the present line's of that number, so nobody
gets it who may have meant that one: it is told, or refused until its timeline is named. By headers alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from holdfast.errors import Damaged, DiskFailed, NoCommit
from holdfast.store.chain import Journal, chain_of, read_journal
from holdfast.store.manifest import Manifest
from holdfast.store.reader import RunReader
from holdfast.store.retention import ancestry, forked_at, writer_of
from holdfast.store.segments import segments, streams


def tip_with(store: RunReader, step: int) -> int | None:
    """The timeline of whose line ``step`` can be had: the present one, or else the newest that a later resume left;
    None if there is none.

    Raises ``NoCommit`` where the present line has come so far, by what is there, and only one that was left can be had
    at ``step``.
    """
    present = store.tip()
    tips = dict.fromkeys((present, *sorted(store.timelines()[0], reverse=True)))
    tip = next((tip for tip in tips if any(step in steps for steps in reached(store, tip, step))), None)
    if tip is not None and _is_left(store, tip, step):
        came = come_to(store, present)
        if step <= came:
            raise NoCommit(
                f"step {step} of {store.root} cannot be had any more: the present line, timeline {present}, has come to"
                f" step {came}, and what leads to its step {step} was retired, pruned or compacted, or is damaged."
                f" {_said(store, tip, step, 'Another')}: to begin from that one, call"
                f" resume(source='{named(store, tip, step)}') in a fresh directory."
            )
    return tip


def told_of_left(store: RunReader, tip: int | None, step: int) -> str:
    """What is to be said where ``step`` is taken of the line of ``tip``; nothing where that is the present line's."""
    if tip is None or not _is_left(store, tip, step):
        return ""
    present = store.tip()
    return (
        f"{_said(store, tip, step, 'this')}, since the present line, timeline {present}, has come to step"
        f" {come_to(store, present)} only."
    )


def _said(store: RunReader, tip: int, step: int, which: str) -> str:
    timelines = store.timelines()[0]
    fork = forked_at(timelines, store.tip(), tip)
    left = "" if fork is None else f", which was left at step {fork}"
    return f"{which} step {step} is of timeline {writer_of(timelines, tip, step)}{left}"


def named(store: RunReader, tip: int, step: int) -> str:
    """How ``step`` of the line of ``tip`` is named, whatever the present line has."""
    return f"{store.root}@{step}.t{writer_of(store.timelines()[0], tip, step)}"


def _is_left(store: RunReader, tip: int, step: int) -> bool:
    """Whether ``step`` of the line of ``tip`` is none of the present line, which may share it."""
    timelines, present = store.timelines()[0], store.tip()
    limits = dict(ancestry(timelines, present))
    writer = writer_of(timelines, tip, step)
    limit = limits.get(writer, -1)
    return present > 0 and limit is not None and limit < step


def come_to(store: RunReader, tip: int) -> int:
    """The newest step that the line of ``tip`` is known to have had, whether or not it still can be; -1 if none is."""
    limits = dict(ancestry(store.timelines()[0], tip))
    steps = [ref.step for ref in store.line(tip)] + [limit for limit in limits.values() if limit is not None]
    for stream in streams(store.disk):
        steps += read_journal(store, stream, tip).records
        begun = [ref for ref in segments(store.disk, stream) if limits.get(ref.timeline, 0) is None]
        steps += [ref.first_step - 1 for ref in begun]  # whether or not it can be read
    return max(steps, default=-1)


def commit_at(store: RunReader, step: int, timeline: int | None = None) -> Manifest:
    """The commit of ``step``: of ``timeline``, or of the present line, or else of the newest that has one, with a
    warning. Raises ``NoCommit``."""
    found = store.at(step, timeline)
    if timeline is None and _is_left(store, found.timeline, step):
        warnings.warn(
            f"{store.root}@{step}: {_said(store, found.timeline, step, 'this')}. The present line, timeline"
            f" {store.tip()}, has come to step {come_to(store, store.tip())}, and has no commit of this step. Name it"
            f" {named(store, found.timeline, step)} if it is meant.",
            stacklevel=3,
        )
    return found


def reached(store: RunReader, tip: int, until: int | None = None) -> Iterator[range]:
    """The steps, to ``until`` at most, that can be had of the line of ``tip``: of each base, newest first,
    its own and those that its records lead to. Raises ``DiskFailed`` if the newest cannot be seen."""
    journals: dict[str, Journal] = {}
    seen = False
    for ref in store.line(tip):
        if until is not None and ref.step > until:
            continue
        try:
            base = store.load(ref)
            for stream in base.streams:
                journals[stream] = journals.get(stream) or read_journal(store, stream, tip)
            chains = [chain_of(base, stream, journals[stream], until) for stream in base.streams]
        except (Damaged, NoCommit):
            continue
        except DiskFailed:
            if not seen:
                raise
            continue
        seen = True
        yield range(base.step, min(chain.last.step for chain in chains) + 1)


def left_behind(store: RunReader, after: int) -> set[int]:
    """The steps after ``after`` that can be had of lines which later resumes left."""
    left = store.timelines()[0].keys() - {store.tip()}
    lines = [steps for tip in left for steps in reached(store, tip)]
    return {step for steps in lines for step in steps if step > after}
