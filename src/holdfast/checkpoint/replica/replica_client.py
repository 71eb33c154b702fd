"""The trainer's side of a replica: a second process that does every optimizer step after the trainer.

The trainer hands over what each step consumed, in shared memory and over a socket. The other process
(``replica_server``) applies it to its own state, is the run's only writer, and outlives the trainer. ``replica_step``
survives the trainer's death, ``durable_step`` survives power loss. Used in place of a ``Recorder``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

from holdfast import failpoints

from ...accelerators import devices_of
from ...distributed import Ranks
from ...errors import BadInput, Damaged, HoldfastError, RunLocked
from ...events import EventLog
from ...state.live_state import LiveState
from ...store.commit.retention import Keep
from ...store.disk import Disk
from ...store.format.manifest import Point
from ...store.run_store import LocalStore
from ..capture import state_digests
from ..capture.staging_buffers import StagingBuffer
from ..compression.codecs import Exact
from ..coordinator import RankCoordinator
from ..log.recorder import FinalizedStep, too_many_steps
from ..recovery.model_description import describe, refuse_what_cannot_be_rebuilt
from ..recovery.run_recovery import RecoveryResult, recover
from ..user_state import ScriptState
from . import retained_state, shared_memory
from .channel import RING, RecordSender, SharedPool
from .replica_process import ReplicaConfig, ReplicaProcess

LINGER_SECONDS = 600.0
"""The time that a replica waits for another trainer when its own has died and everything is on the disk."""

BASE_EVERY = 100
"""The default number of steps between snapshots."""


class Replica:
    """The replica of the run in ``run``, as its trainer sees it.

    Call order: ``start``, ``recover``, ``begin``; then for each step ``take_slot``, ``put`` and ``advance``.
    """

    def __init__(
        self,
        run: str | Path,
        state: LiveState,
        *,
        memory: Path = shared_memory.MEMORY,
        staging_bytes: int,
        base_every: int | None,
        keep: Keep,
        direct: bool,
        deadline_seconds: float,
        events: EventLog,
        ranks: Ranks,
    ) -> None:
        """Prepare a replica without starting it. Raises ``BadInput`` if ``state`` cannot have one."""
        refuse_what_cannot_be_rebuilt(state)
        if not memory.is_dir():
            raise BadInput(f"replica: {memory} is not a directory. Give replica= one in memory (a tmpfs).")
        self._state, self._base_every, self._events = state, base_every or BASE_EVERY, events
        self._deadline = deadline_seconds
        self._suffix = "" if ranks.alone else f".{ranks.stream}"
        self._place = shared_memory.place_of(run, memory, self._suffix)
        """The directory of the shared-memory store, as ``start`` finds it."""
        self._memory = memory
        self._terms = ReplicaConfig(
            os.path.realpath(run), str(self._place), astuple(keep), direct, staging_bytes, LINGER_SECONDS, os.getpid(),
            failpoints.armed, ranks.rank, ranks.world_size,
        )  # fmt: skip
        self.pool: SharedPool | None = None
        self.last_put = -1
        self._handed = self._done = -1
        """The newest step that the replica has been handed, and the newest that it has done."""
        self._drift: str | None = None
        self._answer: bool | None = None
        """The replica's answer to the last ``equals_trainer``; None until it comes."""
        self._left: list[str] = []
        self._under_way = False
        self._states = 0
        """The number of whole states that were handed over."""
        self._helper = ReplicaProcess(self._hear, deadline_seconds)
        self._post = RecordSender(self._send, devices_of(p.parameter for p in state.parameters))
        self.agreement: RankCoordinator | None = None
        """The agreement with other ranks; None for one process."""
        self._started = False

    @property
    def is_alive(self) -> bool:
        """Return whether the other process may still use what it was given."""
        return self._helper.is_alive

    @property
    def durable_step(self) -> int:
        """The newest step that survives power loss."""
        return self._helper.durable_step

    @property
    def pending(self) -> int:
        """The number of steps that the replica has not done yet."""
        return self.last_put - self._done

    @property
    def replica_step(self) -> int:
        """The newest step that survives the trainer's death."""
        if self._drift is not None or self._helper.failure is not None:
            return self.durable_step
        return max(self._handed, self.durable_step)

    def ring_bytes(self) -> int:
        """Return the bytes of the ring that an earlier replica of the run still has, which ends before this begins."""
        with suppress(HoldfastError, OSError):  # of a run that is not there, or is refused later
            place = shared_memory.place_for(self._terms.run, self._memory, self._key(), self._suffix)
            return os.stat(place / RING).st_blocks * 512
        return 0

    # Start

    def start(self, takes: bool) -> None:
        """Start the process. When this returns the process holds the run's lock, and earlier replicas have finished.

        An earlier replica need not write what it kept if training ``takes`` that. Raises ``RunLocked`` if the run has
        another writer.
        """
        self._make_earlier_ones_leave(takes)
        self._start()

    def _make_earlier_ones_leave(self, takes: bool) -> None:
        """Make earlier replicas of the run finish and end.

        Replicas of another number of ranks write what they can to the disk. Replicas of this run in a directory that
        was moved finish their work and keep it.
        """
        self._place = shared_memory.place_for(self._terms.run, self._memory, self._key(), self._suffix)
        self._terms = replace(self._terms, place=str(self._place))
        for place in self._strays():
            with suppress(RunLocked):  # a copy of this run is training
                retained_state.make_earlier_one_leave(place, self._terms.run, self._deadline, False)
        for place in self._places():
            retained_state.make_earlier_one_leave(
                place, self._terms.run, self._deadline, takes and place == self._place
            )

    def _places(self) -> list[Path]:
        """Return the shared-memory stores of the run on this host, whoever left them."""
        return shared_memory.places_of(self._terms.run, self._memory, self._key())

    def _key(self) -> str:
        """Return the key of the run, as its directory says now; "" before it is begun."""
        with LocalStore(self._terms.run) as reader:
            return reader.run_key()

    def _strays(self) -> list[Path]:
        """Return the shared-memory stores of this rank that may belong to this run, but to another directory."""
        found = shared_memory.strays_of(self._terms.run, self._memory, self._key())
        return [place for place in found if shared_memory.suffix_of(place) == self._suffix]

    def _kept(self, store: LocalStore) -> list[retained_state.RetainedState]:
        """Return the kept states that this rank finds in memory, those of its own store first."""
        return [
            each for place in (self._place, *self._strays()) for each in retained_state.look(place, store)
        ]

    def _told_of_stray(self, own: retained_state.RetainedState) -> list[str]:
        """Return a warning where a step is taken from a shared-memory store that stays as it is."""
        if Path(own.place) == self._place:
            return []
        owner = shared_memory.owner_of(Path(own.place))
        where = "another directory" if owner is None else owner.run
        return [
            f"step {own.last} was in memory of a replica of this run when that was in {where}, and is taken from there."
            f" Remove {own.place} if no copy of the run needs it."
        ]

    def _start(self) -> None:
        self._helper.start()
        self._started = True
        self._helper.send({"terms": asdict(self._terms)})
        self._helper.wait_for_word("entered")

    def recover(
        self, store: LocalStore, script: ScriptState, *, target: int | None, exact: bool, approximate: bool
    ) -> RecoveryResult:
        """Recover as ``recovery.recover`` does, or from memory if a replica kept a step that is at least as new."""
        problems: list[str] = []
        mine = self._kept(store)
        found = retained_state.agreed([mine], retained_state.newest(store, target), target, exact)
        own = None if found is None else retained_state.leading_to(found.step, mine)
        if found is not None and own is not None:
            try:
                with shared_memory.opened(own.path) as memory:
                    loaded = recover(memory, self._state, script, ranks=Ranks())
            except Damaged as error:
                problems.append(f"what the replica kept is not whole: {error}")
            else:
                durable = self._helper.durable_step = retained_state.newest(store, target)
                self._events.emit("resumed", source="replica", step=found.step, durable_step=durable)
                told = loaded.problems + self._told_of_stray(own)
                return RecoveryResult(found, told, progress=loaded.progress)
        recovered = recover(
            store, self._state, script, ranks=Ranks(), target=target, exact=exact, approximate=approximate
        )
        self._helper.durable_step = recovered.point.step
        if target is None and not problems:
            problems = self._not_used(store, recovered.point.step, "which go with other ranks than these")
        return replace(recovered, problems=problems + recovered.problems, same_cut=True, residuals_lost=False)

    def _not_used(self, store: LocalStore, step: int, why: str) -> list[str]:
        """Return a warning if memory has newer steps than ``step``, which was found on the disk."""
        last = retained_state.newest_of(self._places(), store)
        if last <= step:
            return []
        self._events.emit("not_taken", step=step, kept_step=last, why=why)
        return [f"replicas kept steps up to {last} in memory, {why}: the disk was taken, and they go"]

    def begin(self, fork: Point | None, step: int, progress: dict[str, Any], num_slots: int) -> None:
        """Hand over the whole state at ``step``, and begin or continue the run, also after the trainer has gone back.

        When this returns the replica has the state, and the first step of a new run is durable.
        """
        self.last_put = self._handed = self._done = step
        self.sync(self._state, step, progress, num_slots, begin=self._beginning(fork))
        self._clean_up_after_others()
        if fork is None:
            self.wait(step)

    def _clean_up_after_others(self) -> None:
        """Remove what other numbers of ranks left in memory; none of it is on the run's timeline any more."""
        for place in self._places():
            suffix = shared_memory.suffix_of(place)
            if suffix not in self._suffixes() or (suffix == self._suffix and place != self._place):
                shared_memory.remove(place)

    def _suffixes(self) -> list[str]:
        """Return the suffixes of the shared-memory stores of all ranks."""
        return [""]

    def _beginning(self, fork: Point | None) -> dict[str, Any]:
        point = None if fork is None else asdict(retained_state.ForkPoint(fork.step, fork.timeline, fork.key))
        return {"fork": point, "durable": self.durable_step}

    def sync(
        self,
        state: LiveState,
        step: int,
        progress: dict[str, Any],
        num_slots: int,
        again: bool = False,
        **more: Any,
    ) -> None:
        """Hand over the whole of ``state``, whose form may have changed. The replica has it on return.

        ``again`` requests a snapshot even where there is one of the step.
        """
        self.drain()
        if self.pool is not None:
            self.pool.close()
        self._state, self._left, self._under_way = state, [], False
        devices = devices_of(p.parameter for p in state.parameters)
        self.pool = SharedPool(self._place, Exact().layouts(state), num_slots, devices)
        shared_memory.remove(self._place / retained_state.SYNC)
        shared_memory.put(self._place / retained_state.SYNC, state, step, {**progress, **self._mark(state)})
        failpoints.reach("after_state_handed")
        self._drift = None
        ring = {"part_bytes": self.pool.part_bytes, "count": num_slots}
        persist = again or self.durable_step < step
        more |= {"again": True} if again else {}
        self._states += 1
        about = {
            "sync": describe(state), "number": self._states, "step": step, "ring": ring, "needed": persist, **more,
        }  # fmt: skip
        self._hand(about, persist)
        self._helper.wait_for_word("synced", self._wait_for)
        Disk(self._place).unlink(RING)
        shared_memory.remove(self._place / retained_state.SYNC)

    def _mark(self, state: LiveState) -> dict[str, Any]:
        """Return the progress entries that turn a handed-over state into a kept one, where that may be needed."""
        return {}

    def _hand(self, about: dict[str, Any], persist: bool) -> None:
        """Announce the handed-over state. With ``persist`` the replica makes a snapshot of it at once."""
        self._under_way = persist
        self._helper.send({**about, "persist": persist})

    # Every step

    def take_slot(self) -> StagingBuffer:
        """Return a free staging buffer for the next step. Raises the replica's error."""
        assert self.pool is not None
        pool, taken = self.pool, list[StagingBuffer]()

        def tried() -> bool:
            idle = not self.pending
            if (slot := pool.take()) is not None:
                taken.append(slot)
            return idle or bool(taken)

        self._wait_for(tried)
        if not taken:
            raise too_many_steps(pool.count)
        return taken[0]

    def put(self, sealed: FinalizedStep) -> None:
        """Hand over a step. When this returns the step survives the trainer's death.

        A step with copies under way from a device does so once they have arrived, as ``replica_step`` says.
        """
        with self._helper.changed:
            self.last_put = sealed.step
        self._post.put(sealed)

    def _send(self, sealed: FinalizedStep) -> None:
        """Send a step to the replica once its data has arrived."""
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
        self._helper.send(message, data)
        with self._helper.changed:
            self._handed = sealed.step
            self._helper.changed.notify_all()
        failpoints.reach("after_step_handed")

    def _place_of(self, part: memoryview, sealed: FinalizedStep) -> list[int] | None:
        """Return the number of the staging buffer that holds ``part``, and the number of the part in it.

        Returns None if no staging buffer holds it.
        """
        assert self.pool is not None
        for slot in sealed.slots:
            for number, own in enumerate(slot.parts):
                if own is part:
                    return [self.pool.slots.index(slot), number]
        return None

    def advance(self, step: int, progress: Callable[[], dict[str, Any]], most_bytes: int) -> None:
        """Continue the comparison of the state, or begin one when a snapshot is due. Called at the end of ``step``.

        Compares about ``most_bytes``. Hands over the whole state again if the replica has drifted. Raises the replica's
        error.
        """
        self._check()
        if self._drift is not None:
            self._resync(step, progress())
        elif not self._under_way and step - max(self.durable_step, 0) >= self._base_every:
            self._under_way, self._left = True, state_digests.owners(self._state)
        if self._left:
            self._compare(most_bytes)

    def save(self, step: int, progress: Callable[[], dict[str, Any]], again: bool = False) -> None:
        """Compare the whole state, and have the replica make a snapshot of ``step``. It is durable on return.

        ``step`` is the current step. ``again`` is set after a ``sync`` that requested a snapshot.
        """
        if again:
            self._wait_for(lambda: not self._under_way)
        while self.durable_step < step:
            self.drain()
            if self._drift is not None:
                self._resync(step, progress())
            else:
                self._under_way, self._left = True, state_digests.owners(self._state)
                self._compare(1 << 62)
            self._helper.wait_for(lambda: self.durable_step >= step or self._drift is not None)

    def equals_trainer(self) -> bool:
        """Return whether the replica holds the trainer's state as it is now, by all bytes of its tensors.

        Called at a step that the replica has done. Training waits.
        """
        self.drain()
        found = state_digests.take(self._state, state_digests.owners(self._state), 1 << 62)
        self._answer = None
        self._helper.send({"is_equal": found, "values": self._state.values()})
        self._wait_for(lambda: self._answer is not None)
        return bool(self._answer)

    def _compare(self, most_bytes: int) -> None:
        found = state_digests.take(self._state, self._left, most_bytes)
        values = None if self._left else self._state.values()
        self._wait_for_post()
        self._helper.send({"compare": found, "last": not self._left, "values": values})

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
        self.sync(self._state, step, progress, self.pool.count)

    # Going back

    def settle(self, makes_base: bool) -> None:
        """Return when the replica has done every step, and no snapshot is under way.

        With ``makes_base`` there is one of the last step then, unless the replica has drifted. It is of what the
        replica has, and not compared with the trainer, whose state may be in the middle of a step.
        """
        self.drain()
        if self._left:  # the comparison before a snapshot is not complete
            self._left, self._under_way = [], False
        self._wait_for(lambda: not self._under_way or self._drift is not None)
        if makes_base and self.durable_step < self.last_put and self._drift is None:
            self._helper.send({"make_base": True})
            self._wait_for(lambda: self.durable_step >= self.last_put)

    def went_back(self, step: int) -> None:
        """Note that the trainer is at ``step`` again, which a snapshot holds. Called before ``begin``."""
        self._helper.durable_step = step

    # Waiting and shutdown

    def wait(self, step: int) -> None:
        """Return when ``step`` is durable. A snapshot of it must be under way."""
        self._wait_for(lambda: self.durable_step >= step)

    def drain(self) -> None:
        """Return when the replica has done every step."""
        self._wait_for(lambda: not self.pending)

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        self._helper.wait_for(lambda: self._check() or reached(), lambda: not self._is_late)

    @property
    def _is_late(self) -> bool:
        """Return whether a step is on its way from a device, so that the replica does not know of it."""
        return self._handed < self.last_put

    def _wait_for_post(self) -> None:
        """Return when every step has been sent, so that the next message comes after them."""
        self._wait_for(lambda: not self._is_late)

    def _check(self) -> None:
        """Raise the error that keeps training from continuing."""
        self._helper.check()
        self._post.check()  # the replica has what had arrived before

    def close(self) -> None:
        """Let the replica write what it has and end. Raises its error, or the one that kept a step from it."""
        if not self._started:
            return
        self._started = False
        self._post.close()
        try:
            if self._helper.failure is None:
                self._helper.send({"close": True})
        finally:
            try:
                self._helper.end()
            finally:
                if self.pool is not None:  # remove what a killed replica left
                    self._clean_up()
        self._post.check()

    def _clean_up(self) -> None:
        """Remove everything from the shared-memory store but a state that the disk does not have."""
        if self.durable_step < self.last_put and (self._place / retained_state.KEPT).exists():
            Disk(self._place).unlink(RING)
            shared_memory.remove(self._place / retained_state.SYNC)
        else:
            shared_memory.remove(self._place)

    def _hear(self, about: dict[str, Any]) -> None:
        """Process a message of the replica. Called by the thread that listens."""
        if "done" in about:
            assert self.pool is not None
            self._done = about["done"]
            self.pool.give([self.pool.slots[number] for number in about["slots"]])
        elif "base" in about:
            self._helper.durable_step = about["base"]
            if about["of"] == self._states:  # not one that was under way when another state was handed over
                self._under_way = False
        elif "drift" in about:
            self._drift, self._left = about["drift"], []
        elif "is_equal" in about:
            self._answer = about["is_equal"]
