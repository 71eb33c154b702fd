"""Parts of all combinations, for tests of things that are better met in every pair than in every combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def one_in(n: int, *kinds: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every ``n``-th combination of one of each of ``kinds``: each choice from all kinds but one is among them, with
    every ``n``-th of that one kind, which must have ``n`` or more."""
    found = itertools.product(*(enumerate(kind) for kind in kinds))
    return [tuple(one for _, one in each) for each in found if sum(number for number, _ in each) % n == 0]
