"""The event log of a run: its history, one JSON object per line of ``RUN/events.jsonl``.

Times are unix seconds, sizes bytes. The log is for people and tools, never for recovery: a failure to write it does not
harm the training. It is never synced, and anybody may add to it, so readers skip what is no event, such as a line torn
by a crash. A line is one ``write`` to a file opened for appending, so a killed process leaves at most its last line
torn.

A log that has grown to ``PART_BYTES`` is renamed to ``events.000001.jsonl``, then ``events.000002.jsonl``, and so on,
and begun anew; the newest ``PARTS`` of these *parts* stay. Readers read the parts first. Several processes may append
to one log: before a line, each looks whether another has renamed the file.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import math
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from .errors import Damaged
from .quantities import MiB
from .regular_files import load_json, open_regular

LOG = "events.jsonl"
"""The name of the log in a run's directory."""
PART_BYTES = 64 * MiB
PARTS = 3
"""The number of renamed parts that stay besides the log itself."""

TAIL_BYTES = 64 * 1024
"""The number of bytes at the end of a log that are searched for its newest events."""


class EventLog:
    """An appender of events to ``path``, which is created at the first one; None discards them. Any thread may emit.

    >>> EventLog(None).emit("step", step=12, loss=2.31)
    """

    def __init__(self, path: Path | None, part_bytes: int = PART_BYTES) -> None:
        """Prepare the log. A log of ``part_bytes`` or more becomes a part, and a new one is begun."""
        self.path, self.part_bytes = path, part_bytes
        self._file = -1
        self._using = threading.RLock()  # a signal handler may emit as well

    def fit_into(self, storage_bytes: int | None) -> None:
        """Let a part have at most a 64th of ``storage_bytes``, and 64 KiB at least, if the run has such a limit."""
        if storage_bytes is not None:
            self.part_bytes = min(self.part_bytes, max(storage_bytes // 64, 64 * 1024))

    def emit(self, event: str, **fields: Any) -> None:
        """Append ``{"event": event, "time": now, **fields}``. Never raises: a failure is one warning."""
        if self.path is None:
            return
        try:
            line = json.dumps(_plain({"event": event, "time": time.time(), **fields}))
            with self._using:  # a descriptor closed meanwhile may be another file's by now
                if self._file < 0 or _is_another(self.path, self._file):
                    self.close()
                    self._open(self.path)
                os.write(self._file, line.encode() + b"\n")
                if os.fstat(self._file).st_size >= self.part_bytes and _rotated(self.path, self._file):
                    self.close()
                    self._open(self.path)  # readers find the log at its place
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
        events = list(parsed(_tail_of(log).splitlines()))
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
    """Yield the events of the log ``path`` and its parts, oldest first; torn lines are skipped."""
    with ExitStack() as opened:
        files = [opened.enter_context(file) for _, file in open_log(path)]
        for file in files:
            with io.TextIOWrapper(file, encoding="utf-8", errors="replace") as lines:
                yield from parsed(lines)


def open_log(path: Path, first: int = 0) -> list[tuple[int, BinaryIO]]:
    """Open the parts of the log ``path`` from number ``first`` on, and the log, and return them, oldest first.

    The log has the number that it will have as a part. All files are of one moment, also while a writer renames them.
    Raises ``FileNotFoundError`` if there is none, ``Damaged`` where something else than a file lies.
    """
    while True:
        numbers = part_numbers(path)
        places = [(number, part_path(path, number)) for number in numbers]
        own = max(numbers, default=0) + 1
        found: list[tuple[int, BinaryIO]] = []
        try:
            for number, place in [*places, (own, path)]:
                with suppress(FileNotFoundError):  # removed, or just renamed
                    if number >= min(first, own):
                        found.append((number, open(open_regular(place), "rb")))  # noqa: SIM115
        except BaseException:
            _close_all(found)
            raise
        if part_numbers(path) == numbers:
            break
        _close_all(found)
    if not found and not path.exists():
        raise FileNotFoundError(f"there is no event log {path}")
    return found


def part_numbers(path: Path) -> list[int]:
    """Return the numbers of the parts of the log ``path``, lowest and oldest first."""
    form = _part_form(path.name)
    with suppress(OSError):
        return sorted(int(match[1]) for name in os.listdir(path.parent) if (match := form.fullmatch(name)))
    return []


def part_path(path: Path, number: int) -> Path:
    """Return the place of a part of the log ``path``.

    >>> part_path(Path("run/events.jsonl"), 7).name
    'events.000007.jsonl'
    """
    return path.with_name(f"{path.stem}.{number:06d}{path.suffix}")


def is_log(name: str) -> bool:
    """Return whether the file ``name`` of a run's directory is its event log or a part of it.

    >>> [is_log(name) for name in ("events.jsonl", "events.000001.jsonl", "events.csv")]
    [True, True, False]
    """
    return name == LOG or _part_form(LOG).fullmatch(name) is not None


def _part_form(name: str) -> re.Pattern[str]:
    stem, dot, suffix = name.rpartition(".") if "." in name else (name, "", "")
    return re.compile(rf"{re.escape(stem)}\.(\d{{6,}}){re.escape(dot + suffix)}")


def _is_another(path: Path, file: int) -> bool:
    """Return whether another file than the open ``file`` is at ``path``.

    False if none is: the directory may have been moved, and the log with it.
    """
    try:
        there = os.stat(path)
    except OSError:
        return False
    return not os.path.samestat(there, os.fstat(file))


def _rotated(path: Path, file: int) -> bool:
    """Make the log ``path``, open as ``file``, its newest part, and remove the oldest ones.

    Returns False where that is not possible now. The lock lets one of several writers do it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_another(path, file):  # renamed by another writer, who then closed it
            return True
        numbers = part_numbers(path)
        os.rename(path, part_path(path, max(numbers, default=0) + 1))
    except OSError:
        return False
    for number in numbers[: max(0, len(numbers) + 1 - PARTS)]:
        with suppress(OSError):
            os.unlink(part_path(path, number))
    return True


def _tail_of(log: Path) -> bytes:
    """Return the last ``TAIL_BYTES`` of a log, which may begin in a part. Raises as ``open_log``."""
    tail, files = b"", open_log(log)
    try:
        for _, file in reversed(files):
            wanted = TAIL_BYTES - len(tail)
            file.seek(max(0, file.seek(0, os.SEEK_END) - wanted))
            tail = file.read(wanted) + tail
            if len(tail) >= TAIL_BYTES:
                break
    finally:
        _close_all(files)
    return tail


def _close_all(files: Iterable[tuple[int, BinaryIO]]) -> None:
    for _, file in files:
        file.close()


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


SECONDS_BETWEEN_LINES = 1.0
Standing = Callable[[], dict[str, Any]]
"""Returns further fields of a line; its ``written_bytes`` counts since the run was opened."""


class StepLog:
    """The writer of step lines, at most one a second, so that short steps cost nothing.

    Without an event log, nothing is computed. Seconds, bytes.
    """

    def __init__(self, events: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._clock = events, clock
        self._due = float("-inf")
        self._step = self._num_steps = self._written = 0
        self._seconds = self._stall = self._longest_stall = 0.0

    def stepped(self, step: int, seconds: float, stall: float, standing: Standing) -> None:
        """Count ``step``, done ``seconds`` after the one before, with ``stall`` seconds spent on keeping it."""
        if self._events.path is None:
            return
        self._step, self._num_steps = step, self._num_steps + 1
        self._seconds += seconds
        self._stall += stall
        self._longest_stall = max(self._longest_stall, stall)
        if self._clock() >= self._due:
            self._tell(standing())

    def end(self, step: int, standing: Standing) -> None:
        """Write the last line, for a run that is closed after ``step``."""
        if self._events.path is None:
            return
        now = standing()
        if self._num_steps:
            self._tell(now)
        self._events.emit("closed", step=step, **now)

    def _tell(self, now: dict[str, Any]) -> None:
        """Write one line for the steps since the last line, with mean times."""
        count, self._num_steps = self._num_steps, 0
        self._due = self._clock() + SECONDS_BETWEEN_LINES
        if "written_bytes" in now:
            before, self._written = self._written, now["written_bytes"]
            now = now | {"written_bytes": self._written - before}
        self._events.emit(
            "step", step=self._step, steps=count, seconds=self._seconds / count, stall_seconds=self._stall / count,
            longest_stall_seconds=self._longest_stall, **now,
        )  # fmt: skip
        self._seconds = self._stall = self._longest_stall = 0.0
