"""Ranks: the processes that train together, as far as a checkpointer has to know of the others.

Where all do the same at the same moment (resuming, a base at once), they exchange values on a group of their own. What
happens in the background goes over a *board*, a key-value store of torch that the first rank serves: nobody waits for
anybody there, and a rank that dies leaves the last that it said.
"""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import RankFailed

T = TypeVar("T")

PATIENCE_SECONDS = 10.0
"""How long the others may be late without a word."""


class Ranks:
    """This process among ``world_size``. By itself it is rank 0 of 1."""

    def __init__(self, rank: int = 0, world_size: int = 1, group: Any = None) -> None:
        self.rank, self.world_size, self._group = rank, world_size, group
        self.alone = group is None
        self.tell_lost: Callable[[], None] = lambda: None
        """Raises what is known of a rank that did not come."""

    @classmethod
    def here(cls, deadline_seconds: float) -> Ranks:
        """Those of torch.distributed, if it is in use. Called on all ranks, and waits for them."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        with _told_of_wait(deadline_seconds):
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
        assert self._group is not None
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._gone(error) from error
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

    def spread(self, sent: torch.Tensor | None, source: int) -> torch.Tensor:
        """The bytes that the rank ``source`` has ``sent``. Called on all ranks."""
        assert self._group is not None
        [nbytes] = {each for each in self.everyone(None if sent is None else len(sent)) if each is not None}
        received = torch.empty(nbytes, dtype=torch.uint8) if sent is None else sent
        try:
            dist.broadcast(received, source, group=self._group)
        except RuntimeError as error:
            raise self._gone(error) from error
        return received

    def _gone(self, error: RuntimeError) -> RankFailed:
        """What a collective that failed means. Raises what is known of who did not come, if anything is."""
        self.tell_lost()
        return RankFailed(
            f"rank {self.rank} waited for the others, and one has ended or does not come ({error}). Every step that was"
            " durable still is; start all ranks again to resume."
        )

    def board(self, initial: Mapping[str, str], deadline_seconds: float) -> dist.TCPStore:
        """A key-value store that all ranks share, with ``initial`` values. Called on all ranks."""
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        timeout = timedelta(seconds=deadline_seconds)

        made: list[dist.TCPStore] = []

        def serve() -> int:
            made.append(dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False))
            for key, value in initial.items():
                made[0].set(key, value)
            return made[0].port

        def connect() -> None:
            if self.rank:
                made.append(dist.TCPStore(host, port, is_master=False, timeout=timeout))

        port = self.first_does(serve)
        self.all_do(connect)
        return made[0]


def stream_of(rank: int) -> str:
    return f"rank-{rank:05d}"


@contextmanager
def _told_of_wait(deadline_seconds: float) -> Iterator[None]:
    """Warn once if what is inside takes long, since not all ranks come."""
    text = (
        f"rank {dist.get_rank()} has waited {PATIENCE_SECONDS:g} s for the other ranks to make their Checkpointer. All"
        f" {dist.get_world_size()} ranks have to make it, not rank 0 alone: each stores its part. It waits for"
        f" {deadline_seconds:g} s in all."
    )
    timer = threading.Timer(PATIENCE_SECONDS, warnings.warn, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
