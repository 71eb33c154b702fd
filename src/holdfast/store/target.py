"""Targets: commits as a person names them: RUN, RUN@STEP, RUN@STEP.tTIMELINE."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """A commit as it was named; without a step the newest one.

    >>> Target.parse("runs/7b@1200.t2")
    Target(run=PosixPath('runs/7b'), step=1200, timeline=2)
    """

    run: Path
    step: int | None = None
    timeline: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        match = re.fullmatch(r"(.+)@(\d+)(?:\.t(\d+))?", text)
        if match is None or Path(text).is_dir():
            return cls(Path(text))
        return cls(Path(match[1]), int(match[2]), int(match[3]) if match[3] else None)


def holds_run(path: Path) -> bool:
    """Whether there is a run in ``path``, or the configuration of one."""
    return (path / "commits").is_dir() or (path / "config.toml").is_file()
