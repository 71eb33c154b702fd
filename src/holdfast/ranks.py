"""Ranks: the processes that train together, as far as who stores their state has to know of the others.

Where all do the same at the same moment (resuming, a base at once), they exchange values on a group of their own. What
happens in the background goes over a *board*, a key-value store of torch that the first rank serves: nobody waits for
anybody there, and a rank that dies leaves the last that it said.
"""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .errors import HoldfastError, RankFailed

T = TypeVar("T")

PATIENCE_SECONDS = 10.0
"""How long the others may be late without a word."""

BEAT_SECONDS = 0.5
"""How often the first rank tells the others that they wait for something."""

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""What tells a running machine from any other."""

SUMMED_AT_ONCE = 4 << 20
"""Elements: what is received waits in memory."""


def this_machine() -> str:
    """The same for all processes of one running machine."""
    try:
        return BOOT.read_text()
    except OSError:  # no Linux
        return socket.gethostname()


class Ranks:
    """This process among ``world_size``. By itself it is rank 0 of 1."""

    def __init__(self, rank: int = 0, world_size: int = 1, group: Any = None) -> None:
        self.rank, self.world_size, self._group = rank, world_size, group
        self.alone = group is None
        self.tell_lost: Callable[[], None] = lambda: None
        """Raises what is known of a rank that did not come."""

    @classmethod
    def here(cls, deadline_seconds: float, what: str = "make their Checkpointer") -> Ranks:
        """Those of torch.distributed, if it is in use. Called on all ranks, and waits for them; ``what`` is what they
        are to do."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        with _told_of_wait(deadline_seconds, what):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_seconds))
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def close(self) -> None:
        """Let go of the others: who waits for this rank gets ``RankFailed``. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(ValueError):  # the script has destroyed all groups
                dist.destroy_process_group(group)

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """An error inside is the end of the group."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @property
    def stream(self) -> str:
        """The name of this rank's journal."""
        return stream_of(self.rank)

    @property
    def prefix(self) -> str:
        """Of the names of the units that this rank stores."""
        return "" if self.alone else f"{self.stream}."

    def is_mine(self, unit: str) -> bool:
        """Whether this rank removes the files of ``unit`` when no commit needs them: the first one also those that
        ranks left which are there no more."""
        others = tuple(f"{stream_of(rank)}." for rank in range(1, self.world_size))
        return unit.startswith(self.prefix) if self.rank else not unit.startswith(others)

    def everyone(self, value: T) -> list[T]:
        """The ``value`` of each rank, by rank. Called on all of them."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._failing():
            dist.all_gather_object(values, value, group=self._open())
        return values

    def all_do(self, what: Callable[[], T]) -> list[T]:
        """What ``what`` returned on each rank. If it raised anywhere it raises everywhere: the own error, or one that
        names the rank and has its text. Called on all ranks."""
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
        """What ``what`` returned on rank 0, which alone calls it. Raises as ``all_do``. Called on all ranks."""
        result = self.all_do(lambda: what() if self.rank == 0 else None)[0]
        return cast(T, result)

    def first_takes_its_time(self, what: Callable[[], T]) -> T | None:
        """What ``what`` returned on rank 0, which alone calls it, and None on the others: they wait for as long as it
        lives, whatever their deadline. Called on all ranks, inside ``agreeing``."""
        if self.alone:
            return what()
        if self.rank:
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
        """Tell the others from time to time to wait, and that it is ``over``."""
        with suppress(HoldfastError):  # what all do next says who is gone
            while not over.wait(BEAT_SECONDS):
                self.everyone(True)
            self.everyone(False)

    def spread(self, sent: torch.Tensor | None, source: int) -> torch.Tensor:
        """The bytes that the rank ``source`` has ``sent``. Called on all ranks."""
        [nbytes] = {each for each in self.everyone(None if sent is None else len(sent)) if each is not None}
        received = torch.empty(nbytes, dtype=torch.uint8) if sent is None else sent
        with self._failing():
            dist.broadcast(received, source, group=self._open())
        return received

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """What is inside is done on all ranks. If it raises anywhere it raises everywhere, as ``all_do``."""
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
        """Of ``flat``, let all ranks have the element ``ranges`` that each has, by rank. Called on all."""
        if self.alone:
            return
        with self._failing():
            for rank, (start, stop) in enumerate(ranges):
                if start < stop:
                    dist.broadcast(flat[start:stop], rank, group=self._open())

    def sum_into(self, own: torch.Tensor, flat: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Put into ``own`` the sum over all ranks of what ``flat`` has in this rank's of the element ``ranges``. It is
        added up in the order of the ranks, whatever comes first. Called on all."""
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
        mine, received = flat[start:stop], torch.empty(stop - start, dtype=flat.dtype)
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
        """What a collective inside fails with means that somebody is gone."""
        try:
            yield
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> RankFailed:
        """What a collective that failed means. Raises what is known of who did not come, if anything is."""
        self.tell_lost()
        return RankFailed(
            f"rank {self.rank} waited for the others, and one has ended or does not come ({error}). Every step that was"
            " durable still is; start all ranks again to resume, and where one was only slow, with a longer"
            " deadline_seconds=."
        )

    def board(self, initial: Mapping[str, str], deadline_seconds: float) -> dist.TCPStore:
        """A key-value store that all ranks share, with ``initial`` values. Called on all ranks."""
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
    """Warn once if what is inside takes long, since not all ranks come."""
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
