"""One start of a script under ``holdfast drill``: where its runs go, and at which step it ends.

The drill sets ``HOLDFAST_DRILL`` to the folder of an attempt, which holds ``plan.json``. Every run directory that the
script opens for training is then one below that folder, so that a drill writes to no run of the user. The invariant:
the same path of a run leads to the same directory in every start with the same folder.

A command that starts scripts holds a lock in its folder, which the system drops with the command. A process that waits
for what only the command would end asks from time to time whether it is there (``is_supervised``), so that it does not
wait for ever. Called where a run is opened.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadInput
from ..events import parsed
from ..regular_files import home_path, load_json, read_regular
from ..store.disk import Disk

if TYPE_CHECKING:
    from ..distributed import Ranks

VARIABLE = "HOLDFAST_DRILL"
PLAN, OPENED, RUNS = "plan.json", "opened.jsonl", "runs"
"""The plan of an attempt, the list of the runs that it opened, and the folder that holds them."""


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
    """Return the directory in which ``run`` is trained: in a drill one of its own, else the path that was given."""
    path, attempt = home_path(run), Attempt.here()
    return path if attempt is None else attempt.directory_of(path)


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
