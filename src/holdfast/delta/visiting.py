"""Visiting: tensors that rest on the host, and go to a device, a few at a time, to be updated there.

A device's kernels round otherwise than the host's, so the replica of a trainer on a device has the same device do its
updates: then both have the same bits. Sizes are bytes. Not run on a device yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

VISIT_BYTES = 256 << 20
"""Of parameters that go together, with their gradients and what their optimizer holds; one goes in any case."""


class Visit:
    """``parameter`` on ``device``, with what its ``optimizer`` holds for it, but for the slots ``on_host``."""

    def __init__(
        self,
        parameter: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        on_host: Iterable[str],
    ) -> None:
        self._parameter, self._optimizer, self._home = parameter, optimizer, parameter.data
        parameter.data = self._home.to(device, copy=True)
        held = optimizer.state.get(parameter, {})
        self._homes = {slot: held[slot] for slot in tensors_in(held) if slot not in on_host}
        held.update({slot: home.to(device, copy=True) for slot, home in self._homes.items()})

    @torch.no_grad()
    def end(self) -> set[str]:
        """All is at home again. Returns the slots that the optimizer had on the host meanwhile."""
        device = self._parameter.device
        self._home.copy_(self._parameter.data)
        self._parameter.data = self._home
        held = self._optimizer.state.get(self._parameter, {})
        stayed = {slot for slot in tensors_in(held) if held[slot].device != device}
        for slot in tensors_in(held):
            if slot not in stayed:
                held[slot] = _at_home(held[slot], self._homes.get(slot))
        return stayed


def tensors_in(held: Mapping[str, object]) -> list[str]:
    """The slots that hold tensors."""
    return [slot for slot, value in held.items() if isinstance(value, torch.Tensor)]


def _at_home(tensor: torch.Tensor, home: torch.Tensor | None) -> torch.Tensor:
    """The values of ``tensor`` on the host: in ``home``, if they fit there."""
    if home is None or (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
        return tensor.to("cpu", copy=True)
    return home.copy_(tensor)


def visit_bytes(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    """What a parameter takes on the device, its gradient included."""
    held = optimizer.state.get(parameter, {})
    return 2 * parameter.nbytes + sum(held[slot].nbytes for slot in tensors_in(held))
