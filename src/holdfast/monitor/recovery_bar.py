"""The progress bar of a recovery: what is loaded and replayed, and the time left. It is drawn on terminals only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(console: Console | None = None) -> Callable[[Any], None]:
    """Return a function for ``Checkpointer.resume(show=...)`` that draws the progress, if standard error is
    a terminal.
    """
    out = console or Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
    task = progress.add_task("", total=1.0)

    def show(recovery: Any) -> None:
        progress.update(task, description=recovery.text, completed=recovery.done_share)
        if recovery.over:
            progress.stop()
        elif not progress.live.is_started:
            progress.start()

    return show
