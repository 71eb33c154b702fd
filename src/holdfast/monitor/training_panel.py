"""The panel of a training: one live picture of a run in a terminal, plain lines everywhere else.

It reads only the step events of ``events.jsonl`` (``Engine.last``), so that it shows what the log records. Rates are
per second over the last steps, SSD rates in 10**9 bytes (as drives are sold), memory in powers of two. The picture fits
80 columns; on narrower terminals its rows take two lines.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..quantities import counted, format_bytes, format_seconds
from .facts import describe_speed_of_light

RECENT = 20
"""The number of steps that rates are taken over."""
SECONDS_BETWEEN_LINES = 2.0, 60.0
"""Seconds between lines of plain output: at the beginning, growing with the run, and at most.

The first step, the last and every skipped one are always printed.
"""
LOSSES = 1000
"""The number of steps whose losses are drawn."""
SIDE_BY_SIDE = 74
"""The columns inside the box from which on a row is one line: those of a terminal of 80."""
BARS = "▁▂▃▄▅▆▇█"


class TrainingPanel:
    """A context manager around the training loop; call ``step`` after each step.

    ``steps`` is the last step of the run. ``host_budget`` is in bytes (None: no known limit). ``commit_every`` is in
    steps (0: never). ``busiest_seconds`` is the busiest resource of the plan and the seconds that it works for a step
    (None: the run was not planned by rates).
    """

    def __init__(
        self,
        console: Console,
        *,
        title: str,
        steps: int,
        host_budget: int | None = None,
        commit_every: int = 1,
        busiest_seconds: tuple[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.title, self.steps, self.host_budget = console, title, steps, host_budget
        self.commit_every, self.busiest_seconds = commit_every, busiest_seconds
        self._clock = clock
        self._stopping = ""
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._started, self._printed = clock(), float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> TrainingPanel:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(get_renderable=self.picture, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, event: dict[str, Any]) -> None:
        """Show the step of ``event``."""
        self._recent.append(event)
        if event["skipped"] is not None:
            self.note(f"step {event['step']} was skipped: {event['skipped']}")
        else:
            self._losses.append(event["loss"])
        if self._live is None and self._is_due(event["step"]):
            self.console.print(self.line(), soft_wrap=True, highlight=False)

    def durable(self, step: int) -> None:
        """Show that ``step`` became durable after the last event."""
        if self._recent:
            self._recent[-1] = self._recent[-1] | {"durable_step": step}

    def announce_stop(self, text: str) -> None:
        """Show that the run is about to stop. Takes no lock, so a signal handler may call it."""
        self._stopping = text
        if self._live is None:
            with suppress(OSError):  # nobody may be reading
                os.write(2, b"\n" * self.console.is_terminal + text.encode() + b"\n")

    def note(self, text: str) -> None:
        """Print a line that stays: above the picture, or among the lines."""
        self.console.print(Text(text, style="yellow"), soft_wrap=True)

    def line(self) -> str:
        """Describe the last step in one line."""
        event = self._recent[-1]
        return (
            f"step {event['step']:>{len(str(self.steps))}}/{self.steps}  loss {number(event['loss'])}  "
            f"{self._per_second('tokens'):,.0f} tokens/s  read {self._gigabytes('read_bytes')}  "
            f"write {self._gigabytes('written_bytes')}  memory {self._memory()}  "
            f"durable {event['durable_step']}  {format_seconds(self.seconds_left())} left"
        )

    def picture(self) -> RenderableType:
        """Return the last steps in a box; nothing before the first step."""
        if not self._recent:
            return ""
        event = self._recent[-1]
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(
            ProgressBar(total=self.steps, completed=event["step"]),
            f"{event['step'] / self.steps:.0%}, {format_seconds(self.seconds_left())} left",
        )
        said, state = f"step {event['step']} of {self.steps}", Text(self._stopping, style="yellow")
        return Box(self.title, said, state, [bar, "", Rows(self._rows(event))])

    def seconds_left(self) -> float:
        """Return the seconds left at the pace of the recent steps."""
        events = list(self._recent)
        seconds = sum(event["seconds"] for event in events) / len(events)
        return seconds * (self.steps - events[-1]["step"])

    def _rows(self, event: dict[str, Any]) -> list[tuple[str, str, str]]:
        norm, rate = number(event["grad_norm"]), number(event["learning_rate"][0])
        bars = max(1, min(36, self.console.width - 16))
        return [
            ("loss", number(event["loss"]), sparkline(list(self._losses), bars)),
            ("update", f"learning rate {rate}", f"gradient norm {norm}"),
            ("speed", f"{self._per_second('tokens'):,.0f} tokens/s", self._speed_of_light()),
            ("SSD", f"read  {self._gigabytes('read_bytes')}", f"write {self._gigabytes('written_bytes')}"),
            ("memory", self._memory(), memory_bar(event["host_bytes"], self.host_budget, 20)),
            ("durable", f"step {event['durable_step']}", self._durability(event)),
        ]

    def _speed_of_light(self) -> str:
        """Describe the share of the speed of light; empty where it is not known. The oldest step may be the first."""
        seconds = [event["seconds"] for event in list(self._recent)[1:] if event["skipped"] is None]
        if self.busiest_seconds is None or not seconds:
            return ""
        lane, least = self.busiest_seconds
        return " ".join(describe_speed_of_light({"share": least / max(median(seconds), 1e-9), "lane": lane}))

    def _durability(self, event: dict[str, Any]) -> str:
        behind = event["step"] - event["durable_step"]
        if self.commit_every == 0:
            return "commits are off (durability.every = 0)"
        if behind == 0:
            return "survives power loss"
        cadence = f"; a commit every {self.commit_every}" if self.commit_every > 1 else ""
        return f"{counted(behind, 'step')} behind{cadence}"

    def _is_due(self, step: int) -> bool:
        now, (least, most) = self._clock(), SECONDS_BETWEEN_LINES
        pause = min(max(least, (now - self._started) / 30), most)
        if now - self._printed < pause and step != self.steps:
            return False
        self._printed = now
        return True

    def _per_second(self, key: str) -> float:
        events = list(self._recent)  # copied at once, because another thread draws the picture
        return sum(event[key] for event in events) / max(sum(event["seconds"] for event in events), 1e-9)

    def _gigabytes(self, key: str) -> str:
        return f"{self._per_second(key) / 1e9:.2f} GB/s"

    def _memory(self) -> str:
        used = format_bytes(self._recent[-1]["host_bytes"])
        return used if self.host_budget is None else f"{used} of {format_bytes(self.host_budget)}"


@dataclass(frozen=True)
class Box:
    """The picture of a run in a box: its ``name`` and the ``caption`` of its step above, its ``state`` below.

    A name that does not fit loses its beginning.
    """

    name: str
    caption: str
    state: Text
    parts: Sequence[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name, columns = self.name, max(1, options.max_width - cell_len(self.caption) - 8)
        while cell_len(name) > columns:
            name = f"…{name[2:]}" if len(name) > 2 else ""
        yield Panel(
            Group(*self.parts),
            title=Text.assemble((name, "bold"), "  " * bool(name), self.caption),
            title_align="left",
            subtitle=self.state,
            subtitle_align="left",
            padding=(0, 2),
        )


@dataclass(frozen=True)
class Rows:
    """Rows of a label, a number and what belongs to it, which is below the number on a narrow terminal."""

    rows: Sequence[tuple[str, str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 3), expand=True)
        table.add_column(style="dim", no_wrap=True, min_width=7)
        table.add_column(no_wrap=True)
        if options.max_width >= SIDE_BY_SIDE:
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)  # this column gives way to numbers
            for row in self.rows:
                table.add_row(*row)
        else:
            table.columns[1].ratio = 1
            for label, value, more in self.rows:
                table.add_row(label, f"{value}\n{more}" if more else value)
        yield table


def number(value: float | None) -> str:
    """Format ``value`` with four digits, or as a dash.

    >>> number(2.30512), number(0.000123), number(None)
    ('2.305', '0.000123', '-')
    """
    return "-" if value is None else f"{value:.4g}" if abs(value) < 0.1 else f"{value:.3f}"


def sparkline(values: list[float], width: int) -> str:
    """Draw ``values`` as at most ``width`` bars, each the mean of its share, scaled from least to most.

    >>> sparkline([3.0, 2.0, 1.0, 1.0], 4)
    '█▅▁▁'
    """
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * place // width for place in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(max(means) - min(means), 1e-12)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


def memory_bar(used: int, budget: int | None, width: int) -> str:
    """Draw how much of the budget is used as a bar; empty without a budget.

    >>> memory_bar(1, 4, 8)
    '██░░░░░░'
    """
    if budget is None:
        return ""
    filled = min(width, round(width * used / budget))
    return "█" * filled + "░" * (width - filled)
