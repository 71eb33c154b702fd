"""Detection of changes that no optimizer step made, and that records would not hold.

Each tensor counts its changes in place. The counter shows changes by an optimizer and to the tensor itself, but not
those through ``.data`` or NumPy. A parameter that gets other memory is noticed by its address. Every step runs three
scans of parameters and optimizer state (``MutationCheck``), so each is a few passes over flat lists, and one of the
buffers that are not persistent (``CarriedBuffers``).
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import xxhash

from ...errors import BadInput
from ...quantities import MiB
from ...state.capture import changes_of, storable
from ...state.layout.regions import is_distributed, local_held
from ...state.live_state import LiveState
from ...state.module_attributes import Attributes, changed_attributes, made_attributes, restore_attributes

PATIENCE = 1000
"""The number of iterations without a step that is an error: more than gradients are accumulated over."""

HINT = 100
"""The number of iterations without a step that causes a warning, unless gradients are accumulated."""

MOST_TRANSIENT_BYTES = 16 * MiB
"""The most bytes of non-persistent buffers, together, that are copied in every step."""

Kind = tuple[torch.dtype, torch.Size]
Marks = tuple[list[int], list[int], list[int], list[Any]]
"""The state as the last scan saw it.

1. Change counts of the parameters.
2. Addresses of the parameters.
3. Identities of the values of the optimizer's state.
4. Change counts of these values, or marks of those that are no tensors.
"""


class MutationCheck:
    """A detector of external changes to ``state``.

    Call ``accept`` at the end of each step, and ``stepped`` after each optimizer's step.
    """

    def __init__(self, state: LiveState) -> None:
        self._told = self._hinted = False
        self.idle = 0
        """The number of iterations since an optimizer stepped last."""
        self.watch(state)

    def watch(self, state: LiveState) -> None:
        """Use ``state`` as the state to watch from here on."""
        self._state = state
        self._names: list[list[str]] = [[] for _ in (*state.optimizers, None)]
        self._parameters: list[list[torch.Tensor]] = [[] for _ in self._names]
        self._any_distributed = any(is_distributed(captured.parameter) for captured in state.parameters)
        for captured in state.parameters:
            index = state.optimizer_of(captured)
            place = -1 if index is None else index
            self._names[place].append(captured.name)
            self._parameters[place].append(captured.parameter)
        self._linked = _linked(self._parameters)
        self.accept()

    def accept(self) -> None:
        """Accept the current state as known."""
        self._marks = [self._now(place) for place in range(len(self._parameters))]

    def stepped(self, index: int) -> None:
        """Accept the changes by optimizer ``index`` as known."""
        for place in self._linked[index]:
            self._marks[place] = self._now(place)

    @property
    def is_other(self) -> bool:
        """Return whether anything differs from the state known last."""
        return any(self._now(place) != marks for place, marks in enumerate(self._marks))

    def changed_unexpectedly(self, updated: bool, index: int | None = None) -> bool:
        """Return whether anything unknown changed the state, or that of optimizer ``index``, and accept the state as
        known.

        Warns the first time. Raises ``BadInput`` after ``PATIENCE`` iterations in which no optimizer ``updated``
        anything, since nothing of the run would be recorded.
        """
        names: list[str] = []
        for place in range(len(self._marks)) if index is None else self._linked[index]:
            before, now = self._marks[place], self._now(place)
            if before != now:
                self._marks[place] = now
                names += self._changed(place, before, now)
        self._wait(updated)
        if names and not self._told:
            self._told = True
            which = names[0] + (f" and {len(names) - 1} others" if names[1:] else "")
            warnings.warn(
                f"{which} changed otherwise than by a step of an optimizer that the Checkpointer was given, which no"
                " record would bring back: a base is made after every such step, which takes long. Pass what changes"
                " them as after_update=: then it is done in a replay, too; call save() after what is done once.",
                stacklevel=6,
            )
        return bool(names)

    def _wait(self, updated: bool) -> None:
        self.idle = 0 if updated else self.idle + 1
        way_out = "Give it the one whose step() the script calls; one that wraps another is given as the one inside."
        if self.idle >= PATIENCE:
            raise BadInput(
                f"in each of the last {PATIENCE} iterations none of the optimizers that the Checkpointer was given has"
                f" stepped, so nothing could be recorded. {way_out}"
            )
        if self.idle >= HINT and not self._hinted and not self._told and not self._accumulates():
            self._hinted = True
            # FSDP stores gradients of passes without an exchange elsewhere
            maybe = " Where gradients are accumulated over as many, nothing is wrong." * self._any_distributed
            warnings.warn(
                f"in the last {HINT} iterations none of the optimizers that the Checkpointer was given has stepped, so"
                f" nothing was recorded.{maybe} {way_out} After {PATIENCE} this is an error.",
                stacklevel=7,
            )

    def _accumulates(self) -> bool:
        """Return whether some gradient was added to about as often as iterations passed without a step."""
        grads = [parameter.grad for parameter in chain.from_iterable(self._parameters)]
        local = [getattr(grad, "_local_tensor", grad) for grad in grads if grad is not None]
        return any(changes_of(grad) >= self.idle // 2 for grad in local)

    def _now(self, place: int) -> Marks:
        parameters = self._parameters[place]
        held = _held(self._state.optimizers[place], parameters) if place < len(self._state.optimizers) else []
        return _changes(parameters), self._addresses(parameters), list(map(id, held)), _changes(held)

    def _addresses(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return the addresses of this process's part of each parameter."""
        if self._any_distributed:
            parameters = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
        return list(map(torch.Tensor.data_ptr, parameters))

    def _changed(self, place: int, before: Marks, now: Marks) -> list[str]:
        """Return the names of what differs from ``before``."""
        were, are = zip(before[0], before[1], strict=True), zip(now[0], now[1], strict=True)
        names = [name for name, a, b in zip(self._names[place], were, are, strict=True) if a != b]
        if before[2:] != now[2:]:
            names.append(f"the state of {type(self._state.optimizers[place]).__name__}")
        return names


def _linked(parameters: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Return by place the places whose parameters share storage, since views of one storage have one counter."""
    places_of: dict[int, set[int]] = {}
    for place, held in enumerate(parameters):
        for tensor in map(local_held, held):
            places_of.setdefault(tensor.untyped_storage().data_ptr(), set()).add(place)
    return [
        sorted({place}.union(*(found for storage, found in places_of.items() if storage and place in found)))
        for place in range(len(parameters))
    ]


_VERSION = attrgetter("_version")
_PLAIN = {bool, int, float, str, bytes, type(None)}
_TENSORS = (torch.Tensor, torch.nn.Parameter)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _changes(things: Sequence[Any]) -> list[Any]:
    """Return the change count of each tensor, and a mark of everything else."""
    try:
        return list(map(_VERSION, things))
    except (AttributeError, RuntimeError):  # not a tensor, or a tensor of inference mode
        return [changes_of(thing) if isinstance(thing, torch.Tensor) else mark_of(thing) for thing in things]


def mark_of(value: Any, opaque: list[Any] | None = None) -> Any:
    """Return a mark that differs once ``value``, or anything in it, was changed in place or replaced.

    Args:
        value: A value of an optimizer's state, or of an attribute.
        opaque: Collects what is neither a number, text or tensor nor a plain container of these.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        if opaque is not None and (kind not in _TENSORS or value.layout != torch.strided):
            opaque.append(value)
        return (id(value), None if kind is torch.nn.Parameter else changes_of(value))
    if kind in (list, tuple, deque):
        return (kind, *[mark_of(item, opaque) for item in value])
    if isinstance(value, dict):
        if opaque is not None and kind is not dict:
            opaque.append(value)
        return tuple((mark_of(key, opaque), mark_of(item, opaque)) for key, item in value.items())
    if opaque is not None:
        opaque.append(value)
    if isinstance(value, GENERATORS):
        return _hashed(generator_state(value))
    if isinstance(value, (np.ndarray, set, bytearray)):
        return _hashed(value.tobytes() if isinstance(value, np.ndarray) else value)
    return id(value)


def _hashed(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(value if isinstance(value, bytes) else repr(value).encode())


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator of torch, NumPy or Python."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def _held(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of the optimizer's state for ``parameters``. Joined parameters each return that of all."""
    every = filter(None, map(optimizer.state.get, parameters))
    try:
        return list(chain.from_iterable(map(dict.values, every)))
    except TypeError:  # not a dictionary, which is refused after the first step
        return []


class CarriedBuffers:
    """The non-persistent buffers of the model of one training loop, which is ``alone`` if it has one process.

    A buffer with ``persistent=False`` is a constant or a cache, which a model makes anew. One that changes from step to
    step is neither. From the step at which that is first seen, the run carries it like any other buffer, with the
    numbers and small tensors in its module's attributes. Where that is impossible, a warning says so at that step.
    Called by the training thread, at the end of each step.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self.carried: set[str] = set()
        """Names of the buffers that the run carries."""
        self._rebound: set[str] = set()
        self._told: set[tuple[str, str]] = set()
        self._emptied: set[str] = set()
        """Names of buffers that were carried and then became None."""
        self._marks: dict[str, tuple[int, int]] = {}
        self._kinds: dict[str, Kind] | None = None
        """Dtype and shape of the buffers that the model was made with; a resume can restore only these."""
        self._attributes: Attributes = {}
        """The attributes of each module when it was made."""

    def begin(self, state: LiveState) -> None:
        """Record the buffers and attributes that the model was made with."""
        kinds: dict[str, Kind] = {}
        for name, (module, own) in state.passing.items():
            buffer = module._buffers.get(own)
            if buffer is not None and storable(buffer):
                kinds[name] = (buffer.dtype, buffer.shape)
        self._attributes = made_attributes(state.passing) | self._attributes
        if self._kinds is None:
            self._kinds = kinds

    def accept(self, state: LiveState) -> None:
        """Accept the current buffers as the start of the run, including those that ``state`` carries."""
        self.carried |= state.carried
        self._rebound |= state.rebound
        self._marks = self._now(state)

    def _now(self, state: LiveState) -> dict[str, tuple[int, int]]:
        found = {}
        for name, (module, own) in state.passing.items():
            buffer = module._buffers.get(own)
            if buffer is not None:
                found[name] = (id(buffer), changes_of(buffer))
        return found

    def look(self, state: LiveState) -> bool:
        """Return whether this step changed the set of carried buffers, and with it the form of the state."""
        if not state.passing:
            return False
        before, self._marks = self._marks, self._now(state)
        if before == self._marks:
            return False
        carried = set(self.carried)
        self.drop_emptied(state)
        for name, mark in self._marks.items():
            if before.get(name) != mark:
                self._see_changed(state, name, is_other=before.get(name, mark)[0] != mark[0])
        return carried != self.carried

    def drop_emptied(self, state: LiveState) -> None:
        """Stop carrying the buffers that are None now, with a warning."""
        for name in sorted(self.carried & state.passing.keys()):
            module, own = state.passing[name]
            if module._buffers.get(own) is None:
                self._emptied.add(name)
                self.carried.discard(name)
                state.drop_carried(name)
                self._tell(
                    name,
                    "It is None now, so it is not in the run any more: a resume begins with what the model makes.",
                )

    def _see_changed(self, state: LiveState, name: str, is_other: bool) -> None:
        module, own = state.passing[name]
        buffer = module._buffers[own]
        assert buffer is not None
        if is_other:
            self._rebound.add(name)
        why = self._why_not(state, name, buffer)
        if why:
            self.carried.discard(name)
            self._tell(
                name, f"It is not in the run, since {why}: a resume begins with what the model makes anew."
            )
        elif name not in self.carried:
            self.carried.add(name)
            self._tell(
                name, "From this step on it is in the run, with numbers that its module keeps in attributes."
            )

    def _why_not(self, state: LiveState, name: str, buffer: torch.Tensor) -> str:
        if not self._alone:
            return "it is on several ranks"
        if not storable(buffer):
            return "it is of a kind that commits do not hold"
        if name in self._emptied:
            return "it is None at times"
        if self._kinds is None or name not in self._kinds:
            return "the model was made without it"
        if (buffer.dtype, buffer.shape) != self._kinds[name]:
            return "its shape or type changes"
        sizes = [state.passing[each] for each in {*self.carried, name}]
        if (
            sum(found.nbytes for module, own in sizes if (found := module._buffers.get(own)) is not None)
            > MOST_TRANSIENT_BYTES
        ):
            return f"such buffers have more than {MOST_TRANSIENT_BYTES // MiB} MiB"
        return ""

    def _tell(self, name: str, text: str) -> None:
        if (name, text) in self._told:
            return
        self._told.add((name, text))
        warnings.warn(
            f"buffer {name} is registered with persistent=False, and iterations change it. {text} Register it with"
            " persistent=True if it is a part of the training state.",
            stacklevel=6,
        )

    def recorded_attributes(self, state: LiveState) -> dict[str, Any]:
        """Return the module attributes that records hold for carried buffers, as JSON; empty without such buffers."""
        if not self.carried:
            return {}
        here = sorted(self.carried & state.passing.keys())
        modules = changed_attributes(state.passing, here, self._attributes)
        return {"modules": modules, "rebound": sorted(self._rebound & self.carried)}

    def restore(self, state: LiveState, progress: Mapping[str, Any]) -> None:
        """Restore the module attributes that ``recorded_attributes`` returned."""
        restore_attributes(state.passing, progress.get("modules", {}))
