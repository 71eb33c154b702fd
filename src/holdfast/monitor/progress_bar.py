"""The progress bar of a script: a recovery, or the steps of an engine, drawn on terminals only.

A bar must never change where a script's own output goes: what the script prints to a file stays in the file, and what
it prints to the terminal appears above the bar. The cursor stays visible, since a run may be killed.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from ..errors import BadInput
from ..quantities import format_seconds
from .charts import milliseconds
from .training_panel import RECENT, number

if TYPE_CHECKING:
    from ..offload.engine import Engine


SECONDS_BETWEEN_DRAWINGS = 0.1


def progress_bar(console: Console | None = None) -> ProgressBar:
    """Return a bar for ``Checkpointer.resume(show=...)``, or for the steps of an engine.

    ``console`` is standard error unless given; nothing is drawn where it is no terminal.

    >>> for step in progress_bar().steps(engine, 200):  # doctest: +SKIP
    ...     engine.step(micro_batches(step))
    """
    return ProgressBar(console or Console(stderr=True))


class ProgressBar:
    """Draws how far a recovery or a training is. Called with a recovery's progress, it shows that."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._recovery: tuple[Progress, TaskID] | None = None

    def __call__(self, recovery: Any) -> None:
        """Show how far ``recovery`` is."""
        if self._recovery is None:
            columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
            progress = self._progress(*columns, transient=True)
            self._recovery = progress, progress.add_task("", total=1.0)
        progress, task = self._recovery
        progress.update(task, description=recovery.text, completed=recovery.done_share)
        if recovery.over:
            self._stop(progress)
        elif not progress.live.is_started:
            self._start(progress)

    def steps(self, engine: Engine, until: int) -> Iterator[int]:
        """Yield the numbers of the steps still to do, the first being 0, and show each that was done.

        A resumed engine goes on where it was. Of several ranks the first one draws.

        Args:
            engine: The engine that the loop calls ``step`` of.
            until: The number of steps done when the loop ends.

        Raises ``BadInput`` where the body of the loop has not called ``engine.step``.
        """
        nowrap = Column(no_wrap=True)
        columns = (
            TextColumn("step {task.completed}/{task.total}", table_column=nowrap),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.description}", table_column=nowrap),
        )
        progress = self._progress(*columns, expand=True, auto_refresh=False, disable=_rank() > 0)
        task = progress.add_task("", total=until, completed=engine.steps_done)
        recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        drawn_at = float("-inf")
        try:
            self._start(progress)
            while engine.steps_done < until:
                before = engine.steps_done
                yield before
                if engine.steps_done == before:
                    raise BadInput(f"the body of the loop did not call engine.step for step {before}")
                recent.append(engine.last)
                others = len(f"step {engine.steps_done}/{until}  ")  # with the spaces beside the bar
                said = describe_step(recent, engine.durable_step, until, self._console.width - others)
                progress.update(task, completed=engine.steps_done, description=said)
                now = time.monotonic()
                if now - drawn_at >= SECONDS_BETWEEN_DRAWINGS or engine.steps_done >= until:
                    progress.refresh()
                    drawn_at = now
        finally:
            self._stop(progress)

    def _progress(self, *columns: Any, disable: bool = False, **options: Any) -> Progress:
        out = self._console
        return Progress(
            *columns,
            console=out,
            disable=disable or not out.is_terminal or out.is_dumb_terminal,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            **options,
        )

    def _stop(self, progress: Progress) -> None:
        if not progress.disable:  # rich 13.7 would print an empty line
            progress.stop()

    def _start(self, progress: Progress) -> None:
        progress.start()
        if not progress.disable:
            self._console.show_cursor(True)


def describe_step(recent: deque[dict[str, Any]], durable_step: int, until: int, columns: int) -> str:
    """Describe the newest of the ``recent`` steps in at most ``columns``; rates are means of all of them.

    Where not everything fits, the loss and the time left stay longest, and the tokens go first.

    >>> step = {"step": 12, "loss": 2.30512, "seconds": 0.85, "tokens": 2048, "skipped": None}
    >>> describe_step(deque([step]), 11, 200, 80)
    'loss 2.305  2,409 tokens/s  850 ms/step  durable 11  2 min 40 s left'
    >>> describe_step(deque([step | {"tokens": 0, "skipped": "the loss is nan"}]), 11, 12, 80)
    'skipped  850 ms/step  durable 11  0.0 s left'
    >>> describe_step(deque([step]), 11, 200, 30)
    'loss 2.305  2 min 40 s left'
    """
    newest = recent[-1]
    seconds = sum(event["seconds"] for event in recent)
    tokens, each = sum(event["tokens"] for event in recent), seconds / len(recent)
    loss = "skipped" if newest["skipped"] else f"loss {number(newest['loss'])}"
    rate = f"{tokens / max(seconds, 1e-9):,.0f} tokens/s" if tokens else ""
    time, durable = f"{milliseconds(each)}/step", f"durable {durable_step}"
    left = f"{format_seconds(each * max(until - newest['step'], 0))} left"
    shown = [loss]
    for part in (left, time, durable, rate):
        shown += [part] if part and len("  ".join([*shown, part])) <= columns else []
    return "  ".join(part for part in (loss, rate, time, durable, left) if part in shown)


def _rank() -> int:
    """Return the rank of this process in torch's process group; 0 without one."""
    from torch import distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
