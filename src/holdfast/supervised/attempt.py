"""One start of a script under ``holdfast drill``: where its runs go, at which step it ends, and what each step was.

The drill sets ``HOLDFAST_DRILL`` to the folder of an attempt, which holds ``plan.json``. Every run directory that the
script opens for training is then one below that folder, so that a drill writes to no run of the user. The invariant:
the same path of a run leads to the same directory in every start with the same folder.

A ``Witness`` records digests of everything that a step's end consists of, as one line of JSON. Two starts of a script
did the same if their lines are equal. The first line that differs, and what differs in it, tells which step went
another way and probably why. Lines are of each rank, in ``steps-DIRECTORY-RANK.jsonl``. A line is one write, so a
killed process leaves at most its last one torn.

A command that starts scripts holds a lock in its folder, which the system drops with the command. A process that waits
for what only the command would end asks from time to time whether it is there (``is_supervised``), so that it does not
wait for ever. Called where a run is opened, and by ``Checkpointer`` and the engine at every step.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ..errors import BadInput
from ..events import parsed
from ..regular_files import home_path, load_json, read_regular
from ..store.disk import Disk
from .script_values import script_values

if TYPE_CHECKING:
    from ..distributed import Ranks

VARIABLE = "HOLDFAST_DRILL"
PLAN, OPENED, RUNS = "plan.json", "opened.jsonl", "runs"
"""The plan of an attempt, the list of the runs that it opened, and the folder that holds them."""

RAY_SESSION = re.compile(r"/session_\d{4}-\d\d-\d\d_[\d_-]+/")
"""A part of the working directory of each worker of Ray."""


@dataclass(frozen=True)
class Attempt:
    """One start of the script, which ends after step ``until``.

    With a ``kill_step`` it stops dead ``kill_delay`` seconds after that step, at a moment that no code of it chooses,
    for the drill to kill it; at ``until`` it waits for that.
    """

    folder: Path
    until: int
    start: int = 0
    """The number of starts with this folder before this one."""
    kill_step: int | None = None
    kill_delay: float = 0.0

    @classmethod
    def here(cls) -> Attempt | None:
        """Return the attempt that this process belongs to; None outside a drill."""
        folder = os.environ.get(VARIABLE)
        if not folder:
            return None
        try:
            plan = load_json(read_regular(Path(folder) / PLAN))
            return cls(Path(folder), **plan)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"{VARIABLE} is {folder!r}, which is no folder of a drill ({error}). `holdfast drill` sets it; unset"
                " it for a training of its own."
            ) from error

    def write(self) -> dict[str, str]:
        """Write the plan, and return the environment that brings a process into this attempt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = {key: value for key, value in asdict(self).items() if key != "folder"}
        (self.folder / PLAN).write_text(json.dumps(plan), encoding="utf-8")
        return {VARIABLE: str(self.folder)}

    def directory_of(self, run: Path) -> Path:
        """Return the directory below ``folder`` that stands for ``run``, named by the order of opening."""
        path = Path(os.path.abspath(run))
        home = self.folder / RUNS
        if path.is_relative_to(home):
            return path
        with open(self.folder / OPENED, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks come at the same time
            known = self.opened()
            name = next((name for name, each in known.items() if each == str(path)), None)
            if name is None:
                name = f"run-{len(known)}"
                file.write(json.dumps({"run": str(path), "directory": name}) + "\n")
        return home / name

    def opened(self) -> dict[str, str]:
        """Return the runs that the script opened, by the name of the directory that stands for each, in order."""
        try:
            text = (self.folder / OPENED).read_bytes()
        except FileNotFoundError:
            return {}
        return {line["directory"]: line["run"] for line in parsed(text.splitlines())}


def training_directory(run: str | os.PathLike[str]) -> Path:
    """Return the directory in which ``run`` is trained: in a drill one of its own, else the path that was given.

    Raises ``BadInput`` for a relative path in a worker of Ray, where a training would begin anew in each session.
    """
    path, attempt = home_path(run), Attempt.here()
    if attempt is not None:
        return attempt.directory_of(path)
    if not path.is_absolute() and RAY_SESSION.search(f"{os.getcwd()}/"):
        raise BadInput(
            f"{run} would be in {os.getcwd()}, which is of this session of Ray and this machine alone, so that another"
            " session would begin anew. Give an absolute path that all workers see."
        )
    return path


def shared_directory(run: str | os.PathLike[str], ranks: Ranks, has_nodes: bool) -> Path:
    """Return the directory in which all ranks train, as ``training_directory`` does.

    A drill leaves out ``nodes=``, so ranks that have a directory on each node's own disk share that of the first rank.
    In a drill this is collective: every rank must call it.
    """
    if in_drill() and all(ranks.everyone(has_nodes)):
        return ranks.first_does(lambda: training_directory(run))
    return training_directory(run)


def in_drill() -> bool:
    """Return whether ``holdfast drill`` started this process, so that nothing but its folder may be written."""
    return bool(os.environ.get(VARIABLE))


def refuse_in_drill(what: str) -> None:
    """Raise ``BadInput`` in a drill for ``what``, which would write to a run that a drill does not replace."""
    if in_drill():
        raise BadInput(
            f"{what} is not part of a drill, which would write to the real run. A drill follows scripts that train with"
            " holdfast.Checkpointer, its trainers' callbacks, or holdfast.offload."
        )


NAME = "supervisor"
"""The file in the folder of the command that it holds a lock of."""


class Supervisor:
    """A command's claim on its ``folder``, for as long as this object is open. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def is_supervised(folder: Path) -> bool:
    """Return whether the command that made ``folder`` still runs."""
    return Disk(folder).is_locked(NAME)


BEGUN, STEP = "begun", "step"
"""The two kinds of lines: a run was opened, with the steps done, and a step was done."""
PARTS = ("random", "computing", "optimizers", "groups", "things", "loader", "scheduler")
"""The parts of the user state that lines tell apart; the rest is one digest."""
DURABLE_SECONDS = 2.0
"""The longest time that a step waits to be durable before a kill."""


class Witness:
    """The writer of one rank's lines about the run in ``directory``."""

    def __init__(self, attempt: Attempt, directory: Path, rank: int) -> None:
        self._attempt = attempt
        self._path = attempt.folder / f"steps-{directory.name}-{rank:05d}.jsonl"
        self._may_stop = attempt.kill_step is not None and rank == 0
        self._began = 0
        """The steps that were done when the run was opened."""

    @classmethod
    def of(cls, directory: str | Path, rank: int) -> Witness | None:
        """Return the witness of a run that was opened in a drill; None outside one."""
        attempt = Attempt.here()
        return None if attempt is None else cls(attempt, Path(directory), rank)

    def begun(self, step: int, tensors: Mapping[str, str]) -> None:
        """Note that the run was opened with ``step`` steps done. ``tensors`` are digests by name.

        Raises ``SystemExit`` where no step is left to do.
        """
        self._began = step
        self._write(BEGUN, step, tensors=dict(tensors))
        if self._is_last(step):
            raise SystemExit(0)

    def stepped(
        self,
        step: int,
        tensors: Mapping[str, str],
        progress: Mapping[str, Any],
        close: Callable[[], None],
        durable_step: Callable[[], int],
    ) -> None:
        """Note the end of ``step``, and end the script after the last one.

        Args:
            step: The number of the step.
            tensors: Digests by name.
            progress: The user state as JSON.
            close: Closes the run. Called before the script ends.
            durable_step: Returns the newest durable step. A kill waits until there is one of this process.

        Raises ``SystemExit`` after the last step.
        """
        script = script_values()
        self._wait_before_kill(step, durable_step)
        self._write(STEP, step, tensors=dict(tensors), progress=digests_of(progress), script=script)
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
        if self._is_kill_due(step):
            self._may_stop = False
            threading.Thread(target=_stop_dead, args=(self._attempt.kill_delay,), daemon=True).start()

    def _is_kill_due(self, step: int) -> bool:
        return self._may_stop and step >= (self._attempt.kill_step or 0)

    def _wait_before_kill(self, step: int, durable_step: Callable[[], int]) -> None:
        """Wait until a step of this process is durable, if the kill of this attempt comes after ``step``.

        Many short steps may be done before any is durable. The next start would then begin anew, which shows nothing.
        """
        end = time.monotonic() + DURABLE_SECONDS
        while self._is_kill_due(step) and durable_step() <= self._began and time.monotonic() < end:
            time.sleep(0.002)


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
