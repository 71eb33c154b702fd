"""The opening of a state by its name: a run, a step of it, or a path of any format.

A step without a commit is rebuilt from the log records that lead to it. torch is imported only for that, or for formats
that need it. Called by the command line and by ``sources``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .errors import NoCommit
from .formats.foreign_formats import is_of_others, open_source
from .formats.run_directory import CommitSource
from .formats.source import Source, looking_at
from .regular_files import home_path
from .store.commit.retention import copies_in, copy_path, is_on_line
from .store.log.chain import last_step
from .store.object_store import NamedCommit, Url, holds_run
from .store.reader import RunReader
from .store.run_store import LocalStore


def source_of(text: str, open_run: Callable[[Path | Url], RunReader] = LocalStore.read) -> Source:
    """Return the state that ``text`` names: RUN, RUN@STEP, RUN@STEP.tTIMELINE, or a path of a foreign format.

    A run without a step means its newest step; log records that lead there are replayed in memory. A step of which
    the run has the weights alone means these. A step of an abandoned timeline is found only where ``text`` names the
    timeline. Raises ``NoCommit`` if a run has no such step, ``BadInput`` if nothing known is there, ``Damaged``, and
    ``DiskFailed``.
    """
    target = NamedCommit.parse(text)
    with looking_at(target.run):
        is_run = holds_run(target.run) and not is_of_others(target.run)
    if not is_run:
        return open_source(home_path(text))
    reader = open_run(target.run)
    newest = reader.head()
    if newest is None:
        raise NoCommit(f"{target.run} has no commit yet")
    step = max(newest.step, last_step(reader, newest)) if target.step is None else target.step
    try:
        return _of_run(reader, step, target.timeline)
    except NoCommit:
        if (copy := _weights_of(reader, step, target.timeline)) is None:
            raise
    return open_source(copy)


def _of_run(reader: RunReader, step: int, timeline: int | None) -> Source:
    """Return the whole state of a step. Raises ``NoCommit`` if neither a commit nor log records have it."""
    line = reader.line(timeline)
    for ref in line:
        if ref.step == step and (manifest := reader.load(ref)).oldest_step == step:
            return CommitSource(reader, manifest)
    is_commit = any(ref.step == step for ref in line)
    has_records = bool(reader.disk.listdir("journal"))  # a run of offload has none
    if all(ref.step > step for ref in line) or not (is_commit or has_records):
        return CommitSource(reader, reader.at(step, timeline))  # where it is nowhere, this raises
    return _replayed(reader, step, timeline)


def _weights_of(reader: RunReader, step: int, timeline: int | None) -> Path | None:
    """Return the copy of the weights of a step of ``timeline`` (None: of the current line), or None."""
    records, tip = reader.timelines()[0], reader.tip() if timeline is None else timeline
    found = [ref for ref in copies_in(reader.disk) if ref.step == step and is_on_line(ref, records, tip)]
    return Path(reader.root) / copy_path(found[-1]) if found and isinstance(reader.root, Path) else None


def is_weights_alone(run: Path | Url, step: int | None, timeline: int | None) -> bool:
    """Return whether of ``step`` the run has a copy of the weights, and no state that could be resumed."""
    if step is None:
        return False
    reader = LocalStore.read(run)
    if _weights_of(reader, step, timeline) is None:
        return False
    base = next((ref for ref in reader.line(timeline) if ref.step <= step), None)
    return base is None or last_step(reader, reader.load(base), timeline) < step


def _replayed(reader: RunReader, step: int, tip: int | None) -> Source:
    from .checkpoint.recovery.run_recovery import state_at
    from .checkpoint.snapshot.snapshot_state import replay_info
    from .formats.memory_source import InMemory

    state, progress = state_at(reader.root, step, tip)
    owned = [pair for parameter in state.parameters for pair in state.owned(parameter).values()]
    aliases = progress.pop("aliases")
    progress = {**progress, "step": step, **state.standing()}
    progress["replay"] = replay_info(state, after_update=False)
    found = InMemory(f"{reader.root}@{step}", "holdfast", owned + list(state.buffers().values()), progress)
    found.aliases = aliases
    return found
