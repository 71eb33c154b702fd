"""The opening of a state by its name: a run, a step of it, or a path of any format.

A step without a commit is rebuilt from the log records that lead to it. torch is imported only for that, or for formats
that need it. Called by the command line and by ``sources``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .errors import NoCommit
from .formats.fragment_reads import looking_at
from .formats.readers import is_of_others, open_source
from .formats.readers.run_directory import CommitSource
from .formats.source import Source
from .regular_files import home_path
from .store.log.chain import last_step
from .store.reader import RunReader
from .store.remote.object_store import NamedCommit, Url, holds_run
from .store.run_store import LocalStore


def source_of(text: str, open_run: Callable[[Path | Url], RunReader] = LocalStore.read) -> Source:
    """Return the state that ``text`` names: RUN, RUN@STEP, RUN@STEP.tTIMELINE, or a path of a foreign format.

    A run without a step means its newest step; log records that lead there are replayed in memory. A step of an
    abandoned timeline is found only where ``text`` names the timeline. Raises ``NoCommit`` if a run has no such
    step, ``BadInput`` if nothing known is there, ``Damaged``, and ``DiskFailed``.
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
    line = reader.line(target.timeline)
    for ref in line:
        if ref.step == step and (manifest := reader.load(ref)).oldest_step == step:
            return CommitSource(reader, manifest)
    if all(ref.step > step for ref in line):
        return CommitSource(reader, reader.at(step, target.timeline))  # where it is nowhere, this raises
    return _replayed(reader, step, target.timeline)


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
