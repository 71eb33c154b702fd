"""The ranks that train together, with the exchanges that storing their state needs.

Where all ranks do the same at the same moment (a resume, a common snapshot), they exchange values on their own process
group. Background communication uses a *board*, a key-value store of torch that the first rank serves: nobody waits for
anybody there, and the last values of a dead rank remain.
"""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .errors import HoldfastError, RankFailed

T = TypeVar("T")
PATIENCE_SECONDS = 10.0
"""The seconds after which a rank that waits for the others warns."""
BEAT_SECONDS = 0.5
"""The interval in seconds at which the first rank sends the others a heartbeat while they wait."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""The file that identifies a running machine."""
SUMMED_AT_ONCE = 4 << 20
"""The number of elements that are summed at once: received values occupy memory."""


def this_machine() -> str:
    """Return text that is equal for all processes of one running machine."""
    try:
        return BOOT.read_text()
    except OSError:  # no Linux
        return socket.gethostname()


class Ranks:
    """This process as one of ``world_size`` ranks. Without a group it is rank 0 of 1."""

    def __init__(self, rank: int = 0, world_size: int = 1, group: Any = None) -> None:
        self.rank, self.world_size, self._group = rank, world_size, group
        self.alone = group is None
        self.tell_lost: Callable[[], None] = lambda: None
        """A function that raises what is known of a missing rank."""

    @classmethod
    def here(cls, deadline_seconds: float, what: str = "make their Checkpointer") -> Ranks:
        """Return the ranks of torch.distributed, if it is in use. Collective: every rank must call this.

        ``what`` describes, for a warning, what the ranks are about to do.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        with _told_of_wait(deadline_seconds, what):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_seconds))
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def close(self) -> None:
        """Leave the group: a rank that waits for this one gets ``RankFailed``. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(ValueError):  # the script has destroyed all groups
                dist.destroy_process_group(group)

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Leave the group if the body raises an error."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @property
    def stream(self) -> str:
        """The name of this rank's log."""
        return stream_of(self.rank)

    @property
    def prefix(self) -> str:
        """The prefix of the names of the units that this rank stores."""
        return "" if self.alone else f"{self.stream}."

    def is_mine(self, unit: str) -> bool:
        """Return whether this rank removes the files of ``unit`` when no commit needs them.

        The first rank also removes those of ranks that no longer exist.
        """
        others = tuple(f"{stream_of(rank)}." for rank in range(1, self.world_size))
        return unit.startswith(self.prefix) if self.rank else not unit.startswith(others)

    def everyone(self, value: T) -> list[T]:
        """Return the ``value`` of each rank, by rank. Collective: every rank must call this."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._failing():
            dist.all_gather_object(values, value, group=self._open())
        return values

    def all_do(self, what: Callable[[], T]) -> list[T]:
        """Run ``what`` on each rank and return the results by rank. Collective: every rank must call this.

        An error on any rank is raised on all: a rank's own error, or ``RankFailed`` with the number and text of the
        other.
        """
        if self.alone:
            return [what()]
        result, failure = None, None
        try:
            result = what()
        except Exception as error:
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes = self.everyone((result, told))
        if failure is not None:
            raise failure
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                raise RankFailed(f"rank {rank} failed, so no rank goes on. {failed}")
        return [cast(T, result) for result, _ in outcomes]

    def first_does(self, what: Callable[[], T]) -> T:
        """Run ``what`` on rank 0 alone and return its result on all ranks. Collective: every rank must call this.

        Raises as ``all_do``.
        """
        result = self.all_do(lambda: what() if self.rank == 0 else None)[0]
        return cast(T, result)

    def first_takes_its_time(
        self, what: Callable[[], T], meanwhile: AbstractContextManager[Any] | None = None
    ) -> T | None:
        """Run ``what`` on rank 0 alone, and return its result there and None on the others.

        The others wait as long as rank 0 lives, whatever their deadline. If that takes a while, they wait within
        ``meanwhile``. Collective: every rank must call this, inside ``agreeing``.
        """
        if self.alone:
            return what()
        if self.rank:
            if self.everyone(True)[0]:
                with meanwhile or nullcontext():
                    while self.everyone(True)[0]:
                        pass
            return None
        over = threading.Event()
        beating = threading.Thread(target=self._beat, args=(over,), name="holdfast-beat", daemon=True)
        beating.start()
        try:
            return what()
        finally:
            over.set()
            beating.join()

    def _beat(self, over: threading.Event) -> None:
        """Send the others a heartbeat from time to time, and a last message when the work is ``over``."""
        with suppress(HoldfastError):  # the next collective reports a lost rank
            while not over.wait(BEAT_SECONDS):
                self.everyone(True)
            self.everyone(False)

    def spread(self, sent: torch.Tensor | None, source: int) -> torch.Tensor:
        """Return the bytes that rank ``source`` has ``sent``. Collective: every rank must call this."""
        [nbytes] = {each for each in self.everyone(None if sent is None else len(sent)) if each is not None}
        received = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if sent is None else sent
        with self._failing():
            dist.broadcast(received, source, group=self._open())
        return received

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Run the body on all ranks; an error on any rank is raised on all, as in ``all_do``.

        Collective: every rank must enter this.
        """
        if self.alone:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error

        def end() -> None:
            if failure is not None:
                raise failure

        self.all_do(end)

    def fill(self, flat: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Broadcast to all ranks the range of ``flat`` that each rank has; ``ranges`` are element ranges by rank.

        Collective: every rank must call this.
        """
        if self.alone:
            return
        values = flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat  # gloo knows no fp8
        with self._failing():
            for rank, (start, stop) in enumerate(ranges):
                if start < stop:
                    dist.broadcast(values[start:stop], rank, group=self._open())

    def sum_into(self, own: torch.Tensor, flat: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Put into ``own`` the sum over all ranks of this rank's range of ``flat``.

        Collective: every rank must call this.

        ``ranges`` are element ranges by rank. Values are added in rank order, whatever order they arrive in, so the sum
        is reproducible.
        """
        longest = max(stop - start for start, stop in ranges)
        with self._failing():
            for at in range(0, longest, SUMMED_AT_ONCE):
                parts = [(min(a + at, b), min(a + at + SUMMED_AT_ONCE, b)) for a, b in ranges]
                self._sum_part(own[at : at + SUMMED_AT_ONCE], flat, parts)

    def _sum_part(self, own: torch.Tensor, flat: torch.Tensor, parts: list[tuple[int, int]]) -> None:
        group = self._open()
        sent = [
            dist.isend(flat[start:stop], rank, group=group)
            for rank, (start, stop) in enumerate(parts)
            if rank != self.rank and start < stop
        ]
        start, stop = parts[self.rank]
        mine, received = flat[start:stop], torch.empty(stop - start, dtype=flat.dtype, device="cpu")
        for rank in range(self.world_size if start < stop else 0):
            if rank != self.rank:
                dist.recv(received, rank, group=group)
            part = mine if rank == self.rank else received
            if rank == 0:
                own[: stop - start].copy_(part)
            else:
                own[: stop - start].add_(part)
        for work in sent:
            cast(Any, work).wait()

    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("this rank has let go of the others")
        return self._group

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn the error of a failed collective into one about a lost rank."""
        try:
            yield
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> RankFailed:
        """Return the error for a failed collective. Raises a more specific one if the lost rank is known."""
        self.tell_lost()
        return RankFailed(
            f"rank {self.rank} waited for the others, and one has ended or does not come ({error}). Every step that was"
            " durable still is; start all ranks again to resume, and where one was only slow, with a longer"
            " deadline_seconds=."
        )

    def board(self, initial: Mapping[str, str], deadline_seconds: float) -> dist.TCPStore:
        """Return a key-value store with ``initial`` values that all ranks share.

        Collective: every rank must call this.
        """
        timeout = timedelta(seconds=deadline_seconds)

        made: list[dist.TCPStore] = []

        def serve() -> tuple[str, int]:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            made.append(dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False))
            for key, value in initial.items():
                made[0].set(key, value)
            return host, made[0].port

        def connect() -> None:
            if self.rank:
                made.append(dist.TCPStore(host, port, is_master=False, timeout=timeout))

        host, port = self.first_does(serve)
        self.all_do(connect)
        return made[0]


def stream_of(rank: int) -> str:
    return f"rank-{rank:05d}"


@contextmanager
def _told_of_wait(deadline_seconds: float, what: str) -> Iterator[None]:
    """Warn once if the body takes long because not all ranks come."""
    text = (
        f"rank {dist.get_rank()} has waited {PATIENCE_SECONDS:g} s for the other ranks to {what}. All"
        f" {dist.get_world_size()} ranks have to, not rank 0 alone: each stores its part. It waits for"
        f" {deadline_seconds:g} s in all."
    )
    timer = threading.Timer(PATIENCE_SECONDS, warnings.warn, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
