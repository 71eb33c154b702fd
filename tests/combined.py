"""Fixed parts of all combinations and repetitions, the same on every machine.

With ``HOLDFAST_CAMPAIGN=1`` in the environment (``make campaign``) all of them are there.
"""

from __future__ import annotations

import itertools
import os
import random
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


def together(
    factors: Mapping[str, Sequence[Any]],
    forbidden: Sequence[Mapping[str, Sequence[Any]]] = (),
    strength: int = 2,
) -> list[dict[str, Any]]:
    """Cases with one value of each factor, in which any ``strength`` values that may be together once are, greedily.

    Args:
        factors: By name, the values of each. The first one comes more often than the others.
        forbidden: Each by name some values, of which one case must not have one of each name.
    """
    draw = random.Random(0)
    places = {name: range(len(values)) for name, values in factors.items()}
    rules = [
        {name: {factors[name].index(v) for v in values} for name, values in rule.items()}
        for rule in forbidden
    ]

    def may_be(case: Mapping[str, int]) -> bool:
        return not any(all(case.get(name) in values for name, values in rule.items()) for rule in rules)

    def completed(case: dict[str, int], order: Sequence[str]) -> dict[str, int] | None:
        """``case`` with a value of each factor of ``order``, each that which adds most to what was found."""
        if not order:
            return case
        name, *rest = order
        others = list(itertools.combinations(sorted(case.items()), strength - 1))
        gains = [sum(frozenset((*o, (name, place))) in missing for o in others) for place in places[name]]
        for place in sorted(places[name], key=lambda place: -gains[place]):
            found = {**case, name: place}
            if may_be(found) and (found := completed(found, rest)) is not None:
                return found
        return None

    missing = dict.fromkeys(
        frozenset(zip(names, chosen))
        for names in itertools.combinations(factors, strength)
        for chosen in itertools.product(*(places[name] for name in names))
        if may_be(dict(zip(names, chosen)))
    )
    cases = []
    while missing:
        best: tuple[int, dict[str, int]] = (0, {})
        for _ in range(8):
            start = dict(next(iter(missing)))
            order = draw.sample([name for name in factors if name not in start], len(factors) - strength)
            case = completed(start, order)
            if case is not None:
                news = sum(each <= set(case.items()) for each in missing)
                best = max(best, (news, case), key=lambda pair: pair[0])
        assert best[0], f"no case may have {dict(next(iter(missing)))}"
        missing = {each: None for each in missing if not each <= set(best[1].items())}
        cases.append({name: factors[name][best[1][name]] for name in factors})
    return cases
