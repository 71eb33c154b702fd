"""Processes that train and are killed, at 30 ms each: forked from the server of ``support.warm_python``.

    outcome = ForkServer().run(root="run", text="text.txt", steps=8, kill_after=0.2)

A child says over a pipe what ``durable_step`` it saw, whatever happens to it afterwards. One that says nothing for
``PATIENCE_SECONDS`` ends itself and leaves the stacks of all its threads, so that a deadlock is told from a
slow machine.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from support.warm_python import call, environment_of

PATIENCE_SECONDS = 60.0
"""Between two words of a child, which are some 50 ms apart on an idle machine. Less than a test may take."""


@dataclass
class Outcome:
    """What became of a child."""

    code: int
    """0, or minus the signal that ended it."""
    seconds: float
    cpu_seconds: float
    acknowledged: list[int] = field(default_factory=list)
    """Every ``durable_step`` it saw, in order; the first is the step resumed from, if there was one."""
    resumed: int | None = None
    """The step at which training began: known when ``offload`` had returned."""
    finished: bool = False
    losses: list[float] = field(default_factory=list)
    digest: str = ""
    """Of the state at the end."""
    error: str = ""
    exit_code: int | None = None
    warnings: list[str] = field(default_factory=list)
    stacks: str = ""
    """Of all its threads, if it said nothing for too long."""
    replica: int = 0
    """The process of its replica, where it has one."""
    durable_step: int = -1
    """Beside a replica: the newest step that it knew to survive power loss. What it acknowledges survives itself."""

    @property
    def durable(self) -> int:
        """The newest acknowledged step, -1 if there is none."""
        return max(self.acknowledged, default=-1)

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


RUNS = ("crash_run", "survive_run", "loader_run", "replica_run", "convert_run")
"""The scripts of children."""


class ForkServer:
    """The test's end. Runs one child at a time."""

    def run(self, **order: Any) -> Outcome:
        """Fork a child that does ``crash_run.train``; see ``_Child``. Returns when it is gone. A child that
        hangs is a failure of the test, with its stacks."""
        answer = call("fork_server", "supervise", *RUNS, env=environment_of(), **order)
        lines = answer.pop("lines")
        outcome = Outcome(**answer)
        for line in lines:
            for name, value in json.loads(line).items():
                if name == "acknowledged":
                    outcome.acknowledged.append(value)
                else:
                    setattr(outcome, name, value)
        assert not outcome.stacks, (
            f"a process of {order} hung; it ran for {outcome.seconds:.1f} s and computed for"
            f" {outcome.cpu_seconds:.1f}, and said {lines}\n{outcome.stacks}"
        )
        return outcome


Kill = Callable[[], dict[str, Any]]
"""What a process is ordered besides, drawn anew each time, so that it is killed."""


def at_random(chance: random.Random, seconds: float) -> Kill:
    """A kill within ``seconds`` of the start."""
    return lambda: {"kill_after": chance.uniform(0.0, seconds)}


def at_each(names: Sequence[str], seed: int = 0, of_units: int = 9) -> list[Kill]:
    """A kill at each failpoint, in their order, or with another ``seed`` in any; at one of the first two arrivals, or
    of the ``of_units`` first syncs of data."""
    chance = random.Random(seed)
    most = {"after_timeline_opened": 1, "before_data_sync": of_units, "after_data_sync": of_units}
    order = chance.sample(names, len(names)) if seed else names
    return [partial(dict, failpoint=f"{name}:{chance.randint(1, most.get(name, 2))}") for name in order]


def kill_in_turn(
    run: Callable[..., Outcome],
    folder: Path,
    kills: Sequence[Kill],
    check_end: Callable[[Path, Outcome], None],
    goes_back: bool = False,
) -> tuple[Path, int]:
    """Let processes of one run be killed in turn, each where it resumes from what the one before has left.

    One that comes to its end is checked, and the next is killed by the same of ``kills`` in another directory.

    Args:
        run: starts a process in a directory, with what one of ``kills`` says.
        goes_back: a process may resume an earlier step than the last acknowledged one.

    Returns: the last directory, and the newest step acknowledged there.
    """
    number, acknowledged = 0, -1
    for kill in kills:
        for _ in range(30):
            order, root = kill(), folder / str(number)
            outcome = run(root=root, **order)
            assert outcome.killed or outcome.finished, (order, outcome)
            assert goes_back or outcome.resumed is None or outcome.resumed >= acknowledged, (order, outcome)
            acknowledged = max(acknowledged, outcome.durable)
            if outcome.killed:
                break
            check_end(root, outcome)
            number, acknowledged = number + 1, -1
        else:
            raise AssertionError(f"processes came to their end before {order}")
    return root, acknowledged


def supervise(kill_after: float | None = None, **order: Any) -> dict[str, Any]:
    """In a process of its own: fork, listen, kill when it is time, wait."""
    reading, writing = os.pipe()
    started = time.monotonic()
    with tempfile.TemporaryFile() as stacks:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _Child(writing, stacks, **order).main()
        os.close(writing)
        heard = _listen(reading, pid, None if kill_after is None else started + kill_after)
        os.close(reading)
        _, status, usage = os.wait4(pid, 0)
        stacks.seek(0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - started,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "lines": heard.decode().split("\n")[:-1],  # a line cut by the kill was not said
            "stacks": stacks.read().decode(),
        }


def _listen(reading: int, pid: int, deadline: float | None) -> bytes:
    """What the child says until it is gone, whoever else still holds its pipe. It is killed at ``deadline``."""
    heard, gone = b"", os.pidfd_open(pid)
    try:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select([reading, gone], [], [], left)[0]
            if reading in ready:
                data = os.read(reading, 65536)
                if not data:
                    return heard
                heard += data
            elif gone in ready:
                return heard
            else:
                os.kill(pid, signal.SIGKILL)
                deadline = None
    finally:
        os.close(gone)


class _Child:
    """A process that trains.

    ``failpoint`` ends it at a place of the commit protocol; with ``cut`` the power of that mount goes first,
    and it goes right after step ``at``, or the first one ``from_step`` on, was acknowledged. ``fill`` is a file
    that takes all space at that time.
    With ``hangs`` the thread that arrives at the failpoint stays there. After ``PATIENCE_SECONDS`` without a
    word the process writes the stacks of its threads to ``stacks`` and ends.
    """

    def __init__(
        self,
        pipe: int,
        stacks: IO[bytes],
        *,
        failpoint: str = "",
        cut: str = "",
        fill: str = "",
        at: int | None = None,
        from_step: int | None = None,
        hangs: bool = False,
        **run: Any,
    ) -> None:
        self.pipe, self.stacks, self.patience = pipe, stacks, PATIENCE_SECONDS
        self.failpoint, self.cut, self.fill, self.at, self.hangs = failpoint, cut, fill, at, hangs
        self.from_step = from_step
        self.run = run

    def main(self) -> None:
        import warnings

        from holdfast import failpoints
        from holdfast.io.threads import BufferedIOWarning

        failpoints.armed, failpoints.action = self.failpoint, self.hang if self.hangs else self.die
        self.watch()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.simplefilter(
                    "ignore", BufferedIOWarning
                )  # the machine's, where it has no direct I/O
                try:
                    self.train()
                finally:
                    self.say(warnings=[str(warning.message) for warning in caught])
        except BaseException as error:
            self.say(error=f"{type(error).__name__}: {error}", exit_code=getattr(error, "exit_code", None))
        finally:
            os._exit(0)

    def train(self) -> None:
        import convert_run
        import crash_run
        import loader_run
        import replica_run
        import survive_run

        run = dict(self.run)
        if "verb" in run:
            survive_run.shorten(said=self.say, **run)
            return
        trains = {
            "survive": survive_run.train, "loader": loader_run.train, "replica": replica_run.train,
            "convert": convert_run.convert,
        }  # fmt: skip
        for name, train in trains.items():
            if run.pop(name, False):
                train(said=self.say, acknowledge=partial(self.acknowledge, None), **run)
                return
        steps, nan_at = run.pop("steps"), run.pop("nan_at", None)
        with crash_run.acknowledging(self.acknowledge):
            engine = crash_run.engine_of(**run)
            self.say(resumed=engine.steps_done)
            losses = crash_run.take_steps(engine, steps, nan_at)
        self.say(finished=True, losses=losses)

    def acknowledge(self, runtime: Any, step: int) -> None:
        self.say(acknowledged=step)
        if step == self.at or (self.from_step is not None and step >= self.from_step):
            fill_disk(self.fill) if self.fill else self.die()

    def die(self) -> None:
        if self.cut:
            from powercut import shut_down

            shut_down(self.cut)
        os.kill(os.getpid(), signal.SIGKILL)

    def say(self, **what: Any) -> None:
        os.write(self.pipe, json.dumps(what).encode() + b"\n")
        self.watch()

    def watch(self) -> None:
        """Begin to count the silence: by a thread that needs no lock of Python's."""
        faulthandler.dump_traceback_later(self.patience, exit=True, file=self.stacks)

    def hang(self) -> None:
        self.patience = 0.2
        self.watch()
        threading.Event().wait()


def fill_disk(path: str) -> None:
    """Let a file grow until not a byte more fits."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (1 << 20, 1 << 12, 1):
        with suppress(OSError):
            while os.write(fd, b"x" * size):
                pass
    os.close(fd)
