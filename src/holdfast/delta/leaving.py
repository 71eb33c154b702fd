"""Leaving: what goes from a CUDA device to the host while training goes on.

Copies into pinned memory are begun on the stream that training computes on, and end whenever they end: the thread that
writes waits for them, not the one that trains. On a stream beside, the optimizer, which may overwrite gradients, would
have to wait for all of them at once, or they be copied on the device first. Not run on a device yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..units import format_bytes


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The CUDA devices that hold some of ``tensors``."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type == "cuda"))


def marks(devices: Iterable[torch.device]) -> list[Any]:
    """Events that have come when all has ended that was begun on ``devices`` so far, on the streams in use there."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


class Leaving:
    """Copies of ``tensors`` that are on their way."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copies = {key: copied(tensor) for key, tensor in tensors.items()}
        self._marks = marks(devices_of(tensors.values()))

    def arrived(self) -> dict[str, torch.Tensor]:
        """The copies, when they are there."""
        for mark in self._marks:
            mark.synchronize()
        return self._copies


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in pinned memory of torch's, that may be under way."""
    return tensor.detach().to("cpu", non_blocking=True, copy=True)


def pin(memory: memoryview) -> bool:
    """Keep ``memory`` where it is, so that a device can write to it by itself. Whether that could be had."""
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostRegister(_address(memory), len(memory), 0)
    if int(error):
        warnings.warn(
            f"{format_bytes(len(memory))} for records cannot be pinned (CUDA error {int(error)}), so training waits for"
            " copies of gradients. Raise the limit of locked memory (ulimit -l), or give less memory=.",
            stacklevel=6,
        )
    return not int(error)


def unpin(memory: memoryview) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(_address(memory))


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
