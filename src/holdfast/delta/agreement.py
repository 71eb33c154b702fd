"""Agreement: what all ranks have, found out in the background, so that training waits for nobody.

A thread in each rank tells the board how far its records are durable, and reads what the others told. A step is durable
when it is on every rank. The first rank makes bases commits when every rank has its share. A rank that fails says so,
and every other raises ``RankFailed`` with its name and its text.

Ranks *meet* at the end of a step where all must do something at once: make a base, or stop. Any of them calls, each
says at which step it is, and asks at the end of every step from then on; the greatest step that any can still finish
is where they meet. So nobody waits in a collective of the training for one that waits here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import RankFailed
from ..ranks import Ranks
from . import awake
from .alike import Alike

BUSY_SECONDS, IDLE_SECONDS = 0.02, 0.2
"""Between two looks at the board, while something is expected and otherwise."""

PROBE_SECONDS = 1.0
"""Between two looks of the first rank whether the others are there."""

HEARD_SECONDS = 5.0
"""How long the first rank, which has failed or heard of it, waits at most for the others to hear of it, too."""

GRACE_SECONDS = 20.0
"""How long a rank that is to stop waits for the others to say where they are."""


@dataclass
class Standing:
    """What is known of all ranks."""

    durable_step: int
    """The newest step that is durable on every rank."""
    behind: int = 0
    """The rank that is behind."""
    base_wanted: int = 0
    """The number of the base that the first rank has begun last."""
    published: int = 0
    """The number of the base that was made a commit last."""
    given_up: int = 0
    """The number of the base, not before that one, that was given up last."""
    called: int = 0
    """The number of the meeting that somebody has called last."""
    settled: tuple[int, int, str] = (0, 0, "")
    """Of the last meeting of which that is known: its number, the step at which it is, and what for."""
    missing: tuple[tuple[int, str], ...] = ()
    """The ranks of which the share of the base that is under way is not there, with the last sign of life of each."""


class Agreement:
    """``how_far`` gives the step up to which this rank is durable. ``publish`` is called on the first rank, with where
    the shares of a base are by rank; ``follow`` on the others when it has returned there; ``hear`` on all, with what is
    known now; ``is_there`` says on the first whether the process of another rank still writes the run, and ``survives``
    how much of what a rank had is left when it has ended. All run on the thread of this object. ``sure`` is what a step
    is that all ranks have."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        how_far: Callable[[], int],
        steps_done: Callable[[], int],
        publish: Callable[[list[dict[str, Any]]], Any],
        follow: Callable[[], None],
        hear: Callable[[Standing], None] = lambda standing: None,
        sure: str = "durable",
        is_there: Callable[[int], bool] = lambda rank: True,
        survives: Callable[[int, int], int] = lambda rank, step: step,
        alike: Alike | None = None,
        deadline_seconds: float,
    ) -> None:
        """Called on all ranks, and waits for them."""
        self._ranks, self._how_far, self._steps_done = ranks, how_far, steps_done
        self._publish, self._follow, self._deadline = publish, follow, deadline_seconds
        self._hear, self._sure = hear, sure
        self._is_there, self._survives, self._probe_at = is_there, survives, 0.0
        self._alike = alike or Alike(ranks, lambda event, **fields: None)
        self._alike.tell = self.tell
        self._seen: set[int] = set()
        self._missed: set[int] = set()
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
            **Alike.common,
        }
        own = {
            "own": str(start), "share": "", "beat": "", "at": "", "leaving": "", "closed": "", "heard": "",
            "alike": Alike.NOTHING,
        }  # fmt: skip
        every = {f"{name}/{rank}": own[name] for name in own for rank in range(ranks.world_size)}
        self._keys = [*common, *every] if ranks.rank == 0 else list(common)
        self._board: Any = ranks.board(common | every, deadline_seconds)
        self._said: dict[str, str] = {}
        self._say: dict[str, str] = {}
        self._lock = threading.Condition()
        self.standing = Standing(start)
        self.stopping = False
        """Whether all ranks are about to stop."""
        self._met = self._answered = 0
        self.failure: BaseException | None = None
        self._leading, self._newest_base = threading.Lock(), 0
        self._closing = self._all_closed = False
        self._thread = threading.Thread(target=self._work, name="holdfast-agreement", daemon=True)
        ranks.tell_lost = self._tell_lost
        self._thread.start()

    def tell(self, name: str, value: str) -> None:
        """Put ``value`` on the board, soon."""
        with self._lock:
            self._say[name] = value
            self._lock.notify_all()

    def look_soon(self) -> None:
        """This rank has got on."""
        with self._lock:
            self._lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one goes on no more."""
        self.tell("failed", f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}")

    def begin_base(self) -> int:
        """On the first rank: the others begin a base too. Returns its number."""
        with self._leading:
            self._newest_base += 1
            self.tell("base", str(self._newest_base))
            return self._newest_base

    def end_bases(self) -> None:
        """On the first rank: when this returns none that was begun before becomes a commit any more."""
        with self._leading:
            self._newest_base += 1

    def share(self, number: int, step: int, ref: dict[str, Any]) -> None:
        """This rank's part of base ``number``, of ``step`` and the steps before it, is durable: its file is ``ref``."""
        self.tell(f"share/{self._ranks.rank}", json.dumps([number, step, ref]))

    def beat(self, sign: str) -> None:
        """This rank's part of the base that is under way goes on being written."""
        self.tell(f"beat/{self._ranks.rank}", sign)

    def leave(self) -> None:
        """What writes for this rank ends in order: it is not to be missed."""
        self.tell(f"leaving/{self._ranks.rank}", "yes")

    def share_nothing(self, number: int) -> None:
        """Base ``number`` cannot be had from this rank, so from none."""
        self.tell(f"share/{self._ranks.rank}", json.dumps([number, -1, None]))

    def check(self) -> None:
        """Raise what went wrong anywhere."""
        if self.failure is not None:
            raise self.failure

    def wait(self, step: int) -> None:
        """Return when ``step`` is durable on every rank. Raises ``RankFailed``, naming who is behind, after the
        deadline, and as ``check``."""
        self._until(lambda: self.standing.durable_step >= step, f"step {step} to be durable")

    @property
    def called(self) -> bool:
        """Whether all are to meet: this rank may finish the step it is in, and asks before the next."""
        return self.standing.called > self._met

    def call(self, stop: bool = False) -> None:
        """Call all ranks to make a base at once, or to stop."""
        with self._lock:
            if stop:
                self.stopping = True
                self._say["stop"] = "yes"
            self.standing.called = max(self.standing.called, self._met + 1)
            self.tell("called", str(self.standing.called))

    def meet(self) -> str:
        """Asked at the end of a step, once ``called``: what all ranks do now, "stop" or "base"; empty if that is after
        a later step. Raises ``RankFailed`` if that does not become known; who is to stop does so by itself then."""
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
        """End the thread. ``orderly``: the first rank, which serves the board, waits for the others."""
        if orderly and self.failure is None:
            self.tell(f"closed/{self._ranks.rank}", "yes")
            with suppress(RankFailed):
                self._until(self._may_leave, "the others to close", GRACE_SECONDS)
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(self._deadline)
        if self._ranks.rank == 0 and ("failed" in self._said or self.failure is not None):
            self._outlast()
        if not self._thread.is_alive():
            self._board = None

    def _outlast(self) -> None:
        """Keep the board, which goes with this rank, until the others have seen why: those whose locks are seen say so,
        and others have the time of two looks."""
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
        """Raise why another rank did not come, if that is heard of soon."""
        end = time.monotonic() + 2 * PROBE_SECONDS
        with self._lock:
            while self.failure is None and time.monotonic() < end:
                self._lock.wait(BUSY_SECONDS)
        self.check()

    def _may_leave(self) -> bool:
        return self._ranks.rank != 0 or self._all_closed

    def _until(self, met: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        seconds = self._deadline if seconds is None else seconds
        end = awake.now() + seconds
        with self._lock:
            self._lock.notify_all()
            while not met():
                self.check()
                if awake.now() > end:
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
                    if self._closing and not self._say:
                        return
                    if not self._say:
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
                    )  # less, maybe, than was told
                    self._board.set(
                        "failed", f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}"
                    )
            with self._lock:
                self._lock.notify_all()

    def _look(self) -> bool:
        """Tell what is new here, read what is new elsewhere. Whether more is expected soon."""
        lost = self._lost()
        with self._lock:
            say, self._say = self._say, {}
        own = self._how_far()  # now: what has failed by what is to be said counts no more
        say = {f"own/{self._ranks.rank}": str(own), **say}  # before a failure that it comes of
        for name, value in say.items():
            if self._said.get(name) != value:
                self._board.set(name, value)
                self._said[name] = value
        values = self._board.multi_get(self._keys)
        found = {key: value.decode() for key, value in zip(self._keys, values, strict=True)}
        if self._ranks.rank == 0:
            self._lead(found)
            self._alike.lead(found, self._board)
            self._report(lost, found)
        if found["failed"]:  # maybe of the first rank, which does not find it any more
            own_keys = [f"own/{rank}" for rank in range(self._ranks.world_size)]
            steps = list(map(int, self._board.multi_get(own_keys)))
            found["durable"] = f"{min(steps)} {steps.index(min(steps))}"
        self._alike.note(found)
        self._note(found)
        return own < self._steps_done() or self.standing.durable_step < own or self.called

    def _lead(self, found: dict[str, str]) -> None:
        """What the first rank does for all: find the step that is durable everywhere, publish, settle where to stop."""

        def of_all(name: str) -> list[Any]:
            return [json.loads(found[f"{name}/{r}"] or "null") for r in range(self._ranks.world_size)]

        def settle(name: str, value: str) -> None:
            if found[name] != value:
                self._board.set(name, value)
                found[name] = value

        steps, shares, places = of_all("own"), of_all("share"), of_all("at")
        settle("durable", f"{min(steps)} {steps.index(min(steps))}")
        wanted = int(found["base"])
        ended = max(int(found["published"]), int(found["given_up"]))
        missing = [
            rank for rank, share in enumerate(shares) if wanted > ended and (share or [0])[0] != wanted
        ]
        settle("missing", json.dumps([[rank, found[f"beat/{rank}"]] for rank in missing]))
        there = wanted > ended and not missing
        if wanted > ended and any(share and share[0] == wanted and share[2] is None for share in shares):
            settle("given_up", str(wanted))
        elif there and min(steps) >= max(share[1] for share in shares):
            with self._leading:
                if wanted == self._newest_base:
                    self._publish([share[2] for share in shares])
                    settle("published", str(wanted))
        called = int(found["called"])
        if called > json.loads(found["settled"])[0] and all(at and at[0] == called for at in places):
            step = max(step if waits else step + 1 for _, step, waits in places)
            settle("settled", json.dumps([called, step, "stop" if found["stop"] else "base"]))
        self._all_closed = all(found[f"closed/{r}"] for r in range(self._ranks.world_size))

    def _lost(self) -> list[int]:
        """On the first rank: those of which the process is there no more, nor was at the look before. Asked before the
        board is, on which they may have said that they are done, or why they failed. Where locks of another host are
        not seen, nobody is missed."""
        now = time.monotonic()
        if self._ranks.rank or now < self._probe_at:
            return []
        self._probe_at = now + PROBE_SECONDS
        there = set(filter(self._is_there, range(1, self._ranks.world_size)))
        self._seen |= there
        before, self._missed = self._missed, self._seen - there
        return sorted(self._missed & before)

    def _report(self, lost: list[int], found: dict[str, str]) -> None:
        """Tell all of a rank that is not there and has said nothing."""
        silent = [rank for rank in lost if not found[f"closed/{rank}"] and not found[f"leaving/{rank}"]]
        if silent and not found["failed"]:
            for rank in silent:
                self._board.set(f"own/{rank}", str(self._survives(rank, int(found[f"own/{rank}"]))))
            found["failed"] = f"rank {silent[0]} has ended without a word, or closed without saving."
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
