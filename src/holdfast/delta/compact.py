"""Compaction: a newer base from an older one and its records, by replay, so that a recovery replays less.

The order: the new base is durable and verified before anything older goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from .. import failpoints
from ..errors import BadInput, Damaged, NoCommit
from ..state.live import LiveState
from ..store.chain import chain_of, read_journal
from ..store.journal import StoredRecord, streams
from ..store.local import LocalStore, Written
from ..store.manifest import Manifest, Point
from ..store.pruning import reach_needs
from ..store.retention import Keep
from .bases import divided, of_one_base, owned_by
from .holder import rebuilt
from .image import Image
from .ranks import Ranks
from .recovery import recover
from .script import NoScript
from .watching import Recovery

EVERYTHING = Keep(last=2**62)


@dataclass(frozen=True)
class Compacted:
    """``base`` was made from that of ``from_step``."""

    base: Manifest
    from_step: int
    dropped: bool
    """Whether the one that it was made from is gone, with what led from it to ``base``."""


def compact(root: Path, to: int | None, watch: Recovery | None = None) -> Compacted:
    """Make a base of step ``to``, and drop the one before it with the steps up to ``to``; of the newest step, with
    nothing dropped, if it is None.

    Raises, with nothing removed, ``RunLocked`` for a run that is being written, ``BadInput`` for one that cannot be
    replayed without its script, ``NoCommit`` if there is nothing to compact, and ``Damaged`` if a base is not whole.
    """
    with LocalStore.open(root, keep=EVERYTHING) as store:
        old = _base_before(store, to)
        stream = _only_stream(store, old)
        target = chain_of(old, stream, read_journal(store, stream), to).last.step
        if target == old.step or (to is not None and target != to):
            raise NoCommit(f"{root}: {_nothing_to_do(old, to, target)}")
        _refuse_damaged(store, old)
        state = rebuilt(old, store.atoms(old))
        found = recover(store, state, NoScript(), ranks=Ranks(), target=target, watch=watch)
        point, odd = found.point, found.odd
        if point.step != target:
            raise BadInput(
                f"{root} cannot be replayed to step {target} without its script: "
                f"{(odd or ['the records end before it.'])[0]} Nothing was removed."
            )
        if found.residuals_lost:
            raise BadInput(
                f"{root} cannot be compacted to step {target}: training had residuals of error feedback there, which"
                " records cannot bring forward. Nothing was removed. A base with them is what the script makes: call"
                " save() of its Checkpointer."
            )
        new = _write(store, state, point, old)
        failpoints.reach("after_compacted")
        damaged = store.verify(new)
        if damaged:
            raise Damaged(
                f"the new base of step {new.step} is not whole, and nothing was removed: {damaged[0]}"
            )
        if to is not None:
            line = [store.load(ref) for ref in store.line() if ref != old.ref]
            beside = [store.load(ref) for ref in store.commits() if ref not in store.line()]
            needed = reach_needs(store, line) + [(manifest.oldest_step, None) for manifest in beside]
            store.retire([old.ref], needed)
        return Compacted(new, old.step, to is not None)


def _only_stream(store: LocalStore, base: Manifest) -> str:
    here = streams(store.disk)
    if base.shares or len(here) != 1:
        raise BadInput(f"{store.root} has records of {len(here)} processes; a run of one can be compacted")
    return here[0]


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


def _write(store: LocalStore, state: LiveState, point: Point, old: Manifest) -> Manifest:
    """A base of ``point``, which ``state`` is at. Durable when this returns."""
    owned = owned_by(state)
    units, index = divided(owned, state)
    files: Written = {}
    for unit in units:
        unit.files = made = store.unit(unit.name, unit.layout, copies=1)
        made.create()
        tensors = unit.tensors_of(owned)
        generation = store.free_generation(made)
        fill = Image(unit.layout, tensors).fill
        files[unit.name] = (
            generation,
            made.write_through(generation, fill, kind="state", phase="base", priority=2),
        )
    progress = point.about["progress"] if isinstance(point, StoredRecord) else cast(Manifest, point).progress
    beside = {name: old.progress[name] for name in ("replay", "rates") if name in old.progress}
    index = of_one_base(index, point.timeline, point.step)
    return store.insert(
        point, files, store.put_index(index), {**progress, "values": state.values(), **beside}
    )
