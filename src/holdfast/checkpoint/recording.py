"""The durability backend by log records: every step is a record on the disk, and snapshots are made beside training.

A step counts as durable when its record is on the disk of every rank, or a snapshot holds it. If the disk is behind,
training waits or skips records, as the options say; after skipped records a snapshot closes the gap. With ``every``
other than 1 there may be no records, and a step counts as durable once a snapshot of it is published; copies in memory
may keep steps between. Called by ``Checkpointer`` as ``DurabilityBackend`` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from holdfast import failpoints

from ..accelerators import devices_of
from ..errors import Damaged, NoCommit, RunMismatch
from ..events import EventLog, tell
from ..quantities import counted, format_seconds
from ..schedule.interval.step_cadence import StepCadence
from ..store import run_store
from ..store.format.manifest import Manifest
from ..store.log.chain import DURABLE_AT_FORK
from ..store.log.journal import uncopied
from ..store.node_store import NodeStore
from ..store.run_store import LocalStore
from .capture.optimizer_hooks import OptimizerHooks, Update
from .capture.staging_buffers import StagingBuffer, StagingPool
from .collective_snapshots import CollectiveSnapshot, StorageShare
from .coordinator import RankCoordinator
from .durability import DurabilityBackend, ResumeRequest
from .grace import Grace
from .log.log_records import RecordBuilder
from .log.recorder import Recorder
from .nodes.node_run import NodePeers, NodeRun
from .options import Options
from .recovery.following import Follower
from .recovery.lineage import Reached
from .recovery.recovery_progress import RecoveryProgress, announced
from .recovery.rollback import HostCopy, LivingScript, line_to, reachable_step
from .recovery.run_recovery import BY, RECORDS, RecoveryResult, recover, recovered_at
from .replica import retained_state
from .snapshot import memory_copies
from .snapshot.memory_copies import (
    MemoryCopies,
    machine_seconds,
    newest_copy,
    recover_copy,
    remove_left_copy,
    this_machine,
    why_unavailable,
)
from .snapshot.run_drives import RunDrives
from .snapshot.snapshot_chunks import owned_by
from .snapshot.snapshot_scheduler import PRIOR_BYTES_PER_SECOND, SnapshotResources, SnapshotScheduler
from .training_state import TrainingState

SURE = 2.0
"""The factor by which a snapshot may take longer than predicted, where the process has only some seconds left."""


class LogBackend(DurabilityBackend):
    """Survival by log records, which a ``Recorder`` writes, and snapshots, which ``SnapshotScheduler`` schedules."""

    def __init__(
        self,
        training: TrainingState,
        options: Options,
        events: EventLog,
        peers: NodePeers | None = None,
        drives: RunDrives | None = None,
    ) -> None:
        """Prepare the backend. ``peers`` is there where the nodes share no directory."""
        super().__init__(training, options, events)
        self._peers, self._drives = peers, drives
        self._nodes: NodeRun | None = None
        self._pool: StagingPool | None = None
        self._recorder: Recorder | None = None
        self._pace: SnapshotScheduler | None = None
        self._follower: Follower | None = None
        self._copies: MemoryCopies | None = None
        """The copies in memory; None where nothing is kept there."""
        self._disk_step: int | None = None
        """The newest step that the disk has, where training continues from a copy in memory; else None."""

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    @property
    def pace(self) -> SnapshotScheduler:
        assert self._pace is not None
        return self._pace

    @property
    def pool(self) -> StagingPool:
        assert self._pool is not None
        return self._pool

    @property
    def durable_step(self) -> int:
        if self._pace is None:  # the first snapshot is not there yet
            return -1
        if self.agreement is not None:
            return self.agreement.standing.durable_step
        return self.recorder.durable_step

    @property
    def written_step(self) -> int:
        return -1 if self._recorder is None else self._recorder.durable_step

    @property
    def replica_step(self) -> int:
        in_memory = -1 if self._copies is None else self._copies.step
        return max(self.durable_step, in_memory)

    @property
    def base_step(self) -> int:
        return self.pace.base_step

    def has_state_in_base(self) -> bool:
        return self.pace.has_state_of(self._training.steps_done)

    def note_saved(self) -> None:
        if self.records_steps:
            self._sealer.follow(self._training.state, self._training.steps_done)

    @property
    def records_steps(self) -> bool:
        return self._pace is None or self._pace.cadence.records

    @property
    def complete(self) -> bool:
        return self.pace.complete

    def has(self, step: int) -> bool:
        return self.complete or self.recorder.durable_step >= step

    def standing(self) -> dict[str, Any]:
        if self._pace is None or self._recorder is None:
            return {}
        recorder, bases = self._recorder, self._pace.bases
        is_in_memory = self._copies is not None and self._copies.step >= 0
        return {
            **({"memory_step": self.replica_step} if is_in_memory else {}),
            "written_bytes": recorder.written_bytes + bases.written_bytes,
            "waiting_bytes": recorder.pending_bytes,
            "staged_bytes": bases.memory_bytes,
        }

    @property
    def recovered_by(self) -> str:
        recovery = self._recovery
        if self._disk_step is not None:
            seconds = format_seconds(recovery.load_seconds)
            return f"from the copy in memory, in {seconds}; the disk has step {self._disk_step:,}"
        records = counted(recovery.replayed_records, "record")
        seconds = format_seconds(recovery.load_seconds + recovery.replay_seconds)
        if recovery.reached is not None:
            return f"followed to step {recovery.reached:,}, and {records} replayed in {seconds}"
        replayed = f" and {records} replayed" * bool(recovery.replayed_records)
        tiers = "" if self._nodes is None else self._nodes.source_text
        how = f" ({tiers})" * bool(tiers)
        return f"the base of step {recovery.base_step:,} loaded{replayed} in {seconds}{how}"

    # Start

    def following(self, store: LocalStore, asked: ResumeRequest) -> AbstractContextManager[Any]:
        """Return the context in which a standby waits: one in which its state follows the run, where it can.

        It cannot without a shared directory, or where an older step is asked for. Nor can it on several ranks whose
        updates may be collectives, since each rank follows by itself.
        """
        training, is_older = self._training, asked.target is not None or asked.continuing
        is_local = training.ranks.alone or training.is_elementwise
        if not is_local or self._peers is not None or is_older:
            return nullcontext()
        self._follower = Follower(
            store, training.state, training.update_again, training.ranks.rank, asked.approximate
        )
        return self._follower

    def enter(self, store: LocalStore, asked: ResumeRequest) -> RecoveryResult | None:
        self._store = store
        self._recovery = RecoveryProgress(announced(self._events.emit, asked.show))
        seen = self._entered(store, asked)
        with store.unchanging() if self._nodes is None else nullcontext():
            return self._restored(store, seen, asked)

    def _restored(self, store: LocalStore, seen: LocalStore, asked: ResumeRequest) -> RecoveryResult | None:
        """Restore the newest recoverable step from what can be ``seen`` of the run in ``store``; None if it has none.

        Writes nothing to the run.
        """
        training, recovery = self._training, self._recovery
        follower, self._follower = self._follower, None
        for error in store.unread:
            self._events.emit("unreadable", what=str(error))
        if not store.commits():
            training.ranks.all_do(partial(_refuse_followed, store, follower))
            return None
        kept = self._newer_copy(store, asked)
        if kept is not None:
            if follower is not None:
                follower.reached = None  # a damaged copy may be loaded in part
            found = self._from_copy(store, kept)
            if found is not None:
                return found
        found = self._from_disk(seen, asked, None if follower is None else follower.reached)
        if self._disk_step is not None:
            return found
        training.rates = recovery.rates
        recovery.is_approximate = found.is_approximate
        self._events.emit("recovered", step=found.point.step, **recovery.facts())
        self._settle(found, seen)
        if asked.target is None and isinstance(store.root, Path):
            training.ranks.all_do(
                partial(retained_state.refuse_to_leave, store.root, store, found.point.step)
            )
        return found

    def _from_disk(self, store: LocalStore, asked: ResumeRequest, reached: Reached | None) -> RecoveryResult:
        """Restore what the disk leads to, or else a copy in memory of a later step, where the disk is damaged.

        Args:
            store: The run.
            asked: The step that is wanted.
            reached: The point of the run that the state is at already, if any.
        """
        training = self._training

        def recovered(reached: Reached | None) -> RecoveryResult:
            return recover(
                store, training.state, training.script, ranks=training.ranks, target=asked.target, exact=asked.exact,
                continuing=asked.continuing, approximate=asked.approximate, after_update=training.update_again,
                watch=self._recovery, reached=reached,
            )  # fmt: skip

        try:
            found = recovered(reached)
        except (Damaged, NoCommit):
            disk_step = _newest_whole(store, asked.target)
            kept = self._newer_copy(store, asked, disk_step)
            newer = None if kept is None else self._from_copy(store, kept, disk_step)
            if newer is None:
                raise
            return newer
        disk_step = found.point.step
        kept = self._newer_copy(store, asked, disk_step)
        if kept is None:
            return found
        return self._from_copy(store, kept, disk_step) or recovered(None)

    def _newer_copy(
        self, store: LocalStore, asked: ResumeRequest, disk_step: int | None = None
    ) -> retained_state.RetainedState | None:
        """Return the copy that an earlier process left in memory, if it is newer than ``disk_step``.

        By default the headers on the disk tell that step.
        """
        return None if self._why_no_copies() else newest_copy(store, asked.target, asked.exact, disk_step)

    def _from_copy(
        self, store: LocalStore, kept: retained_state.RetainedState, disk_step: int | None = None
    ) -> RecoveryResult | None:
        """Restore the copy ``kept``. None if it is damaged, where the state may be of no step.

        Args:
            store: The run.
            kept: The copy.
            disk_step: The step that the disk was found to lead to, -1 for none; None to believe its headers.
        """
        training = self._training
        found = recover_copy(store, kept, training.state, training.script, self._recovery)
        if found is None:
            return None
        training.rates = self._recovery.rates
        # later steps of the disk are abandoned
        self._disk_step = memory_copies.disk_step(store, kept.last) if disk_step is None else disk_step
        self._events.emit("resumed", source="memory", step=found.point.step, durable_step=self._disk_step)
        if disk_step is not None:
            end = f"step {disk_step:,} alone" if disk_step >= 0 else "no step"
            found.problems.append(
                f"the copy in memory was taken, since the disk leads to {end}: what is newer there is damaged."
                f" `holdfast verify {store.root}` names it."
            )
        return found

    def _entered(self, store: LocalStore, asked: ResumeRequest) -> LocalStore:
        """Enter the run, and return what can be read of it: the same, or with all nodes' disks."""
        ranks = self._training.ranks
        if self._peers is None:
            if self._drives is not None:
                self._drives.decide(store)
            ranks.first_does(partial(store.enter, syncs_beside=True))
            run_store.see_alike(store, ranks)
            return store
        assert isinstance(store, NodeStore)
        self._nodes = NodeRun(self._peers, ranks, store, self._events.emit, self._options.deadline_seconds)
        return self._nodes.view(asked.target)

    def _settle(self, found: RecoveryResult, seen: LocalStore) -> None:
        """Note where records may not follow what was recovered from ``seen``, since some share lacks a copy."""
        if self._nodes is not None:
            found.same_cut = self._nodes.settle(found.point, seen) and found.same_cut

    def begin(self, found: RecoveryResult | None) -> None:
        self._num_slots = self._slots_that_fit()  # beside the script's state, whose size is known now
        self._training.ranks.first_does(lambda: self._store.disk.makedirs("journal"))
        point = None if found is None else found.point
        if self._nodes is None:
            about: dict[str, str | int] = {BY: RECORDS, **this_machine()}
            if self._disk_step is not None:
                about[DURABLE_AT_FORK] = self._disk_step
            run_store.begin(self._store, self._training.ranks, point, about)
            if self._drives is not None:
                self._drives.take(self._store)
        else:
            self._nodes.begin(point, {BY: RECORDS})
        self._store.measure()
        self._pool = self._slot_pool()
        self._copies = self._make_copies()
        self._recorder = self._make_recorder(self._pool)
        self._recorder.waits_until = self._ends_at
        self.begun = True
        pace = self._make_pace(self._recorder)
        newest = self._store.newest_base
        is_as_was = found is not None and (found.same_cut or self._disk_step is not None)
        goes_on = is_as_was and newest is not None
        # A base is made by all ranks or by none, and one may know of damage that others have not met.
        if all(self._training.ranks.everyone(goes_on)) and newest is not None:
            pace.continue_after(newest.step, newest.oldest_step)
            if self._disk_step is not None:
                pace.leave_out(self._training.steps_done)
        else:
            pace.save_snapshot(self._training.steps_done)
        pace.tune(self._options.base_every, self._options.limits, self._pool.slot_bytes)
        if self._recovery.over and self._disk_step is None:
            pace.recovered(self._recovery)
        told = None if newest is None else newest.progress_of(newest.streams[0]).get("every")
        if found is not None and self._disk_step is not None:
            told = found.progress.get("every")
        told_anywhere = self._training.ranks.everyone(told)  # a node that lost its directory has no base
        pace.continue_cadence(next((each for each in told_anywhere if each is not None), None))
        self._pace = pace
        if found is not None and (isinstance(found.point, Manifest) or found.is_approximate):
            self.note_saved()  # the base may hold what the script changed after the last record

    def _slot_pool(self) -> StagingPool:
        """Return a pool for the state as it is now: that of the timeline before, if it serves."""
        state, before = self._training.state, self._pool
        devices = devices_of(p.parameter for p in state.parameters)
        layouts = self._training.codec.layouts(state)
        if before is not None and before.serves(layouts, self._num_slots, devices):
            return before  # to fault its pages in again would take longer than a rollback
        if before is not None:
            before.close()
        return StagingPool(layouts, self._num_slots, devices)

    def _make_recorder(self, pool: StagingPool) -> Recorder:
        training = self._training
        copying = uncopied if self._nodes is None else self._nodes.copy.copying
        self._journal = self._store.journal(training.ranks.stream, copying)
        return Recorder(
            self._journal, pool,
            durable_step=training.steps_done if self._disk_step is None else self._disk_step,
            group=max(1, pool.count // 2), deadline_seconds=self._options.deadline_seconds,
            pack=training.codec.pack, cpus=self._options.helper_cpus,
        )  # fmt: skip

    def _make_pace(self, recorder: Recorder) -> SnapshotScheduler:
        """Return the snapshot scheduler; with several ranks one that makes this rank's share."""
        training, options, emit = self._training, self._options, self._events.emit
        means = SnapshotResources(
            self.staging_bytes, options.bytes_per_step, options.storage_bytes, not training.is_elementwise,
            options.when_behind, training.after_update is not None, options.mean_seconds_between_failures,
            machine_seconds(self._store, options.mean_seconds_between_failures), self._why_no_copies(),
        )  # fmt: skip
        together = (
            None
            if training.ranks.alone
            else CollectiveSnapshot(training.ranks, self._store, emit, self._nodes)
        )
        pace = SnapshotScheduler(
            self._store, training.state, recorder, means, progress=training.progress, emit=emit,
            restarted=self._sealer.forget, prefix=training.ranks.prefix, together=together,
            cadence=StepCadence(options.told_every, self._copies is not None), copies=self._copies,
        )  # fmt: skip
        if together is not None:
            self._agree(together, recorder)
        return pace

    def _make_copies(self) -> MemoryCopies | None:
        """Return the copies in memory, if they may be chosen, or if training continues from one.

        Otherwise one that an earlier process left is removed, since nothing continues from it any more.
        """
        is_taken = self._disk_step is not None
        if self._why_no_copies():
            return None
        if not (is_taken or self._options.told_every is None):
            remove_left_copy(self._store)
            return None
        kept_step = self._training.steps_done if is_taken else -1
        return MemoryCopies(self._store, kept_step, self._options.helper_cpus)

    def _why_no_copies(self) -> str:
        return why_unavailable(self._store, self._training.ranks.world_size, self._peers is not None)

    def _agree(self, together: CollectiveSnapshot, recorder: Recorder) -> None:
        """Start the background agreement with the other ranks."""
        training, store, options = self._training, self._store, self._options
        together.room = StorageShare(
            training.ranks,
            store,
            recorder,
            options.storage_bytes,
            self._stored_bytes,
            together.call,
            self._nodes,
        )
        self.agreement = together.agreement = RankCoordinator(
            training.ranks, how_far=lambda: recorder.durable_step, steps_done=lambda: training.steps_done,
            publish=together.publish_shares, follow=together.follow, is_there=store.has_writer, alike=together.alike,
            deadline_seconds=options.deadline_seconds,
        )  # fmt: skip
        if self._nodes is not None:
            self._nodes.fail, self._nodes.lost = self.agreement.fail, self.agreement.lost
            self._nodes.watch_exit()

    def _stored_bytes(self) -> int:
        """Return the bytes of the state that this rank stores."""
        return sum(
            atom.nbytes for held in owned_by(self._training.state).values() for atom, _ in held.values()
        )

    def optimizer_hooks(
        self, take_slot: Callable[[], StagingBuffer | None], clip_norm: float | None
    ) -> OptimizerHooks:
        hooks = OptimizerHooks(self._training.state, self._training.codec, take_slot, clip_norm)
        hooks.records = lambda: self.records_steps
        return hooks

    # Every step

    def take_slot(self) -> StagingBuffer | None:
        if not self.records_steps:
            return None
        return self.recorder.take_slot(wait=self._options.when_behind == "block")

    def record(self, updates: Sequence[Update]) -> None:
        pace, step = self.pace, self._training.steps_done
        if not pace.cadence.records:
            self.give_back(updates)
            pace.leave_out(step)
            return
        slots, is_recording = [update.slot for update in updates], pace.recording
        if not updates and is_recording:
            slots.append(self.take_slot())  # skipped by the loss scaler, and recorded like any other step
        if not is_recording or None in slots:
            self.give_back(updates)
            pace.open_gap(step)
            return
        sealed = self._seal(updates)
        sealed.slots = sealed.slots or tuple(slot for slot in slots if slot is not None)
        failpoints.reach("after_step_sealed")
        if pace.fits(sealed.nbytes):
            self.recorder.put(sealed)
            failpoints.reach("after_step_put")
        else:
            self.pool.give(sealed.slots)
            pace.go_without_room(step)

    def record_irreproducible(self, updates: Sequence[Update], why: str) -> None:
        self.give_back(updates)
        self.pace.open_gap(self._training.steps_done, why)

    def advance_snapshot(self) -> None:
        self.pace.advance(self._training.steps_done)

    def stepped(self, seconds: float, stall_seconds: float) -> None:
        self.pace.stepped(self._training.steps_done, seconds, stall_seconds)

    def make_room(self, nbytes: int) -> bool:
        def found() -> bool:
            fits = self._store.make_room(nbytes)
            self._store.used_bytes += nbytes * fits
            return fits

        return self.recorder.do(found)

    def adapt(self) -> None:
        self.recorder.drain()
        self.pace.close()
        self._num_slots = self._slots_that_fit()
        self._pool = self._slot_pool()
        self.recorder.use(self._pool)
        self.pace.watch(self._training.state)
        self.save_snapshot()

    # Waiting and shutdown

    def save_snapshot(self, again: bool = False, compares: bool = True) -> None:
        self.pace.save_snapshot(self._training.steps_done, again, compares)

    def wait(self, step: int) -> None:
        self.recorder.wait(step)
        self.wait_for_all(step)

    def drain(self) -> None:
        self.recorder.drain()

    def leave_broken(self) -> None:
        try:
            super().leave_broken()
        finally:
            if self._nodes is not None:
                self._nodes.wait_for_guests()

    def _ends_at(self) -> float | None:
        """Return the time at which the last write has to end; None if there is none, or before a SIGTERM."""
        return None if self.grace is None else self.grace.ends_at

    def has_time(self) -> bool:
        if self.grace is None:
            return True
        bases = self.pace.bases
        nbytes = bases.memory_bytes + sum(bases.expected_bytes())
        return self.grace.allows(SURE * (self._record_seconds() + nbytes / self._snapshot_rate()))

    def _is_time(self) -> bool:
        return self.grace is None or not self.grace.hurries or self.has_time()

    def _snapshot_rate(self) -> float:
        """Return the bytes per second at which this process has written snapshots, or else records."""
        for who in (self.pace.bases, self.recorder):
            if who.written_bytes and who.write_seconds:
                return who.written_bytes / who.write_seconds
        return PRIOR_BYTES_PER_SECOND

    def _record_rate(self) -> float:
        """Return the rate of records as steps hand them over, before they are packed."""
        return self.recorder.bytes_per_second or self._snapshot_rate()

    def _record_seconds(self) -> float:
        """Return how long the records that wait would take to write."""
        return self.recorder.pending_bytes / self._record_rate()

    def _hurry(self, grace: Grace, recorder: Recorder) -> None:
        """Have ``recorder`` write only what ends in time: records before the copies of a snapshot under way."""
        copy_seconds = 0.0 if self._pace is None else self._pace.bases.memory_bytes / self._snapshot_rate()
        is_short = not grace.allows(self._record_seconds() + copy_seconds)
        recorder.write_until(grace.ends_at or 0.0, self._record_rate(), records_only=is_short)

    # Going back

    @property
    def copies_differ(self) -> bool:
        return self.pace.copies_differ

    def prepare_rollback(self, step: int, nearest: bool) -> int:
        self.pace.abandon(self._training.ranks)
        return reachable_step(self._seen(step), self._training, step, nearest)

    def _seen(self, target: int) -> LocalStore:
        """Return the run as it can be read: the directory, or that of all nodes.

        Collective: every rank must call this.
        """
        return self._store if self._nodes is None else self._nodes.view(target)

    def go_back(
        self, step: int, restores: Callable[[str, Any], bool], copy: HostCopy | None
    ) -> RecoveryResult:
        training = self._training
        ranks, state, script = training.ranks, training.state, LivingScript(training.script, restores)
        self._end_timeline()
        seen = self._seen(step)
        line = line_to(seen, step, []) if copy is not None and copy.is_of(step, state) else None
        has_line = ranks.everyone(line is not None)
        self._recovery = recovery = RecoveryProgress()
        if copy is not None and line is not None and all(has_line):
            copy.restore(state)
            found = recovered_at(seen, state, script, line, ranks=ranks, after_update=training.update_again)
        else:
            found = recover(
                seen, state, script, ranks=ranks, target=step, exact=True, after_update=training.update_again,
                watch=recovery,
            )  # fmt: skip
            training.rates = recovery.rates
        self._settle(found, seen)
        return found

    def _end_timeline(self) -> None:
        """End what records the current timeline. The run stays locked, and staging buffers stay allocated.

        Nodes keep their connections, over which the recovery reads.
        """
        super().part(orderly=True)
        self.agreement = None
        self._drop_copies()
        self.close()
        self._journal.cut()
        self.pace.bases.release()
        self._pace = None
        if self._nodes is not None:
            self._nodes.end_timeline()
        self._store.close_units()
        self._sealer = RecordBuilder(self._training.state, shortens=True)

    def _drop_copies(self) -> None:
        """Remove the copy in memory, of a step that is being abandoned."""
        copies, self._copies, self._disk_step = self._copies, None, None
        if copies is not None:
            copies.close(self._training.steps_done)

    def _leave_copies(self) -> None:
        """Remove the copy in memory, or report that the next process will continue from it."""
        copies, durable = self._copies, self.written_step
        if copies is not None and copies.close(durable):
            tell(
                f"{self._store.root}: step {copies.step:,} is in the memory of this machine ({copies.place}), and the"
                f" disk has step {durable:,}. The next start continues from memory, unless the machine ends before."
            )

    @property
    def is_alive(self) -> bool:
        return self._recorder is not None and self._recorder.is_alive

    def close(self) -> None:
        with suppress(Exception):  # the recorder reports failures
            if self._pace is not None:
                self._pace.close()
        if self._recorder is not None:
            if self.grace is not None and self.grace.hurries and self._pace is not None:
                self._hurry(self.grace, self._recorder)
            try:
                self._recorder.close()
            finally:
                self._leave_copies()

    def part(self, orderly: bool) -> None:
        super().part(orderly)
        healthy = self.agreement is not None and self.agreement.failure is None
        if self._nodes is not None:  # a write that was left is still being copied, and would be waited for
            self._nodes.close(orderly and healthy and not self.is_alive)

    def release(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._pace is not None:
            self._pace.bases.release()


def _newest_whole(store: LocalStore, target: int | None) -> int:
    """Return the step of the newest base, at most ``target``, that a recovery has not found damaged; -1 if none."""
    whole = (ref.step for ref in store.line() if ref not in store.damaged)
    return max((step for step in whole if target is None or step <= target), default=-1)


def _refuse_followed(store: LocalStore, follower: Follower | None) -> None:
    """Raise ``RunMismatch`` if the state has followed a run of which nothing is left."""
    if follower is not None and follower.has_begun:
        raise RunMismatch(
            f"{store.root} was emptied while this standby waited, and its model has followed what was there, so"
            " it is not that of a fresh start. Start the script again."
        )
