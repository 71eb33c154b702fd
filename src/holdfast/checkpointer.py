"""Checkpointer: every optimizer step of an ordinary training loop can be recovered, bit for bit.

A run is a *base*, which is a commit of the whole state, and the records of the steps since. ``step()`` seals what the
optimizers consumed in the iteration and returns; a thread makes it durable. ``resume()`` loads the newest base and
replays the records. This module only joins: what trains is ``delta.loop``, what is seen of it ``delta.tap``, how its
steps survive ``delta.survival``: by records (``recording``) or by a replica (``replicating``). Sizes are bytes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .accelerators import devices_of, refuse_unrecorded
from .delta import tier
from .delta.codecs import Codec, Exact
from .delta.loop import Loop, is_no_place
from .delta.options import (
    Options,
    refuse_bad_resume,
    refuse_clipping,
    refuse_of_several,
    refuse_other_calls,
    refuse_other_remotes,
    refuse_waiting,
    refuse_with_a_replica,
)
from .delta.pulse import Pulse
from .delta.recording import Recording
from .delta.recovery import Recovered
from .delta.remote import Remote
from .delta.replicating import Replicating
from .delta.sigterm import SigTerm
from .delta.survival import Asked, Survival
from .delta.tap import Update
from .delta.watching import Recovery
from .errors import BadInput, EngineFailed, RankFailed
from .events import EventLog, said_lost, tell
from .io.queue import IOQueue
from .plan.tuner import BASE_BYTES_PER_STEP
from .ranks import Ranks
from .regular import home_path
from .sources import From, begin_from
from .store.local import LocalStore
from .store.places import check_place
from .store.retention import Keep
from .units import GiB


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
    (``"skip"``) or training has waited for one (``"commit"``). A kill loses what is on its way to the disk, 8 steps at
    most; with ``wait_each_step`` none, since ``step`` returns when the step is durable. After a SIGTERM ``step`` makes
    the step durable and ends the process; a script that handles the signal itself is left alone. A context manager.

    ``codec`` is what records hold of gradients: ``Exact()`` without one. ``TopK`` and ``Int8`` change what training
    consumes.

    With ``clip_norm`` gradients are clipped here, as ``torch.nn.utils.clip_grad_norm_`` does, instead of in the script;
    only with one optimizer.
    ``replica`` has a second process do every step as well, in host memory that outlives this one, instead of recording
    steps on the disk, which then has bases only; a path is where it keeps things in memory instead of ``/dev/shm``.

    ``remote``, s3://BUCKET/PREFIX, is where a copy of the run is kept up with beside training; ``keep`` goes for both.

    A writer or a rank that does not get on for ``deadline_seconds`` is an error. ``direct=False`` writes through the
    page cache; ``disk`` stands in for the file system in tests.
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
        wait_each_step: bool = False,
        deadline_seconds: float = 300.0,
        direct: bool = True,
        clip_norm: float | None = None,
        replica: bool | str | Path = False,
        remote: str | None = None,
        disk: Any = None,
    ) -> None:
        """Raises ``BadInput`` and its kin with nothing written."""
        keep, codec = Keep() if keep is None else keep, Exact() if codec is None else codec
        self._ranks = ranks = Ranks.here(deadline_seconds)
        run = home_path(run) if disk is None else run
        log = Path(run).absolute() / "events.jsonl"
        self._events = EventLog(log if disk is None and not ranks.rank else None)
        self._remote: Remote | None = None

        def check() -> None:
            self._options = Options(
                codec=codec, keep=keep, base_every=base_every, when_behind=when_behind, memory=memory, storage=storage,
                recovery_seconds=recovery_seconds, bandwidth_share=bandwidth_share, deadline_seconds=deadline_seconds,
                direct=direct, bytes_per_step=BASE_BYTES_PER_STEP,
            )  # fmt: skip
            self._loop = Loop(
                ranks, model, optimizer, scheduler=scheduler, loader=loader, scaler=scaler, also=also or {},
                codec=codec, averages=averages, after_update=after_update,
            )  # fmt: skip
            refuse_of_several(ranks, when_behind)
            if replica is not False:
                them = self._loop.optimizers
                refuse_with_a_replica(ranks, them, codec, after_update, averages, when_behind, storage)
                refuse_waiting(wait_each_step)
            if disk is None:
                check_place(run)

        def prepare() -> None:
            refuse_clipping(self._loop.state, clip_norm)
            self._loop.state.refuse_odd_state()
            refuse_unrecorded(devices_of(p.parameter for p in self._loop.state.parameters))
            if replica is False:
                self._survival: Survival = Recording(self._loop, self._options, self._events)
            else:
                place = tier.MEMORY if replica is True else home_path(replica)
                self._survival = Replicating(self._loop, self._options, self._events, run=run, memory=place)
            if remote is not None and ranks.rank == 0:
                self._remote = Remote(run, remote, keep, self._events)

        with ranks.closing_on_error(), ExitStack() as undoing:
            ranks.all_do(check)  # what is wrong on one rank is an error on all
            refuse_other_remotes(ranks, remote)
            undoing.callback(self._loop.let_go)
            self._loop.hook_up()
            self._loop.look()
            ranks.all_do(prepare)
            undoing.pop_all()
        self._queue = IOQueue()
        self._store = LocalStore(run, keep=keep, disk=disk, queue=self._queue, direct=direct)
        self._tap = self._survival.tap(self._take_slot, clip_norm)
        self._tap.begins = self._loop.begins_step
        self._pulse = Pulse(self._events)
        self._sigterm: SigTerm | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._process = os.getpid()
        self._wait_each_step = wait_each_step
        self._stepping = False
        self._thread = 0
        self._stepped_at = 0.0
        self.stall_seconds = 0.0
        """How long the last step kept the training thread: copies, ``step()`` itself, and waiting for the disk. What a
        lossy codec does to gradients is training, and not in it."""

    @property
    def steps_done(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return self._loop.steps_done

    @property
    def exactness(self) -> Literal["state", "continuation"]:
        """What ``resume`` reached: tensors bit-equal to those that the run had at that step, and with "continuation"
        also the residuals, so that what follows is bit-equal to a run that was never interrupted."""
        return self._loop.exactness

    @property
    def durable_step(self) -> int:
        """The newest step that survives power loss, on every rank."""
        return self._survival.durable_step

    @property
    def replica_step(self) -> int:
        """The newest step that survives the death of this process, and of all ranks'; without a replica that is the
        ``durable_step``. With a replica of a trainer on a GPU it may be behind the last step:
        one survives when its gradients have left the device."""
        return self._survival.replica_step

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

        Raises ``NoCommit`` if there is no such step, ``Damaged`` if no base is whole, ``Unreadable`` if a later step
        may be in what the disk does not give back, and names the step to ask for, ``RunMismatch`` for another model.
        """
        self._refuse_closed()
        if self._survival.begun:
            raise BadInput(
                "resume is called once, before the first step; make another Checkpointer to go back"
            )
        self._ranks.all_do(lambda: refuse_bad_resume(step, before, exactness))
        start = source if source is None or isinstance(source, From) else From(source)
        target = step if before is None else before - 1
        asked = Asked(target, step is not None, exactness == "continuation", show)
        try:
            self._ranks.first_does(self._check_remote)
            refuse_other_calls(self._ranks, target, asked.exact, asked.continuing)
            found = self._survival.enter(self._store, asked)
            if found is None and target:
                raise BadInput(
                    f"{self._store.root} has no step yet; call resume() without one to begin the run"
                )
            self._go_on_from(found, start)
            self._survival.begin(found)
            if found is not None and not self._ranks.rank:
                self._tell_resumed(target)
            self._watch()
        except BaseException:
            self.close(save=False)
            raise
        return self.steps_done

    def _tell_resumed(self, target: int | None) -> None:
        """Say where the run continues, how it came there, and what is known to be lost."""
        lost = said_lost(self._events.path, self.steps_done) if target is None else "As asked for."
        how = self._survival.recovered_by
        tell(f"{self._store.root} continues after step {self.steps_done:,}{f': {how}' * bool(how)}. {lost}")

    def _go_on_from(self, found: Recovered | None, start: From | None) -> None:
        """Where the run was, or in a fresh one from ``start``, or from where the script is."""
        if found is not None:
            self._loop.go_on(found)
        else:
            self._loop.begin_anew()
            if start is not None:
                begin_from(start, self._loop, self._events.emit)
        self._loop.attend()

    def _check_remote(self) -> None:
        if self._remote is not None:
            self._remote.check()

    def _watch(self) -> None:
        """See every step from here on, and copy what is durable."""
        self._thread = threading.get_ident()
        self._tap.attach()
        self._sigterm = SigTerm.watched()
        if self._remote is not None:
            self._remote.start()
        self._stepped_at = time.perf_counter()
        self._events.emit(
            "checkpointer", first_step=self.steps_done, pid=os.getpid(), host=os.uname().nodename,
            ranks=self._ranks.world_size, codec=type(self._loop.codec).__name__, **self._survival.about(),
        )  # fmt: skip

    def step(self) -> None:
        """End the iteration: the step that it did is on its way to the disk when this returns, and durable with
        ``wait_each_step``. An iteration in which no
        optimizer stepped is one of accumulation, unless the loss scale fell: then it is a skipped step.

        Raises what an earlier write failed with. After an error no step is recorded any more.
        """
        self._refuse_unusable()
        self._refuse_other_thread()
        before = self.steps_done
        with self._ending_on_error():  # of this step there may be no record, so none can follow
            self._stepping = True
            self._step()
            self._stepping = False
        if self.steps_done > before:  # in mid-accumulation buffers are of no step
            if self._wait_each_step:
                self.wait()
            self._meet(stop=self._sigterm is not None and self._sigterm.arrived)

    def _step(self) -> None:
        updates = self._tap.take()
        if not self._loop.ends_step(bool(updates)):
            return
        if self._loop.after_update is not None and updates:
            self._tap.do_after(self._loop.after_update, updates)
        started = time.perf_counter()
        self._loop.stepped(updates)
        alone = self._ranks.alone  # what one of several ranks finds by itself the others do not know of
        other = alone and (self._loop.has_new_buffers or self._loop.state.has_other_buffers())
        if self._tap.changed or other or (alone and self._tap.lost):
            self._adapt(updates)
        elif self._tap.lost:
            self._survival.lose(updates, self._tap.lost)
        else:
            self._survival.record(updates)
        self._tap.settle()
        self._survival.go_on()
        self._time(started)

    def _adapt(self, updates: list[Update]) -> None:
        """The step could not be recorded as those before it: what there is now is kept otherwise."""
        self._survival.give_back(updates)
        self._loop.look_again()
        self._loop.check_again(updates)
        self._tap.watch(self._loop.state)
        self._survival.adapt()

    def _time(self, started: float) -> None:
        """Note what the step took, whose keeping ``started`` then."""
        now = time.perf_counter()
        seconds, self._stepped_at = now - self._stepped_at, now
        self.stall_seconds, self._tap.seconds = self._tap.seconds + now - started, 0.0
        self._survival.stepped(seconds, self.stall_seconds)
        self._pulse.stepped(self.steps_done, seconds, self.stall_seconds, self._standing)

    def _meet(self, stop: bool) -> None:
        """Do what all ranks do at once: end after a SIGTERM to any, or make a base."""
        with self._ending_on_error():
            what = self._survival.meet(stop)
            if what == "base":
                self._survival.whole()
        if what == "stop":
            self._leave()

    def _leave(self) -> None:
        """On SIGTERM: everything is durable, and the process ends as the signal would have ended it."""
        self._events.emit("stopped", signal="SIGTERM", step=self.steps_done)
        self.close()
        raise SystemExit(128 + signal.SIGTERM)

    def save(self) -> None:
        """A base of the present step, which stands alone. Durable when this returns. Called after ``step``, before the
        next iteration begins."""
        self._refuse_unusable()

        def lacks() -> bool:
            """Whether there is no base of the present step, as all is now."""
            self._refuse_between()
            return self._survival.base_step < self.steps_done or self._has_moved()

        self._make_base_if(lacks)

    def wait(self, step: int | None = None) -> None:
        """Return when ``step`` (None: the present one) is durable. Raises what a write failed with."""
        self._refuse_unusable()
        until = self.steps_done if step is None else step

        def lacks() -> bool:
            """Whether only a base makes the step durable."""
            if until > self.steps_done:
                raise BadInput(f"step {until} has not been done yet: {self.steps_done} have")
            if self._survival.has(until):
                return False
            self._refuse_between()
            return True

        self._make_base_if(lacks)
        self._survival.wait(until)

    def _make_base_if(self, lacks: Callable[[], bool]) -> None:
        """Of the present step, on all ranks if any ``lacks`` one: each may know of another newest base."""
        asked = self._ranks.all_do(lambda: (True, self._has_moved()) if lacks() else (False, False))
        if any(lacking for lacking, _ in asked):
            with self._ending_on_error():  # parameters may be read by the writer still
                self._loop.note_again(is_no_place)
                self._survival.whole(again=any(moved for _, moved in asked))
                self._tap.saved()

    def _has_moved(self) -> bool:
        """Whether something was changed since the last step that a base of it would have otherwise."""
        return self._tap.has_changes or self._loop.has_moved

    def close(self, save: bool = True) -> None:
        """Make everything durable, residuals by a base, and leave nothing behind: no hook (but DDP's communication hook
        where there was one, which torch takes off no model), no thread, no lock. A second call does nothing, nor does
        one in a fork of the process. A SIGTERM that came after the last ``step`` ends the process here."""
        if self._closed or self._is_forked:
            return
        self._closed = True
        self._tap.detach()
        self._loop.let_go()
        try:
            self._finish(orderly=save and self._failure is None)
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._end(save)
        if save and self._sigterm is not None and self._sigterm.arrived:
            raise SystemExit(128 + signal.SIGTERM)

    def _finish(self, orderly: bool) -> None:
        """Make durable what is not; on every rank, unless this is the end of a failure."""
        try:
            if orderly and not self._tap.updates:
                self._survival.finish()
        finally:
            self._survival.close()
        if orderly:
            self._survival.wait_for_all(self.steps_done)

    def _end(self, save: bool) -> None:
        """Leave the script, the other ranks, the remote copy and the directory."""
        if self._sigterm is not None:
            self._sigterm.restore()
        self._survival.part(orderly=save)
        if self._survival.begun:
            self._pulse.end(self.steps_done, self._standing)
        self._ranks.close()
        try:
            if self._remote is not None:
                self._remote.close(self.steps_done if save else None)
        finally:
            if not self._survival.is_alive:
                self._let_go()

    def _let_go(self) -> None:
        """Of everything. Not while the recorder is at work, or hangs: what it uses, and the lock, stay as they are then
        until the process ends."""
        self._queue.close()
        self._store.close()
        self._survival.let_go()
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
        """What goes wrong inside is the end: every later call raises it."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """Every rank of what keeps this one from going on."""
        if not isinstance(error, RankFailed):
            self._survival.fail(error)

    def _standing(self) -> dict[str, Any]:
        """What is durable, what was written, and what waits in memory, for the log."""
        there = {} if self._remote is None else {"remote_durable_step": self._remote.durable_step}
        return {"durable_step": self.durable_step, **there, **self._survival.standing()}

    def _take_slot(self) -> Any:
        self._refuse_unusable()
        return self._survival.take_slot()

    def _refuse_unusable(self) -> None:
        self._refuse_closed()
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise EngineFailed(
                f"a call was interrupted. Step {self.durable_step} is durable: close this Checkpointer, and"
                " make another to resume"
            )
        self._survival.check()
        if not self._survival.begun:
            raise BadInput("call resume() before the first step: it begins or continues the run")

    def _refuse_between(self) -> None:
        self._refuse_other_thread()
        if self._tap.updates or self._stepping:
            after = "Wait until step() has returned." if self._stepping else "Call step() first."
            raise BadInput(
                f"an optimizer has stepped since step {self.steps_done}, so a base would be of neither step. {after}"
            )
        self._loop.refuse_moved_on()

    def _refuse_other_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise BadInput(
                "step(), and what makes a base, is called by the thread that called resume() and trains: another would"
                " copy the state while it changes. Set a flag there, and call save() after step()."
            )

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
