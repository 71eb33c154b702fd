"""The part of the training state that is not tensors of the model.

It holds the step, random number generators, data position and learning-rate schedule. User objects with ``state_dict``
are stored by value (``encoding``). Random numbers that an update draws from the global generators are noted by the
states before it, so that a replay draws the same. Learning-rate schedulers that are in use but were not given, so that
no commit has their state, are found by ``UngivenSchedulers``.
"""

from __future__ import annotations

import gc
import inspect
import random
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from ..accelerators import current_kind, random_states, set_random_states
from ..errors import BadInput, RunMismatch
from ..quantities import counted, shown
from .encoding import decode, encode

OF_VERSIONS = {
    *("verbose", "default_min_lr", "_step_count", "_get_lr_called_within_step", "_last_lr", "_is_initial"),
    *("_scale_fn_ref", "_scale_fn_custom", "_anneal_func_type", "_schedule_phases"),
}
"""The keys in the state of a schedule that only some versions of torch keep."""
HOST_GENERATORS = {"python", "numpy", "torch"}
"""The keys of ``random_state`` that every process has."""
ELASTIC = (
    "a loader that counts the samples of all ranks: holdfast.loader(dataset, batch_size) does, and one of your own that"
    " does says so by an attribute elastic = True."
)
"""The way out for messages about a data position that belongs to one rank alone."""
MOST_LOOKED_AT = 10_000
"""The most objects to examine within a given one, such as the schedulers in a ``SequentialLR``."""


def refuse_stateless(things: Mapping[str, Any]) -> None:
    """Raise ``BadInput`` for one of ``things``, if it was given, whose state no commit could hold."""
    for name, thing in things.items():
        if thing is not None and not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            instead = ": holdfast.loader(dataset, batch_size) has them" if name == "loader" else ""
            raise BadInput(
                f"{name}: {type(thing).__name__} has no state_dict and load_state_dict, so a resume would lose its"
                f" position{instead}."
            )


def refuse_other_groups(what: str, there: Sequence[Any], here: Sequence[Any]) -> None:
    """Raise ``RunMismatch`` unless the optimizer ``what`` has as many parameter groups as in the run."""
    if len(there) != len(here):
        raise RunMismatch(
            f"{what} of the run has {counted(len(there), 'parameter group')}, this one has {len(here)}. Build it with"
            " the groups that the run was made with."
        )


def hyper_parameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the hyper-parameters of an optimizer's parameter ``groups``, as JSON.

    Parameters among the values are stored by their place. Raises ``BadInput`` naming the first value that cannot be
    stored.
    """
    for number, group in enumerate(groups):
        if odd := [key for key in group if type(key) is not str]:
            raise BadInput(
                f"param_groups[{number}] has the key {odd[0]!r}, and commits have texts as keys: use one"
            )
    places: dict[int, list[int]] = {}

    def known(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not places:
            places.update(
                {id(p): [i, k] for i, each in enumerate(groups) for k, p in enumerate(each["params"])}
            )
        return {"__member__": places[id(value)]} if id(value) in places else None

    return [
        {
            key: encode(value, f"param_groups[{number}][{key!r}]", known)
            for key, value in group.items()
            if key != "params"
        }
        for number, group in enumerate(groups)
    ]


def load_hyper_parameters(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Set parameter ``groups`` to the result of ``hyper_parameters``, as ``fill_groups`` does."""

    def resolve(told: dict[str, Any]) -> Any:
        if "__member__" not in told:
            return None
        group, position = told["__member__"]
        return groups[group]["params"][position]

    fill_groups(groups, [{key: decode(value, resolve) for key, value in each.items()} for each in saved])


def fill_groups(groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]]) -> None:
    """Set the ``values`` in parameter ``groups``.

    A tensor that a group holds keeps its place and its device and gets the new value, because the script may hold it
    too. If other groups hold it as well, a group with another value gets a tensor of its own.
    """
    filled: dict[int, torch.Tensor] = {}
    for group, own in zip(groups, values, strict=True):
        for key, value in own.items():
            held = group.get(key)
            alike = isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor)
            if (
                alike
                and (held.shape, held.dtype) == (value.shape, value.dtype)
                and torch.equal(filled.setdefault(id(held), value), value)
            ):
                held.detach().copy_(value)
            else:
                group[key] = value


def override_warnings(
    before: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
    given: Sequence[Mapping[str, Any]],
    after: str,
) -> str | None:
    """Return the warning that the run's hyper-parameters replace those that a script was given, or None.

    Args:
        before: Those that the script which wrote the run was given.
        own: The run's own hyper-parameters, which are kept.
        given: Those that the script was given now.
        after: The call after which the script can change them.
    """
    changed = list(_changed(before, own, given))
    if not changed:
        return None
    return (
        f"the run's own hyper-parameters are kept: {'; '.join(changed)}. To change one, set it after {after}, in"
        " optimizer.param_groups (a learning rate that a scheduler sets: in its base_lrs as well)."
    )


def _changed(
    before: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    for number, (was, runs, now) in enumerate(zip(before, own, given, strict=False)):
        for key, value in now.items():
            if key == "param_names" or (key == "lr" and "initial_lr" in now):  # a scheduler moves this rate
                continue
            if value != was.get(key, value) and value != runs.get(key):
                run, script = (decode(group.get(key)) for group in (runs, now))
                yield f"param_groups[{number}][{key!r}] is {run!r} and not {script!r}, as the optimizer was given"


def adopt(things: Mapping[str, Any], progress: Mapping[str, Any]) -> list[str]:
    """Load the state that the ``progress`` of another run has for ``things``, by name.

    A thing is left as it is if the progress lacks it or has a state of another kind for it. Returns a message for
    each difference.
    """
    there = progress.get("things", progress)
    told = []
    for name, thing in things.items():
        saved, own = there.get(name), thing.state_dict()
        if saved is None or (not saved and own):
            told.append(f"it has no {name}; that of the script goes on as it is")
            continue
        fitting, differing = _fitting(own, decode(saved))
        if fitting is None:
            told.append(f"its {name} is of another kind{differing}; that of the script goes on as it is")
            continue
        thing.load_state_dict(fitting)
        if differing:
            told.append(f"its {name} is of another version{differing}; the rest of it was taken over")
    return told


def _fitting(own: dict[str, Any], saved: Any) -> tuple[dict[str, Any] | None, str]:
    """Return ``saved`` as a state like ``own``, or None if it is of another kind; and the difference as text."""
    if not isinstance(saved, dict):
        return None, ""
    empty = {key: own[key] for key in own.keys() - saved.keys() if not any(_leaves(own[key]))}
    saved = empty | saved  # flattening a state drops empty dictionaries in lists
    each = ((saved.keys() - own.keys(), "it has"), (own.keys() - saved.keys(), "it lacks"))
    parts = [f"{verb} {', '.join(sorted(map(str, keys)))}" for keys, verb in each if keys]
    differing = f" ({', and '.join(parts)})" if parts else ""
    other = (own.keys() ^ saved.keys()) - OF_VERSIONS
    if other or (parts and not own.keys() & saved.keys() & {"last_epoch"}):
        return None, differing
    try:
        return _with_keys_of(own, saved), differing
    except ValueError:
        return None, differing


def _leaves(value: Any) -> Iterator[Any]:
    """Yield each value in nested dictionaries and lists that is neither, as ``(value,)``."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield (value,)


def _with_keys_of(own: Any, saved: Any) -> Any:
    """Return ``saved`` with integer keys where ``own`` has them.

    Flattening a state by names turns such keys into text. Raises ``ValueError`` if they are no numbers, or if a
    schedule has another number of parts.
    """
    if isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        return [_with_keys_of(mine, theirs) for mine, theirs in zip(own, saved, strict=True)]
    if not isinstance(own, dict) or not isinstance(saved, dict):
        return saved
    if own and all(type(key) is int for key in own):
        saved = {int(str(key)): value for key, value in saved.items()}
    if own.keys() & {"last_epoch", "_schedulers"}:
        for mine, theirs in ((own[key], saved[key]) for key in own.keys() & saved.keys()):
            if _is_parts(mine) and _is_parts(theirs) and len(mine) != len(theirs):
                raise ValueError(f"{len(theirs)} parts, and here {len(mine)}")
    made = {key: _with_keys_of(own.get(key), value) for key, value in saved.items()}
    return Counter(made) if isinstance(own, Counter) else made


def _is_parts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def refuse_other_ranks(loader: Any, progress: Mapping[str, Any], here: int) -> None:
    """Raise ``RunMismatch`` if ``progress`` holds a loader's position for another number of ranks than ``here``.

    A ``loader`` with ``elastic = True`` has a position that means the same to any number.
    """
    wrote = progress.get("ranks", 1)
    if wrote != here and _is_of_one_rank(loader, progress):
        raise RunMismatch(
            f"the place in the data that {type(loader).__name__} keeps is each rank's own: {counted(wrote, 'rank')}"
            f" wrote the run, and {counted(here, 'rank')} would go on from it. Resume with {wrote}, or begin another"
            f" run with {ELASTIC}"
        )


def refuse_place_of_first(loader: Any, progress: Mapping[str, Any]) -> None:
    """Raise ``RunMismatch`` if ``progress``, of a state to begin from, holds only the first rank's data position.

    A ``loader`` with ``elastic = True`` has a position that means the same to any number of ranks.
    """
    wrote = progress.get("ranks", 1)
    if wrote > 1 and _is_of_one_rank(loader, progress):
        raise RunMismatch(
            f"the place in the data that {type(loader).__name__} keeps is each rank's own: {wrote} ranks wrote the"
            " state to begin from, and it is read with the place of the first. Go on in the run's own directory, or"
            f" begin with {ELASTIC}"
        )


def _is_of_one_rank(loader: Any, progress: Mapping[str, Any]) -> bool:
    """Return whether ``progress`` has a position for the ``loader`` that means nothing to another number of ranks."""
    there = "loader" in progress.get("things", progress)
    return loader is not None and there and not getattr(loader, "elastic", False)


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, and of an accelerator in use.

    The accelerator's states are under its type ("cuda").
    """
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        **random_states(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the global generators to ``state``. Accelerator states go to as many devices of the type as there are."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(map(int, words)), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for kind in state.keys() - HOST_GENERATORS:
        set_random_states(kind, state[kind])


def generator_states() -> list[Any]:
    """Return the states of all global generators, in the form that compares fastest."""
    of_devices = [state for states in random_states().values() for state in states]
    return [random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), *of_devices]


def drawn_since(before: list[Any]) -> Any:
    """Return the states ``before`` as JSON if anything was drawn since; otherwise None."""
    python, numpy, *torchs = before
    now = generator_states()
    if now[0] == python and _alike(now[1], numpy) and all(map(torch.equal, now[2:], torchs)):
        return None
    version, words, gauss = python
    packed = (version, np.array(words, dtype=np.uint32), gauss)
    of_devices = {current_kind() or "cuda": torchs[1:]}
    return encode({"python": packed, "numpy": numpy, "torch": torchs[0], **of_devices})


def draw_again(drawn: Any) -> None:
    """Set the generators to the states that ``drawn_since`` returned; None leaves them as they are."""
    if drawn is not None:
        restore_random_state(decode(drawn))


def _alike(one: Any, other: Any) -> bool:
    return one[2:] == other[2:] and np.array_equal(one[1], other[1])


class UngivenSchedulers:
    """Finds schedulers of ``optimizers`` that are not in ``given``. Called after every step.

    A scheduler of torch leaves ``initial_lr`` in the groups of its optimizer. ``ReduceLROnPlateau`` leaves nothing and
    is noticed when a learning rate has moved. The scheduler itself is then searched once, among the objects that refer
    to the optimizer.
    """

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
