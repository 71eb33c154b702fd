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


def convert(guide: str) -> None:
    """Run each ``holdfast convert`` that ``guide`` shows."""
    lines = re.findall(r"holdfast convert [^`#\n]+", (GUIDES / f"{guide}.md").read_text())
    assert lines
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.output)
