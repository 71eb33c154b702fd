"""Whole drills whose starts are forks of a process that has torch loaded, instead of new interpreters."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any

from holdfast.cli import drilling
from holdfast.cli.child_process import Child
from holdfast.supervised.attempt import Supervisor


class Forked(Child):
    """A script that runs in a fork."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> None:
        self._process: Any = Fork(command[0], environment, output)


class Fork:
    """As much of a ``Popen`` as a ``Child`` uses."""

    def __init__(self, script: str, environment: Mapping[str, str], output: IO[bytes]) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            os.environ.update(environment)
            code = ran(script)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, how: int = 0) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, how)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def ran(script: str) -> int:
    """Run ``script`` as a program, and return its exit code."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    script: str,
    folder: str,
    options: Mapping[str, Any],
) -> None:
    """Drill ``script`` in the working directory ``folder``."""
    drilling.Child = Forked  # type: ignore[misc]
    os.chdir(folder)
    with drilling._folder(None) as place, Supervisor(place):
        # without a name for the drill, whose own generator would be taken for one of the script
        say(verdict=asdict(drilling._Drill([script], drilling.DrillOptions(**options), place, False).run()))
