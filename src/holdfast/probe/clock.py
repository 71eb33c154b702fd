"""Measuring for a while: as often as a time allows, once at least."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(action: Callable[[], object], seconds: float) -> float:
    """Of one ``action``, over those that fit into ``seconds``, after one that does not count."""
    action()
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while not found or time.perf_counter() < ends:
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found)
