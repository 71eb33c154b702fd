"""Survival: how the steps of a run outlive the process that does them.

There are two ways: every step is recorded on the disk (``recording.py``), or a second process does every step as well
(``replicating.py``). What a ``Checkpointer`` asks of either is here, and what both do alike.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..events import EventLog
from ..store.local import LocalStore
from .agreement import Agreement
from .loop import Loop, is_schedule
from .options import Options
from .recorder import Sealed
from .recovery import Recovered
from .sealer import Sealer
from .slots import Slot, SlotPool
from .tap import Tap, Update
from .watching import Recovery


@dataclass(frozen=True)
class Asked:
    """What ``resume`` was asked for: the step ``target``, or the newest before it unless ``exact``, or the newest."""

    target: int | None
    exact: bool
    continuing: bool
    """Only a step from which training goes on as it did."""
    show: Callable[[Recovery], None] | None
    """Told how it gets on."""


class Survival(ABC):
    """Of the steps of ``loop``. The order of calls: ``enter``, ``begin``; for each step ``take_slot``, ``record`` and
    ``go_on``; at the end ``finish``, ``close`` and ``let_go``. Called on all ranks, but for ``take_slot``."""

    beside = False
    """Whether a replica does every step as well."""

    def __init__(self, loop: Loop, options: Options, events: EventLog) -> None:
        """Nothing is begun. Raises ``BadInput`` if there is no memory for two steps."""
        self._loop, self._options, self._events = loop, options, events
        self.staging_bytes = options.staging_bytes
        self._num_slots = self._slots_that_fit()
        self._sealer = Sealer(loop.state, shortens=not self.beside)  # a replica's record stands alone
        self.agreement: Agreement | None = None
        """With the other ranks, from ``begin`` on, where there are some."""
        self.begun = False

    # How far it is

    @property
    @abstractmethod
    def durable_step(self) -> int:
        """The newest step that survives power loss, on every rank; -1 before there is one."""

    @property
    @abstractmethod
    def replica_step(self) -> int:
        """The newest step that survives the death of all trainers."""

    @property
    @abstractmethod
    def base_step(self) -> int:
        """That of the newest base, as far as this rank knows."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether every step done is durable, or on its way to be."""

    @abstractmethod
    def has(self, step: int) -> bool:
        """Whether this rank has ``step`` durable, or on its way to be, without another base."""

    @abstractmethod
    def standing(self) -> dict[str, Any]:
        """What was written, and what waits in memory, for the log."""

    def about(self) -> dict[str, Any]:
        """What it has to work with, for the log."""
        ring_bytes = len(self.pool.slots) * self.pool.slot_bytes
        return {
            "replica": self.beside, "memory": self._options.memory_bytes, "storage": self._options.storage_bytes,
            "ring_bytes": ring_bytes, "staging_bytes": self.staging_bytes,
        }  # fmt: skip

    @property
    def recovered_by(self) -> str:
        """How ``enter`` came to its step, for a person; empty where that is not known."""
        return ""

    # Beginning

    @abstractmethod
    def enter(self, store: LocalStore, asked: Asked) -> Recovered | None:
        """Be the run's writer, and bring the loop to the step that ``recover`` finds; None if the run has none."""

    @abstractmethod
    def begin(self, found: Recovered | None) -> None:
        """Go on after what was found, with the loop where it is now. When this returns, the step it is at is kept."""

    @abstractmethod
    def tap(self, take_slot: Callable[[], Slot | None], clip_norm: float | None) -> Tap:
        """What sees the steps of the loop."""

    # Every step

    @property
    @abstractmethod
    def pool(self) -> SlotPool:
        """What updates are copied into."""

    @abstractmethod
    def take_slot(self) -> Slot | None:
        """A slot for the next step; None where the disk is behind and nobody is to wait for it."""

    @abstractmethod
    def record(self, updates: Sequence[Update]) -> None:
        """Keep the step that ``updates`` have done."""

    def lose(self, updates: Sequence[Update], why: str) -> None:
        """As ``record``, of a step that no record would bring back, which this rank alone may know."""
        self.record(updates)  # a replica that differs is found by its fingerprint

    @abstractmethod
    def go_on(self) -> None:
        """The step is over: do of the next base what is due."""

    @abstractmethod
    def adapt(self) -> None:
        """The loop has another form than before, as its last ``look`` says: keep its present step, and go on from
        there."""

    def stepped(self, seconds: float, stall_seconds: float) -> None:
        """The step took ``seconds``, of which training waited for ``stall_seconds``."""
        return

    def give_back(self, updates: Sequence[Update]) -> None:
        """Of ``updates`` nothing is kept."""
        self.pool.give(list({id(u.slot): u.slot for u in updates if u.slot is not None}.values()))

    # Waiting and ending

    @abstractmethod
    def whole(self, again: bool = False) -> None:
        """Make a base of the present step, durable when this returns; ``again`` if one of this step does not hold what
        there is now."""

    @abstractmethod
    def wait(self, step: int) -> None:
        """Return when ``step``, of which there is a record or a base under way, is durable on all ranks."""

    @abstractmethod
    def settle(self) -> None:
        """Return when nothing is under way any more."""

    def finish(self) -> None:
        """Make a base where what is durable does not hold all that there is."""
        if not self.begun:
            return
        begun = self._loop.has_begun_another
        residuals = {} if begun else self._loop.state.residuals
        if residuals:
            self.settle()  # a base that is under way may be of this very step
        moved = not begun and self._loop.schedule_moved
        needed = not self.complete or moved or bool(residuals and self.base_step < self._loop.steps_done)
        asked = self._loop.ranks.everyone((needed, moved))  # each may know of another newest base
        if not any(needed for needed, _ in asked):
            return
        if any(self._loop.ranks.everyone(self._loop.has_moved_on)):
            self._go_without_base()
        else:
            self._loop.note_again(is_schedule)
            self.whole(again=any(moved for _, moved in asked))

    def _go_without_base(self) -> None:
        """There can be none of the present step any more, and no record has it."""
        step, durable = self._loop.steps_done, self.durable_step
        warnings.warn(
            f"closed in mid-accumulation, and buffers are not those of step {step} any more, so there can be no base of"
            f" it: step {durable} is durable. Close after an optimizer's step and its step().",
            stacklevel=5,
        )

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether anything is at work still that uses slots, files or the lock."""

    @abstractmethod
    def close(self) -> None:
        """Begin nothing any more, and end what works beside training. Raises what it failed with."""

    @abstractmethod
    def let_go(self) -> None:
        """Free all memory. Nothing is at work any more."""

    # With other ranks

    def check(self) -> None:
        """Raise what went wrong on any rank."""
        if self.agreement is not None:
            self.agreement.check()

    def fail(self, error: BaseException) -> None:
        """Tell every rank that this one does not go on."""
        if self.agreement is not None:
            self.agreement.fail(error)

    def meet(self, stop: bool) -> str:
        """What all ranks do at once after this step, of which any may want to ``stop``: "stop", "base" or nothing."""
        if self.agreement is None:
            return "stop" if stop else ""
        if stop:
            self.agreement.call(stop=True)
        return self.agreement.meet() if self.agreement.called else ""

    def wait_for_all(self, step: int) -> None:
        """Return when every rank has ``step``."""
        if self.agreement is not None:
            self.agreement.wait(step)

    def part(self, orderly: bool) -> None:
        """Agree on nothing any more; ``orderly`` if no rank is left behind."""
        if self.agreement is not None:
            self.agreement.close(orderly)

    # Helpers of both

    def _seal(self, updates: Sequence[Update]) -> Sealed:
        loop = self._loop
        return self._sealer.seal(loop.state, loop.steps_done, updates, loop.now, self.base_step)

    def _slot_bytes(self) -> int:
        return sum(layout.file_bytes for layout in self._loop.codec.layouts(self._loop.state))

    def _slots_that_fit(self) -> int:
        return self._options.slots_that_fit(self._slot_bytes() + self._loop.script.text_bytes)
