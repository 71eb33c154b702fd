"""Sources by name: a commit of a run, a step that its records lead to, or a state of another library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .delta.holder import replay_info
from .delta.standing import state_at
from .errors import NoCommit
from .store.chain import last_step
from .store.journal import StoredRecord
from .store.local import LocalStore
from .store.reader import RunReader
from .store.target import Target
from .universal.convert import open_source
from .universal.convert.holdfast import Commit
from .universal.memory import InMemory
from .universal.source import Source


def is_run(path: Path) -> bool:
    """Whether there is a run in ``path``, or the configuration of one."""
    return (path / "commits").is_dir() or (path / "config.toml").is_file()


def has_records(path: Path) -> bool:
    """Whether in ``path`` there is a run of a Checkpointer."""
    if not (path / "commits").is_dir():
        return False
    head = LocalStore.read(path).head()
    return head is not None and "optimizers" in head.progress_of(head.streams[0])


def source_of(text: str, open_run: Callable[[Path], RunReader] = LocalStore.read) -> Source:
    """The state that ``text`` names: RUN, RUN@STEP, or a path of another format. A run without a step is meant at its
    newest, and where records lead there, they are replayed in memory.

    Raises ``NoCommit`` if a run has no such step, ``BadInput`` if nothing is there that is known, ``Damaged``.
    """
    target = Target.parse(text)
    if not is_run(target.run):
        return open_source(Path(text))
    reader = open_run(target.run)
    if target.step is not None and target.timeline is not None:
        return Commit(reader, reader.at(target.step, target.timeline))
    newest = reader.head()
    if newest is None:
        raise NoCommit(f"{target.run} has no commit yet")
    step = max(newest.step, last_step(reader, newest)) if target.step is None else target.step
    for ref in reader.line():
        if ref.step == step and (manifest := reader.load(ref)).oldest_step == step:
            return Commit(reader, manifest)
    return _replayed(reader, step)


def _replayed(reader: RunReader, step: int) -> Source:
    state, point = state_at(reader.root, step)
    owned = [pair for parameter in state.parameters for pair in state.owned(parameter).values()]
    progress = point.about["progress"] if isinstance(point, StoredRecord) else {}
    progress = {**progress, "step": step, "values": state.values()}
    progress["replay"] = replay_info(state, after_update=False)
    source = InMemory(f"{reader.root}@{step}", owned + list(state.buffers().values()), progress)
    source.format = "holdfast"
    return source
