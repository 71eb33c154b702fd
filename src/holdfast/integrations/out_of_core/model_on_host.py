"""A script's model before an engine has it and after, which computes with one block after the other.

The model is in host memory, or on ``meta`` with its values in a folder. One block at a time is on the device, and what
is outside of blocks. The model's own parameters and buffers stay where they are: copies are in their places for as long
as they are used. Called by ``offloaded_trainer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...offload.model.blocks import candidates, find_blocks

Read = Callable[[Iterable[nn.Parameter]], Iterator[torch.Tensor]]
"""Function that yields the values of parameters on ``meta``."""


def _nothing(parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
    return iter(())


@contextmanager
def computing_on(device: torch.device, model: nn.Module, read: Read = _nothing) -> Iterator[None]:
    """Let calls of ``model`` in evaluation mode, without gradients, compute on ``device``, one block after the other.

    Args:
        device: The device.
        model: The model, without quantised layers. One that has no blocks is copied whole.
        read: Reads the parameters that are on ``meta``.
    """
    inside: set[nn.Module] = set()
    with ExitStack() as done:
        for block in find_blocks(model).modules if candidates(model) else ():
            modules = list(block.modules())
            inside.update(modules)
            copies = _Copies(modules, device, read)
            done.callback(copies.drop)
            done.callback(block.register_forward_pre_hook(copies.make).remove)
            done.callback(block.register_forward_hook(copies.drop, always_call=True).remove)
        outside = _Copies([module for module in model.modules() if module not in inside], device, read)
        done.callback(outside.drop)
        outside.make()
        yield


class _Copies:
    """The copies on a device of what some modules hold, in the places of the originals while they are there."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, read: Read) -> None:
        self._modules, self._device, self._read = list(modules), device, read
        self._originals: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def make(self, *_: Any) -> None:
        """Copy to the device what is not there."""
        places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (held, name, original)
            for module in self._modules
            for held in (module._parameters, module._buffers)
            for name, original in held.items()
            if original is not None and original.device != self._device
        ]
        made: dict[int, torch.Tensor] = {}
        absent = {id(each): each for _, _, each in places if isinstance(each, nn.Parameter) and each.is_meta}
        values = dict(zip(absent, self._read(absent.values()), strict=True))
        for held, name, original in places:
            if id(original) not in made:
                copy = values.pop(id(original), original).detach().to(self._device)
                is_parameter = isinstance(original, nn.Parameter)
                made[id(original)] = nn.Parameter(copy, requires_grad=False) if is_parameter else copy
            self._originals.append((held, name, original))
            held[name] = made[id(original)]

    def drop(self, *_: Any) -> None:
        """Put the originals back."""
        while self._originals:
            held, name, original = self._originals.pop()
            held[name] = original
