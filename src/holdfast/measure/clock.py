"""Repeated timing of an action, as often as a time allows and at least once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(action: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of one ``action`` over the runs that fit into ``seconds``.

    A first run, which does not count, goes before.
    """
    action()
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while not found or time.perf_counter() < ends:
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found)
