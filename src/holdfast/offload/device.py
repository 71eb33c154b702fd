"""The device that computes, and how bytes get there.

On a CPU the device is host memory: an upload or a download hands the tensor over. The byte counters count
what an operation hands over, which on a separate device is what crosses the bus.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import BadInput


class HostDevice:
    """The CPU. ``unified``: the device computes in host memory."""

    unified = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` of host memory, on the device. Ready for computation when it returns."""
        return tensor

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` of the device, in host memory. Readable when it returns."""
        return tensor

    def free_bytes(self) -> int:
        """The host's memory is not counted here."""
        return 0

    def take_batch(self, batch: Any) -> Any:
        """A micro-batch whose tensors are on the device."""
        return batch

    def take_buffers(self, model: nn.Module) -> None:
        """Move the model's buffers to the device."""


class CudaDevice:
    """One CUDA device. Copies are synchronous; overlapping them with computation comes with streams."""

    unified = False

    def __init__(self, name: str) -> None:
        self.torch_device = torch.device(name)
        if self.torch_device.index is None:
            self.torch_device = torch.device("cuda", torch.cuda.current_device())

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")

    def free_bytes(self) -> int:
        """Memory of the device that nobody has taken, with what this process has taken and does not use."""
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] + kept

    def take_batch(self, batch: Any) -> Any:
        return pytree.tree_map(lambda x: x.to(self.torch_device) if isinstance(x, torch.Tensor) else x, batch)

    def take_buffers(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.torch_device)


Device = HostDevice | CudaDevice


def open_device(name: str) -> Device:
    """``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``: CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"device {name!r} is not one of cpu, cuda, cuda:N, auto") from error
    if wanted.type == "cpu":
        return HostDevice()
    if wanted.type != "cuda" or (wanted.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        here = ["cpu", *(f"cuda:{number}" for number in range(count))]
        raise BadInput(f'device {name!r} is not here: pass device="auto", or one of {", ".join(here)}')
    return CudaDevice(name)
