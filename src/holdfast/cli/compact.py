"""``compact``: make a snapshot of a later step from a snapshot and its log records."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.recovery.compaction import compact
from ..checkpoint.recovery.recovery_progress import RecoveryProgress
from ..monitor.progress_bar import progress_bar
from ..quantities import counted, format_bytes
from ..store.commit.pruning import said_spans
from .output import error_console, print_json
from .runs import directory_of


def compact_run(run: Path, to: int | None, *, as_json: bool) -> None:
    """Make a snapshot of step ``to``, or of the newest step, and print what it took."""
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
            f"The base of step {done.from_step:,} stays, with what follows it: steps {said_spans(done.left)} of what"
            f" a later resume left need it. `holdfast prune {run} --keep-last 1 --dry-run` says what would go with it."
        )
    if done.unread:
        print(
            f"The base of step {done.from_step:,} stays, since what cannot be read may need it:"
            f" {' '.join(done.unread)}"
        )
