"""A copy of a run that is being written, as a kill would leave it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path


def copy_of_live_run(run: Path, target: Path) -> Path:
    """Copy ``run`` to ``target``, again where a file changed meanwhile, and return ``target``."""
    for _ in range(100):
        before = _files(run)
        with suppress(shutil.Error):  # a file was renamed or removed
            shutil.copytree(run, target)
            if _files(run) == before:
                return target
        shutil.rmtree(target)
    raise AssertionError(f"{run} changes all the time")


def _files(run: Path) -> dict[Path, tuple[int, int]]:
    found = {}
    for path in run.rglob("*"):
        with suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime_ns, path.stat().st_size
    return found
