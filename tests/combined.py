"""Fixed parts of all combinations and repetitions, the same on every machine.

With ``HOLDFAST_CAMPAIGN=1`` in the environment (``make campaign``) all of them are there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

CAMPAIGN = bool(os.environ.get("HOLDFAST_CAMPAIGN"))


def one_in(n: int, *kinds: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every ``n``-th combination of one of each of ``kinds``: each choice from all kinds but one is among them, with
    every ``n``-th of that one kind, which must have ``n`` or more."""
    found = itertools.product(*(enumerate(kind) for kind in kinds))
    n = 1 if CAMPAIGN else n
    return [tuple(one for _, one in each) for each in found if sum(number for number, _ in each) % n == 0]


def some_of(n: int, things: Sequence[T]) -> Sequence[T]:
    """Every ``n``-th of ``things`` that are alike but for their numbers, such as seeds."""
    return things[:: 1 if CAMPAIGN else n]


def spread(n: int, things: Sequence[T]) -> list[T]:
    """``n`` of ``things``, from all of their length."""
    return (
        [things[k * len(things) // n] for k in range(min(n, len(things)))]
        if n < len(things)
        else list(things)
    )


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int = 1) -> list[int]:
    """Places of as many of ``cases`` as it takes to have each value of each parameter once, greedily.

    With a ``strength`` of 2 it is each pair of values of two parameters.
    """
    shows = [
        {*itertools.combinations(sorted(case.items(), key=lambda item: item[0]), strength)} for case in cases
    ]
    wanted, chosen = set[tuple[Any, ...]]().union(*shows), []
    while wanted:
        best = max(range(len(cases)), key=lambda place: len(wanted & shows[place]))
        chosen.append(best)
        wanted -= shows[best]
    return sorted(chosen)
