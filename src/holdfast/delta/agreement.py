"""Agreement: what all ranks have, found out in the background, so that training waits for nobody.

A thread in each rank tells the board how far its records are durable, and reads what the others told. A step is durable
when it is on every rank. The first rank makes bases commits when every rank has its share, and settles the step at
which all stop. A rank that fails says so, and every other raises ``RankFailed`` with its name and its text.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from ..errors import RankFailed
from .ranks import Ranks

BUSY_SECONDS, IDLE_SECONDS = 0.02, 0.2
"""Between two looks at the board, while something is expected and otherwise."""

GRACE_SECONDS = 20.0
"""How long a rank that is to stop waits for the others to say where they are."""


class HowFar(Protocol):
    """What is asked of a ``Recorder``, or of what stands in its place."""

    @property
    def durable_step(self) -> int: ...


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
    stop_at: int | None = None
    """The step after which all end."""


class Agreement:
    """``recorder`` knows how far this rank is durable. ``publish`` is called on the first rank, with where the shares
    of a base are by rank; ``follow`` on the others when it has returned there; ``hear`` on all, with what is known now.
    All run on the thread of this object. ``sure`` is what a step is that all ranks have.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        recorder: HowFar,
        steps_done: Callable[[], int],
        publish: Callable[[list[dict[str, Any]]], Any],
        follow: Callable[[], None],
        hear: Callable[[Standing], None] = lambda standing: None,
        sure: str = "durable",
        deadline_seconds: float,
    ) -> None:
        """Called on all ranks, and waits for them."""
        self._ranks, self._recorder, self._steps_done = ranks, recorder, steps_done
        self._publish, self._follow, self._deadline = publish, follow, deadline_seconds
        self._hear, self._sure = hear, sure
        start = recorder.durable_step
        common = {
            "durable": f"{start} 0",
            "base": "0",
            "published": "0",
            "given_up": "0",
            "stop": "",
            "stop_at": "",
            "failed": "",
        }
        own = {"own": str(start), "share": "", "at": "", "closed": ""}
        every = {f"{name}/{rank}": own[name] for name in own for rank in range(ranks.world_size)}
        self._keys = [*common, *every] if ranks.rank == 0 else list(common)
        self._board: dist.TCPStore = ranks.board(common | every, deadline_seconds)
        self._said: dict[str, str] = {}
        self._say: dict[str, str] = {}
        self._lock = threading.Condition()
        self.standing = Standing(start)
        self.stopping = False
        """Whether all ranks are about to stop: this one may finish the step it is in, and asks before the next."""
        self.failure: BaseException | None = None
        self._leading, self._newest_base = threading.Lock(), 0
        self._closing = self._all_closed = False
        self._thread = threading.Thread(target=self._work, name="holdfast-agreement", daemon=True)
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

    def wait_for_stop(self) -> int:
        """The step at which all ranks stop; asked at the end of a step, once ``stopping``."""
        self.tell(f"at/{self._ranks.rank}", json.dumps([self._steps_done(), True]))
        try:
            self._until(lambda: self.standing.stop_at is not None, "the others to stop", GRACE_SECONDS)
        except RankFailed:
            return self._steps_done()
        assert self.standing.stop_at is not None
        return self.standing.stop_at

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
        if self._ranks.rank == 0 and "failed" in self._said:
            time.sleep(2 * IDLE_SECONDS)  # the board goes with this process, and the others are to see why

    def _may_leave(self) -> bool:
        return self._ranks.rank != 0 or self._all_closed

    def _until(self, met: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        seconds = self._deadline if seconds is None else seconds
        end = time.monotonic() + seconds
        with self._lock:
            self._lock.notify_all()
            while not met():
                self.check()
                if time.monotonic() > end:
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
                    error = RankFailed(
                        f"rank 0, which the others ask how far all are, does not answer ({error}). Step"
                        f" {self.standing.durable_step} is {self._sure}: start all ranks again to resume."
                    )
                self.failure = self.failure or error
            if self._ranks.rank == 0 or not isinstance(error, RankFailed | RuntimeError):
                with suppress(RuntimeError):
                    self._board.set(
                        "failed", f"rank {self._ranks.rank} failed: {type(error).__name__}: {error}"
                    )
            with self._lock:
                self._lock.notify_all()

    def _look(self) -> bool:
        """Tell what is new here, read what is new elsewhere. Whether more is expected soon."""
        own = self._recorder.durable_step
        with self._lock:
            say, self._say = self._say, {}
        say[f"own/{self._ranks.rank}"] = str(own)
        for name, value in say.items():
            if self._said.get(name) != value:
                self._board.set(name, value)
                self._said[name] = value
        values = self._board.multi_get(self._keys)
        found = {key: value.decode() for key, value in zip(self._keys, values, strict=True)}
        if self._ranks.rank == 0:
            self._lead(found)
        self._note(found)
        return own < self._steps_done() or self.standing.durable_step < own or self.stopping

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
        there = wanted > ended and all(share and share[0] == wanted for share in shares)
        if there and any(share[2] is None for share in shares):
            settle("given_up", str(wanted))
        elif there and min(steps) >= max(share[1] for share in shares):
            with self._leading:
                if wanted == self._newest_base:
                    self._publish([share[2] for share in shares])
                    settle("published", str(wanted))
        if not found["stop_at"] and None not in places:
            settle("stop_at", str(max(step if waits else step + 1 for step, waits in places)))
        self._all_closed = all(found[f"closed/{r}"] for r in range(self._ranks.world_size))

    def _note(self, found: dict[str, str]) -> None:
        published = int(found["published"])
        if published > self.standing.published and self._ranks.rank != 0:
            self._follow()
        with self._lock:
            standing = self.standing
            standing.durable_step, standing.behind = map(int, found["durable"].split())
            standing.base_wanted, standing.published = int(found["base"]), published
            standing.given_up = int(found["given_up"])
            standing.stop_at = int(found["stop_at"]) if found["stop_at"] else None
            if found["stop"] and not self.stopping:
                self.stopping = True
                self._say.setdefault(f"at/{self._ranks.rank}", json.dumps([self._steps_done(), False]))
            if found["failed"] and self.failure is None:
                self.failure = RankFailed(
                    f"{found['failed']} Step {standing.durable_step} is {self._sure} on all ranks: start them again to"
                    " resume."
                )
            self._lock.notify_all()
        self._hear(standing)
