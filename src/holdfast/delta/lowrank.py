"""Low rank: a matrix as the product of two narrow ones, times a factor, or as it is.

The product has the bits that ``torch.distributed``'s PowerSGD hook gave training if it is computed as there: one
``bmm`` of the whole matrix. (Computed in pieces, or by ``mm``, it often has others. In fp64 it depends on how the
narrow ones lie in memory as well, so they are copied first.) Who writes a record compares, and has the matrix as it is
where they differ.
"""

from __future__ import annotations

import torch

from .sparse import BITS, Arrays, Take

SAMPLES = 1 << 16
"""Elements of a matrix by which a factor is looked for."""


def whole(flat: torch.Tensor) -> Arrays:
    """``flat`` as it is."""
    return {"form": torch.zeros(2, dtype=torch.int32), "grad": flat}


def narrow(left: torch.Tensor, right: torch.Tensor, factor: float = 1.0) -> Arrays:
    """The flat matrix of ``factor`` times ``left``, (rows, rank), times the transpose of ``right``, (columns, rank)."""
    return {
        "form": torch.tensor(left.shape, dtype=torch.int32),
        "left": left.reshape(-1),
        "right": right.reshape(-1),
        "factor": torch.tensor([factor], dtype=torch.float64),
    }


def multiplied(take: Take, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The flat tensor that ``take`` gives the arrays of."""
    rows, rank = take("form", torch.int32, 2).tolist()
    if not rank:
        return take("grad", dtype, elements)
    left = take("left", dtype, rows * rank).clone().view(1, rows, rank)
    right = take("right", dtype, elements // rows * rank).clone().view(1, elements // rows, rank)
    product = torch.bmm(left, right.transpose(1, 2)).view(-1)
    [factor] = take("factor", torch.float64, 1).tolist()
    return times(product, factor)


def times(product: torch.Tensor, factor: float) -> torch.Tensor:
    """``product``, multiplied in place."""
    return product if factor == 1 else product.mul_(factor)


def factor_between(product: torch.Tensor, given: torch.Tensor) -> float:
    """What every element of ``product`` was multiplied by to be ``given``, by some of them; 1 if nothing does."""
    step = max(1, product.numel() // SAMPLES)
    some, wanted = product[::step], given[::step]
    if same_bits(some, wanted):
        return 1.0
    place = some.abs().argmax()
    near = (wanted[place].double() / some[place].double()).to(product.dtype)
    for other in (0, 1, -1):  # the quotient was rounded, twice
        factor = (near.view(BITS[near.element_size()]) + other).view(near.dtype)
        if same_bits(some * factor, wanted):
            return float(factor)
    return 1.0


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same bytes, signs of zeros and NaN included."""
    bits = BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))
