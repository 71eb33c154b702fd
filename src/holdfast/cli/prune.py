"""``prune``: show which commits a policy would remove and which steps depend on them, and remove them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..quantities import counted, format_bytes
from ..store.commit.pruning import Pruning, planned, prune, said_spans
from ..store.commit.retention import Keep
from .output import console, plain_table, print_json, print_table
from .runs import directory_of, open_run


def prune_run(run: Path, keep: Keep, *, dry_run: bool, as_json: bool) -> None:
    """Remove what ``keep`` does not keep, or with ``dry_run`` only print it."""
    found = planned(open_run(run), keep) if dry_run else prune(directory_of(run, "prune"), keep)
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
    return f"Steps {said_spans(found.lost)} {'could not' if dry_run else 'cannot'} be recovered any more."


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
