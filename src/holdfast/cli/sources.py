"""What the command line names, as a source: a commit of a run, a step that its records lead to, or a foreign state."""

from __future__ import annotations

from pathlib import Path

from ..delta.standing import state_at
from ..errors import NoCommit
from ..store.journal import StoredRecord
from ..universal.convert import open_source
from ..universal.convert.holdfast import Commit
from ..universal.memory import InMemory
from ..universal.source import Source
from .inspect import records_to
from .runs import Target, open_run


def is_run(text: str) -> bool:
    """Whether ``text`` names a run, or a step of one."""
    run = Target.parse(text).run
    return (run / "commits").is_dir() or (run / "config.toml").is_file()


def source_of(text: str) -> Source:
    """The state that ``text`` names: RUN, RUN@STEP, or a path of another format. A run without a step is meant at its
    newest, records included, which are replayed in memory."""
    if not is_run(text):
        return open_source(Path(text))
    target = Target.parse(text)
    reader = open_run(target.run)
    line = reader.line()
    newest = reader.head()
    if newest is None or not line:
        raise NoCommit(f"{target.run} has no commit yet")
    if target.timeline is not None:
        return Commit(reader, reader.at(target.step or 0, target.timeline))
    step = target.step if target.step is not None else max(newest.step, records_to(reader, newest))
    listed = [ref for ref in line if ref.step == step]
    if listed:
        manifest = reader.load(listed[0])
        if manifest.oldest_step == manifest.step:
            return Commit(reader, manifest)
    state, point = state_at(Path(reader.root), step)
    owned = [pair for parameter in state.parameters for pair in state.owned(parameter).values()]
    progress = point.about["progress"] if isinstance(point, StoredRecord) else {}
    return InMemory(
        f"{reader.root}@{step}", owned + list(state.buffers().values()), {**progress, "step": step}
    )
