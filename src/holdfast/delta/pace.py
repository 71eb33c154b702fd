"""Pace: when bases are made, and what happens when the disk is behind or full.

A base is due so many steps after the last one was begun; the number is told or the ``Tuner``'s. Its units are copied at
the ends of the steps that follow, as the time of a step and the memory allow. Where steps could not be recorded there
is a *gap*, which ends with a base: one that training waits for (``"block"``, ``"commit"``), or one made beside it with
records again from its beginning (``"skip"``, unless that has failed once). Called by the training thread; bytes.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ..plan.cadence import STORAGE_FULLS, Limits
from ..plan.tuner import FIRST_STEPS, Tuner, prior
from ..state.live import LiveState
from ..store.local import LocalStore
from ..units import format_bytes
from .allotment import LEAST_STORAGE, left_bytes
from .bases import BaseMaker
from .recorder import Recorder, Task
from .together import Together
from .watching import Recovery

POLICIES = ("block", "skip", "commit")

PRIOR_BYTES_PER_SECOND = 500_000_000.0
"""Believed of the disk by a process that has written no base yet."""


@dataclass(frozen=True)
class Means:
    """What bases may take."""

    staging_bytes: int
    """Of copies that wait to be written."""
    bytes_per_step: int
    """Copied at the end of one step."""
    storage_bytes: int | None = None
    """Of the disk, for the whole run; None is ``STORAGE_FULLS`` times the state, or ``LEAST_STORAGE``, besides what is
    kept for good."""
    of_one_step: bool = False
    """All units of a base are of one step. Several ranks wait for such a base, since no two copy at the same step."""
    when_behind: str = "block"


class Pace:
    """Makes the bases of a run. ``progress`` gives that of the present step, ``emit`` writes an event, ``restarted`` is
    told when records begin anew. With ``together`` a base is that of several ranks, of which this one has ``prefix``'s
    part."""

    def __init__(
        self,
        store: LocalStore,
        state: LiveState,
        recorder: Recorder,
        means: Means,
        *,
        progress: Callable[[], dict[str, Any]],
        emit: Callable[..., None],
        restarted: Callable[[], None],
        prefix: str = "",
        together: Together | None = None,
    ) -> None:
        self._store, self._state, self._recorder, self._means = store, state, recorder, means
        self._progress = progress if together is None else lambda: together.alike.marked(progress())
        self._emit, self._restarted = emit, restarted
        self.bases = BaseMaker(store, state, recorder, prefix, self._set_cap)
        self._together = together
        self.tuner: Tuner | None = None
        self.base_step, self._begun_at = -1, 0
        self._losses_when_shared = 0
        self._again = False
        """Whether all ranks make another base after the next step, since one did not make room enough."""
        self.gap = False
        """Whether steps are not recorded, or their records follow a base that is not there yet."""
        self._losses = self._losses_at_begin = 0
        self._failed_beside = False
        """Whether a base that was to end the gap could not be made beside training: the next one is waited for."""
        self._published: deque[int] = deque()
        self._told: dict[BaseMaker | Recorder, tuple[int, float]] = {self.bases: (0, 0.0), recorder: (0, 0.0)}
        self._stall = self._stall_of_base = 0.0
        self._num_stages = 0
        self._dropped = 0

    @property
    def recording(self) -> bool:
        """Whether the record of the present step is of use."""
        self._see_published()
        return not self.gap or self._held

    @property
    def complete(self) -> bool:
        """Whether every step done is durable, or on its way to be."""
        self._see_published()
        return not self.gap

    @property
    def _held(self) -> bool:
        """Whether steps are recorded for a base that is under way, which is to end the gap."""
        return self.gap and self.bases.under_way and self._losses == self._losses_at_begin

    def go_on_after(self, base_step: int, begun_at: int) -> None:
        """The newest base there is."""
        self.base_step, self._begun_at = base_step, begun_at

    def watch(self, state: LiveState) -> None:
        """From here on bases are of ``state``. None is under way."""
        self._state = state
        self.bases.watch(state)

    def go_on(self, step: int) -> None:
        """At the end of ``step``: copy the next units of a base that is under way, begin one that is due."""
        started = time.perf_counter()
        bases = self.bases
        self._see_published()
        if self._together is not None:
            self._together.alike.go_on(self._state, step)
        if self._again:
            self.whole(step)
        elif self.gap and (self._together is not None or not bases.under_way):
            self._end_gap(step)
        elif self._at_once:
            if self._is_time(step):
                self.whole(step)
        elif self._is_due(step):
            if self._together is not None:
                self._together.alike.begin(self._state, step)
            self._begin(step)
        if bases.under_way and not bases.all_staged:
            self._stage(step)
        self._stall = time.perf_counter() - started
        self._stall_of_base += self._stall

    @property
    def _at_once(self) -> bool:
        """Whether training waits for every base: only so are all parts of all ranks of one step."""
        return self._together is not None and self._means.of_one_step

    def _is_time(self, step: int) -> bool:
        assert self.tuner is not None
        return step - self._begun_at >= self.tuner.steps

    def _is_due(self, step: int) -> bool:
        due = not self.bases.under_way and self._is_time(step)
        return due if self._together is None else self._together.is_due(due, self.bases)

    def whole(self, step: int, again: bool = False) -> None:
        """A base of ``step``, the present one, unit after unit, durable when this returns; ``again`` if one of this
        step does not hold what there is now. Called on all ranks."""
        self._recorder.settle()
        self._see_published()
        self._restarted()
        there = self.base_step == step and self._together is None  # one that was made beside training
        if there and not again:
            self.gap = False
            return
        if self._together is not None:
            self._together.nothing_else()
        self.bases.give_up()
        if self._together is not None:
            self._recorder.settle()
            self._together.room.divide()
            self._together.alike.compare(self._state, step)
        self._begin(step)
        while not self.bases.all_staged:
            self.bases.write_next(step)
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

    def lose(self, step: int, why: str = "the disk is behind") -> None:
        """The present step is not recorded: only a base made after it can follow."""
        if not self.bases.all_staged:
            self.bases.give_up()  # the records that would bring its units to one step have ended
        self._losses += 1
        if self.gap:
            return
        self.gap = True
        agreement = None if self._together is None else self._together.agreement
        durable = self._recorder.durable_step if agreement is None else agreement.standing.durable_step
        self._emit("gap", step=step, durable_step=durable, why=why)
        warnings.warn(
            f"step {step} was not recorded, since {why}: step {durable} is durable, and the next that will be is that"
            " of the next base",
            stacklevel=5,
        )

    def go_without_room(self, step: int) -> None:
        """The record of the present step is not within the storage cap: a base of it makes room, now or when the disk
        has caught up."""
        store = self._store
        if self._again:  # there is a base of this very step in a moment
            return
        self._emit(
            "storage", step=step, cap=store.cap_bytes, used=store.used_bytes, policy=self._means.when_behind
        )
        if self._means.when_behind == "block" and self._together is None:
            self.whole(step)
        else:
            self.lose(step, f"its record is not within storage = {format_bytes(store.told_cap_bytes)}")

    def fits(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` may be written within the storage cap. Older bases go for it."""
        if self.tuner is not None:
            self.tuner.records_are(nbytes)
        nbytes += self._recorder.header_bytes  # about
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
        """From here on bases are due as ``told``, or as ``limits`` allow. There is a base."""
        bases = self.bases
        full = bases.full_bytes or self._store.newest_bytes
        rate = bases.written_bytes / bases.write_seconds if bases.written_bytes else PRIOR_BYTES_PER_SECOND
        believed = prior(full, record_bytes, self._means.bytes_per_step, rate)
        if self._at_once:  # all ranks have to find the same step by themselves
            told = told or FIRST_STEPS
        self.tuner = Tuner(told, limits, believed)
        self._recorder.expect(self.tuner.steps)
        if self._together is not None:
            self._together.room.divide()
        self._set_cap(full)
        self.tuner.restarted(*self._store.restarts())

    def recovered(self, recovery: Recovery) -> None:
        """What the resume took, before the first step."""
        assert self.tuner is not None
        self.tuner.replayed(
            recovery.loaded_bytes, recovery.load_seconds, recovery.replayed_records, recovery.replay_seconds
        )

    def stepped(self, step: int, seconds: float, stall: float) -> None:
        """``step`` has taken ``seconds`` since the one before, and training waited for ``stall`` of them."""
        tuner = self.tuner
        if tuner is None:
            return
        self._tell_dropped()
        tuner.stepped(seconds - stall, max(stall - self._stall, 0.0))
        change = tuner.retuned()
        if change is not None:
            self._emit(
                "cadence", step=step, base_every=change.steps, was=change.was, binding=change.binding,
                relaxed=change.relaxed, measured=asdict(change.measured),
            )  # fmt: skip

    def close(self) -> None:
        """Nothing is put any more: forget a base of which not all is copied."""
        if not self.bases.all_staged:
            self.bases.give_up()

    def _end_gap(self, step: int) -> None:
        if self._together is not None:
            self._together.call()
            return
        if self._recorder.pending:
            return
        if self._means.when_behind == "skip" and not self._means.of_one_step and not self._failed_beside:
            self._failed_beside = True  # until it is published
            self._recorder.hold()
            self._restarted()
            self._begin(step)
        else:
            self.whole(step)

    def _begin(self, step: int) -> None:
        self._begun_at, self._losses_at_begin = step, self._losses
        self.bases.begin()
        if self.tuner is not None:
            self._recorder.expect(self.tuner.steps)
        self._set_cap(self.bases.full_bytes)

    def _set_cap(self, full_bytes: int) -> None:
        """What the run may take of the disk: as told, or what is kept for good and so many times the state."""
        for_good, told = self._store.for_good_bytes, self._means.storage_bytes
        if self._together is not None:
            self._together.room.default(full_bytes)
            cap = self._store.cap_bytes
        else:
            cap = max(STORAGE_FULLS * full_bytes, LEAST_STORAGE) + for_good if told is None else told
            self._store.cap_bytes = cap
        if cap is not None and self.tuner is not None:
            self.tuner.limits = replace(self.tuner.limits, storage_bytes=max(cap - for_good, 1))

    def _stage(self, step: int) -> None:
        """Copy units of the base that is under way, as many as the time of a step and the memory allow."""
        bases, means = self.bases, self._means
        room = means.staging_bytes - bases.memory_bytes
        self._num_stages += 1
        together = bases.left_bytes if means.of_one_step else bases.late_bytes
        if together > means.staging_bytes:
            self.whole(step)  # no room for a copy of all that must be of one step: training waits
            return
        if together == bases.left_bytes:
            if together <= room:
                bases.stage(step, together)
        elif bases.next_bytes > means.staging_bytes:
            bases.write_next(step)  # likewise for one that is larger than all copies may be
        elif bases.next_bytes <= room:
            bases.stage(step, min(max(means.bytes_per_step, bases.next_bytes), room))
        if bases.under_way and bases.all_staged:
            if self._together is not None:
                self._together.sharing, self._losses_when_shared = True, self._losses
            self._recorder.put(Task(partial(self._publish, self._progress(), self._losses)))

    def _publish(self, progress: dict[str, Any], losses: int, again: bool = False) -> None:
        """Make the base a commit, in place of one of its step if that is there and made ``again``. On the recorder's
        thread, when the records up to it are durable."""
        if self._together is not None:
            self._together.share(self.bases.share(progress))
            return
        self.base_step = self.bases.publish(progress, again).step
        self._recorder.restart(self.base_step)
        self._published.append(losses)
        self.bases.end()  # the training thread finds it published, and not one that is given up
        self._emit("base", step=self.base_step, durable_step=self._recorder.durable_step)

    def _see_published(self) -> None:
        """A base ends the gap if no step was lost since its last unit was copied."""
        if self._together is not None and (step := self._together.see_published(self.bases)) is not None:
            self.base_step = step
            self._published.append(self._losses_when_shared)
            self._recorder.put(Task(self._store.measure, at_once=True))
        if not self._published:
            return
        if self._published.popleft() == self._losses:
            self.gap = self._failed_beside = False
        if self.tuner is not None and self._num_stages:  # not one that was asked for
            self._tell_written(self.tuner)
            self.tuner.based(self.bases.full_bytes, self._num_stages, self._stall_of_base)
        self._stall_of_base, self._num_stages = 0.0, 0

    def _is_room(self, nbytes: int) -> bool:
        return nbytes + self._margin(nbytes) <= left_bytes(self._store, self._recorder)

    def _margin(self, nbytes: int) -> int:
        """What may be left over at the ends of segments."""
        return 2 * self._recorder.group * nbytes

    def _tell_dropped(self) -> None:
        gone = self._store.dropped[self._dropped :]
        self._dropped += len(gone)
        for ref in gone:
            self._emit(
                "storage", dropped_step=ref.step, cap=self._store.cap_bytes, used=self._store.used_bytes
            )

    def _tell_written(self, tuner: Tuner) -> None:
        """What bases and records have taken to write since it was told last."""
        for who, (nbytes, seconds) in self._told.items():
            self._told[who] = who.written_bytes, who.write_seconds
            tuner.wrote(who.written_bytes - nbytes, who.write_seconds - seconds)
