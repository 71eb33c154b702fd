"""The part of the training state that is not tensors of the model.

It holds the step, random number generators, data position and learning-rate schedule. User objects with ``state_dict``
are stored by value (``encoding``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..accelerators import random_states, set_random_states
from ..errors import BadInput, RunMismatch
from ..quantities import counted
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
        {k: encode(v, f"param_groups[{i}][{k!r}]", known) for k, v in group.items() if k != "params"}
        for i, group in enumerate(groups)
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
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for kind in state.keys() - HOST_GENERATORS:
        set_random_states(kind, state[kind])
