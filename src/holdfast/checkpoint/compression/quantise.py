"""Quantization of a flat tensor to 8-bit integers with a scale for each block."""

from __future__ import annotations

import torch

from .sparse import Arrays, Take, num_blocks

LARGEST = 127


def quantise(flat: torch.Tensor, block: int) -> Arrays:
    """Round ``flat``, in fp32 or wider, to 255 multiples of a scale: the block's largest magnitude over 127."""
    padded = torch.zeros(num_blocks(flat.numel(), block) * block, dtype=flat.dtype, device=flat.device)
    padded[: flat.numel()] = flat
    scales, steps = quantise_rows(padded.view(-1, block))
    return {"scales": scales, "steps": steps.view(-1)[: flat.numel()]}


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each row, and the rows in 8 bits."""
    scales = (rows.abs().amax(1) / LARGEST).to(torch.float32) if rows.numel() else rows.new_empty(0).float()
    steps = torch.where(scales > 0, scales, torch.ones_like(scales)).to(rows.dtype)
    values = (rows / steps[:, None]).round_().nan_to_num_().clamp_(-LARGEST, LARGEST)
    return scales, values.to(torch.int8)


def scaled(take: Take, elements: int, dtype: torch.dtype, block: int) -> torch.Tensor:
    """Return the flat tensor whose arrays ``take`` gives."""
    scales = take("scales", torch.float32, num_blocks(elements, block))
    steps = take("steps", torch.int8, elements)
    padded = torch.zeros(scales.numel() * block, dtype=torch.float32, device=steps.device)
    padded[:elements] = steps
    return scaled_rows(scales, padded.view(-1, block)).view(-1)[:elements].to(dtype)


def scaled_rows(scales: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the values of rows in 8 bits, in fp32."""
    return steps * scales[:, None]
