"""Recovery of a run: the newest whole snapshot and the log records after it, loaded into a live model.

A snapshot that does not verify gives way to the one before it, whose records reach further back. A record ends the
lineage if it is missing, does not verify, or does not reproduce the state of training; the run then continues after the
step before. Data that the device does not return may be whole, so no step is given up for it, unless an earlier step is
requested. All ranks recover the same step, the newest that every rank can reach. ``recover`` serves ``Checkpointer``,
replicas and compaction; ``state_at`` rebuilds the state of any step without the script, for readers of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...distributed import Ranks
from ...errors import (
    BadInput,
    Damaged,
    DiskFailed,
    HoldfastError,
    NoCommit,
    OtherArithmetic,
    RunMismatch,
    Unreadable,
)
from ...quantities import shown
from ...state.encoding import joined, joined_members
from ...state.live_state import LiveState
from ...store.format.manifest import CommitRef, Manifest, Point
from ...store.log.chain import Journal, read_journal
from ...store.log.segments import streams
from ...store.object_store import Url
from ...store.run_store import LocalStore
from ...store.verifying import NONE_WHOLE
from ..arithmetic import (
    GROUPS,
    arithmetic_here,
    depends_on_products,
    differing,
    recorded_settings,
    settings_warnings,
)
from ..rank_consistency import broadcast_missing_state
from ..snapshot.snapshot_state import members_of, places_of, rebuilt, strides_of
from ..user_state import NoScriptState, ScriptState
from .lineage import Lineage, Reached, ReplayMismatch
from .recovery_progress import RecoveryProgress

BY, RECORDS = "by", "records"
"""The key, and a value, in a timeline's record that name how the writer's steps survive."""


def recover(
    store: LocalStore,
    state: LiveState,
    script: ScriptState,
    *,
    ranks: Ranks,
    target: int | None = None,
    tip: int | None = None,
    exact: bool = False,
    continuing: bool = False,
    approximate: bool = False,
    after_update: Callable[[int], None] | None = None,
    watch: RecoveryProgress | None = None,
    reached: Reached | None = None,
) -> RecoveryResult:
    """Restore model, optimizers and user state to the newest recoverable step.

    Collective: every rank must call this; all ranks restore the same step.

    Args:
        target: The greatest step that is wanted; None for the newest.
        tip: The timeline whose steps are recovered; None for the current one.
        exact: Fail unless precisely ``target`` can be restored.
        continuing: Only accept a step whose residuals were saved, so that training continues bit for bit.
        approximate: Replay records of another kind of processor with the arithmetic of this one.
        after_update: Called after each replayed update with the number of steps done.
        watch: Observer of the progress.
        reached: The point of the run that ``state`` is at already, if any.

    Residuals are restored only if they are those of the restored step.

    Raises ``NoCommit`` if ``target`` cannot be restored, ``Damaged`` if no snapshot is whole, and ``Unreadable`` if a
    later step may be in data that cannot be read. Raises ``RunMismatch`` if the run belongs to another model, and
    ``OtherArithmetic`` if a replay would not give the bits of training, with nothing changed.
    """
    search = _Search(
        store, state, script, ranks, target, tip, exact=exact, continuing=continuing, after_update=after_update,
        watch=watch, reached=reached, approximate=approximate,
    )  # fmt: skip
    bases = search.bases()
    for ref in bases:
        line = search.line_from(ref)
        if line is None:
            store.damaged.add(ref)
            continue
        search.refuse_end(line)
        return search.restored(line)
    raise search.no_intact_snapshot(bases)


def recovered_at(
    store: LocalStore,
    state: LiveState,
    script: ScriptState,
    line: Lineage,
    *,
    ranks: Ranks,
    after_update: Callable[[int], None] | None = None,
) -> RecoveryResult:
    """Restore user state at the end of ``line``, whose tensors the live state has already, and return the result.

    Collective: every rank must call this.
    """
    search = _Search(
        store, state, script, ranks, line.step, None, exact=True, continuing=False, after_update=after_update,
        watch=None,
    )  # fmt: skip
    return search.restored(line)


@dataclass
class RecoveryResult:
    """The point where the run continues.

    ``problems`` holds what was wrong with later steps. ``same_cut`` is true if every rank stores what the rank of its
    number stored, computes as that one did, and does the same after updates. Records may then follow the existing ones.
    """

    point: Point
    problems: list[str] = field(default_factory=list)
    same_cut: bool = True
    is_approximate: bool = False
    """True if any rank replayed with other arithmetic than training had, so that last bits differ."""
    residuals_lost: bool = False
    """True if steps have changed residuals since the snapshot's copy, so that residuals begin at zero."""
    trained: Collection[str] = ()
    """The parameters that the last step trained, as far as that is known."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """The state that is no tensor, from the record of the last step."""


def state_at(root: Path | Url, step: int, tip: int | None) -> tuple[LiveState, dict[str, Any]]:
    """Return the state of the run in ``root`` at ``step``, and the progress of its script there.

    Loads the snapshot before the step and replays the records after it, on the timeline ``tip``. Takes no lock and
    changes nothing. Raises ``NoCommit`` if no records lead to the step, ``BadInput`` if the replay needs the script.
    """
    with LocalStore(root) as store:
        ref = next((ref for ref in store.line(tip) if ref.step <= step), None)
        if ref is None:
            raise NoCommit(f"{root} has no commit of step {step} or before it.")
        base, script = store.load(ref), _Kept()
        threads = torch.get_num_threads()
        try:
            state = rebuilt(base, store.atoms(base))  # which sets the run's number of threads
            found = recover(store, state, script, ranks=Ranks(), target=step, tip=tip, exact=True)
        finally:
            torch.set_num_threads(threads)
        if found.residuals_lost:
            raise BadInput(
                f"{root} has no base of step {found.point.step}, and the residuals of error feedback at it are in no"
                " record. Name a step that `holdfast ls` lists."
            )
        told = joined([base.progress_of(stream) for stream in base.streams])
        return state, {"ranks": len(base.streams), **script.progress, "aliases": told.get("aliases", {})}


class _Kept(NoScriptState):
    """A stand-in for the script that keeps the progress which would be restored."""

    def restore(
        self, progress: dict[str, Any], which: Callable[[str, Any], bool] = lambda name, thing: True
    ) -> None:
        self.progress = progress


def require_intact_snapshot(store: LocalStore, target: int | None, tip: int | None = None) -> None:
    """Raise ``Damaged`` if no snapshot at or before ``target`` is whole, before anything live is touched.

    Reads one snapshot in full. Considers those of the timeline that ``recover`` uses.
    """
    problems: list[Damaged] = []
    for ref in store.line(tip):
        if target is None or ref.step <= target:
            try:
                found = store.verify(store.load(ref))
            except Damaged as error:
                found = [error]
            if not found:
                return
            problems += found
    if problems:
        raise problems[0]


@dataclass
class _Search:
    """The search for the line that a run continues: what is requested, and what was wrong on the way."""

    store: LocalStore
    state: LiveState
    script: ScriptState
    ranks: Ranks
    target: int | None
    tip: int | None
    exact: bool
    continuing: bool
    after_update: Callable[[int], None] | None
    watch: RecoveryProgress | None
    reached: Reached | None = None
    approximate: bool = False
    acknowledged: int = -1
    """A step known from the logs to have been durable on all streams."""
    problems: list[str] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)
    """The step of each snapshot that the device did not return, by the device's message."""

    def bases(self) -> list[CommitRef]:
        """Return the snapshots from which the search may begin, the newest first.

        Raises ``NoCommit`` if there are some, and training continues bit for bit from none.
        """
        store, target, tip = self.store, self.target, self.tip
        bases = [ref for ref in store.line(tip) if target is None or ref.step <= target]
        if not self.continuing:
            return bases
        whole = [ref for ref in bases if not _has_lost_residuals(ref, store, tip)]
        if bases and not whole:
            raise NoCommit(
                f"{store.root} has no step from which training goes on as it did: its ranks copied their residuals at"
                ' several steps. Resume with exactness="state", and call save() now and then for such a step.'
            )
        return whole

    def line_from(self, ref: CommitRef) -> Lineage | None:
        """Return the line from snapshot ``ref``, replayed into the state; None if the snapshot cannot be used.

        If one rank cannot get as far as the others, all begin again with an earlier target. Collective: every rank must
        call this.
        """
        tried: list[Lineage] = []
        ended: list[Unreadable] = []
        target, journals = self.target, self._all_journals(ref)
        self._refuse_other_arithmetic(ref, journals)

        def attempt() -> _Outcome:
            tried.clear(), ended.clear()
            try:
                tried.append(self._replayed(ref, target, journals))
            except ReplayMismatch as error:
                return _Outcome(-1, error.step - 1, str(error))
            except Unreadable as error:
                ended.append(error)
                return _Outcome(-1, error.step, None, is_unread=True)
            # FileNotFoundError: an object of a bucket that was removed meanwhile
            except (Damaged, DiskFailed, FileNotFoundError) as error:
                return _Outcome(None, None, str(error), isinstance(error, DiskFailed))
            return _Outcome(tried[0].step, tried[0].step, _said_end(tried[0]))

        while True:
            outcomes = self.ranks.all_do(attempt)
            said = {each.why: each for each in outcomes if each.why is not None}
            self.problems += [why for why in said if why not in self.problems]
            self.unread |= {why: ref.step for why, each in said.items() if each.is_unread}
            reachable = [each.could for each in outcomes if each.could is not None]
            if len(reachable) < len(outcomes):
                return None
            target = min(reachable)
            # only unreadable data ends it there, and other ranks could continue
            if all(each.is_unread for each in outcomes if each.could == target):
                self.ranks.all_do(partial(_tell_unreadable, ended, target))
            if all(each.has == target for each in outcomes):
                return tried[0]

    def _all_journals(self, ref: CommitRef) -> dict[str, Journal]:
        """Return the headers of the logs after snapshot ``ref``, of which each rank reads its share for all.

        Logs that a rank cannot say anything of are missing. Collective: every rank must call this.
        """
        if self.ranks.alone:
            return {}

        def read() -> dict[str, Journal]:
            with suppress(Damaged, DiskFailed):  # reported where the line is built
                mine = self.store.load(ref).streams[self.ranks.rank :: self.ranks.world_size]
                return {stream: read_journal(self.store, stream, self.tip) for stream in mine}
            return {}

        return {stream: journal for each in self.ranks.all_do(read) for stream, journal in each.items()}

    def _refuse_other_arithmetic(self, ref: CommitRef, journals: Mapping[str, Journal]) -> None:
        """Raise ``OtherArithmetic`` on all ranks where one computes otherwise, before any rank has replayed a record.

        Collective: every rank must call this.
        """
        ranks = self.ranks
        if ranks.alone or self.approximate:
            return

        def refused() -> OtherArithmetic | None:
            try:
                line = self._line(ref, self.target, journals)
                line.refuse_other_model(self.state)
                line.refuse_other_arithmetic(self.state, self.after_update is not None, ranks.rank)
            except OtherArithmetic as error:
                return error
            except (HoldfastError, FileNotFoundError):  # reported where the line is replayed
                pass
            return None

        found = {rank: error for rank, error in enumerate(ranks.all_do(refused)) if error is not None}
        if found:
            error = next(iter(found.values()))
            those = shown([f"rank {rank}" for rank in found])
            raise OtherArithmetic(f"on {those} of {ranks.world_size}: {error}", error.step)

    def _line(self, ref: CommitRef, target: int | None, journals: Mapping[str, Journal]) -> Lineage:
        """Return the line from snapshot ``ref`` up to ``target``, once it is known to belong to this script."""
        line = Lineage.of(self.store, self.store.load(ref), target, self.tip, journals)
        if self.continuing:
            line.end_before_feedback()
        refuse_other_script(line, self.state, self.script, self.ranks, self.after_update is not None)
        return line

    def _replayed(self, ref: CommitRef, target: int | None, journals: Mapping[str, Journal]) -> Lineage:
        """Return the line up to ``target``, with the state at its end."""
        line = self._line(ref, target, journals)
        line.acknowledged = self.acknowledged = max(line.acknowledged, self.acknowledged)
        line.watch = self.watch or line.watch
        line.allows_approximation = self.approximate
        # from here on the state is at no point, until all is replayed
        reached, self.reached = self.reached, None
        line.replay_into(self.state, self.ranks.rank, self.after_update, reached)
        return line

    def refuse_end(self, line: Lineage) -> None:
        """Raise an error if ``line`` ends before the step that was requested, or before one that cannot be read."""
        root = self.store.root
        if line.step < max(self.unread.values(), default=-1):
            raise Unreadable(next(iter(self.unread)), line.step)
        if self.watch is not None:
            self.watch.ended()
        if not self.exact or line.step == self.target:
            return
        if self.continuing and line.damage is None:
            raise NoCommit(
                f"{root} cannot be brought to step {self.target} so that training goes on as it did: residuals are"
                f" part of bases alone, and the newest at or before it is of step {line.step}. Resume there, or with"
                ' exactness="state".'
            )
        why = self.problems[-1] if self.problems else "No later step of this line can be resumed."
        raise NoCommit(
            f"{root} cannot be brought to step {self.target}: after step {line.step} the records end."
            f" {why}{self._describe_timelines()}"
        )

    def _describe_timelines(self) -> str:
        """Return a sentence about abandoned timelines that may have the one step that was requested."""
        if not self.exact or self.tip is not None or self.target is None:
            return ""
        return self.store.describe_others(self.target)

    def restored(self, line: Lineage) -> RecoveryResult:
        """Restore user state and residuals at the end of ``line``, whose tensors the live state has.

        Collective: every rank must call this.
        """
        rank = self.ranks.rank
        if self.target is None and not self.continuing:
            # without a log the store is a replica's, whose timelines fork from steps that were in memory alone
            _tell_lost(line, line.acknowledged if streams(self.store.disk) else -1, self.problems)
        others = _other_members(line, self.state)
        same_cut = self._has_same_cut(line, others)
        is_approximate = any(self.ranks.everyone(line.is_approximate))
        if is_approximate and not self.ranks.alone:  # copies replayed on different processors differ
            broadcast_missing_state(self.state, self.ranks)
        own_residuals = any(share.has_foreign_residuals for share in line.shares.values())
        belong_here = self.state.own_residuals and len(line.chains) == self.ranks.world_size
        lost = line.residuals_lost or (own_residuals and not belong_here)
        if lost or line.residuals_dropped:
            self.state.forget_residuals()
        progress = line.progress(rank)
        if len(line.chains) != self.ranks.world_size:
            self.script.show_all([line.progress(each) for each in range(len(line.chains))])
        self.problems += self._told_of_changes(line, others)
        self.script.restore(progress)
        if rank >= len(line.chains):
            self.script.scatter(rank)
        return RecoveryResult(
            line.point, self.problems, same_cut and not is_approximate, is_approximate, lost, line.trained(rank),
            progress,
        )  # fmt: skip

    def _has_same_cut(self, line: Lineage, others: Mapping[str, str]) -> bool:
        """Return whether every rank stores what the rank of its number stored, and does the same after updates.

        Collective: every rank must call this.
        """
        ranks, here = self.ranks, self.after_update is not None
        alike = len(line.chains) == ranks.world_size and all(
            ranks.everyone(_stores_alike(line, self.state, ranks) and not others)
        )
        return alike and _updated(line, here) == here

    def _told_of_changes(self, line: Lineage, others: Mapping[str, str]) -> list[str]:
        """Return a warning for each thing that is not as the run had it, and that the run continues without."""
        rank, base = self.ranks.rank, line.base.progress_of(line.base.streams[0])
        progress = line.progress(rank)
        problems = self.script.override_warnings(base, progress)
        problems += _told_of_thawed(line.base, self.state, line.trained(rank))
        problems += [text for text in others.values() if text]
        problems += [
            f"{names} were one memory in the run and are not here: from here on each is trained by itself."
            for names in line.apart(self.state, line.stream_of(rank))
        ]
        return problems + settings_warnings(
            recorded_settings(progress, base), depends_on_products(self.state, self.after_update)
        )

    def no_intact_snapshot(self, bases: list[CommitRef]) -> Exception:
        """Return the error for a run of which none of ``bases`` can be used."""
        root = self.store.root
        if not bases:
            return NoCommit(
                f"{root} has no commit of step {self.target} or before it.{self._describe_timelines()}"
            )
        if self.unread:
            return DiskFailed(f"no base of {root} can be read. {next(iter(self.unread))}")
        if gone := [ref for ref in bases if not self.store.disk.exists(ref.path)]:
            return self.store.retired(gone[0])
        return Damaged(f"no commit of {root} is whole: {self.problems[0]} {NONE_WHOLE}")


@dataclass(frozen=True)
class _Outcome:
    """The result of one rank's attempt to recover from a snapshot.

    The rank ``has`` reached one step and ``could`` reach another; ``why`` says why no later one.
    """

    has: int | None
    could: int | None
    why: str | None
    is_unread: bool = False
    """True if the device did not return the snapshot, or what follows the step that the rank could reach."""


def _tell_lost(line: Lineage, durable_step: int, problems: list[str]) -> None:
    """Add to ``problems`` which steps up to ``durable_step`` are lost.

    Raises ``Damaged`` where the log itself is missing.
    """
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
    problems[-1:] = [f"{problems[-1]} {lost}" if problems else lost]


def _has_lost_residuals(ref: CommitRef, store: LocalStore, tip: int | None) -> bool:
    """Return whether the snapshot's own records changed residuals after they were copied.

    Several ranks copy theirs at several steps.
    """
    try:
        base = store.load(ref)
        return Lineage.of(store, base, base.step, tip).residuals_lost
    except (Damaged, DiskFailed):  # reported where the snapshot is loaded
        return False


def _stores_alike(line: Lineage, state: LiveState, ranks: Ranks) -> bool:
    """Return whether this rank stores and computes what the rank of its number did, with the same memory layout."""
    here, arithmetic = strides_of(state), arithmetic_here(state)
    replay = line.base.progress_of(ranks.stream).get("replay", {})
    there = replay.get("strides", here)
    if differing(replay.get("arithmetic", {}), arithmetic, list(GROUPS)):
        return False  # what the snapshot notes is not true of records made here
    boxes = {p.name: state.boxes[p.name] for p in state.stored}
    alike = there == here and line.overlap_alike(state, ranks.stream)
    return alike and line.shares[ranks.stream].boxes == boxes


def refuse_other_script(
    line: Lineage, state: LiveState, script: ScriptState, ranks: Ranks, after_update: bool
) -> None:
    """Raise ``RunMismatch`` if another script made ``line``: with other optimizers, groups, objects or updates.

    ``after_update`` says whether there is one here. Reads headers, and changes nothing.
    """
    script.check(line.progress(ranks.rank), len(line.chains), ranks.world_size)
    _refuse_other_updates(line, after_update)
    _refuse_other_members(line, state)


def _updated(line: Lineage, here: bool) -> bool:
    """Return whether the snapshot was made with ``after_update=``; ``here`` where its version does not say."""
    return line.base.progress_of(line.base.streams[0]).get("replay", {}).get("after_update", here)


def _refuse_other_updates(line: Lineage, here: bool) -> None:
    """Raise ``RunMismatch`` where records were made with ``after_update=`` and it is missing here, or the reverse.

    A replay would give other bits.
    """
    there = _updated(line, here)
    if there == here or not any(chain.records for chain in line.chains.values()):
        return
    told = (
        "the run has an after_update=, which a replay of its records calls, and none was passed. Pass it as before"
        if there
        else "an after_update= was passed, and the records of the run were made without one. Resume without it"
    )
    raise RunMismatch(f"{told}; a base from save() can be gone on from either way.")


def _other_members(line: Lineage, state: LiveState) -> dict[str, str]:
    """Return a text for each parameter that is in another group than the snapshot says.

    The text is empty for a parameter that was in no group.
    """
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
    """Return a warning for parameters that train now and were frozen by the script of the snapshot.

    Parameters in ``trained``, which trained since then, are left out. A snapshot of an earlier version does not say
    what was frozen.
    """
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


def _refuse_other_members(line: Lineage, state: LiveState) -> None:
    """Raise ``RunMismatch`` where records have a parameter in another group than here.

    A replay would give other bits.
    """
    moved = [text for text in _other_members(line, state).values() if text]
    if moved and any(chain.records for chain in line.chains.values()):
        more = f" (and {len(moved) - 1} more are elsewhere too)" if moved[1:] else ""
        raise RunMismatch(
            f"{moved[0]}{more}: the run's records would be replayed with the hyper-parameters of another group. Put it"
            " back, resume, call save(), and change the groups then."
        )


def _tell_unreadable(ended: list[Unreadable], step: int) -> None:
    """Raise ``Unreadable``, naming the ``step`` that all ranks can reach, where the device does not return what
    follows.
    """
    if ended:
        raise Unreadable(ended[0].error, step) from ended[0]


def _said_end(line: Lineage) -> str | None:
    """Return the reason why ``line`` ends; None if there are no later records."""
    harmless = (
        " Nothing that is known to have been durable is lost: a kill leaves such an end." * line.is_torn
    )
    return None if line.damage is None else f"{line.damage}{harmless}"
