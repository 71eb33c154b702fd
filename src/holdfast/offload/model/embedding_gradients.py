"""The gradient of a streamed embedding in parts, where autograd would have it whole and dense.

A part is some columns of all words: each of its elements is a sum over the same tokens in the same order as in the
whole gradient, so the bits are the same. Called where a block that is an embedding computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ...chunked_loss import ALL, COLLECTOR, Part, PartCollector
from ...token_chunks import pieces

EMBEDDED_AT_ONCE = 2**24
"""The most elements of an embedding's gradient that are computed at once, unless one column has more."""


class EmbeddingInParts(TorchFunctionMode):
    """Has the gradient of an embedding's weight in parts, if the weight has a collector."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            found = _embedded(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def columns_at_once(rows: int) -> int:
    """Return the number of columns of an embedding of ``rows`` words in one part of its gradient."""
    return max(1, EMBEDDED_AT_ONCE // rows)


def _embedded(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """Return the rows of ``weight``, as ``F.embedding`` does; None if the gradient cannot come in parts."""
    collector = getattr(weight, COLLECTOR, None)
    gradient = torch.is_grad_enabled() and weight.requires_grad
    if collector is None or not gradient or max_norm is not None or sparse:
        return None
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    return _Embedding.apply(weight, input, padding, scale_grad_by_freq, collector)


class _Embedding(torch.autograd.Function):
    """Rows of a weight, whose gradient goes to a collector."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, input: Tensor, padding: int, scaled: bool, collector: PartCollector
    ) -> Tensor:
        ctx.save_for_backward(input)
        ctx.shape, ctx.options, ctx.collector = weight.shape, (padding, scaled), collector
        return torch.embedding(weight, input, padding, scaled, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,), (input,) = grad_outputs, ctx.saved_tensors
        made = ctx.collector.collect_or_return(
            ctx.next_functions[0][0],
            _columns(grad, input, ctx.shape, ctx.options),
            lambda: grad.new_empty(ctx.shape),
            is_alone=True,
        )
        return made, None, None, None, None


def _columns(grad: Tensor, input: Tensor, shape: torch.Size, options: tuple[int, bool]) -> Iterator[Part]:
    """Yield an embedding's gradient, some columns after others."""
    rows, width = shape
    for columns in pieces(width, columns_at_once(rows)):
        yield (
            (ALL, columns),
            torch.ops.aten.embedding_dense_backward(grad[..., columns].contiguous(), input, rows, *options),
        )
