"""A copy in host memory of all tensors of one step, from which a rollback restores them without the disk.

The copy holds the tensors that steps change, and the optimizers' plain values. Everything else that belongs to the step
is in its record, which is durable by the time the copy is used. Called by the training thread at the end of a step, and
by a rollback.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from ...state.layout.overlaps import buffers_within
from ...state.live_state import LiveState

Slots = dict[str, Any]


class HostCopy:
    """A copy that is taken every ``every`` steps, into the same memory each time.

    With ``with_frozen`` it holds the model's frozen parameters too, since the script may change them after steps.
    """

    def __init__(self, every: int, with_frozen: bool) -> None:
        self.step = -1
        """The step that the copy is of; -1 while there is none."""
        self._every, self._with_frozen = every, with_frozen
        self._held: dict[str, torch.Tensor] = {}
        self._plain: list[tuple[int, torch.Tensor, Slots]] = []
        """The optimizers' values that are no tensors: the optimizer's number, the parameter, and values by slot."""

    @torch.no_grad()
    def advance(self, state: LiveState, step: int) -> None:
        """Take the copy if it is due at ``step``, at whose end ``state`` is."""
        if step % self._every:
            return
        self.step = -1
        before, self._held = self._held, {}
        if any(own.has_leaves for own in state.own) or buffers_within(state.shared()):
            return  # only a replay restores an optimizer's attributes, and which buffers are one memory
        for key, tensor in self._tensors(state):
            there = before.pop(key, None)
            if there is None or (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
                there = torch.empty_like(tensor, device="cpu")
            self._held[key] = there.copy_(tensor)
        self._plain = [(number, p, copy.deepcopy(slots)) for number, p, slots in _plain(state) if slots]
        self.step = step

    def is_of(self, step: int, state: LiveState) -> bool:
        """Return whether the copy is of ``step``, and ``state`` has the same parameters and buffers."""
        return self.step == step and _places(self._held) == _places(dict(self._tensors(state)))

    @torch.no_grad()
    def restore(self, state: LiveState) -> None:
        """Put the copy back into ``state``, in place. Optimizer state that came later is removed."""
        live, missing = dict(self._tensors(state)), {}
        for key, tensor in self._held.items():
            if key in live and (live[key].shape, live[key].dtype) == (tensor.shape, tensor.dtype):
                live[key].copy_(tensor)
            else:
                missing[key] = tensor
        for parameter in state.parameters:
            number = state.optimizer_of(parameter)
            slots = {} if number is None else state.optimizers[number].state.get(parameter.parameter, {})
            for slot in [slot for slot in slots if f"{parameter.name}/{slot}" not in self._held]:
                del slots[slot]
        state.load(missing)
        for number, parameter, slots in self._plain:
            state.optimizers[number].state[parameter].update(copy.deepcopy(slots))

    def _tensors(self, state: LiveState) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield by key the tensors of the state that steps change, whichever rank stores them."""
        for parameter in state.parameters:
            if self._with_frozen or state.is_trained(parameter):
                yield from ((key, tensor) for key, (_, tensor) in state.owned(parameter).items())
        yield from ((key, tensor) for key, (_, tensor) in state.buffers().items())


def _plain(state: LiveState) -> Iterator[tuple[int, torch.Tensor, Slots]]:
    """Yield the optimizer's number, the parameter, and its values that are no tensors, for each parameter."""
    for parameter in state.parameters:
        number = state.optimizer_of(parameter)
        if number is not None:
            slots = state.optimizers[number].state.get(parameter.parameter, {})
            plain = {slot: value for slot, value in slots.items() if not isinstance(value, torch.Tensor)}
            yield number, parameter.parameter, plain


def _places(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of parameters and buffers, by key. Optimizer state may come and go."""
    return {
        key: (tensor.shape, tensor.dtype)
        for key, tensor in tensors.items()
        if key.endswith(("/param", "/buffer"))
    }
