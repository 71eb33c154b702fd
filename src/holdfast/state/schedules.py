"""The learning-rate schedulers that are in use but were not given, so that no commit has their state.

A scheduler of torch leaves ``initial_lr`` in the groups of its optimizer. ``ReduceLROnPlateau`` leaves nothing and is
noticed when a learning rate has moved. The scheduler itself is then searched once, among the objects that refer to the
optimizer.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..quantities import shown

MOST_LOOKED_AT = 10_000
"""The most objects to examine within a given one, such as the schedulers in a ``SequentialLR``."""


class UngivenSchedulers:
    """Finds schedulers of ``optimizers`` that are not in ``given``. Called after every step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], given: Iterable[Any]) -> None:
        each_has = [getattr(each, "members", ()) for each in optimizers]
        inside = [member for members in each_has if isinstance(members, (list, tuple)) for member in members]
        members = [member for member in inside if isinstance(member, torch.optim.Optimizer)]
        self._optimizers, self._given = [*optimizers, *members], list(given)
        self._rates: list[Any] | None = None
        self._looked = {"bound": False, "moved": False}
        """True for each sign since which schedulers were searched for."""

    def look(self, how: str, stacklevel: int) -> None:
        """Warn at the first step that shows a scheduler in use which was not given; ``how`` is the advice.

        One of ``given`` that stands for the loop of a trainer has its own advice as ``schedule_advice``.
        """
        if all(self._looked.values()):
            return
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        before, self._rates = self._rates, [rate for g in groups if isinstance(rate := g.get("lr"), float)]
        signs = {
            "bound": any("initial_lr" in group for group in groups),
            "moved": before is not None and before != self._rates,
        }
        new = [sign for sign, is_there in signs.items() if is_there and not self._looked[sign]]
        if not new:
            return
        self._looked |= dict.fromkeys(new, True)
        given = _things_in(self._given)
        found = _schedulers_of(self._optimizers)
        names = sorted({type(each).__name__ for each in found if id(each) not in given})
        if names:
            own = (getattr(each, "schedule_advice", None) for each in self._given)
            how = next((each for each in own if isinstance(each, str)), how)
            self._looked = dict.fromkeys(self._looked, True)
            warnings.warn(
                f"{shown(names)} moves learning rates and was not given, so no step of the run has its place, and after"
                f" a resume it begins anew. {how}",
                stacklevel=stacklevel,
            )


def needs_arguments(scheduler: Any) -> bool:
    """Return whether ``scheduler.step`` requires a value, as that of ``ReduceLROnPlateau`` does."""
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty and each.kind in by_position for each in parameters)


def _schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Any]:
    """Yield the schedulers of ``optimizers``, and those of optimizers around them, as accelerate has one."""
    ids, around = {id(each) for each in optimizers}, []
    for each in _referring_to(optimizers):
        is_around = isinstance(each, torch.optim.Optimizer)
        looks_so = isinstance(each, LRScheduler) or "sched" in type(each).__name__.lower()
        if not (is_around or looks_so) or id(getattr(each, "optimizer", None)) not in ids:
            continue
        if is_around:
            around.append(each)
        elif hasattr(each, "state_dict"):
            yield each
    if around:
        yield from _schedulers_of(around)


def _referring_to(things: Sequence[Any]) -> Iterator[Any]:
    """Yield the objects of which one of ``things`` is an attribute.

    Each search for referrers goes through all objects of the process, so there is one for all of ``things``.
    """
    found = gc.get_referrers(*things)
    dicts = {id(each): each for each in found if isinstance(each, dict)}
    yield from (each for each in found if id(each) not in dicts)
    if dicts:
        owners = gc.get_referrers(*dicts.values())
        yield from (owner for owner in owners if id(getattr(owner, "__dict__", None)) in dicts)


def _things_in(given: Sequence[Any]) -> set[int]:
    """Return the ids of ``given`` and of the objects in them.

    Near objects come first, since data may hold very many.
    """
    seen: set[int] = set()
    waiting = deque(given)
    while waiting and len(seen) < MOST_LOOKED_AT:
        thing = waiting.popleft()
        if id(thing) in seen or isinstance(
            thing, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type)
        ):
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            waiting += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            waiting += thing
        else:
            waiting += vars(thing).values() if hasattr(thing, "__dict__") else []
    return seen
