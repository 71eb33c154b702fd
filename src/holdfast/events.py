"""The event log of a run: its history, one JSON object per line of ``RUN/events.jsonl``.

Times are unix seconds, sizes bytes. The log is for people and tools, never for recovery: a failure to write it does not
harm the training. It is never synced, and anybody may add to it, so readers skip what is no event, such as a line torn
by a crash. A line is one ``write`` to a file opened for appending, so a killed process leaves at most its last line
torn.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import Damaged
from .regular_files import load_json, open_regular

TAIL_BYTES = 64 * 1024
"""The number of bytes at the end of a log that are searched for its newest events."""


class EventLog:
    """An appender of events to ``path``, which is created at the first one; None discards them. Any thread may emit.

    >>> EventLog(None).emit("step", step=12, loss=2.31)
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = -1
        self._using = threading.RLock()  # a signal handler may emit as well

    def emit(self, event: str, **fields: Any) -> None:
        """Append ``{"event": event, "time": now, **fields}``. Never raises: a failure is one warning."""
        if self.path is None:
            return
        try:
            line = json.dumps(_plain({"event": event, "time": time.time(), **fields}))
            with self._using:  # a descriptor closed meanwhile may be another file's by now
                if self._file < 0:
                    self._open(self.path)
                os.write(self._file, line.encode() + b"\n")
        except (OSError, Damaged, TypeError, ValueError, RecursionError) as error:
            warnings.warn(f"no more events are written to {self.path}: {error}", stacklevel=2)
            self.close()
            self.path = None

    def close(self) -> None:
        with self._using:
            file, self._file = self._file, -1
            if file >= 0:
                os.close(file)

    def _open(self, path: Path) -> None:
        """Open the file for appending, and end a line that a killed process may have torn."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def tell(text: str) -> None:
    """Log one line to the logger ``holdfast``.

    It appears on standard error, unless the script or a library has set up logging, which then decides.
    """
    log = logging.getLogger("holdfast")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("holdfast: %(message)s"))
        log.addHandler(handler)
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
    log.info(text)


def describe_lost_steps(log: Path | None, step: int) -> str:
    """Describe, in a sentence, the steps after ``step`` that ``log`` reports: a resume does them again.

    Events are written at most once a second, so there may have been more.
    """
    newest, durable = _newest_steps(log) if log is not None else (step, step)
    if durable > step:
        return (
            f"Later steps, to {durable:,}, had been durable: files of journal/ or commits/ are missing. Put them back"
            " and resume again, or those steps are done again."
        )
    if newest <= step:
        return "No later step is known."
    steps = f"steps {step + 1:,} to {newest:,} were" if newest > step + 1 else f"step {newest:,} was"
    return f"Lost: {steps} done and not durable, perhaps more; they are done again."


def _newest_steps(log: Path) -> tuple[int, int]:
    """Return the highest step done and the highest durable step in the last events of ``log``; -1 for none."""
    try:
        with open(open_regular(log), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            events = list(parsed(file.read().splitlines()))
    except (OSError, Damaged):
        return -1, -1
    steps = [each for each in _since_the_opening(events) if each.get("event") == "step"]
    done, durable = ([each.get(key) for each in steps] for key in ("step", "durable_step"))
    return _highest(done), _highest(durable)


def _highest(numbers: list[Any]) -> int:
    return max((number for number in numbers if type(number) is int), default=-1)


def _since_the_opening(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events since a process last opened the run or went back: earlier steps may have been abandoned."""
    opened = [
        i for i, each in enumerate(events) if each.get("event") in ("checkpointer", "engine", "rollback")
    ]
    return events[opened[-1] :] if opened else events


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of ``path``, oldest first; torn lines are skipped."""
    with open(open_regular(path), encoding="utf-8", errors="replace") as lines:
        yield from parsed(lines)


def parsed(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events among ``lines``; anything else is skipped."""
    for line in lines:
        try:
            event = load_json(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _plain(value: Any) -> Any:
    """Return ``value`` as strict JSON: numbers that are not finite become ``null``, other values their text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
