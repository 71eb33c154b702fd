"""The ranking of commits by a metric that the script measured at their steps, such as the loss on held-out data.

A commit records its metrics in its manifest, so the ranking is the same after a resume and in a copy of the run. NaN
has no rank, and of equal values the older commit is better. Called by ``retention`` and by the writer of commits.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isnan
from typing import Literal

from holdfast.store.format.manifest import CommitRef, Manifest

Mode = Literal["min", "max"]


def ranked(line: Collection[Manifest], metric: str, mode: Mode) -> list[CommitRef]:
    """Return the commits of ``line`` that have a value of ``metric``, best first.

    A step that a resume made a commit of again counts once.
    """
    found: dict[int, tuple[float, int, CommitRef]] = {}
    for manifest in sorted(line, key=lambda manifest: manifest.ref):
        value = value_of(manifest, metric)
        if value is not None:
            found.setdefault(manifest.step, (_signed(value, mode), manifest.step, manifest.ref))
    return [ref for *_, ref in sorted(found.values())]


def is_better(line: Collection[Manifest], metric: str, mode: Mode, count: int, value: float) -> bool:
    """Return whether a new commit with ``value`` would be one of the best ``count`` of ``line``."""
    if isnan(value):
        return False
    best = ranked(line, metric, mode)[:count]
    if len(best) < count:
        return True
    worst = next(value_of(manifest, metric) for manifest in line if manifest.ref == best[-1])
    return worst is not None and _signed(value, mode) < _signed(worst, mode)


def value_of(manifest: Manifest, metric: str) -> float | None:
    """Return the value of ``metric`` at the commit's step; None if it has none, or NaN."""
    value = manifest.metrics.get(metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or isnan(value):
        return None
    return float(value)


def _signed(value: float, mode: Mode) -> float:
    return value if mode == "min" else -value
