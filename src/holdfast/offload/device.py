"""The device that computes, and how bytes get there.

On a CPU the device is host memory: an upload or a download hands the tensor over. The byte counters count
what an operation hands over, which on a separate device is what crosses the bus.
"""

from __future__ import annotations

import torch


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


Device = HostDevice | CudaDevice


def open_device(name: str) -> Device:
    """``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``: CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return HostDevice() if torch.device(name).type == "cpu" else CudaDevice(name)
