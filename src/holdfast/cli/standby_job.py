"""The verb ``standby``: a script trains, and a second process of it waits, ready, to take over when the first dies.

The second process runs the script up to the opening of the run, where it waits for the run's lock: imports are done,
and the model is built. The system drops the lock with the process that trains, so the takeover needs nobody to notice
the death. This module starts the processes, passes signals on, and decides when it is over: exit code 0 of the process
that trains ends all. A launcher such as torchrun may outlive its workers and start them again (``--max-restarts``).
The standby then trains, and the new workers are its standby. Two launchers on one machine cannot have one port, so
each process but the first gets ports of its own where the command names one. Called by ``main``.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..events import parsed
from ..quantities import counted
from ..supervised.attempt import Supervisor
from ..supervised.standing_by import OPENED, VARIABLE, WAITING, forget_closing
from .child_process import Child, ProcessHandle, ending

LOOK_SECONDS = 0.02
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which nobody takes over."""
PASSED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
FAILED_STANDBYS = 3
"""The number of standbys in a row that may end before they are ready; then the training goes on without one."""
PORTS = re.compile(r"--(master-port|main-process-port|rdzv-endpoint)")
"""The options of launchers that name a port."""
LAUNCHERS = ("torch.distributed.", "accelerate.")
"""The beginnings of modules that ``python -m`` starts and that start a script themselves."""
PORT_VARIABLES = ("PET_MASTER_PORT", "PET_RDZV_ENDPOINT", "MASTER_PORT")
"""The environment variables of launchers that name a port."""
FRUITLESS = 2
"""The number of processes in a row that may die without a durable step of their own; then the script is at fault."""


@dataclass
class _Process:
    """A process of the script, and what it has told."""

    child: Child
    status: Path
    waits = False
    opened: int | None = None
    """The step after which it continued the run; None until it has opened it."""
    opened_at = 0.0
    """The time of that, in seconds since the epoch."""
    was_left = False
    """True once another process has the run, though this one is alive."""
    worker: ProcessHandle | None = None
    """The process that opened the run; None until then, or if it is ``child`` itself."""
    _lines = 0
    """The number of lines that were read."""

    def read(self) -> None:
        """Read what the process has told."""
        if not self.status.exists():
            return
        whole = self.status.read_bytes().rpartition(b"\n")[0].splitlines()
        new, self._lines = whole[self._lines :], len(whole)
        for line in parsed(new):
            self.waits = line.get("is") == WAITING
            if line.get("is") == OPENED:
                self.opened, self.opened_at = line["step"], line.get("time", 0.0)
                self._follow(line.get("pid", self.child.pid))

    def _follow(self, pid: int) -> None:
        self.drop_worker()
        if pid != self.child.pid:
            self.worker = ProcessHandle.of(pid)

    def drop_worker(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()

    def end_worker(self) -> None:
        """Kill the process that opened the run, since its launcher has died and nothing would notice its end."""
        if self.worker is not None:
            self.worker.kill()
        self.drop_worker()


def stand_by(command: Sequence[str], *, restarts: int) -> int:
    """Train by ``command`` with a standby beside it, and return the exit code of the last process that trained."""
    with tempfile.TemporaryDirectory(prefix="holdfast-standby-") as name:
        folder = Path(name)
        with Supervisor(folder):
            return _Job(command, restarts, folder).run()


class _Job:
    def __init__(self, command: Sequence[str], restarts: int, folder: Path) -> None:
        self._command, self._restarts, self._folder = command, restarts, folder
        self._number = self._failed = self._fruitless = 0
        self._last_code = 1
        self._asked = False
        """True after a signal that ends the training."""
        self._before: int | None = None
        """The step after which the process that died last had continued."""
        self._trainer = self._start()
        self._spare: _Process | None = None

    def run(self) -> int:
        previous = {number: signal.signal(number, self._pass_on) for number in PASSED}
        try:
            while (code := self._look()) is None:
                time.sleep(LOOK_SECONDS)
            return code
        finally:
            for process in (self._spare, self._trainer):
                if process is not None:
                    process.child.kill()
                    process.drop_worker()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _look(self) -> int | None:
        """Do what is due; return the exit code once the training is over."""
        self._trainer.read()
        code = self._trainer.child.poll()
        if code is not None:
            return self._after_death(code)
        if (code := self._judge_progress()) is not None:
            return code
        if self._spare is not None:
            self._look_at_spare(self._spare)
        elif self._trainer.opened is not None and self._may_start:
            self._spare = self._start()
        return None

    @property
    def _may_start(self) -> bool:
        return self._restarts > 0 and self._failed < FAILED_STANDBYS and not self._asked

    def _after_death(self, code: int) -> int | None:
        """Promote the standby, or start anew; return the exit code where the training is over."""
        self._trainer.read()
        died = self._trainer
        final = code if code >= 0 else 128 - code
        if code != 0:
            died.end_worker()
        if code == 0 or self._asked:
            return final
        if died.opened is None and self._number == 1:
            return final  # it never trained: a mistake in the command or the script
        if self._restarts == 0:
            self._say(f"process {died.child.pid} ended with {ending(code)}, and no restart is left")
            return final
        self._restarts -= 1
        self._before, self._last_code = died.opened, final
        spare, self._spare = self._spare, None
        ready = spare is not None and spare.child.poll() is None
        self._trainer = spare if spare is not None and ready else self._start()
        forget_closing(self._folder)
        self._trainer.read()
        has_run = self._trainer.waits or self._trainer.opened is not None
        how = "takes over" if ready and has_run else "takes over once it is ready"
        self._say(f"process {died.child.pid} ended with {ending(code)}; {self._trainer.child.pid} {how}")
        return None

    def _judge_progress(self) -> int | None:
        """Return the exit code if processes die again and again without a durable step of their own."""
        step = self._trainer.opened
        if step is None or self._before is None:
            return None
        self._fruitless = self._fruitless + 1 if step == self._before else 0
        self._before = None
        if self._fruitless < FRUITLESS:
            return None
        self._say(
            f"{counted(FRUITLESS, 'process')} died after step {step} without another: the script is at fault"
        )
        return self._last_code

    def _look_at_spare(self, spare: _Process) -> None:
        before, code = spare.waits, spare.child.poll()  # asked first: all that it told is there then
        spare.read()
        if spare.opened_at > self._trainer.opened_at:
            self._exchange(spare)
            return
        if code is None:
            if spare.waits and not before:
                self._failed = 0
                self._say(f"process {spare.child.pid} is ready to take over from {self._trainer.child.pid}")
            return
        self._spare = None
        spare.drop_worker()
        if spare.was_left:  # a launcher that does not start its workers again
            self._say(f"process {spare.child.pid} ended with {ending(code)}")
            return
        self._failed += 1
        end = " The training goes on without one." if self._failed == FAILED_STANDBYS else ""
        self._say(f"the standby {spare.child.pid} ended with {ending(code)} before it was needed.{end}")

    def _exchange(self, spare: _Process) -> None:
        """Make ``spare`` the process that trains, since it has the run, and the other one its standby."""
        died, self._trainer = self._trainer, spare
        self._restarts -= 1
        self._before, self._last_code = died.opened, 1
        died.opened, died.opened_at, died.was_left = None, 0.0, True
        self._say(f"{spare.child.pid} has taken over from the workers of {died.child.pid}")
        self._spare = died if self._restarts > 0 else None
        if self._spare is None:
            died.child.kill()

    def _start(self) -> _Process:
        self._number += 1
        status = self._folder / f"process-{self._number}.jsonl"
        command, ports = list(self._command), dict[str, str]()
        if self._number > 1:
            command, ports = with_own_ports(command, os.environ)
        started = _Process(Child(command, {VARIABLE: str(status), **ports}), status)
        own = [new for new, old in zip(command, self._command, strict=True) if new != old]
        own += [f"{name}={port}" for name, port in ports.items()]
        if own:
            self._say(f"process {started.child.pid} has a port of its own: {', '.join(own)}")
        return started

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on to the process that trains, and begin the end where it is one that ends."""
        self._asked = self._asked or number in ENDING
        self._trainer.child.send(number)

    @staticmethod
    def _say(text: str) -> None:
        print(f"holdfast standby: {text}", file=sys.stderr, flush=True)


def with_own_ports(command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return ``command`` with free ports in place of those that it names, and new values of such variables.

    Options after the script, or after ``-m`` and its module, are the script's, and stay. So does port 0, which the
    launcher replaces by a free one.

    >>> with_own_ports(["torchrun", "--rdzv-endpoint", "localhost:0", "train.py", "--master-port=1"], {})[0]
    ['torchrun', '--rdzv-endpoint', 'localhost:0', 'train.py', '--master-port=1']
    """
    words, is_value = list(command), False
    for i, word in enumerate(words):
        if is_value:
            words[i], is_value = _with_free_port(word), False
            continue
        is_module = i and words[i - 1] in ("-m", "--module") and not word.startswith(LAUNCHERS)
        if is_module or (i and word.endswith(".py")):
            break
        option, equals, value = word.partition("=")
        if PORTS.fullmatch(option.replace("_", "-")):
            is_value = not equals
            words[i] = f"{option}={_with_free_port(value)}" if equals else word
    ports = {name: _with_free_port(variables[name]) for name in PORT_VARIABLES if name in variables}
    return words, {name: port for name, port in ports.items() if port != variables[name]}


def _with_free_port(address: str) -> str:
    """Return ``address``, PORT or HOST:PORT, with a port that is free now, unless the port is 0 or missing."""
    host, colon, port = address.rpartition(":")
    if not port.isdecimal() or int(port) == 0:
        return address
    with socket.socket() as taken:
        taken.bind(("", 0))
        return f"{host}{colon}{taken.getsockname()[1]}"
