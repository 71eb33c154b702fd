"""Background agreement of all ranks on what is durable, so that training never waits for another rank.

A thread in each rank writes to the board, a shared key-value store, how far its records are durable, and reads what the
other ranks wrote. A step is durable when it is durable on every rank. The first rank publishes a snapshot when every
rank has written its share. A rank that fails writes its error, and every other rank raises ``RankFailed`` with its name
and text.

Ranks meet at a barrier at the end of a step where all must act together: make a snapshot, or stop.

1. Any rank calls the barrier.
2. Each rank writes the step that it is at, and from then on asks at the end of every step.
3. The barrier is at the greatest step that any rank can still finish.

So no rank waits in a collective of the training for a rank that waits here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..distributed import Ranks
from ..errors import RankFailed
from . import running_clock
from .rank_consistency import RankConsistency

BUSY_SECONDS, IDLE_SECONDS = 0.02, 0.2
"""Seconds between two reads of the board: while something is expected, and otherwise."""

PROBE_SECONDS = 1.0
"""Seconds between two checks of the first rank whether the other processes exist."""

HEARD_SECONDS = 5.0
"""The longest time that a failed first rank waits for the others to read the failure."""

SILENT = "rank {rank} has ended without a word, or closed without saving."
"""The failure of a rank that has not said why it ends."""

GRACE_SECONDS = 20.0
"""The longest time that a stopping rank waits for the others to write where they are."""


@dataclass
class RankStatus:
    """The state of all ranks, as one rank knows it."""

    durable_step: int
    """The newest step that is durable on every rank."""
    behind: int = 0
    """The rank that is furthest behind."""
    base_wanted: int = 0
    """The number of the snapshot that the first rank began last."""
    published: int = 0
    """The number of the snapshot that was published last."""
    given_up: int = 0
    """The number of the snapshot that was given up last."""
    called: int = 0
    """The number of the barrier that was called last by any rank."""
    settled: tuple[int, int, str] = (0, 0, "")
    """The last barrier with a known place: its number, its step, and its purpose."""
    missing: tuple[tuple[int, str], ...] = ()
    """The ranks that have not written their share of the current snapshot, each with its last heartbeat."""


class RankCoordinator:
    """The connection of one rank to the board, with the thread that serves it.

    ``publish``, ``follow`` and ``hear`` run on that thread. ``how_far``, ``steps_done`` and ``is_there`` are
    also called by the threads that train and close, so they must be thread-safe.

    Args:
        how_far: Returns the step up to which this rank is durable.
        steps_done: Returns the steps that this rank has done.
        publish: Called on the first rank with the shares of a snapshot, by rank.
        follow: Called on the other ranks once ``publish`` has returned on the first.
        hear: Called on all ranks with the newest ``RankStatus``.
        sure: The word for a step that all ranks have, for messages.
        is_there: Returns on the first rank whether the process of another rank still writes the run.
        survives: Returns how many steps of a rank remain after its process has ended.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        how_far: Callable[[], int],
        steps_done: Callable[[], int],
        publish: Callable[[list[dict[str, Any]]], Any],
        follow: Callable[[], None],
        hear: Callable[[RankStatus], None] = lambda standing: None,
        sure: str = "durable",
        is_there: Callable[[int], bool] = lambda rank: True,
        survives: Callable[[int, int], int] = lambda rank, step: step,
        alike: RankConsistency | None = None,
        deadline_seconds: float,
    ) -> None:
        """Start the thread. Collective: every rank must call this, and waits for the others."""
        self._ranks, self._how_far, self._steps_done = ranks, how_far, steps_done
        self._publish, self._follow, self._deadline = publish, follow, deadline_seconds
        self._hear, self._sure = hear, sure
        self._is_there, self._survives, self._probe_at = is_there, survives, 0.0
        self._alike = alike or RankConsistency(ranks, lambda event, **fields: None)
        self._alike.tell = self.tell
        self._seen: set[int] = set()
        self._missed: set[int] = set()
        self._gone: list[int] = []
        """Ranks whose processes have ended, as their connections to this rank showed, and of which all are to know."""
        start = how_far()
        common = {
            "durable": f"{start} 0",
            "base": "0",
            "published": "0",
            "given_up": "0",
            "missing": "[]",
            "stop": "",
            "called": "0",
            "settled": json.dumps([0, 0, ""]),
            "failed": "",
            **RankConsistency.common,
        }
        own = {
            "own": str(start), "share": "", "beat": "", "at": "", "leaving": "", "closed": "", "heard": "",
            "alike": RankConsistency.NOTHING,
        }  # fmt: skip
        every = {f"{name}/{rank}": own[name] for name in own for rank in range(ranks.world_size)}
        self._keys = [*common, *every] if ranks.rank == 0 else list(common)
        self._board: Any = ranks.board(common | every, deadline_seconds)
        self._said: dict[str, str] = {}
        self._say: dict[str, str] = {}
        self._lock = threading.Condition()
        self.standing = RankStatus(start)
        self.stopping = False
        """True once all ranks are about to stop."""
        self._met = self._answered = 0
        self.failure: BaseException | None = None
        self._leading, self._newest_base = threading.Lock(), 0
        self._closing = self._all_closed = False
        self._thread = threading.Thread(target=self._work, name="holdfast-agreement", daemon=True)
        ranks.tell_lost = self._tell_lost
        self._thread.start()

    def tell(self, name: str, value: str) -> None:
        """Write ``value`` to the board under ``name``, soon."""
        with self._lock:
            self._say[name] = value
            self._lock.notify_all()

    def scan_soon(self) -> None:
        """Wake the thread, because this rank has made progress."""
        with self._lock:
            self._lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """Report to all ranks that this one has failed."""
        self.tell("failed", f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}")

    def lost(self, rank: int) -> None:
        """Report to all ranks that the process of ``rank`` has ended, unless that rank or another said why.

        Called by the thread that saw its connection break.
        """
        with self._lock:
            self._gone.append(rank)
            self._lock.notify_all()

    def begin_base(self) -> int:
        """Make the other ranks begin a snapshot as well, and return its number. Called on the first rank."""
        with self._leading:
            self._newest_base += 1
            self.tell("base", str(self._newest_base))
            return self._newest_base

    def end_bases(self) -> None:
        """Prevent the publication of every snapshot begun so far. Called on the first rank.

        None of them becomes a commit after this has returned.
        """
        with self._leading:
            self._newest_base += 1

    def share(self, number: int, step: int, ref: dict[str, Any]) -> None:
        """Report that this rank's share of snapshot ``number`` is durable, in the file ``ref``.

        Args:
            step: The share covers this step and those before it.
        """
        self.tell(f"share/{self._ranks.rank}", json.dumps([number, step, ref]))

    def heartbeat(self, sign: str) -> None:
        """Send a heartbeat: this rank is still writing its share of the current snapshot."""
        self.tell(f"beat/{self._ranks.rank}", sign)

    def leave(self) -> None:
        """Report that this rank's writer ends in order, so that its absence is no failure."""
        self.tell(f"leaving/{self._ranks.rank}", "yes")

    def share_nothing(self, number: int) -> None:
        """Report that this rank cannot write snapshot ``number``, so that all give it up."""
        self.tell(f"share/{self._ranks.rank}", json.dumps([number, -1, None]))

    def check(self) -> None:
        """Raise the error of any rank, if there is one."""
        if self.failure is not None:
            raise self.failure

    def wait(self, step: int) -> None:
        """Return when ``step`` is durable on every rank.

        Raises ``RankFailed`` naming the slowest rank after the deadline, and the errors that ``check`` raises.
        """
        self._until(lambda: self.standing.durable_step >= step, f"step {step} to be durable")

    @property
    def called(self) -> bool:
        """Return whether a barrier is called: this rank may finish its step, and asks before the next."""
        return self.standing.called > self._met

    def call(self, stop: bool = False) -> None:
        """Call all ranks to the barrier, to make a snapshot or to stop."""
        with self._lock:
            if stop:
                self.stopping = True
                self._say["stop"] = "yes"
            self.standing.called = max(self.standing.called, self._met + 1)
            self.tell("called", str(self.standing.called))

    def barrier(self) -> str:
        """Return what all ranks do now, "stop" or "base"; empty if the barrier is at a later step.

        Call it at the end of each step once ``called`` is true. Raises ``RankFailed`` if the place of the barrier does
        not become known; a stopping rank then stops by itself.
        """
        number, step = self.standing.called, self._steps_done()
        with self._lock:
            self._answered = number
            self.tell(f"at/{self._ranks.rank}", json.dumps([number, step, True]))
        try:
            seconds = GRACE_SECONDS if self.stopping else None
            self._until(
                lambda: self.standing.settled[0] >= number, "the others to say where they are", seconds
            )
        except RankFailed:
            if self.stopping:
                return "stop"
            raise
        _, at, what = self.standing.settled
        if at > step:
            return ""
        self._met = number
        return what

    def close(self, orderly: bool) -> None:
        """End the thread. With ``orderly`` the first rank, which serves the board, waits for the others."""
        if orderly and self.failure is None:
            self.tell(f"closed/{self._ranks.rank}", "yes")
            with suppress(RankFailed):
                self._until(self._may_leave, "the others to close", GRACE_SECONDS)
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(self._deadline)
        self.wait_until_failure_is_read()
        if not self._thread.is_alive():
            self._board = None

    def wait_until_failure_is_read(self) -> None:
        """Wait until the other ranks have read a failure, since the board ends with the first rank.

        Returns at once on other ranks, and without a failure. Ranks whose locks are visible confirm it; other ranks get
        the time of two reads; ``HEARD_SECONDS`` at most.
        """
        if self._ranks.rank or not ("failed" in self._said or self.failure is not None):
            return
        keys = [f"heard/{rank}" for rank in range(1, self._ranks.world_size)]
        began = time.monotonic()
        while time.monotonic() < began + HEARD_SECONDS:
            try:
                heard = self._board.multi_get(keys)
            except RuntimeError:
                return
            waits = [not said and self._is_there(rank) for rank, said in enumerate(heard, 1)]
            if all(heard) or (not any(waits) and time.monotonic() > began + 2 * IDLE_SECONDS):
                return
            time.sleep(BUSY_SECONDS)

    def _tell_lost(self) -> None:
        """Raise the reason why another rank did not come, if it becomes known soon.

        A rank that has died is known after two checks, each up to ``PROBE_SECONDS`` late, and one read of the board. On
        a node with a disk of its own it is known at once, by its connection to the rank that keeps its copies.
        """
        end = time.monotonic() + HEARD_SECONDS
        with self._lock:
            while self.failure is None and time.monotonic() < end:
                self._lock.notify_all()  # read the board now
                self._lock.wait(BUSY_SECONDS)
        self.check()

    def _may_leave(self) -> bool:
        return self._ranks.rank != 0 or self._all_closed

    def _until(self, met: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        seconds = self._deadline if seconds is None else seconds
        end = running_clock.now() + seconds
        with self._lock:
            self._lock.notify_all()
            while not met():
                self.check()
                if running_clock.now() > end:
                    raise RankFailed(
                        f"rank {self._ranks.rank} waited {seconds:.0f} s for {what}; rank {self.standing.behind} has"
                        f" got to step {self.standing.durable_step}, up to which all is {self._sure}. See what that"
                        " rank does, and start all ranks again to resume."
                    )
                self._lock.wait(BUSY_SECONDS)

    def _work(self) -> None:
        try:
            while True:
                busy = self._look()
                with self._lock:
                    if self._closing and not (self._say or self._gone):
                        return
                    if not (self._say or self._gone):
                        self._lock.wait(BUSY_SECONDS if busy else IDLE_SECONDS)
        except BaseException as error:
            with self._lock:
                if isinstance(error, RuntimeError) and self._ranks.rank and not self._closing:
                    self.standing.durable_step = self._survives(0, self.standing.durable_step)
                    error = RankFailed(
                        f"rank 0, which the others ask how far all are, does not answer ({error}). Step"
                        f" {self.standing.durable_step} is {self._sure}: start all ranks again to resume."
                    )
                self.failure = self.failure or error
            if self._ranks.rank == 0 or not isinstance(error, RankFailed | RuntimeError):
                with suppress(RuntimeError):
                    self._board.set(
                        f"own/{self._ranks.rank}", str(self._how_far())
                    )  # maybe less than was reported
                    self._board.set(
                        "failed", f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}"
                    )
            with self._lock:
                self._lock.notify_all()

    def _look(self) -> bool:
        """Write what is new here, read what is new elsewhere, and return whether more is expected soon."""
        lost = self._lost()
        with self._lock:
            say, self._say = self._say, {}
            gone, self._gone = self._gone, []
        own = self._how_far()  # read now: a failure may have invalidated what is about to be written
        say = {f"own/{self._ranks.rank}": str(own), **say}  # written before the failure that results from it
        for name, value in say.items():
            if self._said.get(name) != value:
                self._board.set(name, value)
                self._said[name] = value
        for rank in gone:
            self._report_gone(rank)
        values = self._board.multi_get(self._keys)
        found = {key: value.decode() for key, value in zip(self._keys, values, strict=True)}
        if self._ranks.rank == 0:
            self._lead(found)
            self._alike.lead(found, self._board)
            self._report(lost, found)
        if found["failed"]:  # maybe by the first rank, which then no longer computes this
            own_keys = [f"own/{rank}" for rank in range(self._ranks.world_size)]
            steps = list(map(int, self._board.multi_get(own_keys)))
            found["durable"] = f"{min(steps)} {steps.index(min(steps))}"
        self._alike.note(found)
        self._note(found)
        return own < self._steps_done() or self.standing.durable_step < own or self.called

    def _lead(self, found: dict[str, str]) -> None:
        """Do the first rank's duties: find the step durable everywhere, publish snapshots, place the barrier."""

        def of_all(name: str) -> list[Any]:
            return [json.loads(found[f"{name}/{r}"] or "null") for r in range(self._ranks.world_size)]

        def decide(name: str, value: str) -> None:
            if found[name] != value:
                self._board.set(name, value)
                found[name] = value

        steps, shares, places = of_all("own"), of_all("share"), of_all("at")
        decide("durable", f"{min(steps)} {steps.index(min(steps))}")
        wanted = int(found["base"])
        ended = max(int(found["published"]), int(found["given_up"]))
        missing = [
            rank for rank, share in enumerate(shares) if wanted > ended and (share or [0])[0] != wanted
        ]
        decide("missing", json.dumps([[rank, found[f"beat/{rank}"]] for rank in missing]))
        there = wanted > ended and not missing
        if wanted > ended and any(share and share[0] == wanted and share[2] is None for share in shares):
            decide("given_up", str(wanted))
        elif there and (len(of := {share[1] for share in shares}) == 1 or min(steps) >= max(of)):
            with self._leading:
                if wanted == self._newest_base:
                    self._publish([share[2] for share in shares])
                    decide("published", str(wanted))
        called = int(found["called"])
        if called > json.loads(found["settled"])[0] and all(at and at[0] == called for at in places):
            step = max(step if waits else step + 1 for _, step, waits in places)
            decide("settled", json.dumps([called, step, "stop" if found["stop"] else "base"]))
        self._all_closed = all(found[f"closed/{r}"] for r in range(self._ranks.world_size))

    def _lost(self) -> list[int]:
        """Return the ranks whose process was missing in this check and in the one before. Called on the first rank.

        The check runs before the board is read, where a rank may have written that it is done, or why it failed. Ranks
        whose locks are not visible, on another host, are never reported.
        """
        now = time.monotonic()
        if self._ranks.rank or now < self._probe_at:
            return []
        self._probe_at = now + PROBE_SECONDS
        there = set(filter(self._is_there, range(1, self._ranks.world_size)))
        self._seen |= there
        before, self._missed = self._missed, self._seen - there
        return sorted(self._missed & before)

    def _report_gone(self, rank: int) -> None:
        """Report to all ranks that ``rank`` is gone, unless it has said that it leaves, or a failure is known."""
        if not any(self._board.multi_get([f"closed/{rank}", f"leaving/{rank}"])):
            self._board.compare_set("failed", "", SILENT.format(rank=rank))

    def _report(self, lost: list[int], found: dict[str, str]) -> None:
        """Report to all ranks a rank that is gone and has written nothing."""
        silent = [rank for rank in lost if not found[f"closed/{rank}"] and not found[f"leaving/{rank}"]]
        if silent and not found["failed"]:
            for rank in silent:
                self._board.set(f"own/{rank}", str(self._survives(rank, int(found[f"own/{rank}"]))))
            found["failed"] = SILENT.format(rank=silent[0])
            self._board.set("failed", found["failed"])

    def _note(self, found: dict[str, str]) -> None:
        published = int(found["published"])
        if published > self.standing.published and self._ranks.rank != 0:
            self._follow()
        with self._lock:
            standing = self.standing
            standing.durable_step, standing.behind = map(int, found["durable"].split())
            standing.base_wanted, standing.published = int(found["base"]), published
            standing.given_up = int(found["given_up"])
            standing.missing = tuple((rank, sign) for rank, sign in json.loads(found["missing"]))
            standing.settled = tuple(json.loads(found["settled"]))
            standing.called = max(standing.called, int(found["called"]))
            self.stopping = self.stopping or bool(found["stop"])
            if standing.called > max(self._met, self._answered):
                self._answered = standing.called
                self._say[f"at/{self._ranks.rank}"] = json.dumps([self._answered, self._steps_done(), False])
            if found["failed"] and self.failure is None:
                self._say[f"heard/{self._ranks.rank}"] = "yes"
                self.failure = RankFailed(
                    f"{found['failed']} Step {standing.durable_step} is {self._sure} on all ranks: start them again to"
                    " resume."
                )
            self._lock.notify_all()
        self._hear(standing)
