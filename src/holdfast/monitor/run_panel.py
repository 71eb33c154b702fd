"""The panel of ``holdfast watch``: a run of another process, as its log describes it. Units are bytes and seconds.

Rates cover the last lines of the log: SSD rates in 10**9 bytes (as drives are sold), memory in powers of two. The
picture fits 80 columns, and fewer with two lines for a row. The run is not touched: no lock is taken, only the log is
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..events import open_log, parsed
from ..quantities import counted, format_bytes, format_seconds
from ..schedule.operations import SSD_READ, SSD_WRITE
from . import facts
from .charts import milliseconds
from .facts import percent
from .history import History
from .lanes import NAMES
from .training_panel import Box, Rows, memory_bar, number, sparkline

PIECE_BYTES = 1 << 24
"""The number of bytes of a log that are read at once."""

BARS, LOSSES, CLASSES = 20, 1000, 5
PLACES = {
    "replica_step": "in the replica",
    "memory_step": "in memory, for the next process",
    "remote_durable_step": "in the bucket",
}
"""The names of the places that have a step besides the disk, by the key of its number."""


class Tail:
    """A reader of a growing log and its parts: each event once, whole lines only.

    A replaced log is read from its start. A log that became a part is read to its end, then the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = self._offset = self._inode = 0
        self._rest = b""

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events that were written since the last call."""
        with ExitStack() as opened, suppress(FileNotFoundError):
            files = open_log(self._path, self._number)
            for _, file in files:
                opened.enter_context(file)
            for number, file in files:
                self._place(number, os.fstat(file.fileno()))
                file.seek(self._offset)
                while data := file.read(PIECE_BYTES):
                    self._offset += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    yield from parsed(lines)

    def _place(self, number: int, found: os.stat_result) -> None:
        is_new = number > self._number  # a number that has become lower: older parts were removed by hand
        if is_new or found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset, self._rest = found.st_ino, 0, b""
        self._number = number


class LivePanel:
    """A display of ``history``, which grows."""

    def __init__(self, history: History, name: str) -> None:
        self.history, self.name = history, name

    @property
    def steps(self) -> int | None:
        """The last step of the run, if ``holdfast train`` runs it."""
        told = self.history.config.get("train.steps")
        return told if isinstance(told, int) else None

    def document(self, now: float) -> dict[str, Any]:
        """Return what the picture shows, as plain data."""
        history, recent = self.history, facts.recent(self.history)
        newest, life = history.newest, facts.life(history, None)
        return {
            "run": self.name,
            "state": facts.state_of(history, now),
            "silent_seconds": None if history.last_time is None else now - history.last_time,
            "step": newest.get("step"),
            "steps": self.steps,
            "loss": newest.get("loss"),
            "seconds_per_step": facts.times(recent).get("mean_seconds"),
            "predicted_seconds": history.sittings[-1].plan.get("step_seconds") if history.sittings else None,
            "speed_of_light": facts.speed_of_light(history, facts.RECENT),
            "tokens_per_second": facts.rate(recent, "tokens"),
            "read_bytes_per_second": facts.rate(recent, "read_bytes"),
            "written_bytes_per_second": facts.rate(recent, "written_bytes"),
            "moved": newest.get("moved"),
            "stall_share": facts.times(recent).get("stall_share"),
            "lanes": facts.lanes(history),
            "memory": facts.memory(history),
            "host_bytes": newest.get("host_bytes"),
            "device_bytes": newest.get("device_bytes"),
            "every": (facts.cadence(history) or {}).get("every"),
            "durable_step": facts.durability(history).get("durable_step"),
            "remote_durable_step": newest.get("remote_durable_step"),
            "replica_step": newest.get("replica_step"),
            "memory_step": newest.get("memory_step"),
            "written_bytes": life["written_bytes"],
            "rated_share": life["rated_share"],
        }

    def line(self, now: float) -> str:
        """Describe the newest step in one line."""
        found = self.document(now)
        if found["step"] is None:
            return f"{self.name}: {found['state']}"
        of = f"/{found['steps']}" if found["steps"] else ""
        said = f"step {found['step']}{of}  "
        said += f"loss {number(found['loss'])}  " if found["loss"] is not None else ""
        said += f"{milliseconds(found['seconds_per_step'])} a step  "
        said += f"{found['tokens_per_second']:,.0f} tokens/s  " if found["tokens_per_second"] else ""
        said += f"write {_rate(found['written_bytes_per_second'])}  durable {found['durable_step']}  "
        return said + found["state"]

    def picture(self, now: float) -> RenderableType:
        """Return the whole picture in a box."""
        found = self.document(now)
        parts: list[RenderableType] = [*self._progress(found), Rows(list(self._rows(found)))]
        parts += [Text(), Text(facts_said, style="dim")] if (facts_said := self._verdict(found)) else []
        step = "no step yet" if found["step"] is None else f"step {found['step']:,}"
        of = f" of {found['steps']:,}" if found["steps"] else ""
        style = "yellow" if found["state"] in ("silent", "failed", "died") else "dim"
        return Box(self.name, f"{step}{of}", Text(self._state(found), style=style), parts)

    def _state(self, found: dict[str, Any]) -> str:
        silent = found["silent_seconds"]
        if found["state"] == "silent" and silent is not None:
            return f"silent for {format_seconds(silent)}: it has died, or hangs"
        if found["state"] == "died":
            return "died: its process is gone, and it was not closed"
        return found["state"]

    def _progress(self, found: dict[str, Any]) -> list[RenderableType]:
        if not found["steps"] or not found["step"] or not found["seconds_per_step"]:
            return []
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        left = max(found["steps"] - found["step"], 0) * found["seconds_per_step"]
        said = f"{found['step'] / found['steps']:.0%}, {format_seconds(left)} left"
        bar.add_row(ProgressBar(total=found["steps"], completed=found["step"]), said)
        return [bar, Text()]

    def _rows(self, found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
        if found["step"] is None:
            return
        losses = [step.loss for step in self.history.line()[-LOSSES:] if step.loss is not None]
        if losses:
            yield "loss", number(found["loss"]), sparkline(losses, 36)
        tokens, predicted = found["tokens_per_second"], found["predicted_seconds"]
        said = [f"{tokens:,.0f} tokens/s"] if tokens else []
        said += [f"planned {milliseconds(predicted)}"] if predicted else []
        yield "speed", f"{milliseconds(found['seconds_per_step'])} a step", ", ".join(said)
        if light := found["speed_of_light"]:
            yield "", *facts.describe_speed_of_light(light)
        if found["stall_share"] is not None:
            yield "keeping", f"{found['stall_share']:.1%} of the time", "copies, and waiting for the disk"
        yield from self._lane_rows(found)
        yield from self._memory_rows(found)
        behind = found["step"] - found["durable_step"]
        kept = "survives power loss" if behind <= 0 else f"{counted(behind, 'step')} behind"
        yield "durable", f"step {found['durable_step']:,}", kept
        if found["every"] is not None:
            kept = (
                "a record of every step" if found["every"] == 1 else f"a base every {found['every']:,} steps"
            )
            yield "", kept, "chosen"
        for key, name in PLACES.items():
            if found[key] is not None:
                yield "", f"step {found[key]:,}", name
        if found["written_bytes"] is not None:
            share = f"{percent(found['rated_share'])} of an SSD's life"
            yield "written", format_bytes(found["written_bytes"]), share

    def _lane_rows(self, found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
        rates = {SSD_READ: found["read_bytes_per_second"], SSD_WRITE: found["written_bytes_per_second"]}
        recorded = found["lanes"]
        if recorded is None:
            for lane, rate in rates.items():
                if rate is not None:
                    yield "SSD", NAMES[lane].removeprefix("SSD "), _rate(rate)
            return
        label = "lanes"
        for lane, busy in recorded["busy_seconds"].items():
            share = min(busy / recorded["window_seconds"], 1.0) if recorded["window_seconds"] else 0.0
            moved = f"  {_rate(rates[lane])}" if rates.get(lane) is not None else ""
            yield label, NAMES[lane], f"{share:4.0%} {memory_bar(round(share * 100), 100, BARS)}{moved}"
            label = ""

    def _memory_rows(self, found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
        held = found["memory"] or {}
        if found["host_bytes"] is not None:
            budget = held.get("host_budget")
            said = format_bytes(found["host_bytes"]) + (f" of {format_bytes(budget)}" if budget else "")
            yield "memory", said, memory_bar(found["host_bytes"], budget, BARS)
            if found["device_bytes"] is not None:
                yield "", f"  device {format_bytes(found['device_bytes'])}", ""
            measured = [row for row in held.get("classes", ()) if row["measured"]]
            for row in sorted(measured, key=lambda row: -row["measured"])[:CLASSES]:
                yield "", f"  {row['class']}", f"{format_bytes(row['measured'])} at most"
        elif held.get("ring_bytes") is not None:
            yield (
                "memory",
                f"ring {format_bytes(held['ring_bytes'])}",
                f"{format_bytes(held['waiting_bytes'] or 0)} waited at most",
            )

    def _verdict(self, found: dict[str, Any]) -> str:
        recorded = found["lanes"]
        return f"Step {recorded['step']:,}: {recorded['verdict']}" if recorded else ""


def _rate(bytes_per_second: float | None) -> str:
    """Format a rate in 10**9 or 10**6 bytes.

    >>> _rate(1.25e9), _rate(32e6), _rate(None)
    ('1.25 GB/s', '32 MB/s', '-')
    """
    if bytes_per_second is None:
        return "-"
    big = bytes_per_second >= 1e8
    return f"{bytes_per_second / 1e9:.2f} GB/s" if big else f"{bytes_per_second / 1e6:.0f} MB/s"
