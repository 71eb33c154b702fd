"""The snapshots of a run: when each is made, how it proceeds, and what happens when the disk is behind or full.

A snapshot is due a number of steps after the last one was begun; the user or the ``Tuner`` gives the number. Its chunks
are copied at the ends of the following steps, as step time and memory allow. Where steps could not be recorded there is
a *gap*, which ends with a snapshot. Training waits for that snapshot (``"block"``, ``"commit"``), or it is made beside
training with records again from its beginning (``"skip"``, unless that has failed once).

The ``StepCadence`` may leave records out altogether. Then each snapshot is copied whole at the end of one step, and the
steps between are not kept, or some of them in memory (``MemoryCopies``). Where records begin again, they follow such a
snapshot. Sizes are bytes. Called by the training thread; a snapshot is published by the recorder's.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ...distributed import Ranks
from ...errors import HoldfastError
from ...events import tell
from ...quantities import PAGE, format_bytes
from ...schedule.interval.snapshot_interval import STORAGE_FULLS, Limits
from ...schedule.interval.step_cadence import CadenceChoice, StepCadence, choose
from ...schedule.interval.tuner import FIRST_STEPS, MEAN_SECONDS_BETWEEN_FAILURES, Tuner, prior
from ...state.live_state import LiveState
from ...store.run_store import LocalStore
from ..collective_snapshots import LEAST_STORAGE, CollectiveSnapshot
from ..log.recorder import Recorder, RecorderTask
from ..recovery.recovery_progress import RecoveryProgress
from .memory_copies import MemoryCopies
from .snapshot_writer import SnapshotWriter

POLICIES = ("block", "skip", "commit")
PRIOR_BYTES_PER_SECOND = 500_000_000.0
"""The assumed disk bandwidth before the process has written a snapshot."""


@dataclass(frozen=True)
class SnapshotResources:
    """The resources that snapshots may use."""

    staging_bytes: int
    """Bytes of copies that wait to be written."""
    bytes_per_step: int
    """Bytes that are copied at the end of one step."""
    storage_bytes: int | None = None
    """Bytes of the disk, for the whole run.

    None is ``STORAGE_FULLS`` times the state, or ``LEAST_STORAGE`` if that is more, besides what is kept for good.
    """
    of_one_step: bool = False
    """True if all chunks of a snapshot are of one step. Several ranks wait for such a snapshot, since no two copy at
    the same step.
    """
    when_behind: str = "block"
    updates_after: bool = False
    """True if the script changes tensors after each step (``after_update``), frozen ones perhaps."""
    mean_seconds_between_failures: float | None = None
    """The time between failures that the user expects; None to estimate it from restarts."""
    machine_seconds: float = MEAN_SECONDS_BETWEEN_FAILURES
    """The time between failures that memory does not survive."""
    why_no_copies: str = ""
    """The reason why there can be no copies in memory."""


class SnapshotScheduler:
    """The scheduler and maker of a run's snapshots.

    Args:
        progress: Returns the progress of the current step.
        emit: Writes an event.
        restarted: Called when records begin anew.
        prefix: The prefix of this rank's chunks.
        together: The snapshots of several ranks, of which this rank makes its share; None for one process.
        cadence: Says whether steps get records.
        copies: The copies in memory; None where there can be none.
    """

    def __init__(
        self,
        store: LocalStore,
        state: LiveState,
        recorder: Recorder,
        means: SnapshotResources,
        *,
        progress: Callable[[], dict[str, Any]],
        emit: Callable[..., None],
        restarted: Callable[[], None],
        prefix: str = "",
        together: CollectiveSnapshot | None = None,
        cadence: StepCadence | None = None,
        copies: MemoryCopies | None = None,
    ) -> None:
        self.cadence = cadence or StepCadence()
        self._copies = copies
        self._store, self._state, self._recorder, self._means = store, state, recorder, means
        self._progress_now = progress if together is None else lambda: together.alike.marked(progress())
        self._emit, self._restarted = emit, restarted
        self.bases = SnapshotWriter(store, state, recorder, prefix, self._set_cap, means.updates_after)
        self.bases.keeps_buffers = self.cadence.is_auto or not self.cadence.records
        self._together = together
        self.tuner: Tuner | None = None
        self.base_step, self._begun_at = -1, 0
        self._losses_when_shared = 0
        self._again = False
        """True if all ranks make another snapshot after the next step, since the last one did not free enough space."""
        self.gap = False
        """True if steps are not recorded, or if their records follow a snapshot that is not published yet."""
        self._is_meant = False
        """True if the gap is there because the cadence leaves records out, on all ranks alike."""
        self._whole = False
        """True if all of the snapshot under way, or the last one, is to be copied at the end of one step."""
        self._left_out_at = self._copied_at = -1
        """The last step without a record, and the last at whose end a whole snapshot was copied."""
        self._has_chosen = False
        self._losses = self._losses_at_begin = 0
        self._tried_beside = False
        """True if ending the gap beside training was tried and is not done; training waits for the next snapshot."""
        self._published: deque[int] = deque()
        self._told: dict[SnapshotWriter | Recorder, tuple[int, float]] = {
            self.bases: (0, 0.0),
            recorder: (0, 0.0),
        }
        self._stall = self._stall_of_base = 0.0
        self._num_stages = 0
        self._dropped = 0

    @property
    def recording(self) -> bool:
        """Return whether a log record of the current step could be replayed.

        False while a gap is open (an earlier step was not recorded), unless a snapshot that closes the gap is being
        written.
        """
        self._see_published()
        return self.cadence.records and (not self.gap or self._held)

    @property
    def complete(self) -> bool:
        """Return whether every step done is durable, or on its way to be."""
        self._see_published()
        return not self.gap

    @property
    def copies_differ(self) -> bool:
        """Return whether the last comparison found that ranks hold different copies."""
        return self._together is not None and self._together.alike.differs

    @property
    def _held(self) -> bool:
        """Return whether steps are recorded for a snapshot under way that will end the gap."""
        return self.gap and self.bases.under_way and self._losses == self._losses_at_begin

    def continue_after(self, base_step: int, begun_at: int) -> None:
        """Set the newest snapshot of the run that is continued."""
        self.base_step, self._begun_at = base_step, begun_at

    def watch(self, state: LiveState) -> None:
        """Make the following snapshots of ``state``. Called while none is under way."""
        self._state = state
        self.bases.watch(state)

    def advance(self, step: int) -> None:
        """Copy the next chunks of a snapshot under way, or begin one that is due. Called at the end of ``step``."""
        started = time.perf_counter()
        bases = self.bases
        self._see_published()
        if self._together is not None:
            self._together.alike.advance(self._state, step)
        if self._again:
            self.save_snapshot(step)
        elif not self.cadence.records:
            self._advance_alone(step)
        elif self.gap and (self._together is not None or not bases.under_way):
            self._end_gap(step)
        elif self._at_once:
            if self._is_time(step):
                self.save_snapshot(step)
        elif self._is_due(step):
            if self._together is not None:
                self._together.alike.begin(self._state, step)
            self._begin(step)
        if bases.under_way and not bases.all_staged:
            self._stage(step)
        if self._copies is not None and self.cadence.is_copy_due(step):
            self._copy_to_memory(self._copies, step)
        elif self._copies is not None and not (self.cadence.copies or self.cadence.is_measuring):
            self._copies.free(self._recorder.durable_step)
        self._stall = time.perf_counter() - started
        self._stall_of_base += self._stall

    def _advance_alone(self, step: int) -> None:
        """Begin a snapshot that is due while there are no records."""
        if not self.cadence.is_due(step, self._begun_at, exactly=self._together is not None):
            return
        if self._together is not None:
            self._copy_alike(self._together, step)
        elif not self.bases.under_way:
            self._begin(step, whole=True)

    def _copy_to_memory(self, copies: MemoryCopies, step: int) -> None:
        """Copy the state at ``step`` into memory. Where that fails, steps are kept in another way from here on."""
        before = copies.nbytes
        try:
            copies.take(self._state, step, self._progress())
            if copies.nbytes != before:
                self._emit("copies", step=step, bytes=copies.nbytes, place=str(copies.place))
        except (HoldfastError, OSError) as error:
            copies.close(
                self._recorder.durable_step
            )  # and ``free`` removes what stays, once the disk is as new
            self.cadence.leave_copies()
            why = f'every="auto" continues without copies in memory: {error}'
            self._emit(
                "every", step=step, was=self.cadence.every, every=self.cadence.every, copies=0, why=why
            )
            tell(f"{self._store.root}: {why}")
            if self.cadence.copies and self.tuner is not None:
                self._choose(self.tuner, step)
                self._distrust_snapshot()

    def _copy_alike(self, together: CollectiveSnapshot, step: int) -> None:
        """Copy all shares of a snapshot at the end of ``step``, since no records would bring others to one step.

        If any rank cannot copy its share, all wait until the snapshot is written. Collective: every rank must call
        this.
        """
        bases = self.bases
        if not together.begin_alike(bases):
            return
        together.alike.begin(self._state, step)
        self._begin(step, whole=True)
        if bases.left_bytes <= self._means.staging_bytes - bases.memory_bytes:
            bases.stage(step, bases.left_bytes)
        if together.all_are(bases.all_staged):
            self._num_stages += 1
            self._put_staged(step)
        else:
            self.save_snapshot(step)

    def _put_staged(self, step: int) -> None:
        """Have the snapshot, of which all is copied, published once it is written."""
        if self._whole:
            self._copied_at = step
        if self._together is not None:
            self._together.sharing, self._losses_when_shared = True, self._losses
        self._recorder.put(RecorderTask(partial(self._publish, self._progress(), self._losses)))

    @property
    def _at_once(self) -> bool:
        """Return whether training waits for every snapshot: only so are the shares of all ranks of one step."""
        return self._together is not None and self._means.of_one_step

    def _is_time(self, step: int) -> bool:
        assert self.tuner is not None
        return step - self._begun_at >= self.tuner.steps

    def _is_due(self, step: int) -> bool:
        due = not self.bases.under_way and self._is_time(step)
        return due if self._together is None else self._together.is_due(due, self.bases)

    def has_state_of(self, step: int) -> bool:
        """Return whether the newest snapshot is of ``step`` and holds the state as it is now, by all of its bytes.

        False for one with chunks of earlier steps: only its records bring these to ``step``, and no record has what the
        script changed since. To replay them for a comparison would take longer than another snapshot.
        """
        newest = self._store.newest_base
        if newest is None or newest.step != step or newest.oldest_step < step:
            return False
        return self.bases.is_as_in(newest)

    def save_snapshot(self, step: int, again: bool = False, compares: bool = True) -> None:
        """Make a snapshot of the current ``step``, chunk by chunk. It is durable on return.

        ``again`` replaces a snapshot of this step that lacks later changes, and ``compares`` one whose bytes differ.
        Collective: every rank must call this.
        """
        self._recorder.drain()
        self._see_published()
        self._restarted()
        there = self.base_step == step and self._together is None  # one that was made beside training
        if there and not again and (not compares or self.has_state_of(step)):
            self.gap = False
            return
        if self._together is not None:
            self._together.nothing_else()
        self.bases.give_up()
        if self._together is not None:
            self._recorder.drain()
            self._together.room.divide()
            self._together.alike.compare(self._state, step)
        self._begin(step)
        while not self.bases.all_staged:
            self.bases.write_next(step)
        self._copied_at = step
        if self._together is None:
            self._recorder.do(partial(self._publish, self._progress(), self._losses, there))
            self._see_published()
            return
        share = partial(self.bases.share, self._progress())
        self._together.publish_at_once(self.bases, lambda: self._recorder.do(share))
        self.base_step, self.gap = step, False
        self._recorder.restart(step)
        assert self._together.agreement is not None
        self._together.agreement.wait(step)
        self._recorder.do(self._store.measure)
        self._again = not self._again and self._together.room.is_low_anywhere()

    def open_gap(self, step: int, why: str = "the disk is behind") -> None:
        """Open a gap, since the current step is not recorded: only a snapshot made after it can follow."""
        if not self.bases.all_staged:
            self.bases.give_up()  # the records that would bring its chunks to one step have ended
        self._losses += 1
        self._left_out_at = step
        if self.gap:
            return
        self.gap = True
        self._is_meant = False
        agreement = None if self._together is None else self._together.agreement
        durable = self._recorder.durable_step if agreement is None else agreement.standing.durable_step
        self._emit("gap", step=step, durable_step=durable, why=why)
        warnings.warn(
            f"step {step} was not recorded, since {why}: step {durable} is durable, and the next that will be is that"
            " of the next base",
            stacklevel=5,
        )

    def leave_out(self, step: int) -> None:
        """Note that ``step`` has no record because the cadence wants none. The next snapshot keeps a later step."""
        if not (self.bases.all_staged or self._whole):
            self.bases.give_up()
        self._losses += 1
        self._left_out_at = step
        self.gap, self._is_meant, self._tried_beside = True, True, False
        self._recorder.leave_out(step)

    def go_without_room(self, step: int) -> None:
        """Handle a record that exceeds the storage cap.

        A snapshot of the current step frees space, now or once the disk has caught up.
        """
        store = self._store
        if self._again:  # a snapshot of this step follows at once
            return
        self._emit(
            "storage", step=step, cap=store.cap_bytes, used=store.used_bytes, policy=self._means.when_behind
        )
        if self._means.when_behind == "block" and self._together is None:
            self.save_snapshot(step)
        else:
            self.open_gap(step, f"its record is not within storage = {format_bytes(store.run_cap_bytes)}")

    def fits(self, nbytes: int) -> bool:
        """Return whether a record of ``nbytes`` fits within the storage cap. Older snapshots are dropped for it."""
        if self.tuner is not None:
            self.tuner.records_are(round(self._recorder.record_bytes), captured_bytes=nbytes)
        nbytes += self._recorder.header_bytes  # approximate
        if self._together is not None:
            return self._together.room.fits(nbytes)
        if self._store.cap_bytes is None:
            return True
        if self._is_room(nbytes):
            return True
        found = self._recorder.do(lambda: self._store.make_room(nbytes + self._margin(nbytes)))
        self._tell_dropped()
        return found and self._is_room(nbytes)

    def tune(self, told: int | None, limits: Limits, record_bytes: int) -> None:
        """Start the schedule: snapshots are due every ``told`` steps, or as ``limits`` allow.

        Called once there is a snapshot. ``record_bytes`` is the expected size of a record.
        """
        bases = self.bases
        full, frozen = bases.expected_bytes()
        rate = bases.written_bytes / bases.write_seconds if bases.written_bytes else PRIOR_BYTES_PER_SECOND
        believed = prior(max(full, PAGE), record_bytes, self._means.bytes_per_step, rate, frozen)
        if self._at_once:  # all ranks have to compute the same step
            told = told or FIRST_STEPS
        self.tuner = Tuner(told, limits, believed, self._means.mean_seconds_between_failures)
        self._recorder.expect(self.tuner.steps)
        if self._together is not None:
            self._together.room.divide()
        self._set_cap()
        self.tuner.restarted(*self._store.restarts())

    def recovered(self, recovery: RecoveryProgress) -> None:
        """Tell the tuner how long the resume took. Called before the first step."""
        assert self.tuner is not None
        self.tuner.replayed(
            recovery.loaded_bytes, recovery.load_seconds, recovery.replayed_records, recovery.replay_seconds
        )
        if recovery.num_records:
            self.tuner.records_are(recovery.record_bytes // recovery.num_records)

    def stepped(self, step: int, seconds: float, stall: float) -> None:
        """Note that ``step`` took ``seconds`` since the one before, including ``stall`` seconds of waiting."""
        tuner = self.tuner
        if tuner is None:
            return
        self._tell_dropped()
        if self.cadence.records:
            tuner.stepped(seconds - stall, max(stall - self._stall, 0.0))
        else:
            tuner.ran(seconds)
        change = tuner.retuned()
        if change is not None:
            self._emit(
                "cadence", step=step, base_every=change.steps, was=change.was, binding=change.binding,
                relaxed=change.relaxed, measured=asdict(change.measured),
            )  # fmt: skip
        # several ranks count every step, so that all choose at the same one
        as_meant = self._together is not None or (self._left_out_at != step) == self.cadence.records
        recorded = self.cadence.records
        if as_meant and self.cadence.stepped(seconds, stall, self._copied_at == step):
            self._choose(tuner, step)
        elif recorded and not self.cadence.records and not self._has_room:
            self._stay_with_records(step)
        if not recorded:
            self._distrust_snapshot()

    def _distrust_snapshot(self) -> None:
        """Let no records follow a snapshot that was copied before there were records again.

        Until then nobody looked for changes by the script, and the next record may depend on an earlier one. Called
        after a step without a record.
        """
        if self.cadence.records:
            self._losses += 1
            self.gap = self._is_meant = True  # also where all ranks have just waited for that snapshot

    @property
    def _has_room(self) -> bool:
        """Return whether a whole snapshot can be copied. Several ranks wait for one that any of them cannot copy."""
        return self._together is not None or self.bases.expected_bytes()[0] <= self._means.staging_bytes

    def continue_cadence(self, told: dict[str, Any] | None) -> None:
        """Continue with what an earlier process has measured, as a snapshot's progress holds it.

        Called before the first step. Collective: every rank must call this.
        """
        if self.cadence.is_auto and told is not None:
            self.cadence.restore(told)
            if not self._has_room:
                self._stay_with_records(self.base_step)
            elif self.cadence.rates is not None and self.tuner is not None:
                self._choose(self.tuner, self.base_step)

    def _choose(self, tuner: Tuner, step: int) -> None:
        """Choose anew whether steps get records. The first rank does so for all.

        Collective: every rank must call this.
        """
        cadence, together = self.cadence, self._together

        def chosen() -> CadenceChoice:
            rates = cadence.rates
            assert rates is not None
            return choose(
                tuner.measured,
                tuner.limits,
                rates,
                cadence.every,
                cadence.copies,
                self._means.machine_seconds,
            )

        before, was = cadence.copies, cadence.every
        choice = chosen() if together is None else together.decide(chosen)
        cadence.adopt(choice)
        self._emit("every", step=step, was=was, **choice.about, why=choice.describe())
        is_first = together is None or together.is_first
        if is_first and ((choice.every, choice.copies) != (was, before) or not self._has_chosen):
            why = self._means.why_no_copies
            tell(f"{self._store.root}: {choice.describe()}{f' Not compared: {why}.' * bool(why)}")
        self._has_chosen = True

    def _stay_with_records(self, step: int) -> None:
        """Record every step from here on, because memory does not hold a copy of the state."""
        full, _ = self.bases.expected_bytes()
        self.cadence = StepCadence()
        why = (
            f'every="auto" records every step, since a copy of the state ({format_bytes(full)}) is more than half of'
            f" memory=. Give at least {2 * full} bytes to have the choice."
        )
        self._emit("every", step=step, was=1, every=1, why=why)
        warnings.warn(why, stacklevel=6)

    def abandon(self, ranks: Ranks) -> None:
        """Give up the snapshot under way; on return none is being published. An error on one rank is one on all.

        Collective: every rank must call this.
        """

        def drain() -> None:
            self._recorder.drain()
            self._see_published()

        def give_up() -> None:
            self.bases.give_up()
            self._recorder.drain()

        ranks.all_do(drain)
        if self._together is not None:
            self._together.nothing_else()
        ranks.all_do(give_up)

    def close(self) -> None:
        """Give up a snapshot that is not fully copied. Called once nothing more is written."""
        if not self.bases.all_staged:
            self.bases.give_up()

    def _end_gap(self, step: int) -> None:
        if self._together is not None:
            if self._is_meant:
                self.save_snapshot(step)
            else:
                self._together.call()
            return
        if self._recorder.pending:
            return
        beside = self._is_meant or (self._means.when_behind == "skip" and not self._means.of_one_step)
        if beside and not self._tried_beside:
            self._tried_beside = True  # reset when it is published
            self._recorder.hold()
            self._restarted()
            self._begin(step, whole=self._is_meant)
        else:
            self.save_snapshot(step)

    def _begin(self, step: int, whole: bool = False) -> None:
        self._begun_at, self._losses_at_begin, self._whole = step, self._losses, whole
        self.bases.begin()
        if self.tuner is not None:
            self._recorder.expect(self.tuner.steps)
        self._set_cap()

    def _progress(self) -> dict[str, Any]:
        """Return the progress of the current step, with what the cadence has measured."""
        told = {"every": self.cadence.to_json()} if self.cadence.is_auto else {}
        return {**self._progress_now(), **told}

    def _set_cap(self) -> None:
        """Set the storage cap: the configured one, or a multiple of the state plus what is kept for good."""
        full, frozen = self.bases.expected_bytes()
        for_good, told = self._store.for_good_bytes, self._means.storage_bytes
        if self._together is not None:
            self._together.room.default(full, frozen)
            cap = self._store.cap_bytes
        else:
            cap = max(STORAGE_FULLS * (full + frozen), LEAST_STORAGE) + for_good if told is None else told
            self._store.cap_bytes = cap
        if cap is not None and self.tuner is not None:
            self.tuner.limits = replace(self.tuner.limits, storage_bytes=max(cap - for_good, 1))

    def _stage(self, step: int) -> None:
        """Copy chunks of the snapshot under way, as many as step time and memory allow."""
        bases, means = self.bases, self._means
        if not bases.name_again(step):
            return
        room = means.staging_bytes - bases.memory_bytes
        self._num_stages += 1
        together = bases.left_bytes if means.of_one_step or self._whole else bases.late_bytes
        if together > means.staging_bytes:  # no memory to copy all that must be of one step: training waits
            if self._together is None:
                self.save_snapshot(step)
            else:
                self._together.call()  # the other ranks may have memory for theirs
            return
        if together == bases.left_bytes:
            if together <= room:
                bases.stage(step, together)
        elif bases.next_bytes > means.staging_bytes:
            bases.write_next(step)  # the same for a chunk that is larger than all copies may be
        elif bases.next_bytes <= room:
            bases.stage(step, min(max(means.bytes_per_step, bases.next_bytes), room))
        if bases.under_way and bases.all_staged:
            self._put_staged(step)

    def _publish(self, progress: dict[str, Any], losses: int, again: bool = False) -> None:
        """Make the snapshot a commit. With ``again`` it replaces a commit of the same step.

        Called by the recorder's thread, when the records up to the snapshot are durable.
        """
        if self._together is not None:
            self._together.share(self.bases.share(progress))
            return
        self.base_step = self.bases.publish(progress, again).step
        self._recorder.restart(self.base_step)
        self._published.append(losses)
        self.bases.end()  # so that the training thread sees it as published, not as given up
        self._emit("base", step=self.base_step, durable_step=self._recorder.durable_step)

    def _see_published(self) -> None:
        """Note published snapshots. One ends the gap if no step was lost since its last chunk was copied."""
        if self._together is not None and (step := self._together.see_published(self.bases)) is not None:
            self.base_step = step
            if self._whole:
                self._recorder.restart(step)  # no records lead to it
            self._published.append(self._losses_when_shared)
            self._recorder.put(RecorderTask(self._store.measure, at_once=True))
        if not self._published:
            return
        if self._published.popleft() == self._losses:
            self.gap = self._tried_beside = False
        if self.tuner is not None and self._num_stages:  # scheduled, not requested
            self._tell_written(self.tuner)
            full, frozen = max(self.bases.full_bytes, PAGE), self.bases.frozen_bytes
            if not self._whole:  # what a copy in one piece costs is of no use for others
                self.tuner.based(full, self._num_stages, self._stall_of_base, frozen)
        self._stall_of_base, self._num_stages = 0.0, 0

    def _is_room(self, nbytes: int) -> bool:
        return nbytes + self._margin(nbytes) <= self._recorder.left_bytes(self._store)

    def _margin(self, nbytes: int) -> int:
        """Return the bytes that may be wasted at the ends of segments."""
        return 2 * self._recorder.group * nbytes

    def _tell_dropped(self) -> None:
        gone = self._store.dropped[self._dropped :]
        self._dropped += len(gone)
        for ref in gone:
            self._emit(
                "storage", dropped_step=ref.step, cap=self._store.cap_bytes, used=self._store.used_bytes
            )
            if ref in self._store.dropped_best:
                warnings.warn(
                    f"the base of step {ref.step}, one of the best, was removed: storage ="
                    f" {format_bytes(self._store.run_cap_bytes)} has no room for it. Give more, or keep fewer (best=).",
                    stacklevel=5,
                )

    def _tell_written(self, tuner: Tuner) -> None:
        """Tell the tuner the bytes and seconds that snapshots and records have taken since the last call."""
        for who, (nbytes, seconds) in self._told.items():
            self._told[who] = who.written_bytes, who.write_seconds
            tuner.wrote(who.written_bytes - nbytes, who.write_seconds - seconds)
