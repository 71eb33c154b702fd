"""The wait of a standby for its run: until the process that trains it has ended, at the place where a run is opened.

``holdfast standby`` sets ``HOLDFAST_STANDBY`` to a status file. With it, a run that another process writes is waited
for instead of refused. The lock of the run tells when that process is gone, since the system drops it with the process;
so nothing has to notice the death. What was imported and built before the wait is ready. Order: ``wait_for_run``, then
the run is opened as ever, then ``say_opened``. Called by ``Checkpointer``, ``offload`` and the trainers' callbacks.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path, PurePath
from typing import Any

import xxhash

from ..distributed import Ranks
from ..errors import BadInput, RunLocked
from ..store.disk import Disk
from ..store.lock import lock_of
from .attempt import is_supervised

VARIABLE = "HOLDFAST_STANDBY"
WAITING, OPENED = "waiting", "opened"
"""The words of the status file, each with the process and the time; ``opened`` with the steps done."""
CLOSED = "closed"
"""The beginning of the names of marks beside it, one for each run that was closed in order."""
LOOK_SECONDS = 0.005
"""The interval at which the lock is tried: 10 microseconds of a core each time."""
ASK_EVERY = 100
"""The number of tries after which the supervisor is looked for."""


def wait_for_run(
    run: str | PurePath,
    ranks: Ranks | None = None,
    deadline_seconds: float = 300.0,
    leads: bool = False,
    meanwhile: AbstractContextManager[Any] | None = None,
) -> None:
    """Return when no process writes ``run``; at once unless ``holdfast standby`` started this one.

    The first rank waits as long as it takes, and the others for it, all within ``meanwhile`` if there is something to
    wait for. Each other rank then waits for the process that wrote its part, at most ``deadline_seconds``: one that
    ``leads`` a node for the lock of the node's directory. Collective: every rank must call this.

    Raises ``RunLocked`` if that process does not end, and ``SystemExit`` once the supervisor has ended, since nobody
    would know of a takeover.
    """
    if VARIABLE not in os.environ:
        return
    ranks = ranks or Ranks()
    with ranks.agreeing():
        ranks.first_takes_its_time(lambda: _wait(run, 0, float("inf"), meanwhile), meanwhile)
    with ranks.agreeing():
        if ranks.rank and not _wait(run, 0 if leads else ranks.rank, deadline_seconds):
            raise RunLocked(
                f"{run}: the process that wrote as rank {ranks.rank} has not ended in {deadline_seconds:g} s, though"
                " that of rank 0 has. End it, and start again."
            )


def is_standby() -> bool:
    """Return whether this process waits, or has waited, for the end of one that trains."""
    return VARIABLE in os.environ


def say_opened(run: str | PurePath, step: int) -> None:
    """Tell the supervisor that this process trains ``run``, with ``step`` steps done."""
    if path := os.environ.get(VARIABLE):
        _closing(Path(path).parent, run).unlink(missing_ok=True)
    _say(OPENED, run=str(run), step=step)


def say_closed(run: str | PurePath) -> None:
    """Tell that this process closes ``run`` in order, so that nobody takes it over though its lock is released.

    The script may go on, for example to export its model. Should it fail then, the supervisor forgets this.
    """
    if path := os.environ.get(VARIABLE):
        with suppress(OSError):
            _closing(Path(path).parent, run).write_text(path, encoding="utf-8")


def forget_closing(folder: Path) -> None:
    """Forget, in the supervisor with ``folder``, which runs were closed: the process that closed them has died."""
    for mark in folder.glob(f"{CLOSED}-*"):
        mark.unlink(missing_ok=True)


def refuse_replica(replica: bool | str | Path) -> None:
    """Raise ``BadInput`` for a standby of a run with a replica."""
    if VARIABLE in os.environ and replica is not False:
        raise BadInput(
            "a replica writes the run and outlives the trainer, so a standby would not see its death. Leave out"
            " replica= under `holdfast standby`, or train with a replica and no standby."
        )


def _wait(
    run: str | PurePath, rank: int, seconds: float, meanwhile: AbstractContextManager[Any] | None = None
) -> bool:
    """Return whether the lock of ``rank`` became free within ``seconds``."""
    disk, name, end = Disk(Path(run)), lock_of(rank), time.monotonic() + seconds
    status = Path(os.environ[VARIABLE])
    tries = 0
    closed = _closing(status.parent, run)
    with ExitStack() as stack:
        while disk.is_locked(name) or (rank == 0 and _was_closed(closed)):
            if tries == 0 and rank == 0:
                _say(WAITING, run=str(run))
                stack.enter_context(meanwhile or nullcontext())
            tries += 1
            if time.monotonic() > end:
                return False
            if tries % ASK_EVERY == 0 and not is_supervised(status.parent):
                raise SystemExit(
                    f"holdfast standby has ended, so this process stops waiting for {run}. The training goes on"
                    " without one"
                )
            time.sleep(LOOK_SECONDS)
    return True


def _closing(folder: Path, run: str | PurePath) -> Path:
    return folder / f"{CLOSED}-{xxhash.xxh3_64_hexdigest(os.path.realpath(run).encode())}"


def _was_closed(mark: Path) -> bool:
    """Return whether another process has closed the run in order."""
    try:
        return mark.read_text(encoding="utf-8") != os.environ[VARIABLE]
    except OSError:
        return False


def _say(word: str, **facts: object) -> None:
    """Append a line to the status file. A supervisor that is gone needs none."""
    if path := os.environ.get(VARIABLE):
        line = json.dumps({"is": word, "pid": os.getpid(), "time": time.time(), **facts})
        with suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
