"""The verbs that maintain a run: ``compact``, ``prune`` and ``push``.

``compact`` makes a snapshot of a later step, ``prune`` removes what a policy does not keep, and ``push`` copies a run
to a bucket. Each verb prints what it did or, with ``--json``, one document; ``push --follow`` prints one for each copy.
Nothing is removed before it is known which steps depend on it. Called by ``main``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ..checkpoint.recovery.recovery_progress import RecoveryProgress
from ..errors import BadInput, DiskFailed
from ..monitor.progress_bar import progress_bar
from ..quantities import counted, format_bytes
from ..store.commit.pruning import Pruning, planned, prune, prune_nodes, spans_text
from ..store.commit.retention import Keep
from ..store.copying import PushResult
from ..store.object_store import Nodes, Url, place_of
from ..store.pushing import Pusher
from .output import console, error_console, plain_table, print_json, print_table, transfer_progress
from .runs import directory_of, open_run


def compact_run(run: Path, to: int | None, *, as_json: bool) -> None:
    """Make a snapshot of step ``to``, or of the newest step, and print what it took."""
    from ..checkpoint.recovery.compaction import compact  # imports torch, which the other verbs do without

    watch = RecoveryProgress(progress_bar(error_console()))
    done = compact(directory_of(run, "compact"), to, watch)
    base = done.base
    if as_json:
        print_json(
            {
                "step": base.step,
                "timeline": base.timeline,
                "bytes": base.total_bytes,
                "from_step": done.from_step,
                "records": watch.replayed_records,
                "dropped": done.dropped,
                "stays_for": [list(span) for span in done.left],
                "unread": list(done.unread),
            }
        )
        return
    print(
        f"{run}@{base.step} is a base now, {format_bytes(base.total_bytes)}, made from that of step {done.from_step:,}"
        f" and the records of {counted(watch.replayed_records // len(base.streams), 'step')}."
    )
    if done.dropped:
        print(f"Steps {done.from_step:,} to {base.step - 1:,} are gone, unless an older base leads to them.")
    if done.left:
        print(
            f"The base of step {done.from_step:,} stays, with what follows it: steps {spans_text(done.left)} of what"
            f" a later resume left need it. `holdfast prune {run} --keep-last 1 --dry-run` says what would go with it."
        )
    if done.unread:
        print(
            f"The base of step {done.from_step:,} stays, since what cannot be read may need it:"
            f" {' '.join(done.unread)}"
        )


def prune_run(run: Path, keep: Keep, *, dry_run: bool, as_json: bool) -> None:
    """Remove what ``keep`` does not keep, or with ``dry_run`` only print it."""
    place = place_of(run)
    if dry_run:
        found = planned(open_run(run), keep)
    elif isinstance(place, Nodes):
        found = prune_nodes(open_run(place), place.directories, keep)
    else:
        found = prune(directory_of(run, "prune"), keep)
    if as_json:
        print_json(_document(found) | {"dry_run": dry_run})
        return
    if not found.going and not found.segments:
        print(f"nothing to remove: {run} holds no more than the policy keeps")
        return
    table = plain_table(">step", ">timeline", ">size", "depends on it")
    for going in found.going:
        leads = f"records to {going.leads_to:,}" if going.leads_to > going.ref.step else ""
        told = (leads, "" if going.current else "left behind by a later resume")
        text = ", ".join(filter(None, told)) or "nothing more"
        table.add_row(f"{going.ref.step:,}", str(going.ref.timeline), format_bytes(going.bytes), text)
    print_table(console(), table)
    verb = "Would remove" if dry_run else "Removed"
    print(
        f"{verb} {counted(len(found.going), 'commit')} and {counted(len(found.segments), 'segment')} of records,"
        f" {format_bytes(found.total_bytes)}. {_lost(found, dry_run)}"
    )
    for text in found.unread:
        print(f"Steps in what cannot be read are not counted: {text}")


def _lost(found: Pruning, dry_run: bool) -> str:
    if not found.lost:
        return "Every step that could be recovered still can."
    return f"Steps {spans_text(found.lost)} {'could not' if dry_run else 'cannot'} be recovered any more."


def _document(found: Pruning) -> dict[str, Any]:
    return {
        "commits": [
            {"step": g.ref.step, "timeline": g.ref.timeline, "bytes": g.bytes, "leads_to": g.leads_to}
            for g in found.going
        ],
        "kept": [{"step": ref.step, "timeline": ref.timeline} for ref in found.kept],
        "segments": list(found.segments),
        "segment_bytes": found.segment_bytes,
        "bytes": found.total_bytes,
        "steps_lost": [list(span) for span in found.lost],
        "unread": list(found.unread),
    }


SECONDS = 2.0
"""The pause between two scans of a run that is followed, in seconds."""


def push_run(run: Path, destination: str, *, keep_last: int | None, follow: bool, as_json: bool) -> bool:
    """Copy what ``destination`` lacks of ``run``, and print it. Return whether all copied data was undamaged.

    With ``follow`` it repeats until Ctrl-C; after the first copy, through any network failure.
    """
    place = place_of(destination)
    if not isinstance(place, Url):
        raise BadInput(
            f"{destination} is no place in a bucket: give s3://BUCKET/PREFIX. A directory can be copied."
        )
    pusher = Pusher(directory_of(run, "push"), place, keep=None if keep_last is None else Keep(keep_last))
    whole, told = True, ""
    try:
        whole = not _push(pusher, place, follow, as_json).damaged
        while follow:
            time.sleep(SECONDS)
            try:
                whole &= not _push(pusher, place, follow, as_json).damaged
                told = ""
            except DiskFailed as error:
                if str(error) != told:
                    print(f"{error} It is tried again until Ctrl-C.", file=sys.stderr, flush=True)
                told = str(error)
    except KeyboardInterrupt:
        if not follow:
            raise
    return whole


def _push(pusher: Pusher, place: Url, follow: bool, as_json: bool) -> PushResult:
    began = time.perf_counter()
    with transfer_progress("copying", quiet=as_json) as bar:
        task = bar.add_task("copying", total=None)
        done = pusher.push(lambda total, nbytes: bar.update(task, total=total, advance=nbytes))
    if not follow or done.commits or done.records or done.removed or done.damaged:
        _say(done, place, time.perf_counter() - began, follow, as_json)
    return done


def _say(done: PushResult, place: Url, seconds: float, follow: bool, as_json: bool) -> None:
    if as_json:
        document = _push_document(done, seconds)
        print(json.dumps(document), flush=True) if follow else print_json(document)
        return
    steps = "".join(f", step {ref.step:,}" for ref in sorted(done.commits))
    print(
        f"{place}: {counted(len(done.commits), 'commit')}{steps}, and {counted(done.records, 'record')} copied,"
        f" {format_bytes(done.bytes)}, {seconds:.1f} s"
    )
    if done.retired:
        print(
            f"Not copied: {counted(len(done.retired), 'commit')} that the run retired meanwhile. Push again, or let it"
            " keep more of them: keep=Keep(last=...), or durability.retain."
        )
    if done.removed:
        print(f"Removed there: {counted(len(done.removed), 'older commit')}")
    for error in done.damaged:
        print(f"Not copied, since it is damaged: {error}")
    if done.durable_step is None:
        print("Nothing can be recovered from there yet: it has no commit")
    else:
        print(f"Everything up to step {done.durable_step:,} can be recovered from there", flush=True)


def _push_document(done: PushResult, seconds: float) -> dict[str, Any]:
    return {
        "commits": [{"step": ref.step, "timeline": ref.timeline} for ref in done.commits],
        "removed": [{"step": ref.step, "timeline": ref.timeline} for ref in done.removed],
        "retired": [{"step": ref.step, "timeline": ref.timeline} for ref in done.retired],
        "records": done.records,
        "bytes": done.bytes,
        "seconds": seconds,
        "durable_step": done.durable_step,
        "damaged": [{"path": error.path, "text": str(error)} for error in done.damaged],
    }
