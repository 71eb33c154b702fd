"""The runs and commits that the command line names: RUN, RUN@STEP, RUN@STEP.tTIMELINE.

These functions only read: no lock is taken and nothing is written, so they work while a run trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from ..errors import BadInput, NoCommit
from ..store.format.manifest import Manifest
from ..store.joined_nodes import is_node
from ..store.object_store import NamedCommit, Nodes, Url, place_of
from ..store.reader import RunReader, again_if_retired
from ..store.run_store import LocalStore
from .train.kept_config import NAME, read_record, state_directory

T = TypeVar("T")


def with_commits(texts: Sequence[str], read: Callable[..., T]) -> T:
    """Return the result of ``read``, given the reader and the manifest of each commit that ``texts`` name."""
    return while_training(texts, lambda: read(*(part for text in texts for part in open_commit(text))))


def while_training(texts: Sequence[str], attempt: Callable[[], T]) -> T:
    """Return the result of ``attempt``, which reads what ``texts`` name.

    A run that is training may retire its newest commit meanwhile; then ``attempt`` is repeated with the new newest one.
    """
    named = all(NamedCommit.parse(text).step is not None for text in texts)
    return attempt() if named else again_if_retired(attempt)


def open_commit(text: str) -> tuple[RunReader, Manifest]:
    """Return the reader and the manifest of the commit that ``text`` names. Raises ``NoCommit``."""
    target = NamedCommit.parse(text)
    reader = open_run(target.run)
    if target.step is not None:
        return reader, reader.at(target.step, target.timeline)
    newest = reader.head()
    if newest is None:
        raise NoCommit(f"{target.run} has no commit yet; `holdfast train` makes the first one")
    return reader, newest


def open_run(place: Path | Url) -> RunReader:
    """Open the run in a directory, in those of several nodes, or in a bucket. Raises ``NoCommit``.

    Of one node's directory the copies for its partner are read as well. The state of a directory's run may lie
    elsewhere, where its configuration says.
    """
    run = place_of(place)
    if isinstance(run, Url):
        return LocalStore.read(run)
    if (run / "commits").is_dir():
        return LocalStore.read(Nodes(run) if is_node(run) else run)
    if not (run / NAME).exists():
        _refuse_foreign(run)
    if not run.is_dir():
        raise NoCommit(_not_a_directory(run))
    below = {str(path.parent) for name in ("commits", NAME) for path in run.glob(f"*/{name}")}
    if below and not (run / NAME).exists():
        raise NoCommit(f"{run} is not a run, but holds runs: name one of {', '.join(sorted(below))}")
    return LocalStore.read(state_directory(run, read_record(run)))


def _refuse_foreign(path: Path) -> None:
    """Raise ``NoCommit`` if ``path`` is a checkpoint of another library, which other commands read."""
    from ..formats.foreign_formats import format_of

    if (found := format_of(path)) is not None:
        raise NoCommit(
            f"{path} is not a run but a checkpoint of another format ({found}): `holdfast show {path}` lists its"
            " tensors, and source= begins a run from it"
        )


def _not_a_directory(run: Path) -> str:
    """Explain why no run is there: probably ``run`` names a step that is malformed or not allowed here."""
    start, _, step = str(run).rpartition("@")
    if not Path(start).is_dir() or not start:
        return f"{run} is not a directory; name the directory of a run, such as runs/default"
    if NamedCommit.parse(str(run)).step is None:
        return f"{step!r} in {run} is not a step, which is a number; `holdfast ls {start}` lists them"
    return f"{run} names a step, and all of a run is asked for: {start}. `holdfast show {run}` shows one step"


def directory_of(run: Path | Url, verb: str) -> Path:
    """Return the directory of the run that ``verb`` changes. Raises ``BadInput`` if the run is not in one directory."""
    root = open_run(run).root
    if isinstance(root, Nodes):
        raise BadInput(
            f"{root}: a run with nodes= is in the directories of several nodes, where `holdfast {verb}` changes"
            " nothing. A resume and save() make a base of the newest step, a resume restores both copies of each share,"
            " remote= copies, and prune takes the directories of all nodes: DIRECTORY,DIRECTORY,..."
        )
    if isinstance(root, Url):
        raise BadInput(
            f"{root} is in a bucket, where `holdfast {verb}` changes nothing: use it on the run's directory, and"
            " `holdfast push --keep-last` for what is kept of its copy"
        )
    return root


def label(reader: RunReader, manifest: Manifest) -> str:
    """Return the name of a commit for the next command."""
    timeline = "" if manifest.ref in reader.line() else f".t{manifest.timeline}"
    return f"{reader.root}@{manifest.step}{timeline}"


def summary(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON description of a commit."""
    measured = manifest.metrics.items()
    metrics = {name: value for name, value in measured if type(value) in (int, float) and isfinite(value)}
    return {
        "step": manifest.step,
        "timeline": manifest.timeline,
        "parent": manifest.parent,
        "fork_step": manifest.fork_step,
        "created": manifest.created,
        "bytes": manifest.total_bytes,
        "files": len(manifest.files),
        **({"metrics": metrics} if metrics else {}),
    }


def local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
