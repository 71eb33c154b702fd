"""The arithmetic of this machine, as far as the last bits of an update depend on it.

Some operations of torch are not correctly rounded, and their last bits differ by processor, device and version: on a
CPU ``sqrt`` is that of a vector library. A replay elsewhere then differs from training in bits, and fingerprints, which
sample, may not show it. So a snapshot notes digests of what fixed numbers give on the writer's machine, by group of
operations, and recovery compares those that the run's optimizers need. Called where a snapshot's progress is made, and
by ``lineage``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
import xxhash

from ..optim.kinds import is_elementwise
from ..state.live_state import LiveState

ELEMENTS = 8192
"""Number of elements of the fixed numbers. About one in 140 differs between the vector libraries of two processors."""
Compute = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
Arithmetic = Mapping[str, Mapping[str, str]]
"""Digests of results by group of operations, by type of device."""


def arithmetic_here(state: LiveState) -> dict[str, dict[str, str]]:
    """Return the digests of this machine's arithmetic, as JSON, for the devices of the parameters of ``state``."""
    devices = {
        device.type: device for device in (each.parameter.device for each in reversed(state.parameters))
    }  # the first one of each type
    return {kind: arithmetic_of(device) for kind, device in sorted(devices.items()) if kind != "meta"}


@cache
def arithmetic_of(device: torch.device) -> dict[str, str]:
    """Return the digests of one device by group of operations. Takes about a millisecond, once per process."""
    first, second = _fixed_numbers()
    return {name: _digest(compute, first, second, device) for name, compute in GROUPS.items()}


def operations_of(optimizers: Sequence[torch.optim.Optimizer], after_update: bool) -> list[str]:
    """Return the groups of operations on which the bits of an update may depend; all where that is unknown."""
    if after_update or not all(map(is_elementwise, optimizers)):
        return list(GROUPS)
    needed = {"linear"}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("fused"):
                needed.add("fused")
            elif not isinstance(optimizer, torch.optim.SGD):
                needed.add("roots")
    return [name for name in GROUPS if name in needed]


def differing(there: Arithmetic, here: Arithmetic, operations: Sequence[str]) -> list[str]:
    """Return those of ``operations`` whose results differ between two machines; none if one of them noted nothing.

    One type of device is compared with another, which may compute alike.
    """
    if not there or not here:
        return []
    if len(there) != len(here):
        return list(operations)
    pairs = list(zip(there.values(), here.values(), strict=True))
    return [name for name in operations if any(a.get(name) != b.get(name) for a, b in pairs)]


def _fixed_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of positive numbers that are exact on every machine: 23 bits times powers of two."""
    whole = torch.arange(1, ELEMENTS + 1, dtype=torch.int64, device="cpu")
    scale = torch.bitwise_left_shift(torch.ones_like(whole), whole % 16 + 8).to(torch.float32)
    first = (whole * 2654435761 % 8388593).to(torch.float32) / scale
    second = (whole * 40503 % 8388593 + 1).to(torch.float32) / 8388608.0
    return first, second


@torch.no_grad()
def _digest(compute: Compute, first: torch.Tensor, second: torch.Tensor, device: torch.device) -> str:
    """Return the digest of what ``compute`` makes of two tensors; "none" where the device cannot do it."""
    try:
        with torch.autocast(device.type, enabled=False):
            results = compute(first.to(device), second.to(device))
            return xxhash.xxh3_64_hexdigest(b"".join(each.cpu().numpy().tobytes() for each in results))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError):
        return "none"


def _linear(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [a.add(b, alpha=-0.01), a.mul(0.999), a.addcmul(a, b, value=0.001), a.lerp(b, 0.1)]


def _roots(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    root = a.sqrt()
    corrections = [beta**step for beta in (0.9, 0.95, 0.999) for step in range(1, 65)]  # by the C library
    beside = torch.frombuffer(bytearray(struct.pack(f"{len(corrections)}d", *corrections)), dtype=torch.uint8)
    return [root, a.div(b), a.addcdiv(b, root.add(1e-8), value=-0.01), b.pow(0.8), beside]


def _fused(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    tensors = [b.clone(), a.clone(), b.mul(0.1), a.mul(0.01)]
    parameters, gradients, first, second = ([tensor] for tensor in tensors)
    steps = [torch.full((), 3.0, dtype=torch.float32, device=a.device)]
    torch._fused_adamw_(
        parameters, gradients, first, second, [], steps, lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    return [parameters[0], first[0], second[0]]


def _others(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    # a product this small does not depend on the number of threads, nor in 64 bits on torch's matmul precision
    left, right = a[:1024].double().view(32, 32), b[:1024].double().view(32, 32)
    return [left @ right, a.rsqrt(), b.exp(), a[:1024].norm()]


GROUPS: dict[str, Compute] = {
    "linear": _linear,
    "roots": _roots,
    "fused": _fused,
    "others": _others,
}
"""The operations of optimizers, by the groups that are compared one by one."""
DESCRIPTIONS = {
    "linear": "sums and products",
    "roots": "roots, quotients and powers",
    "fused": "fused updates",
    "others": "matrix products, exponentials and norms",
}
"""The groups in words."""
