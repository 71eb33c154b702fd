"""The user state: what the training script holds besides the model and its optimizers' tensors.

Random generators, hyper-parameters, learning-rate schedule, data position and loss scale, by value, as JSON. It is part
of every log record and restored last, when the tensors are there. Called by ``TrainingState`` and recovery.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import xxhash

from ..errors import BadInput, RunMismatch
from ..quantities import MiB, format_bytes
from ..state.encoding import decode, encode
from ..state.progress import (
    adopt,
    hyper_parameters,
    load_hyper_parameters,
    override_warnings,
    random_state,
    refuse_other_groups,
    refuse_other_ranks,
    refuse_stateless,
    restore_random_state,
)
from .arithmetic import computing
from .capture.optimizer_attributes import refuse_unstorable

LARGE_BYTES, MOST_BYTES = 1 * MiB, 16 * MiB
"""Bounds of the tensors in ``also=``, which become text in every log record.

Above the first there is a warning; above the second a new run is refused.
"""
LOOK_EVERY = 100
"""Steps between two measurements of these tensors."""
MOVING = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
"""Keys of a scheduler's state that change with its position, and learning rates."""
PLAIN = (bool, int, float, str)
KNOWN = ("scheduler", "loader", "scaler")
"""Names of user state that is not ``also=``."""
Stateful = Mapping[str, Any]
"""Objects with ``state_dict`` and ``load_state_dict``, by name."""


class ScriptState:
    """The user state: the hyper-parameters of ``optimizers``, and ``things`` with a state of their own."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], things: Stateful) -> None:
        refuse_stateless(things)
        for name, thing in things.items():
            _refuse_unstorable(name, thing)
        self._optimizers, self.things = optimizers, things
        self.given = [hyper_parameters(optimizer.param_groups) for optimizer in optimizers]
        """Hyper-parameters by optimizer, as the script gave them before a resume restored those of the run."""
        self.given_schedule = _given_to(things.get("scheduler"))
        """The scheduler's attributes as the script gave them, and those of nested schedulers, by path, as JSON."""
        self.text_bytes = 0
        """The approximate memory that tensors in ``also=`` take as text in each waiting record."""
        self._looks, self._told = 0, False

    def now(self) -> dict[str, Any]:
        """Return the user state as JSON. Raises ``BadInput`` naming the first object that cannot be stored by value."""
        states = {name: thing.state_dict() for name, thing in self.things.items()}
        if self._looks % LOOK_EVERY == 0:
            self._weigh(states)
        self._looks += 1
        return {
            "random": encode(random_state()),
            "computing": computing(),
            "optimizers": [type(optimizer).__name__ for optimizer in self._optimizers],
            "groups": [hyper_parameters(optimizer.param_groups) for optimizer in self._optimizers],
            "things": {name: encode(state, f"{name}.state_dict()") for name, state in states.items()},
        }

    def again(self, before: dict[str, Any], which: Callable[[str, Any], bool]) -> dict[str, Any]:
        """Return ``before`` with the current hyper-parameters and the current state of objects ``which``, as JSON."""
        own = {name: thing for name, thing in self.things.items() if which(name, thing)}
        things = {
            **before["things"],
            **{name: encode(thing.state_dict(), f"{name}.state_dict()") for name, thing in own.items()},
        }
        groups = [hyper_parameters(optimizer.param_groups) for optimizer in self._optimizers]
        return {**before, "groups": groups, "things": things}

    def refuse_large(self) -> None:
        """Raise ``BadInput`` for tensors in ``also=`` that would make every step slow. Called before a run begins."""
        states = {name: thing.state_dict() for name, thing in self.things.items() if name not in KNOWN}
        nbytes = {name: tensor_bytes(state) for name, state in states.items()}
        if sum(nbytes.values()) > MOST_BYTES:
            raise BadInput(f"{_large(nbytes)}, {format_bytes(MOST_BYTES)} at most")

    def _weigh(self, states: Mapping[str, Any]) -> None:
        nbytes = {name: tensor_bytes(state) for name, state in states.items() if name not in KNOWN}
        total = sum(nbytes.values())
        self.text_bytes = 2 * (4 * total // 3)  # base64, and a second copy while it is written
        if total > LARGE_BYTES and not self._told:
            self._told = True
            warnings.warn(f"{_large(nbytes)}, which takes time and memory in every step", stacklevel=7)

    def check(self, progress: dict[str, Any], wrote: int, num_ranks: int) -> None:
        """Raise ``RunMismatch`` if ``progress`` belongs to another script.

        Raises it as well for a loader that cannot continue on ``num_ranks`` ranks from the positions that ``wrote``
        ranks had.
        """
        if "optimizers" not in progress:
            raise RunMismatch(
                "the run was not made by a Checkpointer, and has no records. Go on with what made it, such as"
                " holdfast.offload, or begin from it in another directory: resume(source=)."
            )
        there, here = progress["optimizers"], [type(optimizer).__name__ for optimizer in self._optimizers]
        if there != here:
            raise RunMismatch(
                f"the run was made with {' and '.join(there)}, these optimizers are {' and '.join(here)}. Give the same"
                " in the same order, or another directory."
            )
        for index, (optimizer, groups) in enumerate(zip(self._optimizers, progress["groups"], strict=True)):
            refuse_other_groups(f"optimizer {index}", groups, optimizer.param_groups)
        lost = [name for name in progress["things"] if name not in self.things]
        if lost:
            known = lost[0] in ("scheduler", "loader", "scaler")
            how = f"{lost[0]}=" if known else f"also={{{lost[0]!r}: ...}}"
            raise RunMismatch(
                f"the run has a {lost[0]}, and none was passed, so its position would be lost. Pass {how}."
                " A new run, in another directory, leaves it out with source=From(..., partial=True)."
            )
        self.check_place({"ranks": wrote, **progress}, num_ranks)

    def check_place(self, progress: dict[str, Any], num_ranks: int) -> None:
        """Raise ``RunMismatch`` if the loader cannot continue from ``progress``, of any run, on ``num_ranks`` ranks."""
        refuse_other_ranks(self.things.get("loader"), progress, num_ranks)

    def override_warnings(self, base: Mapping[str, Any], progress: Mapping[str, Any]) -> list[str]:
        """Return warnings of given settings that the run overrides, and of objects that the run does not have.

        A hyper-parameter is named if the script that made the snapshot ``base`` was given another value, and that of
        ``progress`` stays in force. A snapshot of an earlier version does not say what was given.
        """
        each = zip(base.get("given", []), progress["groups"], self.given, strict=False)
        told = [override_warnings(before, own, given, "resume()") for before, own, given in each]
        told.append(self._told_of_schedule(base.get("given_schedule", {}), progress))
        new = [name for name in self.things if name not in progress["things"]]
        return [text for text in told if text is not None] + [
            f"the run has no {name}: the one that was passed begins where it is" for name in new
        ]

    def _told_of_schedule(self, before: Mapping[str, Any], progress: Mapping[str, Any]) -> str | None:
        own = progress.get("things", {}).get("scheduler")
        if not isinstance(own, Mapping):
            return None
        kept = decode(own)
        if not isinstance(kept, Mapping):  # a tuple, or a tensor
            return None
        runs = _numbers_of(kept)
        changed = [
            f"{key} is {decode(runs[key])!r} and not {decode(value)!r}"
            for key, value in self.given_schedule.items()
            if value == value and value != before.get(key, value) and value != runs.get(key, value)
        ]
        if not changed:
            return None
        return (
            f"the run's own schedule is kept: {'; '.join(changed)}, as the scheduler was given. To change one, set it"
            " after resume(), as an attribute of the scheduler."
        )

    def adopt(self, progress: dict[str, Any], rank: int) -> list[str]:
        """Restore user state from the ``progress`` of another run, of any format, and return warnings of differences.

        Ranks other than the first get random numbers of their own.
        """
        left = adopt(self.things, progress)
        if "random" in progress:
            restore_random_state(decode(progress["random"]))
            if rank:
                self.scatter(rank)
        return left

    def scatter(self, rank: int) -> None:
        """Seed the generators of a rank that the run did not have, from the restored state and the rank."""
        seed = xxhash.xxh3_64_intdigest(torch.get_rng_state().numpy().data, seed=rank)
        torch.manual_seed(seed % 2**63)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def show_all(self, progresses: Sequence[Mapping[str, Any]]) -> None:
        """Give objects with an attribute ``of_ranks`` the states that they had on all ranks of the run, by rank.

        Called before ``restore`` where another number of ranks continues.
        """
        for name, thing in self.things.items():
            if hasattr(thing, "of_ranks") and all(name in each["things"] for each in progresses):
                thing.of_ranks = [decode(each["things"][name]) for each in progresses]

    def restore(
        self, progress: dict[str, Any], which: Callable[[str, Any], bool] = lambda name, thing: True
    ) -> None:
        """Restore user state from ``progress``; of the script's objects those that ``which`` names."""
        for name, thing in self.things.items():
            if name in progress["things"] and which(name, thing):
                thing.load_state_dict(decode(progress["things"][name]))
        for optimizer, groups, given in zip(self._optimizers, progress["groups"], self.given, strict=True):
            load_hyper_parameters(optimizer.param_groups, groups)
            if _is_fused(groups) != _is_fused(given):
                # torch's optimizers tell a GradScaler so when they are made: they unscale by themselves
                cast(Any, optimizer)._step_supports_amp_scaling = _is_fused(groups)
        restore_random_state(decode(progress["random"]))


def _refuse_unstorable(name: str, thing: Any) -> None:
    """Raise ``BadInput``, before a run begins, for a state that would not be restored unchanged.

    Not checked for a loader, which may begin to load when its state is requested, nor for objects without a state yet.
    Their errors appear when the run begins.
    """
    if name == "loader":
        return
    try:
        refuse_unstorable(thing.state_dict(), f"{name}.state_dict()")
    except BadInput:
        raise
    except Exception:
        return


def _given_to(scheduler: Any) -> dict[str, Any]:
    """Return the plain values that a scheduler was given."""
    state = {} if scheduler is None else scheduler.state_dict()
    return _numbers_of(state) if isinstance(state, Mapping) else {}


def _numbers_of(state: Mapping[Any, Any], way: str = "") -> dict[str, Any]:
    """Return the plain values in the state of a scheduler and of nested ones, by path ``way``, as JSON.

    Leaves out its position, and learning rates, which the optimizer's groups hold.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{way}{key}"
        if type(key) is not str or key in MOVING:
            continue
        if type(value) in PLAIN or isinstance(value, Counter):
            found[name] = encode(value, name)
        elif isinstance(value, Mapping):
            found |= _numbers_of(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            for i, each in enumerate(value):
                found |= _numbers_of(each, f"{name}[{i}].") if isinstance(each, Mapping) else {}
            if value and all(type(each) in PLAIN for each in value):
                found[name] = encode(value, name)
    return found


def _is_fused(groups: Sequence[Mapping[str, Any]]) -> bool:
    return any(group.get("fused") for group in groups)


def tensor_bytes(value: Any) -> int:
    """Return the bytes of the tensors and arrays in a ``state_dict``."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _large(nbytes: Mapping[str, int]) -> str:
    name = max(nbytes, key=lambda each: nbytes[each])
    return (
        f"also={{{name!r}: ...}} has {format_bytes(nbytes[name])} of tensors. Pass the module of an average of the"
        " weights as averages=, and what updates it as after_update=; register other tensors as buffers of the model."
        " What is in also= becomes text in every record"
    )


class NoScriptState(ScriptState):
    """A stand-in where there is no script: it checks and restores nothing."""

    def __init__(self) -> None:
        super().__init__((), {})

    def check(self, progress: dict[str, Any], wrote: int, num_ranks: int) -> None: ...
    def restore(
        self, progress: dict[str, Any], which: Callable[[str, Any], bool] = lambda name, thing: True
    ) -> None: ...


def is_schedule(name: str, thing: Any) -> bool:
    """Return whether the script alone moves the object: true for schedulers."""
    return name.startswith("scheduler")


def is_no_place(name: str, thing: Any) -> bool:
    """Return whether the object is no position in data.

    A script may already have fetched the next iteration's batch when it calls ``save``, so positions are excluded.
    """
    return name != "loader" and not hasattr(thing, "__iter__")
