"""The server of a replica: it does every step of its trainer, writes the run, and outlives the trainer.

Invariant: only this process writes to the run's directory.

When the trainer dies, the process

1. does all steps that were handed over,
2. keeps the state in the shared-memory store (``shared_memory``), whole and verified by checksums,
3. makes it a snapshot on the disk, unless another trainer takes it meanwhile,
4. releases the run, and waits for another trainer before it cleans up.

If the trainer ends before it has handed over a state, the process makes a snapshot of what an earlier replica kept. The
working state is private memory: if this process is killed as well, nothing of it can be mistaken for whole. Started by
``replica_main``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast import failpoints

from ...accelerators import give_back_unused
from ...distributed import Ranks
from ...errors import HoldfastError, RunLocked
from ...events import EventLog
from ...quantities import shown
from ...state.live_state import LiveState
from ...store.commit.retention import Keep
from ...store.format.manifest import this_writer
from ...store.run_store import LOCK, LocalStore
from ..arithmetic import computing_as, depends_on_products
from ..capture import state_digests
from ..log.log_records import FlatViews, ReplayRecord, apply, clip_as_recorded, fingerprint
from ..log.recorder import InlineRecorder
from ..recovery.model_description import RankState, adopt, rebuild, updating_devices
from ..recovery.run_recovery import BY, recover
from ..snapshot.snapshot_state import beside_records
from ..snapshot.snapshot_writer import SnapshotWriter
from ..user_state import NoScriptState
from . import retained_state, shared_memory
from .channel import Channel, ChannelClosed, Inbox, Message, Ring
from .replica_process import LAST_WORD, ReplicaConfig

PATIENCE_SECONDS = 5.0
"""The longest time that another process may hold the run's lock."""
LOOK_SECONDS = 0.5
"""The interval of checks whether the trainer is alive, where a child of the trainer keeps its socket open."""
BEAT_SECONDS = 1.0
"""Seconds between two heartbeats while a snapshot is written."""


class ReplicaServer:
    """A server for the trainer at the other end of ``channel``."""

    def __init__(self, channel: Channel, terms: ReplicaConfig) -> None:
        self._channel, self._terms, self._place = channel, terms, Path(terms.place)
        self._inbox = Inbox(channel)
        self._events = EventLog(Path(terms.run) / "events.jsonl")
        self._store = self._look()
        self._door: retained_state.ReplicaListener | None = None
        self._state: LiveState | None = None
        self._on_host = False
        """True once the device has lacked memory for the state, which stays on the host from then on."""
        self._views = FlatViews()
        self._ring: Ring | None = None
        self._bases: SnapshotWriter | None = None
        self._step = self._base_step = -1
        self._state_number = 0
        self._progress: dict[str, Any] = {}
        self._base_progress: dict[str, Any] = {}
        self._run: list[Any] = []
        self._equal = False
        """True if the state is whole, and every comparison since it was handed over found it equal."""
        self._begun = self._closing = self._kept = False
        self._beaten, self._unwritten = 0.0, 0
        self._prefix = ""
        """The prefix of the names of chunks."""

    def serve(self) -> None:
        """Serve the trainer until nothing is left to do."""
        try:
            self._enter()
            self._take_place()
            self._say(word="entered")
            while (message := self._next()) is not None:
                self._do(message)
                self._go_on_with_base()
            self._finish()
        except BaseException as error:
            self._tell(error)
            if self._begun and self._equal and not self._kept:  # the disk failed, and not the state
                self._take_what_waits()
                if self._equal:
                    self._keep()
            self._say(word=LAST_WORD)
        finally:
            if not self._kept:
                there = any(
                    (self._place / folder).exists() for folder in (retained_state.KEPT, retained_state.SYNC)
                )
                self._leave_place(self._begun and not (there and self._base_step < self._step))
            self._store.close()
            self._events.close()
        if self._kept:
            self._linger()

    def _enter(self) -> None:
        """Acquire the run's lock. A replica whose trainer was killed at its start holds the lock a moment longer."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self._store.enter()
            except RunLocked:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
                self._store = self._look()

    def _look(self) -> LocalStore:
        return LocalStore(self._terms.run, keep=Keep(*self._terms.keep), direct=self._terms.direct)

    def _take_place(self) -> None:
        """Prepare the shared-memory store. What an earlier replica kept stays there until a state is handed over."""
        shared_memory.make(self._place)
        self._say_owner()
        self._door = retained_state.ReplicaListener(self._place)

    def _say_owner(self) -> None:
        """Write into the shared-memory store which run owns it, by the run's key where that is known."""
        shared_memory.say_owner(self._place, self._terms.run, self._store.run_key())

    # Messages of the trainer

    def _next(self) -> Message | None:
        """Return the next message; None when the trainer is gone, or closes."""
        assert self._door is not None
        while not self._closing:
            alive = os.getppid() == self._terms.trainer
            if alive and self._door.has_client():
                self._door.say_busy(self._terms.trainer)
            try:
                all_read = not alive and not self._inbox.has_more
                message = self._inbox.next(0.02 if alive and self._base_under_way else LOOK_SECONDS)
            except ChannelClosed:
                return None
            if message is not None:
                return message
            self._go_on_with_base()
            if all_read:
                return None
        return None

    def _do(self, message: Message) -> None:
        about = message.about
        if "sync" in about:
            self._take_over(about)
        elif "about" in about:
            self._take_step(message)
        elif "compare" in about:
            self._compare(about)
        elif "is_equal" in about:
            self._say(is_equal=self._equal and not self._differences(about["is_equal"], about["values"]))
        elif "make_base" in about:
            self._make_base(about)
        elif "close" in about:
            self._closing = True

    def _take_over(self, about: dict[str, Any]) -> None:
        """Replace the state by a whole state that the trainer hands over."""
        self._drop_base()
        adopt(about["sync"])
        state = self._loaded(about["sync"])
        if self._ring is not None:
            self._ring.close()
        self._ring = Ring(self._place, about["ring"]["part_bytes"], about["ring"]["count"])
        for device in updating_devices(about["sync"])[:1]:
            self._ring.pin(device)
        if "begin" in about:
            self._end_timeline()
            self._begin(about["begin"])
            self._base_step, self._begun = about["begin"]["durable"], True
        before, self._state, self._views = self._state, state, FlatViews()
        self._step, self._equal = about["step"], True
        self._state_number = about["number"]
        if "again" in about:  # the snapshot of this step lacks something
            self._base_step = min(self._base_step, self._step - 1)
        if self._bases is None:
            self._bases = SnapshotWriter(self._store, state, InlineRecorder(self._beat), self._prefix)
        self._bases.watch(state, is_copy=True)
        if isinstance(before, RankState):
            before.free()
        del before
        for device in updating_devices(about["sync"]):
            give_back_unused(device)
        if not about["needed"]:
            retained_state.drop(self._place)
        self._say(word="synced")
        if about["persist"]:
            self._begin_base()

    def _loaded(self, about: dict[str, Any]) -> LiveState:
        """Return the described state, with the values that were handed over; on the host if the device lacks memory."""
        with shared_memory.opened(self._place / retained_state.SYNC) as store:
            self._progress = retained_state.unmarked(store.load(store.line()[0]).progress)
            try:
                state = rebuild(about, self._on_host)
                recover(store, state, NoScriptState(), ranks=Ranks())
            except torch.OutOfMemoryError:
                self._on_host = True
                state = rebuild(about, on_host=True)
                recover(store, state, NoScriptState(), ranks=Ranks())
        return state

    def _end_timeline(self) -> None:
        """Close the files of an earlier timeline, which the trainer has left by going back."""
        if self._bases is not None:
            self._bases.release()
            self._bases = None
            self._store.close_units()

    def _begin(self, about: dict[str, Any]) -> None:
        """Open the timeline in which the trainer continues."""
        fork = about["fork"]
        self._store.certified_step = self._progress.get("certified")
        about = {BY: "replica", retained_state.REPLICA_IN: str(self._place.parent)}
        self._store.begin(None if fork is None else retained_state.ForkPoint(**fork), about=about)
        self._run = [self._store.opened.id, self._store.opened.key]
        self._say_owner()

    def _parts_of(self, message: Message) -> list[memoryview]:
        """Return the memory of the parts of a step."""
        assert self._ring is not None
        places = message.about["places"]
        return [message.data if place is None else self._ring.parts(place[0])[place[1]] for place in places]

    def _take_step(self, message: Message) -> None:
        """Do a step as the trainer did it, and compare the fingerprints."""
        assert self._state is not None
        about = message.about
        if self._equal:
            record, parts = about["about"], self._parts_of(message)
            self._equal = False  # until the step is complete
            failpoints.reach("before_replica_update")
            try:
                with computing_as(
                    record["progress"].get("computing", {}), depends_on_products(self._state, None)
                ):
                    clip_as_recorded(record, parts)
                    apply(self._state, [ReplayRecord(record, parts)])
                failpoints.reach("after_replica_update")
                standing = {**self._state.standing(), **beside_records(self._progress)}
                self._step, self._progress = about["step"], {**record["progress"], **standing}
                self._equal = record["fingerprint"] == fingerprint(
                    self._state.stored, self._step, self._views
                )
            except torch.OutOfMemoryError:
                if self._on_host:
                    raise
                self._on_host = True
                self._say(
                    drift=f"the device had no memory for step {about['step']}; its state goes to the host"
                )
            else:
                if not self._equal:
                    self._say(drift=f"after step {self._step} its fingerprint is another one")
        self._say(done=about["step"], slots=about["slots"])

    def _compare(self, about: dict[str, Any]) -> None:
        """Compare some tensors; after the last ones make a snapshot of a state that was found equal."""
        if not self._equal:
            return
        keys = self._differences(about["compare"], about["values"] if about["last"] else None)
        if keys:
            self._equal = False
            self._say(drift=f"at step {self._step} {shown(keys, 1)} differs")
        elif about["last"]:
            self._begin_base()

    def _differences(self, digests: state_digests.Digests, values: Any) -> list[str]:
        """Return what differs from the trainer's tensors and, unless None, from its ``values`` that are no tensors."""
        assert self._state is not None
        keys = state_digests.different(self._state, digests)
        if values is not None and values != self._state.values():
            keys.append("values that are no tensors")
        return keys

    def _make_base(self, about: dict[str, Any]) -> None:
        """Make a snapshot without a comparison, unless the state is known to differ."""
        if self._equal:
            self._begin_base()

    # Snapshots

    @property
    def _base_under_way(self) -> bool:
        return self._bases is not None and self._bases.under_way

    def _begin_base(self) -> None:
        """Begin a snapshot of the current step: from a copy where memory allows, otherwise while steps wait."""
        assert self._bases is not None and self._state is not None
        if self._base_under_way:
            self._publish()
        if self._base_step == self._step:
            self._say(base=self._base_step, of=self._state_number)
            return
        self._base_progress = {**self._progress, **self._state.standing()}
        self._bases.begin()
        while self._bases.left_bytes <= self._terms.memory:
            self._bases.stage(self._step, self._bases.left_bytes)
            if self._bases.all_staged:
                return
        while not self._bases.all_staged:
            if self._is_taken():
                return
            self._bases.write_next(self._step)
        self._publish()

    def _go_on_with_base(self) -> None:
        if self._base_under_way and not self._copies_left():
            self._publish()

    def _publish(self) -> None:
        assert self._bases is not None
        self._store.certified_step = self._base_progress.get("certified")
        self._base_step = self._bases.publish(self._base_progress, again=True).step
        self._bases.end()
        if not self._kept:
            retained_state.drop(self._place)
        self._events.emit("base", step=self._base_step, durable_step=self._base_step)
        self._say(base=self._base_step, of=self._state_number)

    def _copies_left(self) -> int:
        """Return the bytes of the snapshot's copies that are still to be written.

        A disk that accepts some of them is slow, and does not hang; so this sends a heartbeat then.
        """
        left = 0 if self._bases is None else self._bases.memory_bytes
        if left < self._unwritten:
            self._beat()
        self._unwritten = left
        return left

    def _beat(self) -> None:
        """Send the trainer a heartbeat at most once in ``BEAT_SECONDS``, while a snapshot is written."""
        now = time.monotonic()
        if now > self._beaten + BEAT_SECONDS:
            self._beaten = now
            self._say(beat=self._step)

    def _drop_base(self) -> None:
        if self._bases is not None:
            self._bases.give_up()

    # Shutdown

    def _finish(self) -> None:
        """Keep and publish what was handed over, after the trainer has closed or died.

        The kept state becomes a snapshot as well, unless another trainer takes it meanwhile; the next snapshot is then
        that trainer's.
        """
        if not self._begun:
            self._persist_what_was_left()
        if self._begun and self._equal and not self._closing:  # kept first, whatever the disk does
            self._keep()
        self._publish_unless_taken()
        if self._begun and self._equal and self._base_step < self._step and not self._is_taken():
            self._begin_base()
            self._publish_unless_taken()
        if self._closing:
            self._say(word=LAST_WORD)

    def _persist_what_was_left(self) -> None:
        """Make a snapshot of the state that the trainer was to continue from, but had not handed over.

        Skipped if the next trainer takes the state, since nobody waits for the disk any more.
        """
        assert self._door is not None
        try:
            step = retained_state.persist(self._place, self._store, self._beat, self._door.is_taken)
        except (HoldfastError, OSError) as error:
            return self._events.emit("not_persisted", why=str(error))
        if step is not None:
            shared_memory.remove(self._place)
            self._events.emit("base", step=step, durable_step=step)

    def _publish_unless_taken(self) -> None:
        """Publish the snapshot under way once it is written, unless another trainer takes the state."""
        while self._copies_left() and not self._is_taken():
            time.sleep(0.01)
        if self._base_under_way and not self._is_taken():
            self._publish()

    def _is_taken(self) -> bool:
        """Return whether the state is kept, and another trainer waits to continue from it."""
        return self._kept and self._door is not None and self._door.is_taken()

    def _take_what_waits(self) -> None:
        """Do the steps that were handed over before the trainer could learn of a failure."""
        with suppress(ChannelClosed):
            while True:
                all_read = not self._inbox.has_more
                message = self._inbox.next(0.02)
                if message is not None and "about" in message.about:
                    self._take_step_late(message)
                elif message is None and all_read:
                    return

    def _take_step_late(self, message: Message) -> None:
        self._take_step(message)

    def _keep(self) -> None:
        """Keep the state in the shared-memory store. The event log says so if there is no room."""
        assert self._state is not None
        failpoints.reach("before_replica_kept")
        progress = {**self._progress, "values": self._state.values()}
        try:
            self._put_aside(progress)
        except (HoldfastError, OSError, RuntimeError) as error:  # the last is a device's
            retained_state.drop(self._place)
            self._events.emit("not_kept", step=self._step, durable_step=self._base_step, why=str(error))
            return
        self._kept = True
        failpoints.reach("after_replica_kept")
        self._events.emit("kept", step=self._step, durable_step=self._base_step)

    def _put_aside(self, progress: dict[str, Any]) -> None:
        assert self._state is not None
        retained_state.keep(self._place, self._state, self._step, progress, self._run)

    def _say(self, **about: Any) -> None:
        """Send a message to the trainer, if it is still there."""
        with suppress(OSError):
            self._channel.send(about)

    def _tell(self, error: BaseException) -> None:
        """Report ``error`` to the trainer, if it is still there, and to the event log."""
        name = type(error).__name__ if isinstance(error, HoldfastError) else "EngineFailed"
        text = str(error) if isinstance(error, HoldfastError) else f"the replica failed with {error!r}"
        self._say(error=[name, text])
        self._events.emit("replica_failed", error=text, trace=traceback.format_exc())

    def _linger(self) -> None:
        """Wait for another trainer, which can load what was kept. If none comes, remove what the disk has as well."""
        assert self._door is not None
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        with suppress(SystemExit):
            if self._door.has_client(self._terms.linger_seconds):
                return self._door.leave()
        with suppress(HoldfastError):  # another process may be at work in the run by now
            lock = self._store.disk.lock(LOCK, this_writer())
            try:
                self._leave_place(self._base_step >= self._step)
            finally:
                lock.release()

    def _leave_place(self, remove: bool) -> None:
        """Stop listening, and remove the shared-memory store if ``remove`` is set."""
        if self._door is not None:
            self._door.close()
        if remove:
            shared_memory.remove(self._place)
