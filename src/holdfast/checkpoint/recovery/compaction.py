"""A newer snapshot, made from an older one and its log records by replay, so that recovery replays less.

Invariant: the new snapshot is durable and verified before anything older is removed. Called by ``holdfast compact``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import failpoints
from ...distributed import Ranks
from ...errors import BadInput, Damaged, NoCommit
from ...state.live_state import LiveState
from ...store.commit.commit_writer import Written
from ...store.commit.pruning import in_spans, lost_of, reach_needs, reach_of_lines
from ...store.commit.retention import Keep
from ...store.format.manifest import HOME, FileRef, Manifest, Point
from ...store.run_store import LocalStore
from ..snapshot.snapshot_chunks import SnapshotChunk, divided, frozen_in, of_one_base, owned_by
from ..snapshot.snapshot_image import SnapshotImage
from ..snapshot.snapshot_state import beside_records, rebuilt
from ..user_state import NoScriptState
from .lineage import Lineage, ReplayMismatch
from .recovery_progress import RecoveryProgress
from .run_recovery import recover

EVERYTHING = Keep(last=2**62)


@dataclass(frozen=True)
class Compacted:
    """The result of a compaction: ``base`` was made from the snapshot of ``from_step``."""

    base: Manifest
    from_step: int
    dropped: bool
    """True if the old snapshot is gone, with the log records that led from it to ``base``."""
    left: tuple[tuple[int, int], ...] = ()
    """Ranges of steps after ``base`` for which the old snapshot stays.

    Only an abandoned timeline that forks before ``base`` has such steps.
    """
    unread: tuple[str, ...] = ()
    """Commits or records that cannot be read and may need the old snapshot, so that it stays, too."""


def compact(root: Path, to: int | None, watch: RecoveryProgress | None = None) -> Compacted:
    """Make a snapshot of step ``to`` by replay, and drop the snapshot before it with its steps.

    The old snapshot stays if a later step needs it. With ``to=None`` the new one is of the newest step, and nothing is
    dropped.

    Raises, with nothing removed:

    - ``RunLocked`` for a run that is being written.
    - ``BadInput`` for a run that cannot be replayed without its script.
    - ``NoCommit`` if there is nothing to compact.
    - ``Damaged`` if a snapshot is not whole.
    """
    with LocalStore.open(root, keep=EVERYTHING) as store:
        old = _base_before(store, to)
        line = Lineage.of(store, old, to)
        target = line.step
        if target == old.step or (to is not None and target != to):
            raise NoCommit(f"{root}: {_nothing_to_do(old, to, target)}")
        _refuse_damaged(store, old)
        state = rebuilt(old, store.atoms(old))
        if line.residuals_lost:
            raise BadInput(
                f"{root} cannot be compacted to step {target}: training had residuals of error feedback there, which"
                " records cannot bring forward. Nothing was removed. A base with them is what the script makes: call"
                " save() of its Checkpointer."
            )
        new = _shared(line, state, watch) if old.shares else _alone(line, state, watch)
        failpoints.reach("after_compacted")
        damaged = store.verify(new)
        if damaged:
            raise Damaged(
                f"the new base of step {new.step} is not whole, and nothing was removed: {damaged[0]}"
            )
        if to is None:
            return Compacted(new, old.step, False)
        others = [store.load(ref) for ref in store.commits() if ref != old.ref]
        reach = reach_of_lines(store, [*others, old])
        left = {step for step in lost_of(store, reach, reach, without=[old.ref]) if step > to}
        unread = tuple(reach.reasons) if reach.needs_alone(old.ref) else ()
        if not left and not unread:
            store.retire([old.ref], reach_needs(reach, others))
        return Compacted(new, old.step, not left and not unread, tuple(in_spans(left)), unread)


def _base_before(store: LocalStore, to: int | None) -> Manifest:
    for ref in store.line():
        if to is None or ref.step <= to:
            return store.load(ref)
    raise NoCommit(
        f"{store.root} has no base of step {to} or before it: `holdfast ls {store.root}` lists them"
    )


def _nothing_to_do(old: Manifest, to: int | None, target: int) -> str:
    if target == old.step and to in (None, target):
        return f"step {target} is a base already, so there is nothing to compact"
    return f"from the base of step {old.step} records lead to step {target}, and not to {to}"


def _refuse_damaged(store: LocalStore, base: Manifest) -> None:
    damaged = store.verify(base)
    if damaged:
        raise Damaged(f"nothing was changed, since the base of step {base.step} is damaged: {damaged[0]}")


def _alone(line: Lineage, state: LiveState, watch: RecoveryProgress | None) -> Manifest:
    """Make the snapshot of one process, replayed in ``state``. It is durable on return."""
    store, target, [stream] = line.store, line.step, line.chains
    found = recover(store, state, NoScriptState(), ranks=Ranks(), target=target, watch=watch)
    _refuse_earlier(line, target, found.point.step, found.problems)
    files, index = _written(line, state, found.point, stream)
    progress = _progress(line, stream, state)
    return store.insert(found.point, files, store.put_index(index), progress)


def _shared(line: Lineage, state: LiveState, watch: RecoveryProgress | None) -> Manifest:
    """Make the snapshot of several ranks. It is durable on return.

    Each share is replayed in its writer's sharding, so that its log records can follow.
    """
    store, target, shares = line.store, line.step, {}
    line.watch = watch or line.watch
    line.watch.begins(line.base, list(line.chains.values()))
    point = line.point
    try:
        for stream, ghost in line.parts(state):
            _refuse_earlier(line, target, line.step, [str(line.damage)])
            files, index = _written(line, ghost, point, stream, f"{stream}.")
            progress = _progress(line, stream, ghost)
            steps = dict.fromkeys(files, target)
            shares[stream] = store.share(target, files, store.put_index(index), progress, steps)
    except ReplayMismatch as error:
        _refuse_earlier(line, target, error.step - 1, [str(error)])
    line.watch.ended()
    return store.insert_shares(point, shares)


def _refuse_earlier(line: Lineage, target: int, step: int, problems: list[str]) -> None:
    """Raise ``BadInput`` where replay ended before ``target``."""
    if step != target:
        raise BadInput(
            f"{line.store.root} cannot be replayed to step {target} without its script: "
            f"{(problems or ['the records end before it.'])[0]} Nothing was removed."
        )


def _written(
    line: Lineage, state: LiveState, point: Point, stream: str, prefix: str = ""
) -> tuple[Written, dict[str, Any]]:
    """Write the content of ``state`` to files, and return these, durable, with the index of their content.

    A file of the old snapshot with frozen parameters is named again where its content is the same.
    """
    store, owned = line.store, owned_by(state)
    frozen = frozen_in(state).union(line.base.progress_of(stream)["replay"].get("frozen", ()))
    files: Written = {}
    units, index = divided(owned, state, prefix, frozen)
    for unit in units:
        image = SnapshotImage(unit.layout, unit.tensors_of(owned))
        old = line.base.files.get(unit.name)
        folder = HOME if old is None else old.path.rpartition("/")[0]  # on the same drive as before
        if old is not None and unit.is_frozen and _has(old, unit, image):
            generation = store.unit(unit.name, unit.layout, copies=1, folder=folder).generation_of(old.path)
            files[unit.name] = generation, old.checksums
        else:
            files[unit.name] = store.write_unit(
                unit.name, unit.layout, image.fill, phase="base", folder=folder
            )
    return files, of_one_base(index, point.timeline, point.step, prefix)


def _has(file: FileRef, unit: SnapshotChunk, image: SnapshotImage) -> bool:
    """Return whether ``file`` has the content of ``unit``."""
    blocks = range(len(file.checksums))
    return file.bytes == unit.layout.file_bytes and image.first_difference(file.checksums, blocks) is None


def _progress(line: Lineage, stream: str, state: LiveState) -> dict[str, Any]:
    """Return the progress of the writer of ``stream`` after the last step."""
    old = line.base.progress_of(stream)
    made = {**line.chains[stream].progress, **state.standing(), **beside_records(old)}
    if noted := line.writers_arithmetic(stream):  # the records that follow are of the last process
        made["replay"] = {**made["replay"], "arithmetic": noted[-1]}
    return made
