"""The metrics that a script gives at a step, and whether they make the step a snapshot that is kept as one of the best.

With ``Keep(best=k, metric=name)`` a step becomes a snapshot if no ``k`` retained ones of the run's line are better. The
snapshot records the metrics, so that a resume ranks as before. Called by ``Checkpointer.step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..distributed import Ranks
from ..errors import BadInput
from ..store.commit.retention import Keep
from ..store.run_store import LocalStore


def checked(metrics: Mapping[str, Any], keep: Keep) -> dict[str, float]:
    """Return ``metrics`` as plain numbers, tensors and arrays of one element among them.

    Raises ``BadInput`` for other values, and if the metric that ``keep`` ranks by is not among them.
    """
    if not isinstance(metrics, Mapping):
        raise BadInput(f'metrics = {metrics!r} is no dictionary, such as {{"eval_loss": 2.31}}')
    found: dict[str, float] = {}
    for name, value in metrics.items():
        number = _number(value)
        if not isinstance(name, str) or number is None:
            raise BadInput(f"metrics has {name!r}: {value!r}, and takes a number by its name")
        found[name] = number
    if keep.best is not None and keep.metric not in found:
        raise BadInput(
            f"metrics has {', '.join(map(repr, found)) or 'nothing'}, and Keep(best={keep.best}) ranks by"
            f" {keep.metric!r}: give that as well, or leave out metrics= at this step"
        )
    return found


def _number(value: Any) -> float | None:
    """Return a number, or the one in a tensor or an array of one element, as Python's; None for anything else."""
    with suppress(RuntimeError, ValueError):  # of several elements
        found = value.item() if hasattr(value, "item") else value
        return found if type(found) in (int, float) else None
    return None


def is_among_best(metrics: Mapping[str, float], keep: Keep, store: LocalStore, ranks: Ranks) -> bool:
    """Return whether the current step is to be kept as one of the best.

    Collective: every rank must call this. Raises ``BadInput``, on all ranks, unless all have the same ``metrics``.
    """
    gathered = [
        repr(sorted(each.items())) for each in ranks.everyone(dict(metrics))
    ]  # as text, NaN is equal to itself
    if len(set(gathered)) > 1:
        raise BadInput(
            f"metrics is not the same on all ranks (rank {ranks.rank} has {dict(metrics)}). Average it over the ranks"
            " before step()."
        )
    if keep.best is None or keep.metric is None:
        return False
    value = metrics[keep.metric]
    return ranks.first_does(lambda: store.is_among_best(value))
