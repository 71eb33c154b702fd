"""Lets Megatron build, step and save models where there is no GPU: what it asks of CUDA is on the host."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

TYPE = torch.Tensor.type


def _cuda_type(tensor, *args, **options):
    """Megatron tells the types of parameters by the names that they have on a device."""
    found = TYPE(tensor, *args, **options)
    if not isinstance(found, str):
        return found
    return found.replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")


class OnHost(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def go_without_cuda():
    """Change torch, in this process and to its end."""
    torch.Tensor.type = _cuda_type
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    OnHost().__enter__()
