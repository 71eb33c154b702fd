"""Checkpointer: every optimizer step of an ordinary training loop can be recovered, bit for bit.

A run is a *base*, which is a commit of the whole state, and the records of the steps since. ``step()`` seals what the
optimizers consumed in the iteration and returns; a thread makes it durable. ``resume()`` loads the newest base and
replays the records. This module only joins: what is seen is ``delta.tap``, what is written ``delta.recorder`` and
``delta.bases``, how it comes back ``delta.recovery``. Sizes are bytes.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from .delta import tier
from .delta.agreement import Agreement
from .delta.allotment import Allotment
from .delta.bases import owned_by
from .delta.codecs import Codec, Exact
from .delta.comm_hook import HookState, hooked
from .delta.entering import begin, enter, look, see_alike
from .delta.holder import replay_info
from .delta.layers import LayerTap
from .delta.leaving import devices_of
from .delta.lossy import Sparse, TopK
from .delta.options import (
    limits_of,
    optimizers_of,
    refuse_bad,
    refuse_bad_resume,
    refuse_clipping,
    refuse_of_several,
    refuse_taken,
)
from .delta.pace import Means, Pace
from .delta.powersgd import LowRank, PowerSGD, PowerState, approximated
from .delta.pulse import Pulse, standing
from .delta.ranks import Ranks
from .delta.recorder import BOUND, Recorder
from .delta.recovery import Recovered, recover, refuse_unless_one_is_whole
from .delta.remote import Remote
from .delta.replica import BesideReplica, Replica, refuse_with_a_replica
from .delta.replicas import Replicas
from .delta.script import Script
from .delta.sealer import Sealer
from .delta.sigterm import SigTerm
from .delta.slots import SlotPool, slots_that_fit
from .delta.tap import Tap, Update
from .delta.together import Together
from .delta.watching import Recovery, announced
from .errors import BadInput, EngineFailed, RankFailed
from .events import EventLog
from .io.queue import IOQueue
from .sources import From, has_records
from .store.files import check_place
from .store.local import LocalStore
from .store.manifest import Point
from .store.retention import Keep
from .store.target import Target
from .units import GiB, MiB, parse_bytes
from .universal.restore import check, restore
from .universal.source import Source
from .update.kinds import is_elementwise

BASE_BYTES_PER_STEP = 64 * MiB
"""Of a base, copied at the end of one step."""


class Checkpointer:
    """The run in directory ``run`` of a training loop: ``resume`` first, then ``step`` last in every iteration.

    ``optimizer`` is one or several; ``scheduler``, ``loader`` and ``scaler`` are what the script uses of such, each
    with ``state_dict`` and ``load_state_dict``; ``also`` has more of that kind, by name. ``after_update`` is called
    after every optimizer step, in replay too; ``averages`` are the modules that it keeps
    (``torch.optim.swa_utils.AveragedModel``), which are then part of the run. ``memory`` bounds the copies that wait to
    be written, ``storage`` what the run takes of the disk: 20 times the state if it is not given. ``base_every`` is the
    number of steps from the beginning of one base to that of the next; without it the number is chosen, and chosen
    again, such that failures cost least and recovery takes no longer than ``recovery_seconds`` and writing no more than
    ``bandwidth_share`` of what the disk can. ``keep`` says which bases stay, with how many of the records. When the
    disk is behind, ``step`` waits (``"block"``), or goes on unrecorded until a base has been made beside training
    (``"skip"``) or training has waited for one (``"commit"``). After a SIGTERM ``step`` makes the step durable and ends
    the process; a script that handles the signal itself is left alone. A context manager.

    ``codec`` is what records hold of gradients: ``Exact()`` without one. ``TopK`` and ``Int8`` change what training
    consumes, ``PowerSGD`` what ranks of ``DistributedDataParallel`` exchange.

    With ``clip_norm`` gradients are clipped here, as ``torch.nn.utils.clip_grad_norm_`` does, instead of in the script.
    ``replica`` has a second process do every step as well, in host memory that outlives this one, instead of recording
    steps on the disk, which then has bases only; a path is where it keeps things in memory instead of ``/dev/shm``.

    ``remote``, s3://BUCKET/PREFIX, is where a copy of the run is kept up with beside training; ``keep`` goes for both.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        also: Mapping[str, Any] | None = None,
        after_update: Callable[[], None] | None = None,
        averages: nn.Module | Mapping[str, nn.Module] | None = None,
        codec: Codec | None = None,
        memory: int | str = 4 * GiB,
        base_every: int | None = None,
        recovery_seconds: float = 300.0,
        bandwidth_share: float = 0.5,
        storage: int | str | None = None,
        keep: Keep | None = None,
        when_behind: Literal["block", "skip", "commit"] = "block",
        deadline_seconds: float = 300.0,
        direct: bool = True,
        clip_norm: float | None = None,
        replica: bool | str | Path = False,
        remote: str | None = None,
        disk: Any = None,
    ) -> None:
        """Raises ``BadInput`` and its kin with nothing written."""
        keep = Keep() if keep is None else keep
        self._codec = Exact() if codec is None else codec
        given = {"scheduler": scheduler, "loader": loader, "scaler": scaler}
        self._ranks = ranks = Ranks.here(deadline_seconds)
        optimizers: list[torch.optim.Optimizer] = []

        def check() -> None:
            optimizers.extend(optimizers_of(optimizer))
            refuse_bad(base_every, when_behind, keep, self._codec)
            if disk is None:
                check_place(run)
            refuse_taken(also or {}, given)
            given.update(also or {})
            self._script = Script(
                optimizers, {name: thing for name, thing in given.items() if thing is not None}
            )
            refuse_of_several(ranks, when_behind)
            if replica is not False:
                refuse_with_a_replica(
                    ranks, optimizers, self._codec, after_update, averages, when_behind, storage
                )
            self._memory = parse_bytes(memory) if isinstance(memory, str) else memory
            self._storage = parse_bytes(storage) if isinstance(storage, str) else storage
            self._limits = limits_of(recovery_seconds, self._storage, self._memory, bandwidth_share, keep)

        ranks.or_close(lambda: ranks.all_do(check))  # what is wrong on one rank is an error on all
        residuals: dict[torch.Tensor, torch.Tensor] = {}
        subspaces: dict[torch.Tensor, torch.Tensor] = {}
        self._hook: HookState | PowerState | None = None
        if isinstance(self._codec, TopK) and not self._ranks.alone:
            self._hook = hooked(model, self._codec, scaler, residuals)
            if self._hook is not None:
                self._codec = Sparse(self._codec, self._ranks.world_size)
        elif isinstance(self._codec, PowerSGD):
            self._hook = approximated(self._ranks, model, self._codec, scaler, residuals, subspaces)
            self._codec = LowRank(self._hook)
        self._look = partial(
            look,
            self._ranks,
            model,
            optimizers,
            averages,
            residuals,
            subspaces,
            own_residuals=self._hook is not None,
        )
        self._state = ranks.or_close(self._look)
        self._scaler, self._after_update = scaler, after_update
        self._base_every, self._when_behind, self._deadline = base_every, when_behind, deadline_seconds
        self._staging_bytes = max(self._memory // 4, BASE_BYTES_PER_STEP)
        self._at_once = after_update is not None or not all(map(is_elementwise, optimizers))
        events = None if disk is not None or self._ranks.rank else Path(run) / "events.jsonl"
        self._events = EventLog(events)
        self._pulse = Pulse(self._events)
        self._replica: Replica | None = None
        self._remote: Remote | None = None

        def prepare() -> None:
            refuse_clipping(self._state, clip_norm)
            self._num_slots = self._slots_that_fit()
            if replica is not False:
                self._replica = (Replica if ranks.alone else Replicas)(
                    run, self._state, memory=tier.MEMORY if replica is True else Path(replica),
                    staging_bytes=self._staging_bytes, base_every=base_every, keep=keep, direct=direct,
                    deadline_seconds=deadline_seconds, events=self._events, ranks=ranks,
                )  # fmt: skip
            if remote is not None and ranks.rank == 0:
                self._remote = Remote(run, remote, keep, self._events)

        ranks.or_close(lambda: ranks.all_do(prepare))
        self._queue = IOQueue()
        self._store = LocalStore(run, keep=keep, disk=disk, queue=self._queue, direct=direct)
        kind = Tap if replica is False else partial(LayerTap, alone=ranks.alone)
        self._tap = kind(self._state, self._codec, self._take_slot, clip_norm)
        self._sealer = Sealer(self._state)
        self._pool: SlotPool | None = None
        self._recorder: Recorder | None = None
        self._agreement: Agreement | None = None
        self._pace: Pace | BesideReplica | None = None
        self._scale = 0.0
        self._stepped_at = 0.0
        self._failure: BaseException | None = None
        self._now: dict[str, Any] = {}
        self._rates: dict[str, float] = {}
        self._sigterm: SigTerm | None = None
        self._closed = False
        self._source: From | None = None
        self.steps_done = 0
        """Optimizer steps done, skipped ones included."""
        self.exactness: Literal["state", "continuation"] = "continuation"
        """What ``resume`` reached: tensors bit-equal to those that the run had at that step, and with "continuation"
        also the residuals, so that what follows is bit-equal to a run that was never interrupted."""
        self.stall_seconds = 0.0
        """How long the last step kept the training thread: copies, ``step()`` itself, and waiting for the disk. What a
        lossy codec does to gradients is training, and not in it."""

    @property
    def durable_step(self) -> int:
        """The newest step that survives power loss, on every rank."""
        if self._agreement is not None and self._replica is None:
            return self._agreement.standing.durable_step
        return self._recorder.durable_step if self._recorder is not None else -1

    @property
    def replica_step(self) -> int:
        """The newest step that survives the death of this process, and of all ranks'; without a replica that is the
        ``durable_step``."""
        return self.durable_step if self._replica is None else self._replica.replica_step

    @property
    def remote_durable_step(self) -> int:
        """The newest step that can be recovered from ``remote=`` alone; -1 before there is one, and on ranks but the
        first."""
        return -1 if self._remote is None else self._remote.durable_step

    def resume(
        self,
        step: int | None = None,
        before: int | None = None,
        exactness: Literal["state", "continuation"] = "state",
        show: Callable[[Recovery], None] | None = None,
        source: str | Path | From | None = None,
    ) -> int:
        """Bring model, optimizers and script to the newest step that can be recovered, or to ``step``, or to the newest
        before the step ``before``. Returns the steps done: 0 in a fresh directory. Called once, before the first step.
        ``show`` is told how it gets on: ``holdfast.progress_bar()`` draws that on a terminal.

        Residuals of error feedback are in bases, and records cannot bring them forward: after the newest record they
        begin at zero, with a warning (``exactness="state"``); ``"continuation"`` goes back to the newest step from
        which training goes on as it did. ``exactness`` of the checkpointer says what was reached.

        A fresh directory begins from ``source``, if there is one: another run (RUN or RUN@STEP), or a state of another
        library, written under any parallelism. A directory that has steps goes on from those.

        Raises ``NoCommit`` if there is no such step, ``Damaged`` if no base is whole, ``RunMismatch`` for another
        model.
        """
        self._refuse_closed()
        if self._recorder is not None:
            raise BadInput(
                "resume is called once, before the first step; make another Checkpointer to go back"
            )
        self._ranks.all_do(partial(refuse_bad_resume, step, before, exactness))
        target, exact = step if before is None else before - 1, step is not None
        self._source = source if source is None or isinstance(source, From) else From(source)
        try:
            self._ranks.first_does(self._check_remote)
            if self._replica is not None:
                self._resume_beside(self._replica, target, exact)
            else:
                self._resume(target, exact, exactness == "continuation", show)
            self._scale = self._scale_now()
            self._tap.attach()
            self._sigterm = SigTerm.watched()
            if self._remote is not None:
                self._remote.start()
            self._tell_beginning()
        except BaseException:
            self.close(save=False)
            raise
        return self.steps_done

    def _check_remote(self) -> None:
        if self._remote is not None:
            self._remote.check()

    def _resume(
        self,
        target: int | None,
        exact: bool,
        continuing: bool,
        show: Callable[[Recovery], None] | None,
    ) -> None:
        store, ranks, found = self._store, self._ranks, None
        recovery = Recovery(announced(self._events.emit, show))
        self._refuse_other_calls(target, exact, continuing)
        enter(store, ranks)
        if store.commits():
            found = recover(
                store, self._state, self._script, ranks=ranks, target=target, exact=exact, continuing=continuing,
                after_update=self._after_update, watch=recovery,
            )  # fmt: skip
            self._rates = recovery.rates
            self._events.emit("recovered", step=found.point.step, **recovery.facts())
        point = self._go_on_after(found, target)
        begin(store, ranks, point)
        self._pool = self._slot_pool(self._num_slots)
        self._recorder = Recorder(
            store.journal(ranks.stream), self._pool, durable_step=self.steps_done,
            group=max(1, len(self._pool.slots) // 2), deadline_seconds=self._deadline, pack=self._codec.pack,
        )  # fmt: skip
        self._pace = self._paced(self._recorder, recovery, same_cut=found is not None and found.same_cut)

    def _resume_beside(self, replica: Replica, target: int | None, exact: bool) -> None:
        """As ``_resume``; the replica writes the run."""
        self._recorder = cast(Recorder, replica)  # it has all of one that is used here
        self._refuse_other_calls(target, exact)
        replica.start()
        see_alike(self._store, self._ranks)
        found = None
        if self._store.commits():
            found = replica.recover(self._store, self._script, target=target, exact=exact)
        point = self._go_on_after(found, target)
        try:
            replica.begin(point, self.steps_done, self._progress(), self._num_slots)
        finally:  # others are told of an error
            self._agreement = replica.agreement
        self._pace = BesideReplica(replica, self._progress, BASE_BYTES_PER_STEP)

    def _refuse_other_calls(self, *asked: Any) -> None:
        """Raise ``BadInput`` unless ``resume`` was called alike on all ranks."""
        calls = self._ranks.everyone(asked)
        if len(set(calls)) > 1:
            told = ", ".join(f"rank {rank} {step}" for rank, (step, *_) in enumerate(calls))
            raise BadInput(
                f"resume was called differently on the ranks (to step: {told}); call it alike on all"
            )

    def _go_on_after(self, found: Recovered | None, target: int | None) -> Point | None:
        """Note where the run goes on, and what was odd; None is a fresh one."""
        if found is None and target:
            raise BadInput(f"{self._store.root} has no step yet; call resume() without one to begin the run")
        if found is None:
            self._state.forget_residuals()  # of what the script did before
            if self._source is not None:
                self._begin_from(self._source)
        else:
            self._note(found)
        if isinstance(self._hook, PowerState):
            self._hook.steps_done = self.steps_done
        self._now = self._script.now()
        return None if found is None else found.point

    def _begin_from(self, start: From) -> None:
        """Bring everything to where ``start`` is, as far as it says; what it does not say is told."""
        target = Target.parse(str(start.path))
        of_line = start.plain and target.timeline is None
        if of_line and self._ranks.first_does(partial(has_records, target.run)):
            with LocalStore(target.run) as store:
                self._ranks.first_does(partial(refuse_unless_one_is_whole, store, target.step))
                found = recover(
                    store, self._state, self._script, ranks=self._ranks, target=target.step,
                    exact=target.step is not None, after_update=self._after_update,
                )  # fmt: skip
            self._note(found)
            return

        opened: list[Source] = []

        def look() -> str:
            opened.append(start.source())
            if not self._ranks.alone:
                check(self._state, opened[0], start)
            return opened[0].path

        if len(paths := set(self._ranks.all_do(look))) > 1:
            raise BadInput(
                f"the ranks would begin from different states, as one was made meanwhile: {', '.join(sorted(paths))}."
                " Say which: RUN@STEP."
            )

        def bring() -> tuple[int, list[str]]:
            source = opened[0]
            self._script.check_place(source.progress, self._ranks.world_size)
            found, complete = restore(self._state, source, start)
            about = found.told()
            for name in self._script.adopt(source.progress, self._ranks.rank):
                about.append(f"it has no {name}; that of the script goes on as it is")
            if not complete:
                about.append("it does not say the hyper-parameters of all groups; the optimizer's stay")
            return source.progress.get("step") or 0, [
                f"{source.path} ({source.format}): {text}" for text in about
            ]

        self.steps_done, told = self._ranks.all_do(bring)[self._ranks.rank]
        self._events.emit("began_from", path=str(start.path), step=self.steps_done, told=told)
        for text in told:
            warnings.warn(f"beginning from {text}", stacklevel=5)

    def _note(self, found: Recovered) -> None:
        self.steps_done = found.point.step
        for text in found.odd:
            warnings.warn(f"resuming after step {self.steps_done}: {text}", stacklevel=5)
        self._judge(found)

    def _judge(self, found: Recovered) -> None:
        """Which exactness is reached. Without the residuals that the point had training goes on otherwise."""
        if not self._codec.error_feedback:
            self._state.forget_residuals()
        elif found.residuals_lost:
            self.exactness = "state"
            warnings.warn(
                f"resuming after step {found.point.step}, state-exact and not continuation-exact: the residuals of"
                " error feedback begin at zero, since records cannot bring those of a base forward. For the newest step"
                ' from which training goes on as it did, call resume(exactness="continuation").',
                stacklevel=5,
            )

    def step(self) -> None:
        """End the iteration: the step that it did is on its way to the disk when this returns. An iteration in which no
        optimizer stepped is one of accumulation, unless the loss scale fell: then it is a skipped step.

        Raises what an earlier write failed with. After an error no step is recorded any more.
        """
        recorder = self._usable()
        before = self.steps_done
        with self._ending_on_error():  # of this step there may be no record, so none can follow
            self._step(recorder)
        if self.steps_done > before:  # in mid-accumulation buffers are of no step
            self._meet(stop=self._sigterm is not None and self._sigterm.arrived)

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """What goes wrong inside is the end: every later call raises it."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._tell(error)
            raise

    def _step(self, recorder: Recorder) -> None:
        updates = self._tap.take()
        scale = self._scale_now()
        if isinstance(self._hook, HookState):
            self._hook.settle()
        if not updates and scale >= self._scale:
            self._scale = scale
            return
        self._scale = scale
        if self._after_update is not None and updates:
            self._after_update()
        started = time.perf_counter()
        self.steps_done += 1
        if isinstance(self._hook, PowerState):
            self._hook.steps_done = self.steps_done
        self._now = self._script.now()
        pace = self._pace
        assert pace is not None
        if self._tap.changed:
            self._adapt(updates)
        elif not pace.recording or any(update.slot is None for update in updates):
            self._give_back(updates)
            pace.lose(self.steps_done)
        else:
            self._put(recorder, pace, updates)
        self._tap.be_last()
        pace.go_on(self.steps_done)
        now = time.perf_counter()
        self.stall_seconds = self._tap.seconds + now - started
        self._tap.seconds = 0.0
        pace.stepped(self.steps_done, now - self._stepped_at, self.stall_seconds)
        self._pulse.stepped(self.steps_done, now - self._stepped_at, self.stall_seconds, self._standing)
        self._stepped_at = now

    def _put(self, recorder: Recorder, pace: Pace | BesideReplica, updates: list[Update]) -> None:
        sealed = self._sealer.seal(self._state, self.steps_done, updates, self._now, pace.base_step)
        if pace.fits(sealed.nbytes):
            recorder.put(sealed)
        else:
            self._give_back(updates)
            pace.go_without_room(self.steps_done)

    def save(self) -> None:
        """A base of the present step, which stands alone. Durable when this returns. Called after ``step``, before the
        next iteration begins."""
        self._usable()
        pace = self._pace
        assert pace is not None
        if any(self._ranks.all_do(self._base_lacks)):  # each may know of another newest base
            with self._ending_on_error():  # parameters may be read by the writer still
                pace.whole(self.steps_done)

    def _base_lacks(self) -> bool:
        """Whether there is no base of the present step."""
        self._refuse_between()
        assert self._pace is not None
        return self._pace.base_step < self.steps_done

    def wait(self, step: int | None = None) -> None:
        """Return when ``step`` (None: the present one) is durable. Raises what a write failed with."""
        recorder, pace = self._usable(), self._pace
        assert pace is not None
        until = self.steps_done if step is None else step

        def lacks() -> bool:
            """Whether only a base makes the step durable."""
            if until > self.steps_done:
                raise BadInput(f"step {until} has not been done yet: {self.steps_done} have")
            if pace.complete or recorder.durable_step >= until:
                return False
            self._refuse_between()
            return True

        if any(self._ranks.all_do(lacks)):
            with self._ending_on_error():
                pace.whole(self.steps_done)
        recorder.wait(until)
        if self._agreement is not None:
            self._agreement.wait(until)

    def close(self, save: bool = True) -> None:
        """Make everything durable, residuals by a base, and leave nothing behind: no hook, no thread, no lock. A second
        call does nothing. A SIGTERM that came after the last ``step`` ends the process here."""
        if self._closed:
            return
        self._closed = True
        self._tap.detach()
        if self._hook is not None:
            self._hook.active = False
        try:
            self._finish(save)
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            if self._sigterm is not None:
                self._sigterm.restore()
            if self._agreement is not None:
                self._agreement.close(orderly=save)
            self._tell_end()
            self._ranks.close()
            try:
                if self._remote is not None:
                    self._remote.close(self.steps_done if save else None)
            finally:
                if self._recorder is None or not self._recorder.is_alive:
                    self._let_go()
        if save and self._sigterm is not None and self._sigterm.arrived:
            raise SystemExit(128 + signal.SIGTERM)

    def _finish(self, save: bool) -> None:
        """Make durable what is not; on every rank, unless this is the end of a failure."""
        if self._recorder is None:
            return
        try:
            if save and self._failure is None and not self._tap.updates:
                self._close_with_base()
        finally:
            with suppress(Exception):  # what failed is told by the next line
                if self._pace is not None:
                    self._pace.close()
            self._recorder.close()
        if self._agreement is not None and save and self._failure is None:
            self._agreement.wait(self.steps_done)

    def _let_go(self) -> None:
        """Of everything. Not while the recorder is at work, or hangs: what it uses, and the lock, stay as they are then
        until the process ends."""
        self._queue.close()
        self._store.close()
        if self._slots is not None:
            self._slots.close()
        self._events.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        else:
            self._tell(error)
            with suppress(Exception):
                self.close(save=False)

    def _meet(self, stop: bool) -> None:
        """Do what all ranks do at once: end after a SIGTERM to any, or make a base."""
        agreement = self._agreement
        if agreement is None:
            if stop:
                self._leave()
            return
        if stop:
            agreement.call(stop=True)
        what = ""
        with self._ending_on_error():
            if agreement.called:
                what = agreement.meet()
            if what == "base":
                assert self._pace is not None
                self._pace.whole(self.steps_done)
        if what == "stop":
            self._leave()

    def _tell(self, error: BaseException) -> None:
        """Every rank of what keeps this one from going on."""
        if self._agreement is not None and not isinstance(error, RankFailed):
            self._agreement.fail(error)

    def _leave(self) -> None:
        """On SIGTERM: everything is durable, and the process ends as the signal would have ended it."""
        self._events.emit("stopped", signal="SIGTERM", step=self.steps_done)
        self.close()
        raise SystemExit(128 + signal.SIGTERM)

    def _take_slot(self) -> Any:
        recorder = self._usable()
        return recorder.take_slot(wait=self._when_behind == "block")

    def _adapt(self, updates: list[Update]) -> None:
        """The step could not be recorded as those before it: a base follows, and then records of what there is now."""
        self._give_back(updates)
        if self._replica is not None:
            self._state = self._look()
            self._tap.watch(self._state)
            self._replica.sync(self._state, self.steps_done, self._progress(), self._slots_that_fit())
            return
        assert self._recorder is not None and isinstance(self._pace, Pace) and self._pool is not None
        self._recorder.settle()
        self._pace.close()
        self._pool.close()
        self._state = self._look()
        self._tap.watch(self._state)
        self._pool = self._slot_pool(self._slots_that_fit())
        self._recorder.use(self._pool)
        self._pace.watch(self._state)
        self._pace.whole(self.steps_done)

    @property
    def _slots(self) -> SlotPool | None:
        """What updates are copied into."""
        return self._pool if self._replica is None else self._replica.pool

    def _give_back(self, updates: list[Update]) -> None:
        assert self._slots is not None
        self._slots.give(list({id(u.slot): u.slot for u in updates if u.slot is not None}.values()))

    def _slots_that_fit(self) -> int:
        """One for each step that may be on its way; fewer, but two at least, where memory is short."""
        return slots_that_fit(
            self._slot_bytes(), self._memory, self._staging_bytes, BASE_BYTES_PER_STEP, BOUND
        )

    def _slot_pool(self, count: int) -> SlotPool:
        devices = devices_of(p.parameter for p in self._state.parameters)
        return SlotPool(self._codec.layouts(self._state), count, devices)

    def _slot_bytes(self) -> int:
        return sum(layout.file_bytes for layout in self._codec.layouts(self._state))

    def _stored_bytes(self) -> int:
        """Of what this rank stores of the state."""
        return sum(atom.nbytes for held in owned_by(self._state).values() for atom, _ in held.values())

    def _paced(self, recorder: Recorder, recovery: Recovery, same_cut: bool) -> Pace:
        """What makes bases. When this returns there is one that records of this cut may follow."""
        store = self._store
        means = Means(
            self._staging_bytes, BASE_BYTES_PER_STEP, self._storage, self._at_once, self._when_behind
        )
        together = None if self._ranks.alone else Together(self._ranks, store, self._events.emit)
        pace = Pace(
            store, self._state, recorder, means, progress=self._progress, emit=self._events.emit,
            restarted=self._sealer.forget, prefix=self._ranks.prefix, together=together,
        )  # fmt: skip
        if together is not None:
            together.room = Allotment(
                self._ranks, store, recorder, self._storage, self._stored_bytes, together.call
            )
            self._agreement = together.agreement = Agreement(
                self._ranks, how_far=lambda: recorder.durable_step, steps_done=lambda: self.steps_done,
                publish=together.publish_shares, follow=store.follow, is_there=store.has_writer,
                alike=together.alike, deadline_seconds=self._deadline,
            )  # fmt: skip
        newest = store.newest_base
        if same_cut and newest is not None:
            pace.go_on_after(newest.step, newest.oldest_step)
        else:
            pace.whole(self.steps_done)
        pace.tune(self._base_every, self._limits, self._slot_bytes())
        if recovery.over:
            pace.recovered(recovery)
        self._stepped_at = time.perf_counter()
        return pace

    def _close_with_base(self) -> None:
        """Where the records do not hold all that there is."""
        pace, residuals = self._pace, self._state.residuals
        if pace is None:
            return
        if residuals and self._recorder is not None:
            self._recorder.settle()  # a base that is under way may be of this very step
        needed = not pace.complete or bool(residuals and pace.base_step < self.steps_done)
        if any(self._ranks.everyone(needed)):  # of several ranks each may know of another newest base
            pace.whole(self.steps_done)

    def _progress(self) -> dict[str, Any]:
        about = replay_info(self._state, self._after_update is not None)
        return {**self._now, "values": self._state.values(), "replay": about, "rates": self._rates}

    def _tell_beginning(self) -> None:
        """The log, of what the run is, for whoever looks at it."""
        assert self._slots is not None
        ring = len(self._slots.slots) * self._slots.slot_bytes
        self._events.emit(
            "checkpointer", first_step=self.steps_done, pid=os.getpid(), host=os.uname().nodename,
            ranks=self._ranks.world_size, codec=type(self._codec).__name__, replica=self._replica is not None,
            memory=self._memory, storage=self._storage, ring_bytes=ring, staging_bytes=self._staging_bytes,
        )  # fmt: skip

    def _tell_end(self) -> None:
        if self._recorder is not None:
            self._pulse.end(self.steps_done, self._standing)

    def _standing(self) -> dict[str, Any]:
        return standing(self.durable_step, self._recorder, self._pace, self._replica, self._remote)

    def _scale_now(self) -> float:
        return self._scaler.get_scale() if self._scaler is not None else 0.0

    def _usable(self) -> Recorder:
        self._refuse_closed()
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise EngineFailed(
                f"a call was interrupted. Step {self.durable_step} is durable: make another Checkpointer to resume"
            )
        if self._agreement is not None:
            self._agreement.check()
        if self._recorder is None:
            raise BadInput("call resume() before the first step: it begins or continues the run")
        return self._recorder

    def _refuse_between(self) -> None:
        if self._tap.updates:
            raise BadInput(
                f"an optimizer has stepped since step {self.steps_done}, so a base would be of neither step."
                " Call step() first."
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineFailed(f"the checkpointer of {self._store.root} is closed; make another to resume")
