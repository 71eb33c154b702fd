"""Recovery: the newest whole base of a run, and the records from there on, into a live model.

A base that does not verify gives way to the one before it, whose records reach further back. A record that is missing,
does not verify, or does not give what training had, ends the chain: the step before it is where the run continues. What
the device does not give back may be whole: no step is given up for it, unless an earlier one is asked for. All ranks
recover the same step, the newest that every one of them can have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import Damaged, DiskFailed, NoCommit, RunMismatch, Unreadable
from ..ranks import Ranks
from ..state.encoding import joined_members
from ..state.live import LiveState
from ..store.local import LocalStore
from ..store.manifest import CommitRef, Manifest, Point
from ..store.segments import streams
from ..store.target import Url
from ..store.verifying import NONE_WHOLE
from ..units import shown
from .computing import needs_threads, told_in, told_of_other
from .holder import strides_of
from .line import Differs, Line
from .script import Script
from .shell import members_of, places_of
from .watching import Recovery

BY, RECORDS = "by", "records"
"""In the record of a timeline, of its writer: how its steps survive."""


@dataclass
class Recovered:
    """Where the run continues. ``odd`` is what was wrong with later steps; ``same_cut`` whether every rank stores what
    the one of its number stored, and does after updates what it did, so that records may follow those that are there.
    """

    point: Point
    odd: list[str] = field(default_factory=list)
    same_cut: bool = True
    residuals_lost: bool = False
    """Whether steps have changed residuals since those that a base has, so that they begin at zero."""
    trained: Collection[str] = ()
    """Parameters that the last step trained, as far as that is known."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """What the last step's record had of all that is no tensor."""


def recover(
    store: LocalStore,
    state: LiveState,
    script: Script,
    *,
    ranks: Ranks,
    target: int | None = None,
    tip: int | None = None,
    exact: bool = False,
    continuing: bool = False,
    after_update: Callable[[int], None] | None = None,
    watch: Recovery | None = None,
) -> Recovered:
    """Bring ``state`` and ``script`` to the newest step that can be had, at most ``target``; just that one if
    ``exact``; with ``continuing`` to the newest from which training goes on as it did. Residuals are there if they are
    those of that point. Steps are of the line of the timeline ``tip``, or of the present line without one. Called on
    all ranks, which get the same.

    Raises ``NoCommit`` if ``target`` cannot be had, ``Damaged`` if no base is whole, ``Unreadable`` if a later step may
    be in what cannot be read, ``RunMismatch`` if the run is that of another model (with nothing changed then).
    """
    bases = [ref for ref in store.line(tip) if target is None or ref.step <= target]
    search = _Search(
        store, state, script, ranks, target, tip, continuing=continuing, after_update=after_update, watch=watch,
    )  # fmt: skip
    odd, unread = search.odd, search.unread
    continuing_ones = [ref for ref in bases if not (continuing and _has_lost_residuals(ref, store, tip))]
    if bases and not continuing_ones:
        raise NoCommit(
            f"{store.root} has no step from which training goes on as it did: its ranks copied their residuals at"
            ' several steps. Resume with exactness="state", and call save() now and then for such a step.'
        )
    for ref in continuing_ones:
        line = search.line_from(ref)
        if line is None:
            store.damaged.add(ref)
            continue
        if line.step < max(unread.values(), default=-1):
            raise Unreadable(next(iter(unread)), line.step)
        if watch is not None:
            watch.ended()
        if exact and continuing and line.step != target and line.odd is None:
            raise NoCommit(
                f"{store.root} cannot be brought to step {target} so that training goes on as it did: residuals are"
                f" part of bases alone, and the newest at or before it is of step {line.step}. Resume there, or with"
                ' exactness="state".'
            )
        if exact and line.step != target:
            elsewhere = store.said_of_timelines(target) if tip is None and target is not None else ""
            raise NoCommit(
                f"{store.root} cannot be brought to step {target}: after step {line.step} the records end."
                f" {odd[-1] if odd else 'No later step of this line can be had.'}{elsewhere}"
            )
        if target is None and not continuing:
            # without a journal it is a replica's, whose forks are from steps that were in memory alone
            _tell_lost(line, line.acknowledged if streams(store.disk) else -1, odd)
        others = _other_members(line, state)
        same_cut = len(line.chains) == ranks.world_size and all(
            ranks.everyone(_stores_alike(line, state, ranks) and not others)
        )
        same_cut &= _updated(line, after_update is not None) == (after_update is not None)
        own_residuals = any(share.has_foreign_residuals for share in line.shares.values())
        lost = line.residuals_lost or (own_residuals and len(line.chains) != ranks.world_size)
        if lost or line.residuals_dropped:
            state.forget_residuals()
        base, progress = line.base.progress_of(line.base.streams[0]), line.progress(ranks.rank)
        odd += script.told_of_kept(base, progress)
        trained = line.trained(ranks.rank)
        odd += _told_of_thawed(line.base, state, trained)
        odd += [text for text in others.values() if text]
        odd += [
            f"{names} were one memory in the run and are not here: from here on each is trained by itself."
            for names in line.apart(state, line.stream_of(ranks.rank))
        ]
        odd += told_of_other(told_in(progress, base), needs_threads(state, after_update))
        script.restore(progress)
        if ranks.rank >= len(line.chains):
            script.scatter(ranks.rank)
        return Recovered(line.point, odd, same_cut, lost, trained, progress)
    if not bases:
        elsewhere = store.said_of_timelines(target) if exact and tip is None and target is not None else ""
        raise NoCommit(f"{store.root} has no commit of step {target} or before it.{elsewhere}")
    if unread:
        raise DiskFailed(f"no base of {store.root} can be read. {next(iter(unread))}")
    raise Damaged(f"no commit of {store.root} is whole: {odd[0]} {NONE_WHOLE}")


def _tell_lost(line: Line, durable_step: int, odd: list[str]) -> None:
    """Add to ``odd`` which steps to ``durable_step`` are lost. Raises ``Damaged`` where nothing is left that would say
    why."""
    step, root = line.step, line.store.root
    newest = line.store.timelines()[0].get(line.store.tip())
    is_local = not isinstance(root, Url)  # a bucket has no empty folders
    by_records = newest is not None and newest.writer.get(BY) == RECORDS
    if is_local and by_records and not line.store.disk.exists("journal"):
        raise Damaged(
            f"{root} has no journal/, and its steps were recorded there: it was removed or not restored. Nothing on the"
            f" disk was changed: put it back, or call resume(step={step}) to go on from there without it.",
            path="journal",
        )
    if durable_step <= step:
        return
    several = f"Steps {step + 1} to {durable_step} had been durable, and are lost."
    one = f"Step {durable_step} had been durable, and is lost."
    lost = one if durable_step == step + 1 else several
    odd[-1:] = [f"{odd[-1]} {lost}" if odd else lost]


def refuse_unless_one_is_whole(store: LocalStore, target: int | None, tip: int | None = None) -> None:
    """Raise ``Damaged`` if no base at or before ``target`` is, of the line that ``recover`` takes, before anything live
    is touched. Reads one in full."""
    odd: list[Damaged] = []
    for ref in store.line(tip):
        if target is None or ref.step <= target:
            try:
                found = store.verify(store.load(ref))
            except Damaged as error:
                found = [error]
            if not found:
                return
            odd += found
    if odd:
        raise odd[0]


def _has_lost_residuals(ref: CommitRef, store: LocalStore, tip: int | None) -> bool:
    """Whether its own records changed residuals after they were copied: several ranks copy theirs at several steps."""
    try:
        base = store.load(ref)
        return Line.of(store, base, base.step, tip).residuals_lost
    except (Damaged, DiskFailed):  # which is told where it is loaded
        return False


def _stores_alike(line: Line, state: LiveState, ranks: Ranks) -> bool:
    """Whether this rank stores what the rank of its number stored, as it lay in memory there."""
    here = strides_of(state)
    there = line.base.progress_of(ranks.stream).get("replay", {}).get("strides", here)
    boxes = {p.name: state.boxes[p.name] for p in state.stored}
    alike = there == here and line.overlap_alike(state, ranks.stream)
    return alike and line.shares[ranks.stream].boxes == boxes


def _updated(line: Line, here: bool) -> bool:
    """Whether the base was made with ``after_update=``; as ``here`` where it does not say."""
    return line.base.progress_of(line.base.streams[0]).get("replay", {}).get("after_update", here)


def _refuse_other_updates(line: Line, here: bool) -> None:
    """Raise ``RunMismatch`` where records were made with ``after_update=`` and there is none ``here``, or the other way
    round: a replay would give other bits."""
    there = _updated(line, here)
    if there == here or not any(chain.records for chain in line.chains.values()):
        return
    told = (
        "the run has an after_update=, which a replay of its records calls, and none was passed. Pass it as before"
        if there
        else "an after_update= was passed, and the records of the run were made without one. Resume without it"
    )
    raise RunMismatch(f"{told}; a base from save() can be gone on from either way.")


def _other_members(line: Line, state: LiveState) -> dict[str, str]:
    """By parameter that is not in the group in which the base says it was: what is to be said of that; nothing of one
    that was in none."""
    replays = [line.base.progress_of(stream).get("replay") for stream in line.base.streams]
    if not all(replays):
        return {}
    there = places_of(joined_members([each["parameters"] for each in replays if each]))
    here = places_of([members_of(state, optimizer) for optimizer in state.optimizers])
    others = [p.name for p in state.parameters if there.get(p.name) != here.get(p.name)]
    return {
        name: f"{name} was in {_said(there[name])} of the run, and is in {_said(here.get(name))} here"
        if name in there
        else ""
        for name in others
    }


def _told_of_thawed(base: Manifest, state: LiveState, trained: Collection[str]) -> list[str]:
    """That parameters train now which the script of the base had frozen; of those that ``trained`` since then nothing.
    A base of an earlier version does not say what was frozen."""
    frozen = {name for each in base.streams for name in base.progress_of(each).get("given_frozen") or ()}
    thawed = frozen.difference(trained)
    now = [p.name for p in state.parameters if p.name in thawed and state.is_trained(p)]
    if not now:
        return []
    return [
        f"{shown(now)}: frozen when the script was started before, and trained from here on. Which"
        " parameters are is the script's and no part of the run."
    ]


def _said(place: tuple[int, int] | None) -> str:
    return "no parameter group" if place is None else "parameter group {1} of optimizer {0}".format(*place)


def _refuse_other_members(line: Line, state: LiveState) -> None:
    """Raise ``RunMismatch`` where records have a parameter in another group than here: a replay would give other
    bits."""
    moved = [text for text in _other_members(line, state).values() if text]
    if moved and any(chain.records for chain in line.chains.values()):
        more = f" (and {len(moved) - 1} more are elsewhere too)" if moved[1:] else ""
        raise RunMismatch(
            f"{moved[0]}{more}: the run's records would be replayed with the hyper-parameters of another group. Put it"
            " back, resume, call save(), and change the groups then."
        )


@dataclass(frozen=True)
class _Outcome:
    """How far one rank gets from a base: the step that it ``has``, the one that it ``could`` have, and why not more."""

    has: int | None
    could: int | None
    why: str | None
    is_unread: bool = False
    """Whether the base was not given back, or what leads on from the step that it could have."""


@dataclass
class _Search:
    """For the line that a run continues: what is asked of it, and what was wrong on the way."""

    store: LocalStore
    state: LiveState
    script: Script
    ranks: Ranks
    target: int | None
    tip: int | None
    continuing: bool
    after_update: Callable[[int], None] | None
    watch: Recovery | None
    acknowledged: int = -1
    """A step that was durable on all streams, as the journals show."""
    odd: list[str] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)
    """By what the device said, the step of the base that it did not give back."""

    def line_from(self, ref: CommitRef) -> Line | None:
        """The base ``ref`` and its records in the state; None if it cannot be used.

        A rank that cannot get as far as the others makes all begin again with less.
        """
        tried: list[Line] = []
        ended: list[Unreadable] = []
        target = self.target

        def attempt() -> _Outcome:
            tried.clear(), ended.clear()
            try:
                tried.append(self._replayed(ref, target))
            except Differs as error:
                return _Outcome(-1, error.step - 1, str(error))
            except Unreadable as error:
                ended.append(error)
                return _Outcome(-1, error.step, None, is_unread=True)
            except (Damaged, DiskFailed) as error:
                return _Outcome(None, None, str(error), isinstance(error, DiskFailed))
            return _Outcome(tried[0].step, tried[0].step, _said_end(tried[0]))

        while True:
            outcomes = self.ranks.all_do(attempt)
            said = {each.why: each for each in outcomes if each.why is not None}
            self.odd += [why for why in said if why not in self.odd]
            self.unread |= {why: ref.step for why, each in said.items() if each.is_unread}
            reachable = [each.could for each in outcomes if each.could is not None]
            if len(reachable) < len(outcomes):
                return None
            target = min(reachable)
            if all(
                each.is_unread for each in outcomes if each.could == target
            ):  # others could go on from there
                self.ranks.all_do(partial(_tell_unreadable, ended, target))
            if all(each.has == target for each in outcomes):
                return tried[0]

    def _replayed(self, ref: CommitRef, target: int | None) -> Line:
        """The line to ``target`` at most, which the state is at then."""
        line = Line.of(self.store, self.store.load(ref), target, self.tip)
        line.acknowledged = self.acknowledged = max(line.acknowledged, self.acknowledged)
        if self.continuing:
            line.end_before_feedback()
        self.script.check(line.progress(self.ranks.rank), len(line.chains), self.ranks.world_size)
        _refuse_other_updates(line, self.after_update is not None)
        _refuse_other_members(line, self.state)
        line.watch = self.watch or line.watch
        line.replay_into(self.state, self.ranks.rank, self.after_update)
        return line


def _tell_unreadable(ended: list[Unreadable], step: int) -> None:
    """Raise ``Unreadable`` where the device does not give back what leads on, with the ``step`` that all ranks can
    have."""
    if ended:
        raise Unreadable(ended[0].error, step) from ended[0]


def _said_end(line: Line) -> str | None:
    """Why there is no more of ``line``."""
    harmless = (
        " Nothing that is known to have been durable is lost: a kill leaves such an end." * line.is_torn
    )
    return None if line.odd is None else f"{line.odd}{harmless}"
