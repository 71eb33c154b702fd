"""Replica: the trainer's side of a second process that does every optimizer step after the trainer.

The trainer hands over what each step consumed, in shared memory and over a socket; the other process (``host.py``)
applies it to a state of its own, is the run's only writer, and outlives the trainer. ``replica_step`` is what survives
the trainer's death, ``durable_step`` what survives power loss. Stands where a ``Recorder`` stands otherwise.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import holdfast.errors
from holdfast import failpoints

from ..errors import BadInput, Damaged, EngineFailed, ReplicaDied, RunLocked, WriterHung
from ..events import EventLog
from ..state.live import LiveState
from ..store.files import Disk
from ..store.local import LocalStore
from ..store.manifest import Point
from . import drift, tier
from .channel import Channel, Gone
from .rebuild import describe, refuse_what_cannot_be_rebuilt
from .recorder import Sealed
from .recovery import recover
from .ring import RING, SharedPool
from .script import Script
from .slots import Slot
from .tap import gradient_layouts

LINGER_SECONDS = 600.0
"""How long a replica waits for another trainer when its own has died and everything is persisted."""

KEPT, SYNC, SOCKET = "state", "sync", "socket"
"""In a tier: what a replica kept of a dead trainer's run, what a trainer hands over whole, and where to ask."""


class Process(Protocol):
    """The replica's process, as the trainer that started it sees it."""

    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class Fork:
    """The step that a run continues, wherever its state was found."""

    step: int
    timeline: int
    key: str


@dataclass(frozen=True)
class Terms:
    """What a replica's process is told when it starts. ``memory`` bounds its copies for a base."""

    run: str
    place: str
    retain: int
    direct: bool
    memory: int
    linger_seconds: float
    trainer: int
    failpoint: str


def start_process(sock: socket.socket) -> Process:
    """A process that serves the other end of ``sock``: in a session of its own, so that what ends the trainer does not
    reach it, and with none of its output, which somebody may wait for the end of."""
    source = str(Path(holdfast.errors.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.delta.host", str(sock.fileno())],
        pass_fds=(sock.fileno(),), start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


class Replica:
    """Of the run in ``run``. The order of calls: ``start``, ``recover``, ``begin``; then for each step ``take_slot``,
    ``put`` and ``go_on``."""

    def __init__(
        self,
        run: str | Path,
        state: LiveState,
        *,
        memory: Path = tier.MEMORY,
        staging_bytes: int,
        base_every: int,
        retain: int,
        direct: bool,
        deadline_seconds: float,
        events: EventLog,
    ) -> None:
        """Nothing is started yet. Raises ``BadInput`` if there can be no replica of ``state``."""
        refuse_what_cannot_be_rebuilt(state)
        if not memory.is_dir():
            raise BadInput(f"replica: {memory} is not a directory. Give replica= one in memory (a tmpfs).")
        self._state, self._base_every, self._deadline, self._events = (
            state,
            base_every,
            deadline_seconds,
            events,
        )
        self._place = tier.place_of(run, memory)
        self._terms = Terms(
            os.path.realpath(run), str(self._place), retain, direct, staging_bytes, LINGER_SECONDS, os.getpid(),
            failpoints.armed,
        )  # fmt: skip
        self.pool: SharedPool | None = None
        self.durable_step = -1
        self.last_put = -1
        self._done = -1
        self._synced = -1
        self._said: set[str] = set()
        self._drift: str | None = None
        self._left: list[str] = []
        self._under_way = False
        self._failure: BaseException | None = None
        self._heard = time.monotonic()
        self._changed = threading.Condition()
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the other process may still use what it was given."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending(self) -> int:
        """Steps that the replica has not done yet."""
        return self.last_put - self._done

    @property
    def replica_step(self) -> int:
        """The newest step that survives the trainer's death."""
        if self._drift is not None or self._failure is not None:
            return self.durable_step
        return max(self.last_put, self.durable_step)

    # Beginning

    def start(self) -> None:
        """Start the process. When this returns it has the run's lock, and what was there of an earlier replica is
        finished. Raises ``RunLocked`` if the run has another writer."""
        self._make_earlier_one_leave()
        ours, theirs = socket.socketpair()
        try:
            self._process = start_process(theirs)
        finally:
            theirs.close()
        self._channel = Channel(ours, self._deadline)
        self._thread = threading.Thread(target=self._listen, name="holdfast-replica", daemon=True)
        self._thread.start()
        self._send({"terms": asdict(self._terms)})
        self._wait_for(lambda: "entered" in self._said)

    def _make_earlier_one_leave(self) -> None:
        """An earlier replica of this run finishes with its dead trainer's steps before it answers."""
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(self._place / SOCKET))
            except OSError:  # nobody is there
                return
            channel = Channel(sock)
            message = None
            with suppress(Gone):
                message = channel.receive(self._deadline)
                if message is not None and "busy" not in message.about:
                    channel.receive(self._deadline)  # it ends
            if message is not None and "busy" in message.about:
                raise RunLocked(
                    f"{self._terms.run} is being written by the replica of process {message.about['busy']}, which trains."
                    " Wait for it or stop it."
                )

    def recover(
        self, store: LocalStore, script: Script, *, stream: str, target: int | None, exact: bool
    ) -> tuple[Point, list[str]]:
        """As ``recovery.recover`` from ``store``, unless an earlier replica kept a step that is at least as new."""
        odd: list[str] = []
        kept = self._kept(store, target, exact)
        if kept is not None:
            try:
                with tier.opened(self._place / KEPT) as memory:
                    recover(memory, self._state, script, stream=stream)
            except Damaged as error:
                odd.append(f"what the replica kept is not whole: {error}")
            else:
                self.durable_step = store.line()[0].step
                self._events.emit("resumed", source="replica", step=kept.step, durable_step=self.durable_step)
                return kept, odd
        point, more = recover(store, self._state, script, stream=stream, target=target, exact=exact)
        self.durable_step = point.step
        return point, odd + more

    def _kept(self, store: LocalStore, target: int | None, exact: bool) -> Fork | None:
        """The step that an earlier replica kept, if it is of the run's newest timeline and not older than what
        ``store`` has."""
        place = self._place / KEPT
        if not (place / "commits").is_dir():
            return None
        with tier.opened(place) as memory, suppress(Damaged):
            commits = memory.commits()
            run = memory.load(commits[0]).progress["run"] if commits else None
            timelines = store.timelines()[0]
            if run is None or not timelines or run != [max(timelines), timelines[max(timelines)].key]:
                return None
            kept = Fork(commits[0].step, *run)
            wanted = target is None or kept.step == target or (kept.step < target and not exact)
            newest = max(
                (ref.step for ref in store.line() if target is None or ref.step <= target), default=-1
            )
            return kept if wanted and kept.step >= newest else None
        return None

    def begin(self, fork: Point | None, step: int, progress: dict[str, Any], num_slots: int) -> None:
        """Hand over everything at ``step``. When this returns the replica has it, and a run that begins is durable."""
        self.last_put = self._done = step
        point = None if fork is None else asdict(Fork(fork.step, fork.timeline, fork.key))
        self.sync(self._state, step, progress, num_slots, begin={"fork": point})
        if fork is None:
            self.wait(step)

    def sync(
        self, state: LiveState, step: int, progress: dict[str, Any], num_slots: int, **more: Any
    ) -> None:
        """Hand over the whole of ``state``, which may have another form than before. The replica has it when this
        returns."""
        self.settle()
        if self.pool is not None:
            self.pool.close()
        self._state, self._left, self._under_way = state, [], False
        self.pool = SharedPool(self._place, gradient_layouts(state), num_slots)
        tier.remove(self._place / SYNC)
        tier.put(self._place / SYNC, state, step, progress)
        failpoints.reach("after_state_handed")
        with self._changed:
            self._said.discard("synced")
            self._drift = None
        ring = {"part_bytes": self.pool.part_bytes, "count": num_slots}
        persist = self.durable_step < step
        self._under_way = persist
        self._send({"sync": describe(state), "step": step, "ring": ring, "persist": persist, **more})
        self._wait_for(lambda: "synced" in self._said)
        Disk(self._place).unlink(RING)
        tier.remove(self._place / SYNC)

    # Every step

    def take_slot(self, wait: bool = True) -> Slot:
        """A slot for the next step, when one is free. Raises what the replica failed with."""
        assert self.pool is not None
        slot = self.pool.take()
        started = time.monotonic()
        while slot is None:
            self._check(started)
            if not self.pending and (slot := self.pool.take()) is None:
                raise BadInput(
                    f"{len(self.pool.slots)} optimizer steps were done since step() was called last, and there is no"
                    " room for more in one iteration. Call step() after every optimizer step, or give more memory=."
                )
            slot = slot or self.pool.take(timeout=0.1)
        return slot

    def put(self, sealed: Sealed) -> None:
        """Hand over a step. When this returns it survives the trainer's death."""
        assert self.pool is not None
        places, data = [], bytearray()
        for part in sealed.parts:
            place = self._place_of(part, sealed)
            places.append(place)
            if place is None:
                data += part
        numbers = [self.pool.slots.index(slot) for slot in sealed.slots]
        failpoints.reach("before_step_handed")
        message = {"step": sealed.step, "about": sealed.about, "places": places, "slots": numbers}
        with self._changed:
            self.last_put = sealed.step
        self._send(message, data)
        failpoints.reach("after_step_handed")

    def _place_of(self, part: memoryview, sealed: Sealed) -> list[int] | None:
        """The number of the slot that ``part`` is of, and of the part in it; None if it is of none."""
        assert self.pool is not None
        for slot in sealed.slots:
            for number, own in enumerate(slot.parts):
                if own is part:
                    return [self.pool.slots.index(slot), number]
        return None

    def go_on(self, step: int, progress: Callable[[], dict[str, Any]], most_bytes: int) -> None:
        """At the end of ``step``: compare the next ``most_bytes`` of the state when a base is due, and hand everything
        over anew if the replica has drifted. Raises what the replica failed with."""
        self._check(time.monotonic())
        if self._drift is not None:
            self._resync(step, progress())
        elif not self._under_way and step - max(self.durable_step, 0) >= self._base_every:
            self._under_way, self._left = True, drift.owners(self._state)
        if self._left:
            self._compare(step, most_bytes)

    def save(self, step: int, progress: Callable[[], dict[str, Any]]) -> None:
        """Compare everything, and have the replica make a base of ``step``, the present one. Durable when this
        returns."""
        while self.durable_step < step:
            self.settle()
            if self._drift is not None:
                self._resync(step, progress())
            else:
                self._under_way, self._left = True, drift.owners(self._state)
                self._compare(step, 1 << 62)
            self._wait_for(lambda: self.durable_step >= step or self._drift is not None)

    def _compare(self, step: int, most_bytes: int) -> None:
        found = drift.take(self._state, self._left, most_bytes)
        values = None if self._left else self._state.values()
        self._send({"compare": found, "step": step, "last": not self._left, "values": values})

    def _resync(self, step: int, progress: dict[str, Any]) -> None:
        assert self.pool is not None
        what = self._drift
        warnings.warn(
            f"the replica has drifted: {what}. It is made anew from the trainer at step {step}. Until then step"
            f" {self.durable_step} was what survived; if this happens again, record every step on the disk instead"
            " (leave out replica=).",
            stacklevel=5,
        )
        self._events.emit("drift", step=step, what=what, durable_step=self.durable_step)
        self.sync(self._state, step, progress, len(self.pool.slots))

    # Waiting and ending

    def wait(self, step: int) -> None:
        """Return when ``step``, of which a base is being made, is durable."""
        self._wait_for(lambda: self.durable_step >= step)

    def settle(self) -> None:
        """Return when the replica has done every step."""
        self._wait_for(lambda: not self.pending)

    def close(self) -> None:
        """Let the replica persist what it has and end. Raises what it failed with."""
        if self._channel is None or self._process is None:
            return
        try:
            if self._failure is None:
                self._send({"close": True})
                self._wait_for(lambda: "closed" in self._said)
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure

    def _end(self) -> None:
        """Let go of the process, which is gone when this returns, or was killed for it."""
        assert self._channel is not None and self._process is not None and self._thread is not None
        begun = self.pool is not None
        self._channel.close()
        self._thread.join()
        try:
            self._process.wait(10 if self._failure is None else 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that hangs in the system ends when that lets it
                self._process.wait(10)
        if begun:  # what it left, if it was killed
            tier.remove(self._place)

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        started = time.monotonic()
        with self._changed:
            while not reached():
                self._check(started)
                self._changed.wait(0.1)

    def _check(self, since: float) -> None:
        if self._failure is not None:
            raise self._failure
        silent = time.monotonic() - max(since, self._heard)
        if silent > self._deadline:
            raise WriterHung(
                f"the replica has said nothing for {silent:.0f} s. Step {self.durable_step} is durable, later ones are"
                " not. Check the device that the run is on, and resume in a new process."
            )

    def _send(self, about: dict[str, Any], data: bytes | bytearray = b"") -> None:
        assert self._channel is not None
        try:
            self._channel.send(about, memoryview(data))
        except TimeoutError:
            self._check(-self._deadline)
        except OSError as error:
            self._wait_for_failure()
            raise self._failure or self._died() from error

    def _wait_for_failure(self) -> None:
        """The other end is closed; the thread that listens knows why, or is about to."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, 5)

    # What the replica says

    def _listen(self) -> None:
        assert self._channel is not None
        try:
            while True:
                message = self._channel.receive()
                assert message is not None
                with self._changed:
                    self._heard = time.monotonic()
                    self._hear(message.about)
                    self._changed.notify_all()
        except (Gone, OSError, ValueError):
            pass
        with self._changed:
            if "closed" not in self._said and self._failure is None:
                self._failure = self._died()
            self._changed.notify_all()

    def _hear(self, about: dict[str, Any]) -> None:
        if "done" in about:
            assert self.pool is not None
            self._done = about["done"]
            self.pool.give([self.pool.slots[number] for number in about["slots"]])
        elif "base" in about:
            self.durable_step, self._under_way = about["base"], False
        elif "drift" in about:
            self._drift, self._left = about["drift"], []
        elif "error" in about:
            name, text = about["error"]
            self._failure = getattr(holdfast.errors, name, EngineFailed)(text)
        else:
            self._said |= set(about)

    def _died(self) -> ReplicaDied:
        code = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(5)
        how = f"ended with {code}" if code is None or code >= 0 else f"was ended by signal {-code}"
        return ReplicaDied(
            f"the replica of {self._terms.run} {how} while training went on. Step {self.durable_step} is durable, later"
            " ones are not. Make another Checkpointer to resume."
        )
