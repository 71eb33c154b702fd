"""AdamW variants whose moments take two bytes or one instead of four.

The update itself is torch's fused AdamW on fp32 copies of the moments. With the fp32 parameter, AdamW keeps 12 bytes
for each element, ``AdamWBF16`` 8 and ``AdamW8bit`` 6.03, or 5.03 with ``master_bits=24``. A moment with decay
beta2 = 0.999 moves by a thousandth of its distance in each step, and the nearest value in few bits is then mostly the
old one. Moments are therefore rounded up or down at random, with the mean at the exact value (Gupta et al. 2015, arXiv
1502.02551). The random number is a hash of the value's own bits and the step: no generator state is stored, and an
element is rounded alike in any slice.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.optim.adam import adam

from ..state.tensor_entries import STEP
from .declared_state import Form, Group, ShapedStateOptimizer, Slots, State, master_bits_of

BLOCK = 256
"""The elements that share a scale. It divides 4096, at whose multiples updates are sliced."""


class _AdamW(ShapedStateOptimizer):
    cut = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **more: Any,
    ) -> None:
        check_adam(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **more}
        super().__init__(params, defaults)


class AdamWBF16(_AdamW):
    """AdamW (Loshchilov, Hutter 2019, arXiv 1711.05101) with both moments in bf16, rounded stochastically.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``w = w - lr (weight_decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))``.
    The new ``w`` uses the exact ``m`` and ``v``, which are rounded only for storage.

    >>> parameter = torch.nn.Parameter(torch.ones(4))
    >>> parameter.grad = torch.ones(4)
    >>> optimizer = AdamWBF16([parameter], lr=0.1)
    >>> optimizer.step()
    >>> optimizer.state[parameter]["exp_avg"].dtype
    torch.bfloat16
    """

    @staticmethod
    def forms(group: Group, shape: tuple[int, ...]) -> Slots:
        moment = Form(shape, torch.bfloat16)
        return Slots({"exp_avg": moment, "exp_avg_sq": moment}, {STEP: torch.float32})

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        first, second = (state[name].float().contiguous() for name in ("exp_avg", "exp_avg_sq"))
        step = adamw_(param, grad, first, second, state[STEP], group)
        state["exp_avg"].copy_(to_bf16(first, step, 1))
        state["exp_avg_sq"].copy_(to_bf16(second, step, 2))


class AdamW8bit(_AdamW):
    """AdamW with both moments in one byte each, rounded stochastically.

    Blocks of 256 elements share a scale (block-wise dynamic quantization: Dettmers et al. 2021, arXiv 2110.02861). The
    stored tensors are ``m``, and ``sqrt(v)`` instead of ``v``: the update divides by it, and its range is that of
    ``m``. A byte would be too coarse for ``v``: some elements would keep an ``m`` with a divisor near zero.

    Args:
        master_bits: 32, or 24 to round fp32 parameters stochastically to their upper 24 bits after each update. Out of
            core in bf16 a parameter then takes one byte beside the compute copy instead of two, and initial values are
            rounded to the nearest of 24 bits.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        master_bits: int = 32,
    ) -> None:
        if master_bits not in (24, 32):
            raise ValueError(f"master_bits = {master_bits} must be 24 or 32")
        super().__init__(params, lr, betas, eps, weight_decay, master_bits=master_bits)

    @staticmethod
    def forms(group: Group, shape: tuple[int, ...]) -> Slots:
        elements = torch.Size(shape).numel()
        codes, scales = Form(shape, torch.uint8), Form((-(-elements // BLOCK),), every=BLOCK)
        return Slots(
            {"exp_avg": codes, "exp_avg_scale": scales, "rms": codes, "rms_scale": scales},
            {STEP: torch.float32},
            master_bits_of(group),
        )

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        first = decode(state["exp_avg"], state["exp_avg_scale"], signed=True)
        second = decode(state["rms"], state["rms_scale"], signed=False).square_()
        step = adamw_(param, grad, first.view(param.shape), second.view(param.shape), state[STEP], group)
        for name, value, signed, salt in (("exp_avg", first, True, 1), ("rms", second.sqrt_(), False, 2)):
            codes, scales = encode(value, signed, step, salt)
            state[name].copy_(codes.view(param.shape))
            state[f"{name}_scale"].copy_(scales)
        if master_bits_of(group) == 24 and param.dtype == torch.float32:
            param.copy_(to_24_bits(param.contiguous(), step, 3))


def check_adam(lr: Any, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ``ValueError`` for hyper-parameters that no Adam accepts."""
    if float(lr) < 0 or eps < 0 or weight_decay < 0:
        raise ValueError(f"lr = {lr}, eps = {eps} and weight_decay = {weight_decay} must not be negative")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas = {betas} must be from 0 to less than 1")


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    group: Group,
) -> int:
    """Do one step of torch's fused AdamW on ``param`` and fp32 moments, in place; return the number of the step."""
    counted = torch.full((), float(step), device=param.device)
    beta1, beta2 = group["betas"]
    master = param.float().contiguous()  # no copy if it is fp32 and contiguous
    adam(
        [master], [grad.float().contiguous()], [first], [second], [], [counted],
        fused=True, decoupled_weight_decay=True, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
    if master is not param:
        param.copy_(master)
    step.add_(1)
    return int(step)


def chances(value: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    """Return a number of 0 to 65535 for each element of an fp32 ``value``, varying with ``step`` and ``salt``."""
    mixed = value.view(torch.int32) + _signed(step * 0x9E3779B1 + salt * 0x85EBCA77)
    mixed = mixed * _signed(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 15)) * _signed(0x27D4EB2F)
    return (mixed >> 16) & 0xFFFF


def to_bf16(value: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    """Return ``value`` in bf16, rounded stochastically."""
    bits = value.view(torch.int32) + chances(value, step, salt)
    return (bits & _signed(0xFFFF0000)).view(torch.float32).bfloat16()


def to_24_bits(value: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    """Return an fp32 ``value`` with zeros for its 8 lowest bits, rounded stochastically."""
    bits = value.view(torch.int32) + (chances(value, step, salt) >> 8)
    return torch.where(value.isfinite(), (bits & _signed(0xFFFFFF00)).view(torch.float32), value)


@cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the 256 values of a byte in ascending order; the largest is 1.

    Each decade from 1e-7 to 1 has twice as many values as the one below it, in the middles of equal parts (dynamic
    quantization: Dettmers et al. 2021, arXiv 2110.02861). Without a sign, 1e-7 is the least, so that no value becomes
    zero.
    """
    values = [0.0, 1.0] if signed else [1e-7, 1.0]
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def encode(value: torch.Tensor, signed: bool, step: int, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of an fp32 ``value``, flat, and the scale of each block of ``BLOCK``: its largest magnitude."""
    count, levels = value.numel(), dynamic_map(signed).to(value.device)
    blocks = torch.nn.functional.pad(value.reshape(-1), (0, -count % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    parts = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)
    below = (torch.bucketize(parts, levels, right=True) - 1).clamp_(0, 254)
    low, high = levels[below], levels[below + 1]
    up = (parts - low) / (high - low) * 65536 > chances(blocks.view(-1), step, salt)
    return (below + up).to(torch.uint8)[:count], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return the values that ``encode`` stored, flat, to the precision of a byte."""
    values = dynamic_map(signed).to(codes.device)[codes.reshape(-1).int()]
    padded = torch.nn.functional.pad(values, (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    return (padded * scales[:, None]).view(-1)[: codes.numel()]


def _signed(bits: int) -> int:
    """Return the 32 lowest ``bits`` as a signed number."""
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)
