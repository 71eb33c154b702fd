"""Queues of several drives with the interface of one: a transfer goes to its file's drive.

Each drive has threads, lanes and limits of its own, so that a slow or busy drive holds up no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from holdfast.io.queue import IOQueue, Request


class DriveQueues(IOQueue):
    """The queue of a run's own drive, and one queue for each of ``directories``, which are on other drives."""

    def __init__(
        self,
        directories: Sequence[Path],
        threads: int = 4,
        read_limit: int | None = None,
        write_limit: int | None = None,
        total_limit: int | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the queues. Threads and limits are those of each drive."""
        super().__init__(threads, read_limit, write_limit, total_limit, prepare)
        self.others = {
            directory: IOQueue(threads, read_limit, write_limit, total_limit, prepare)
            for directory in directories
        }

    def submit(
        self,
        requests: Sequence[Request],
        *,
        kind: str,
        phase: str,
        priority: int,
        finish: Callable[[], Any] | None = None,
    ) -> Future:
        """Queue ``requests`` as ``IOQueue.submit`` does. The files of one group must be on one drive."""
        path = getattr(requests[0].file, "path", None) if requests else None
        queue = None if path is None else self.others.get(path.parent)
        submit = super().submit if queue is None else queue.submit
        return submit(requests, kind=kind, phase=phase, priority=priority, finish=finish)

    def counters(self) -> dict[tuple[str, str, str], int]:
        """Return the bytes that moved on all drives together."""
        total: Counter[tuple[str, str, str]] = Counter(super().counters())
        for queue in self.others.values():
            total.update(queue.counters())
        return dict(total)

    def close(self) -> None:
        super().close()
        for queue in self.others.values():
            queue.close()
