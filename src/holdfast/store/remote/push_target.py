"""Targets: commits as a person names them: RUN, RUN@STEP, RUN@STEP.tTIMELINE.

A run is a directory, or a prefix of a bucket: s3://bucket/prefix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from ...regular_files import home_path


class Url(PurePosixPath):
    """A place in an object store, ``s3://bucket/prefix``.

    A path that lost one of the slashes is understood.

    >>> print(Url("s3:/bucket/run") / "commits")
    s3://bucket/run/commits
    """

    def __str__(self) -> str:
        return "s3://" + super().__str__().removeprefix("s3:/")


@dataclass(frozen=True)
class NamedCommit:
    """A commit as a person named it; without a step the newest one.

    >>> NamedCommit.parse("runs/7b@1200.t2")
    NamedCommit(run=PosixPath('runs/7b'), step=1200, timeline=2)
    """

    run: Path | Url
    step: int | None = None
    timeline: int | None = None

    @classmethod
    def parse(cls, text: str) -> NamedCommit:
        match = re.fullmatch(r"(.+)@(\d+)(?:\.t(\d+))?", text)
        if match is None or home_path(text).is_dir():
            return cls(place_of(text))
        return cls(place_of(match[1]), int(match[2]), int(match[3]) if match[3] else None)


def place_of(path: str | PurePath) -> Path | Url:
    """Return the place of a run. ``Path`` merges the two slashes of an address."""
    return Url(path) if str(path).startswith("s3:/") else home_path(path)


def holds_run(path: Path | Url) -> bool:
    """Return whether ``path`` holds a run, or the configuration of one."""
    if isinstance(path, Url):  # only runs are read from a bucket
        return True
    return (path / "commits").is_dir() or (path / "config.toml").is_file()
