"""The scripts and commands that ``docs/guides`` shows, run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from holdfast.cli.main import app

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


class Stopped(Exception):
    """Ends a script in the middle."""


class StoppedData(list[Any]):
    """A dataset that stops its reader after so many ``reads``."""

    def __init__(self, samples: list[Any], reads: int) -> None:
        super().__init__(samples)
        self.reads = reads

    def __getitem__(self, i: Any) -> Any:
        self.reads -= 1
        if self.reads < 0:
            raise Stopped
        return super().__getitem__(i)


def scripts(guide: str) -> list[str]:
    """Return the Python samples of ``guide`` in order; the first is the script before."""
    return re.findall(r"```python\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL)


def run(script: str, *, is_stopped: bool = False, **names: Any) -> dict[str, Any]:
    """Run ``script`` with ``names`` given, and return all names that it has at its end."""
    found = None
    try:
        exec(compile(script, "guide", "exec"), names)
    except Stopped as stopped:
        found = stopped
    finally:
        if "ckpt" in names:
            names["ckpt"].close()
    assert (found is not None) == is_stopped
    return names


def commands(guide: str, verb: str) -> list[str]:
    """Return each command of ``holdfast`` with ``verb`` that ``guide`` shows."""
    found = re.findall(rf"holdfast {verb} [^`#\n]+", (GUIDES / f"{guide}.md").read_text())
    assert found
    return found


def call(command: str, *more: str) -> str:
    """Run a ``command`` of ``holdfast`` with ``more`` arguments in this process, and return what it prints."""
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], *more])
    assert done.exit_code == 0, (command, done.output, done.exception)
    return done.output
