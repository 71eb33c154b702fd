"""Durable checkpoints of every optimizer step of an ordinary training loop, recoverable bit for bit.

A run consists of *snapshots*, which are commits of the whole state, and of log records of the steps since. ``step()``
finalizes the log record of what the optimizers consumed in the iteration and returns; a thread makes the record
durable. ``resume()`` loads the newest snapshot and replays the log records after it. In the code a snapshot is a
*base*.

This module only joins other modules. ``training_state`` holds the training state and ``optimizer_hooks``
hooks the optimizers. ``durability`` keeps the steps, by log records (``recording``) or by a replica
(``replicating``). ``rollback`` goes back to a step without a restart. Sizes are bytes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .accelerators import devices_of, refuse_unrecorded
from .checkpoint.bucket_copy import Remote
from .checkpoint.capture.optimizer_hooks import Update
from .checkpoint.capture.state_digests import all_digests
from .checkpoint.compression.codecs import Codec, Exact
from .checkpoint.durability import DurabilityBackend, ResumeRequest
from .checkpoint.grace import Grace, SigTerm
from .checkpoint.loss_guard import GuardOptions, LossGuard
from .checkpoint.nodes.local_disks import LocalDisks
from .checkpoint.nodes.node_run import NodePeers
from .checkpoint.options import (
    DEFAULT_MEMORY,
    Exactness,
    HelperCpus,
    Options,
    chosen_cpus,
    refuse_bad_resume,
    refuse_clipping,
    refuse_no_room_for_best,
    refuse_of_several,
    refuse_other_calls,
    refuse_unequal,
    refuse_with_a_replica,
    refuse_with_nodes,
)
from .checkpoint.recording import LogBackend
from .checkpoint.recovery.recovery_progress import RecoveryProgress
from .checkpoint.recovery.rollback import Rollback
from .checkpoint.recovery.run_recovery import RecoveryResult
from .checkpoint.replica import shared_memory
from .checkpoint.replicating import ReplicaBackend
from .checkpoint.snapshot.run_drives import RunDrives, places_of_drives, queue_for, refuse_bad_drives
from .checkpoint.training_state import TrainingState
from .checkpoint.user_state import is_no_place
from .distributed import Ranks
from .errors import BadInput, EngineFailed, RankFailed
from .events import EventLog, StepLog, describe_lost_steps, tell
from .regular_files import home_path
from .schedule.interval.tuner import BASE_BYTES_PER_STEP
from .store.commit.retention import Keep, checked_metrics, is_among_best
from .store.node_store import NodeStore
from .store.path_checks import check_place, refuse_foreign_checkpoint
from .store.run_store import LocalStore
from .supervised.attempt import Witness, in_drill, shared_directory
from .supervised.standing_by import is_standby, refuse_replica, say_closed, say_opened, wait_for_run

if TYPE_CHECKING:
    from .saved_weights import SavedWeights
    from .sources import From


class Checkpointer:
    """Durable checkpoints of a training loop: call ``resume`` first, then ``step`` last in every iteration.

    A context manager. A kill loses the steps that are on their way to the disk, at most 8. With ``every`` other than 1,
    or ``when_behind`` other than "block", it loses those since the last snapshot where records were left out. After a
    SIGTERM ``step`` makes the step durable and ends the process, unless the script handles the signal itself.

    Args:
        run: Directory of the run.
        model: The module that is trained. A rank with several stages of a pipeline gives a list of them, always in the
            same order; tensors keep the names of the whole model.
        optimizer: One optimizer or several.
        scheduler, loader, scaler: Objects of the script with ``state_dict`` and ``load_state_dict``.
        also: More such objects, by name.
        after_update: Called after every optimizer step, in replay too.
        averages: Modules that ``after_update`` maintains (``torch.optim.swa_utils.AveragedModel``). They become part of
            the run.
        codec: What log records hold of gradients, ``Exact()`` by default. ``TopK`` and ``Int8`` change what training
            consumes.
        memory: Bound of the copies that wait to be written, in bytes. By default 4 GiB, and less on a machine that has
            less free.
        every: 1 writes a log record of every step. A larger number makes a snapshot each so many steps and no records,
            so that a step costs less, and a kill loses the steps since the last snapshot. ``"auto"`` measures what
            either costs in this run, and copies of the state in memory, and chooses.
        base_every: Steps from the beginning of one snapshot to that of the next. By default the interval is chosen, and
            adapted, so that failures cost least within ``recovery_seconds`` and ``bandwidth_share``.
        recovery_seconds: Bound of the time that a recovery takes.
        bandwidth_share: Bound of the share of the disk's bandwidth that writing takes.
        mean_seconds_between_failures: How often the run is expected to fail, for the intervals that are chosen. By
            default one failure a day is assumed at first, and restarts show what it is.
        storage: Bound of the bytes of the run on the disk. By default 20 times the state.
        keep: Which snapshots are retained, with how many of the log records. ``best=`` ranks by ``step(metrics=)``.
        when_behind: What ``step`` does when the disk is behind. ``"block"`` waits. ``"skip"`` continues without log
            records until a snapshot has been made beside training. ``"commit"`` makes training wait for a snapshot.
        wait_each_step: Let ``step`` return only when the step is durable, so that a kill loses none.
        deadline_seconds: A writer or a rank without progress for that long is an error.
        grace_seconds: After a SIGTERM write for at most so many seconds, from its arrival on, and leave out and name
            the steps that would take longer. By default everything is written.
        direct: False writes through the page cache.
        clip_norm: Clip gradients here, as ``torch.nn.utils.clip_grad_norm_`` does, instead of in the script. Only with
            one optimizer.
        replica: Have a second process do every step as well, in host memory that outlives this process. The disk then
            gets snapshots only. A path replaces ``/dev/shm``.
        remote: s3://BUCKET/PREFIX, to which the run is copied beside training; ``keep`` holds there, too.
        nodes: ``run`` is a directory on each node's own disk, and a partner node keeps a copy of every share. A step is
            then durable when both have it.
        drives: Directories on further SSDs, each for this run alone (created if absent). Bases and log records are
            spread over them and the run's directory in proportion to their rates, which are measured once. All ranks
            give the same list, of directories that all of them see.
        helper_cpus: CPUs for the threads that hash, compress and write, such as ``[6, 7]``. ``"auto"`` takes those that
            no rank of this host is confined to, if there are any. Other threads are not touched.
        disk: Stands in for the file system in tests.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        also: Mapping[str, Any] | None = None,
        after_update: Callable[[], None] | None = None,
        averages: nn.Module | Mapping[str, nn.Module] | None = None,
        codec: Codec | None = None,
        memory: int | str | None = None,
        every: int | Literal["auto"] = 1,
        base_every: int | None = None,
        recovery_seconds: float = 300.0,
        bandwidth_share: float = 0.5,
        mean_seconds_between_failures: float | None = None,
        storage: int | str | None = None,
        keep: Keep | None = None,
        when_behind: Literal["block", "skip", "commit"] = "block",
        wait_each_step: bool = False,
        deadline_seconds: float = 300.0,
        grace_seconds: float | None = None,
        direct: bool = True,
        clip_norm: float | None = None,
        replica: bool | str | Path = False,
        remote: str | None = None,
        nodes: LocalDisks | None = None,
        drives: Sequence[str | Path] = (),
        helper_cpus: HelperCpus = None,
        disk: Any = None,
    ) -> None:
        """Check the arguments and prepare the run. Raises ``BadInput`` or a subclass, with nothing written.

        Collective: every rank must call this.
        """
        keep, codec = Keep() if keep is None else keep, Exact() if codec is None else codec
        self._ranks = ranks = Ranks.here(deadline_seconds)
        run = shared_directory(run, ranks, nodes is not None) if disk is None else run
        remote, nodes, drives = (None, None, ()) if in_drill() else (remote, nodes, drives)
        log = Path(run).absolute() / "events.jsonl"
        self._events = EventLog(log if disk is None and not ranks.rank else None)
        self._remote: Remote | None = None
        with ranks.closing_on_error():
            cpus = chosen_cpus(helper_cpus, ranks, replica)
            with ranks.agreeing():  # an error on one rank is an error on all
                self._options = Options(
                    codec=codec, keep=keep, every=every, base_every=base_every, when_behind=when_behind,
                    memory=DEFAULT_MEMORY if memory is None else memory, has_given_memory=memory is not None,
                    storage=storage, recovery_seconds=recovery_seconds,
                    bandwidth_share=bandwidth_share, deadline_seconds=deadline_seconds, direct=direct,
                    bytes_per_step=BASE_BYTES_PER_STEP, wait_each_step=wait_each_step,
                    grace_seconds=grace_seconds, has_replica=replica is not False,
                    mean_seconds_between_failures=mean_seconds_between_failures, helper_cpus=cpus,
                )  # fmt: skip
                self._events.fit_into(self._options.storage_bytes)
                self._training = TrainingState(
                    ranks, model, optimizer, scheduler=scheduler, loader=loader, scaler=scaler, also=also or {},
                    codec=codec, averages=averages, after_update=after_update,
                )  # fmt: skip
                refuse_of_several(ranks, self._options)
                if replica is not False:
                    optimizers = self._training.optimizers
                    refuse_with_a_replica(ranks, self._options, optimizers, after_update, averages)
                    refuse_replica(replica)
                if disk is None:
                    check_place(run)
                    refuse_foreign_checkpoint(run)
                refuse_bad_drives(run, drives, replica, nodes, disk)
            places = places_of_drives(drives)
            mean = mean_seconds_between_failures
            refuse_unequal(
                ranks, remote=remote, every=every, grace_seconds=grace_seconds, drives=places,
                mean_seconds_between_failures=mean, keep=self._options.keep, wait_each_step=wait_each_step,
            )  # fmt: skip
            refuse_with_nodes(ranks, nodes, replica, disk)
            self._peers = None if nodes is None else NodePeers(ranks, nodes, deadline_seconds, remote)
            try:
                self._training.hook_up()
                self._training.look()
                with ranks.agreeing():
                    refuse_clipping(self._training.state, clip_norm)
                    if ranks.alone:
                        refuse_no_room_for_best(self._options, self._training.state)
                    self._training.state.refuse_unsupported_state()
                    refuse_unrecorded(devices_of(p.parameter for p in self._training.state.parameters))
                    self._backend = self._make_backend(run, replica, drives)
                    self._remote = self._make_remote(run, remote, keep)
                if not is_standby():  # which has the memory of the process that trains, once that has ended
                    self._backend.fit_free_memory()
            except BaseException:
                self._training.release()
                raise
        self._queue = queue_for(drives, self._options.helper_cpus)
        self._store = self._make_store(run, keep=keep, disk=disk, queue=self._queue, direct=direct)
        self._optimizer_hooks = self._backend.optimizer_hooks(self._take_slot, clip_norm)
        self._optimizer_hooks.begins = self._training.begins_step
        self._pulse = StepLog(self._events)
        self._weights: SavedWeights | None = None
        self._sigterm: SigTerm | None = None
        self._failure: BaseException | None = None
        self._has_raised = False
        """True once this rank has told the others an error, which the main thread raises: the script is to see it."""
        self._closed = False
        self._process = os.getpid()
        self._rollback = Rollback(
            self._training, self._backend, self._optimizer_hooks, self._store, self._events
        )
        self._stepping = False
        self._thread = 0
        self._stepped_at = 0.0
        self._witness: Witness | None = None
        """The witness of a drill, from ``resume`` on."""
        self.stall_seconds = 0.0
        """The seconds for which the last step blocked the training thread: copies, ``step()`` itself, waiting for the
        disk.

        The time in which a lossy codec changes gradients counts as training and is not included.
        """

    def _make_backend(
        self, run: str | Path, replica: bool | str | Path, drives: Sequence[str | Path]
    ) -> DurabilityBackend:
        """Return what keeps the steps: log records, or a replica."""
        if replica is False:
            spread = RunDrives(drives, self._ranks)
            return LogBackend(self._training, self._options, self._events, self._peers, spread)
        place = shared_memory.MEMORY if replica is True else home_path(replica)
        return ReplicaBackend(self._training, self._options, self._events, run=run, memory=place)

    def _make_remote(self, run: str | Path, remote: str | None, keep: Keep) -> Remote | None:
        """Return the copy in a bucket that this rank makes: the first rank of all, or of each node, does."""
        if remote is None or not (self._ranks.rank == 0 if self._peers is None else self._peers.leads):
            return None
        streams = None if self._peers is None else self._peers.streams
        return Remote(run, remote, keep if self._ranks.rank == 0 else None, self._events, streams)

    def _make_store(self, run: str | Path, **options: Any) -> LocalStore:
        """Return the run directory: that of all ranks, or that of this node."""
        if self._peers is None:
            return LocalStore(run, **options)
        return NodeStore(run, leads=self._peers.leads, **options)

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps done, skipped ones included."""
        return self._training.steps_done

    @property
    def exactness(self) -> Exactness:
        """The exactness that ``resume`` reached.

        "state": tensors are bit-equal to those of the run at that step. "continuation": the residuals are, too, so that
        training continues bit-equal to a run that was never interrupted. "approximate": records of another kind of
        processor were replayed, so that last bits of tensors differ from the run's.
        """
        return self._training.exactness

    @property
    def durable_step(self) -> int:
        """The newest step that survives power loss, on every rank."""
        return self._backend.durable_step

    @property
    def replica_step(self) -> int:
        """The newest step that survives the death of the processes of all ranks.

        Without a replica this is the ``durable_step``, or with ``every="auto"`` the step of a newer copy in memory.
        With a replica of a trainer on a GPU it may be behind the last step: a step survives once its gradients have
        left the device.
        """
        return self._backend.replica_step

    @property
    def remote_durable_step(self) -> int:
        """The newest step that can be recovered from ``remote=`` alone.

        -1 before there is one, and on all ranks but the first.
        """
        return -1 if self._remote is None else self._remote.durable_step

    def resume(
        self,
        step: int | None = None,
        before: int | None = None,
        exactness: Exactness = "state",
        show: Callable[[RecoveryProgress], None] | None = None,
        source: str | Path | From | None = None,
    ) -> int:
        """Restore model, optimizers and user state to the newest recoverable step, and return the number of steps done.

        Returns 0 in a fresh directory. Call it once, before the first step. Collective: every rank must call this.

        Log records cannot bring residuals of error feedback forward; only snapshots hold them. With
        ``exactness="state"`` residuals therefore begin at zero, with a warning. ``"continuation"`` goes back to the
        newest step from which training continues bit for bit. Records of another kind of processor are refused, because
        their replay here would differ from training in last bits; ``"approximate"`` replays them nevertheless. The
        property ``exactness`` says which of the three was reached.

        Args:
            step: Restore exactly this step.
            before: Restore the newest step before this one.
            exactness: "state", "continuation" or "approximate", see above.
            show: Called with the progress of the recovery; ``holdfast.progress_bar()`` draws it on a terminal.
            source: The state from which a fresh directory begins: another run (RUN or RUN@STEP), or a state of another
                library, written under any parallelism. Ignored by a directory that has steps.

        Raises ``NoCommit`` if there is no such step, ``Damaged`` if no snapshot is whole, and ``RunMismatch`` for
        another model. Raises ``OtherArithmetic`` for records of another kind of processor, and ``Unreadable`` if a
        later step may be in data that the disk does not return; their texts name the step to ask for.
        """
        self._refuse_closed()
        if self._backend.begun:
            raise BadInput(
                "resume is called once, before the first step; make another Checkpointer to go back"
            )
        self._ranks.all_do(lambda: refuse_bad_resume(step, before, exactness))
        start = None if source is None else _as_from(source)
        target = step if before is None else before - 1
        asked = ResumeRequest(
            target, step is not None, exactness == "continuation", show, exactness == "approximate"
        )
        try:
            leads = self._peers is not None and self._peers.leads
            following = self._backend.following(self._store, asked)
            wait_for_run(self._store.root, self._ranks, self._options.deadline_seconds, leads, following)
            if self._peers is None:
                self._ranks.first_does(self._check_remote)
            refuse_other_calls(self._ranks, target, asked.exact, asked.continuing, asked.approximate)
            found = self._backend.enter(self._store, asked)
            if self._peers is not None:  # a new node has the run's timelines now
                self._ranks.all_do(self._check_remote)
            if found is None and target:
                raise BadInput(
                    f"{self._store.root} has no step yet; call resume() without one to begin the run"
                )
            self._go_on_from(found, start, asked.approximate)
            self._backend.begin(found)
            self._begin_saving_weights()
            if found is not None and not self._ranks.rank:
                self._tell_resumed(target)
            self._watch()
            self._say_begun()
        except BaseException:
            self.close(save=False)
            raise
        return self.steps_done

    def _count_from(self, step: int) -> None:
        """Let a fresh run begin after ``step`` instead of 0.

        For integrations whose trainer has loaded a state of that step. Call it before ``resume``, which replaces the
        number where the run has steps.
        """
        assert not self._backend.begun
        self._training.steps_done = step

    def _tell_resumed(self, target: int | None) -> None:
        """Print where the run continues, how it was recovered, and what is known to be lost."""
        lost = describe_lost_steps(self._events.path, self.steps_done) if target is None else "As asked for."
        how = self._backend.recovered_by
        tell(f"{self._store.root} continues after step {self.steps_done:,}{f': {how}' * bool(how)}. {lost}")

    def _go_on_from(self, found: RecoveryResult | None, start: From | None, approximate: bool) -> None:
        """Set the training state to what was found, or else to ``start``, or else to that of the script."""
        if found is not None:
            self._training.continue_from(found)
            self._store.certified_step = self._training.certified_step
        else:
            self._training.begin_anew()
            if start is not None:
                from .sources import begin_from  # imported here, as in _as_from

                begin_from(start, self._training, self._events.emit, approximate)
        self._training.begin_iteration()

    def _begin_saving_weights(self) -> None:
        """Save weights alone where ``keep`` asks for it, also of a step during which the process was killed."""
        if self._options.keep.weights is not None:
            from .saved_weights import SavedWeights  # imported here, as in _as_from

            self._weights = SavedWeights(
                self._store, self._options.keep.weights, self._backend.make_room, self._events.emit
            )
            self._save_weights()

    def _say_begun(self) -> None:
        """Tell a standby's supervisor, or a drill, where the run continues."""
        if not self._ranks.rank:
            say_opened(self._store.root, self.steps_done)
        if isinstance(self._store.root, Path):
            self._witness = Witness.of(self._store.root, self._ranks.rank)
        if self._witness is not None:
            self._witness.begun(self.steps_done, all_digests(self._training.state))

    def _check_remote(self) -> None:
        if self._remote is not None:
            self._remote.check()

    def _watch(self) -> None:
        """Attach the hooks that see every step, and start the copy to the remote."""
        self._thread = threading.get_ident()
        self._optimizer_hooks.attach()
        self._sigterm = SigTerm.watched()
        if self._sigterm is not None and not self._ranks.alone:
            self._sigterm.end_if(self._has_lost_another, self._backend.leave_broken)
        if self._options.grace_seconds is not None:
            self._backend.grace = Grace(self._options.grace_seconds, self._sigterm)
        if self._remote is not None:
            self._remote.start()
        self._stepped_at = time.perf_counter()
        self._events.emit(
            "checkpointer", first_step=self.steps_done, pid=os.getpid(), host=os.uname().nodename,
            ranks=self._ranks.world_size, codec=type(self._training.codec).__name__, **self._backend.about(),
        )  # fmt: skip

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """End the iteration and start writing its log record; with ``wait_each_step`` return once the step is durable.

        An iteration in which no optimizer stepped accumulates gradients, unless the loss scale fell: then it is a
        skipped step.

        Args:
            metrics: What was measured after this step, by name, such as ``{"eval_loss": 2.31}``; the same on all ranks,
                each of which must give it. With ``Keep(best=)`` a step that is among the best becomes a snapshot, which
                is durable on return.

        Raises the error of an earlier write. After an error no further step is recorded. Raises ``BadInput`` for
        ``metrics`` that are no numbers, lack the one of ``Keep(metric=)``, or come where no step ended.
        """
        self._refuse_unusable()
        self._refuse_other_thread()
        measured = None if metrics is None else checked_metrics(metrics, self._options.keep)
        before = self.steps_done
        with self._ending_on_error():  # after an error this step may have no record, so none may follow
            self._stepping = True
            self._step()
            self._stepping = False
        if measured is not None:
            self._note_metrics(measured, is_step=self.steps_done > before)
        if self.steps_done > before:  # in the middle of an accumulation buffers belong to no step
            self._save_weights()
            if self._options.wait_each_step and not self._is_short_of_time:
                self.wait()
            self._meet(stop=self._is_stopping)
            if self._witness is not None:
                digests = all_digests(self._training.state)
                self._witness.stepped(
                    self.steps_done, digests, self._training.now, self.close, lambda: self.durable_step
                )

    def _note_metrics(self, metrics: Mapping[str, float], is_step: bool) -> None:
        """Log ``metrics``, and make a snapshot of the current step if it is to be kept as one of the best.

        Collective: every rank must call this.
        """
        if not is_step:
            raise BadInput(
                "metrics= are of a step, and no optimizer has stepped in this iteration: leave them out"
            )
        self._events.emit("metrics", step=self.steps_done, metrics=dict(metrics))
        if not is_among_best(metrics, self._options.keep, self._store, self._ranks):
            return
        if all(self._ranks.everyone(self._backend.has_time())):
            with self._ending_on_error():
                self._training.measured(metrics)
                self._save_snapshot(again=True)
        elif not self._ranks.rank:
            tell(
                f"{self._store.root}: step {self.steps_done:,} is among the best and is not kept, since a base would"
                " have taken longer than grace_seconds."
            )

    def _step(self) -> None:
        updates = self._optimizer_hooks.take()
        if not self._training.ends_step(bool(updates)):
            return
        if self._training.after_update is not None and updates:
            self._optimizer_hooks.do_after(self._training.after_update, updates)
        started = time.perf_counter()
        self._rollback.begin_step()
        self._training.stepped(updates)
        alone = self._ranks.alone  # the other ranks do not know what one rank finds by itself
        other = alone and self._training.has_replaced_tensors
        lost = (
            self._optimizer_hooks.lost if self._backend.records_steps else ""
        )  # snapshots alone hold any change
        if self._optimizer_hooks.changed or other or (alone and lost):
            self._adapt(updates)
        elif lost:
            self._backend.record_irreproducible(updates, lost)
        else:
            self._backend.record(updates)
        self._optimizer_hooks.end_step()
        self._rollback.end_step()
        self._backend.advance_snapshot()
        self._time(started)

    @property
    def _is_short_of_time(self) -> bool:
        """Return whether ``close`` is to decide what is still written. Ranks wait for each other, so one alone does."""
        return self._ranks.alone and self._backend.grace is not None and self._is_stopping

    def _save_weights(self) -> None:
        """Make a copy of the weights if the current step is to have one. After a SIGTERM the resume makes it."""
        if self._weights is not None and not self._is_stopping and self._weights.is_due(self.steps_done):
            with self._ending_on_error():
                self._weights.make(self._training.state, self.steps_done)

    def _adapt(self, updates: list[Update]) -> None:
        """Keep the step otherwise, since it could not be recorded like those before it, and scan the state again."""
        self._backend.give_back(updates)
        self._training.look_again()
        self._training.check_again(updates)
        self._optimizer_hooks.watch(self._training.state)
        self._backend.adapt()

    def _time(self, started: float) -> None:
        """Note how long the step took and how long training stalled for it.

        ``started`` is when the last part of that stall began.
        """
        now = time.perf_counter()
        seconds, self._stepped_at = now - self._stepped_at, now
        self.stall_seconds, self._optimizer_hooks.seconds = self._optimizer_hooks.seconds + now - started, 0.0
        self._backend.stepped(seconds, self.stall_seconds)
        self._pulse.stepped(self.steps_done, seconds, self.stall_seconds, self._standing)

    def _meet(self, stop: bool) -> None:
        """Do what all ranks do at the same step: end after a SIGTERM to any rank, or make a snapshot."""
        with self._ending_on_error():
            what = self._backend.barrier(stop)
            if what == "base":
                self._save_snapshot()
        if what == "stop":
            self._leave()

    def _leave(self) -> None:
        """Make everything durable after a SIGTERM, as far as ``grace_seconds`` allow, and end the process as the signal
        would have.
        """
        self._events.emit("stopped", signal="SIGTERM", step=self.steps_done)
        if self._backend.grace is not None:
            self._backend.grace.begin()
        self.close()
        raise SystemExit(128 + signal.SIGTERM)

    def save(self) -> None:
        """Make a snapshot of the current step. It is durable when this returns.

        Call it after ``step``, before the next iteration begins. Collective: every rank must call this.
        """
        self._refuse_unusable()
        if self._ranks.alone and self._training.has_changed_since_step():
            self._refuse_between()
            with self._ending_on_error():
                self._adapt([])
                self._rollback.end_step()

        def lacks() -> bool:
            """Return whether the current state has no snapshot yet."""
            self._refuse_between()
            is_there = self._backend.base_step >= self.steps_done and not self._has_moved()
            return not (is_there and self._backend.has_state_in_base())

        self._make_base_if(lacks)
        self._backend.note_saved()

    def wait(self, step: int | None = None) -> None:
        """Return when ``step`` (None: the current one) is durable. Raises the error of a failed write.

        Collective: every rank must call this.
        """
        self._refuse_unusable()
        until = self.steps_done if step is None else step

        def lacks() -> bool:
            """Return whether only a snapshot can make the step durable."""
            if until > self.steps_done:
                raise BadInput(f"step {until} has not been done yet: {self.steps_done} have")
            if self._backend.has(until):
                return False
            self._refuse_between()
            return True

        self._make_base_if(lacks)
        self._backend.wait(until)

    def _make_base_if(self, lacks: Callable[[], bool]) -> None:
        """Make a snapshot of the current step on all ranks if ``lacks`` is true on any of them.

        Ranks may differ in the newest snapshot that they know of. Collective: every rank must call this.
        """

        def look() -> tuple[bool, bool, bool]:
            is_lacking = lacks()
            has_base = self._backend.base_step >= self.steps_done
            return (
                is_lacking,
                is_lacking and (has_base or self._has_moved()),
                is_lacking and self._is_changed(),
            )

        asked = self._ranks.all_do(look)
        if any(lacking for lacking, _, _ in asked):
            with self._ending_on_error():  # the writer may still be reading parameters
                if any(changed for _, _, changed in asked):
                    self._training.forget_metrics()
                self._training.note_again(is_no_place)
                self._save_snapshot(again=any(again for _, again, _ in asked))

    def _save_snapshot(self, again: bool = False) -> None:
        """Make a snapshot of the current step, and accept the state as it is. Collective: every rank must call this."""
        self._backend.save_snapshot(again)
        self._optimizer_hooks.saved()
        self._rollback.end_step()  # the script may have changed what a copy of this step has

    def _is_changed(self) -> bool:
        """Return whether tensors were changed since the last step: in a way that was seen, or else in the base's."""
        has_base = self._backend.base_step >= self.steps_done
        return self._optimizer_hooks.has_changes or (has_base and not self._has_moved())

    def _has_moved(self) -> bool:
        """Return whether a snapshot would differ from the last step, because something was changed since."""
        return self._optimizer_hooks.has_changes or self._training.has_moved

    def rollback(self, step: int | None = None) -> int:
        """Put this process, and all ranks, back to a recorded ``step`` without a restart, and return that step.

        Parameters and buffers are changed in place. Optimizer state, random generators, scheduler, scaler, loader and
        ``also=`` are restored as ``resume`` restores them, and gradients are gone. Steps after ``step`` are abandoned:
        they stay in their own timeline, as after a resume. May be called between two iterations or in the middle of
        one. Collective: every rank must call this.

        Args:
            step: None is the newest step that ``step()`` has ended, so that an unfinished iteration is undone.

        Raises ``NoCommit`` if nothing recorded leads to the step, and ``BadInput`` for what only a new process could
        restore: residuals of error feedback, or a loader that is not its own iterator.
        Nothing is changed then. After any other error the process has to end, and another one resumes. With a replica
        only a snapshot leads to its step, and None is the exception.
        """
        self._refuse_unusable()
        return self._go_back(self.steps_done if step is None else step, keeps_places=False)

    def guard(
        self,
        *,
        max_rollbacks: int = 3,
        spike: float = 20.0,
        norm_spike: float = 50.0,
        window: int = 64,
        copy_every: int | None = None,
    ) -> LossGuard:
        """Return a guard, whose ``check(loss)`` goes back to before a bad loss and passes over the batches since.

        A loss is bad if it is not finite, or if it exceeds the median of the last ``window`` good losses by more than
        ``spike`` times their median absolute deviation. A snapshot is *certified* by a good loss at or after its step,
        with a finite state and equal copies on all ranks; the newest certified one is kept until there is a newer one.
        Call this after ``resume``, on every rank.

        Args:
            max_rollbacks: Rollbacks in a row, without a good loss at a later step, after which ``Diverged`` is raised.
            spike: Number of median absolute deviations above the median.
            norm_spike: Multiple of the median of gradient norms at which a norm is bad, if ``check`` is given norms.
            window: Number of last good values.
            copy_every: Steps between two copies of the whole state into host memory, at least 2. A rollback then takes
                its tensors from the copy, and goes to the copy's step. None goes back by the disk, one step at first.

        Raises ``BadInput`` for bad values, and where ``rollback`` could not be used.
        """
        self._refuse_unusable()
        options = GuardOptions(
            max_rollbacks=max_rollbacks,
            spike=spike,
            norm_spike=norm_spike,
            window=window,
            copy_every=copy_every,
        )
        return self._rollback.guard(
            options, lambda step, why: self._go_back(step, keeps_places=True, why=why)
        )

    def _go_back(self, step: int, keeps_places: bool, why: str = "") -> int:
        """Go back to ``step``; for a guard at least to the oldest snapshot, with positions in data as they are."""
        started, before = time.perf_counter(), self.steps_done
        target = self._rollback.prepare(step, keeps_places, self._refuse_within_step)
        with self._ending_on_error():  # in the middle the state is of no step
            self._rollback.go_back(target, keeps_places)
        self._stepped_at = time.perf_counter()
        self._rollback.report(target, before, self._stepped_at - started, keeps_places, why)
        return target

    def close(self, save: bool = True) -> None:
        """Make everything durable, residuals by a snapshot, and remove all hooks, threads and locks.

        Only DDP's communication hook stays, where there is one, because torch cannot remove it. A second call does
        nothing, nor does a call in a fork of the process. A SIGTERM that arrived after the last ``step`` ends the
        process here.
        """
        if self._closed or self._is_forked:
            return
        self._closed = True
        grace = self._backend.grace
        if save and grace is not None and self._ranks.alone and self._is_stopping:
            grace.begin()
        if save and self._failure is None and self._backend.begun and not self._ranks.rank:
            say_closed(self._store.root)
        self._optimizer_hooks.detach()
        self._training.release()
        try:
            self._finish(orderly=save and self._failure is None)
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._end(save)
        if save and self._is_stopping:
            raise SystemExit(128 + signal.SIGTERM)

    def _finish(self, orderly: bool) -> None:
        """Make everything durable on every rank, unless a failure is the reason to close."""
        try:
            if orderly and not self._optimizer_hooks.updates:
                self._backend.finish()
        finally:
            self._backend.close()
        grace = self._backend.grace
        if orderly and grace is not None and grace.hurries:
            self._tell_left_out(grace)
        elif orderly:
            self._backend.wait_for_all(self.steps_done)

    def _tell_left_out(self, grace: Grace) -> None:
        """Report the steps for which ``grace_seconds`` were too few. Collective: every rank must call this."""
        durable = min(self._ranks.everyone(self._backend.written_step))
        if not self._ranks.rank and (text := grace.describe(durable, self.steps_done)):
            self._events.emit(
                "left_out", step=self.steps_done, durable_step=durable, grace_seconds=grace.seconds
            )
            tell(f"{self._store.root}: {text}")
        if durable >= self.steps_done:
            self._backend.wait_for_all(self.steps_done)

    def _end(self, save: bool) -> None:
        """Detach from the script, the other ranks, the remote copy and the directory."""
        if self._sigterm is not None:
            self._sigterm.restore()
        self._backend.part(orderly=save)
        if self._backend.begun:
            self._pulse.end(self.steps_done, self._standing)
        self._ranks.close()
        try:
            if self._remote is not None:
                grace = self._backend.grace
                hurries = grace is not None and grace.hurries
                self._remote.close(self.steps_done if save and not hurries else None, waits=not hurries)
        finally:
            if not self._backend.is_alive:
                self._let_go()

    def _let_go(self) -> None:
        """Release the queue, the store with its lock, and the event log.

        Not called while the recorder is at work or hangs: the recorder uses these, so they stay until the process ends.
        """
        self._queue.close()
        self._store.close()
        self._backend.release()
        self._events.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        elif not self._is_forked:
            self._tell(error)
            with suppress(Exception):
                self.close(save=False)

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Record any error inside as final: every later call raises it."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """Tell every rank the error that stops this one."""
        if not isinstance(error, RankFailed):
            self._has_raised = True
            self._backend.fail(error)

    def _has_lost_another(self) -> bool:
        return not self._has_raised and self._backend.is_broken()

    def _standing(self) -> dict[str, Any]:
        """Return what is durable, what was written and what waits in memory, for the event log."""
        there = {} if self._remote is None else {"remote_durable_step": self._remote.durable_step}
        return {"durable_step": self.durable_step, **there, **self._backend.standing()}

    def _take_slot(self) -> Any:
        self._refuse_unusable()
        return self._backend.take_slot()

    def _refuse_unusable(self) -> None:
        self._refuse_closed()
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise EngineFailed(
                f"a call was interrupted. Step {self.durable_step} is durable: close this Checkpointer, and"
                " make another to resume"
            )
        self._backend.check()
        if not self._backend.begun:
            raise BadInput("call resume() before the first step: it begins or continues the run")

    def _refuse_between(self) -> None:
        self._refuse_other_thread()
        if self._optimizer_hooks.updates or self._stepping:
            after = "Wait until step() has returned." if self._stepping else "Call step() first."
            raise BadInput(
                f"an optimizer has stepped since step {self.steps_done}, so a base would be of neither step. {after}"
            )
        self._training.refuse_moved_on()

    def _refuse_within_step(self) -> None:
        self._refuse_other_thread()
        if self._stepping or self._optimizer_hooks.is_stepping:
            raise BadInput("rollback was called inside step(). Set a flag there, and go back after step().")

    def _refuse_other_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise BadInput(
                "step(), and what makes a base, is called by the thread that called resume() and trains: another would"
                " copy the state while it changes. Set a flag there, and call save() after step()."
            )

    @property
    def _is_stopping(self) -> bool:
        """True once a SIGTERM has arrived that the script does not handle itself."""
        return self._sigterm is not None and self._sigterm.arrived

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _refuse_closed(self) -> None:
        if self._is_forked:
            raise EngineFailed(
                f"the checkpointer of {self._store.root} belongs to process {self._process}, and this is a fork of it"
            )
        if self._closed:
            raise EngineFailed(f"the checkpointer of {self._store.root} is closed; make another to resume")


def _as_from(source: str | Path | From) -> From:
    """Return ``source`` as options. The readers of all formats are imported only where something is read by them."""
    from .sources import From

    return source if isinstance(source, From) else From(source)
