"""Witness: what the log of a run says was durable, so that nobody loses it in silence.

Nothing is recovered by it: the log may lack lines, and is no part of what verifies. It is a lower bound, of which more
than a word is said only where the disk has less.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from ..errors import NoCommit
from ..events import parsed

TAIL_BYTES = 1 << 18
"""Of the log: its last lines say what was durable last."""


def last_durable(log: Path | None) -> int:
    """The newest step that ``log`` says was durable on the line that the run went on with; -1 if it says nothing."""
    step = -1
    for event in parsed(_tail(log) if log is not None else []):
        if event.get("event") == "recovered":  # what was newer was left
            step = _number(event, "step", step)
        if event.get("event") in ("checkpointer", "engine"):  # likewise; a fresh run has a commit by now
            first = _number(event, "first_step", step)
            step = first if step < 0 else min(step, first)
        step = max(step, _number(event, "durable_step", -1))
    return step


def last_memory(log: Path) -> Path | None:
    """Where ``log`` says that the newest replica of the run kept things; None if it says of none."""
    place = None
    with suppress(OSError), open(log, "rb") as lines:
        for event in parsed(line for line in lines if b'"replica_in"' in line):
            place = event.get("replica_in")
    return Path(place) if isinstance(place, str) else None


def _number(event: dict[str, Any], name: str, default: int) -> int:
    found = event.get(name)
    return found if isinstance(found, int) else default


def _tail(log: Path) -> list[bytes]:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []


def refuse_emptied(root: PurePath, durable_step: int) -> None:
    """Raise ``NoCommit`` where a run would begin, and the log says that there was one, to ``durable_step``."""
    if durable_step >= 0:
        raise NoCommit(
            f"{root} has no commit, and had some: its events.jsonl says that step {durable_step} was durable. commits/"
            " and what belongs to it was removed or not restored. Nothing was changed: put the files back, or give"
            " another directory. To begin anew in this one, move events.jsonl away."
        )
