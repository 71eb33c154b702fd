"""Parts of all combinations, for tests of things that are better met in every pair than in every combination, and of
all repetitions. With ``HOLDFAST_WHOLE=1`` in the environment they are all there."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

WHOLE = bool(os.environ.get("HOLDFAST_WHOLE"))


def one_in(n: int, *kinds: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every ``n``-th combination of one of each of ``kinds``: each choice from all kinds but one is among them, with
    every ``n``-th of that one kind, which must have ``n`` or more."""
    found = itertools.product(*(enumerate(kind) for kind in kinds))
    n = 1 if WHOLE else n
    return [tuple(one for _, one in each) for each in found if sum(number for number, _ in each) % n == 0]


def some_of(n: int, things: Sequence[T]) -> Sequence[T]:
    """Every ``n``-th of ``things`` that are alike but for their numbers, such as seeds."""
    return things[:: 1 if WHOLE else n]


def thinned(names: Iterable[str], n: int) -> list[str]:
    """Of "test[case]" about one in ``n`` of each test's, the same ones whenever it is asked, and each test's first."""
    kept, seen = [], set()
    for name in names:
        test = name.split("[")[0]
        if test not in seen or random.Random(name).randrange(n) == 0:
            kept.append(name)
        seen.add(test)
    return kept
