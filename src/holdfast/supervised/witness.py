"""A drill's record of each step: digests of everything that the step's end consists of, as one line of JSON.

Two starts of a script did the same if their lines are equal. The first line that differs, and what differs in it, tells
which step went another way and probably why. Lines are of each rank, in ``steps-DIRECTORY-RANK.jsonl``. A line is one
write, so a killed process leaves at most its last one torn. Called by ``Checkpointer`` and the engine.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from .attempt import Attempt, is_supervised
from .script_values import script_values

BEGUN, STEP = "begun", "step"
"""The two kinds of lines: a run was opened, with the steps done, and a step was done."""
PARTS = ("random", "computing", "optimizers", "groups", "things", "loader", "scheduler")
"""The parts of the user state that lines tell apart; the rest is one digest."""


class Witness:
    """The writer of one rank's lines about the run in ``directory``."""

    def __init__(self, attempt: Attempt, directory: Path, rank: int) -> None:
        self._attempt = attempt
        self._path = attempt.folder / f"steps-{directory.name}-{rank:05d}.jsonl"
        self._may_stop = attempt.kill_step is not None and rank == 0

    @classmethod
    def of(cls, directory: str | Path, rank: int) -> Witness | None:
        """Return the witness of a run that was opened in a drill; None outside one."""
        attempt = Attempt.here()
        return None if attempt is None else cls(attempt, Path(directory), rank)

    def begun(self, step: int, tensors: Mapping[str, str]) -> None:
        """Note that the run was opened with ``step`` steps done. ``tensors`` are digests by name.

        Raises ``SystemExit`` where no step is left to do.
        """
        self._write(BEGUN, step, tensors=dict(tensors))
        if self._is_last(step):
            raise SystemExit(0)

    def stepped(
        self, step: int, tensors: Mapping[str, str], progress: Mapping[str, Any], close: Callable[[], None]
    ) -> None:
        """Note the end of ``step``, and end the script after the last one.

        Args:
            step: The number of the step.
            tensors: Digests by name.
            progress: The user state as JSON.
            close: Closes the run. Called before the script ends.

        Raises ``SystemExit`` after the last step.
        """
        self._write(STEP, step, tensors=dict(tensors), progress=digests_of(progress), script=script_values())
        if self._is_last(step):
            close()
            raise SystemExit(0)

    def _is_last(self, step: int) -> bool:
        """Return whether the script ends after ``step``. Does not return where it waits for its kill."""
        if step < self._attempt.until:
            return False
        while self._attempt.kill_step is not None and is_supervised(self._attempt.folder.parent):
            time.sleep(0.05)
        return True

    def _write(self, event: str, step: int, **facts: Any) -> None:
        line = json.dumps(
            {"event": event, "start": self._attempt.start, "step": step, "time": time.time(), **facts}
        )
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)
        if self._may_stop and step >= (self._attempt.kill_step or 0):
            self._may_stop = False
            threading.Thread(target=_stop_dead, args=(self._attempt.kill_delay,), daemon=True).start()


def _stop_dead(seconds: float) -> None:
    """Stop this process after some seconds, in the middle of whatever it does. The drill then kills it."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGSTOP)


def digests_of(progress: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the user state by the name of each part that a person knows.

    >>> sorted(digests_of({"groups": [{"lr": 0.1}], "step": 3}))
    ['groups[0].lr', 'step']
    """
    found: dict[str, str] = {}
    for key, value in progress.items():
        if key in PARTS and isinstance(value, Mapping):
            found |= {f"{key}.{name}": _digest(each) for name, each in value.items()}
        elif key in PARTS and isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
            for i, each in enumerate(value):
                found |= _group(f"{key}[{i}]", each)
        else:
            found[key] = _digest(value)
    return found


def _group(name: str, value: Any) -> dict[str, str]:
    return {f"{name}.{key}": _digest(each) for key, each in value.items()}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return xxhash.xxh3_64_hexdigest(text.encode())
