"""The cross entropy of a head in chunks of tokens, so that the logits never exist whole.

A head's logits take about 16 bytes per token and word of the vocabulary: 67 GB for 32,768 tokens and 128,256 words.
Here head, softmax and loss are computed for ``rows_per_chunk`` tokens at a time, and a chunk's gradients with them.
What remains is the gradient of the hidden states, and one fp32 sum as large as the head.

The order of the sums, all in fp32: the losses of the chunks are added in the order of the tokens, then divided by the
number of tokens that count. The gradients of weight and bias are added in the same order, each chunk's as its matrix
product rounds it, and rounded to the dtype of the parameter once, at the end. Tokens that fit into one chunk take the
ordinary path, ``F.linear`` and ``F.cross_entropy``, with its bits. Used by ``models.decoder``, by the engine for
models of transformers, and by scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .errors import BadInput
from .token_chunks import rows_per_chunk

Elementwise = Callable[[Tensor], Tensor]
"""Function from the output of a head to its logits, each from its own element."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of hidden states, weight and bias; None where none is needed."""

REDUCTIONS = ("mean", "sum")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the cross entropy (nats, fp32 scalar) of the logits ``hidden @ weight.T + bias``, which never exist whole.

    The logits are computed in the dtype of ``hidden``, or that of autocast, and their softmax in fp32, for
    ``max(1, 2**25 // vocabulary)`` tokens at a time. Losses and the gradients of weight and bias are summed over these
    chunks in fp32, in the order of the tokens, whatever the dtype of the weight. One chunk has the bits of ``F.linear``
    and ``F.cross_entropy(logits.float(), ...)``. Gradients are computed together with the loss and multiplied by the
    loss's own gradient in the backward pass, in fp16 in the backward pass alone. No gradient is computed for what
    requires none, and none at all under ``torch.no_grad()``.

    Args:
        hidden: Hidden states [..., width], of a floating-point dtype.
        weight: Weight of the head [vocabulary, width], of the dtype of ``hidden`` unless autocast is on.
        targets: int64 [...], shaped as ``hidden`` without its last dim; each below ``vocabulary`` or ``ignore_index``.
        bias: Bias of the head [vocabulary], or None.
        ignore_index: Target of tokens that do not count.
        reduction: "mean" over the tokens that count (NaN where none does), or "sum".
        logit_scale: Factor for the logits.
        softcap: Bound of the logits: ``softcap * tanh(logits / softcap)`` after the factor; None leaves them.

    Raises:
        BadInput: Shapes, dtypes or options do not fit together. A target out of range is torch's own error.
    """
    _check(hidden, weight, targets, bias, reduction)

    def logits(out: Tensor) -> Tensor:
        out = out if logit_scale == 1.0 else out * logit_scale
        return out if softcap is None else softcap * torch.tanh(out / softcap)

    return cross_entropy_of(hidden, weight, bias, targets, logits, ignore_index, reduction)


def cross_entropy_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    logits: Elementwise,
    ignore_index: int,
    reduction: str,
    rows: int | None = None,
) -> Tensor:
    """Return what ``chunked_cross_entropy`` does, for arguments that fit together.

    Args:
        logits: Function from the output of the head to its logits, in any floating-point dtype.
        rows: Tokens of a chunk, for comparisons; by default ``rows_per_chunk``.
    """
    rows = rows or rows_per_chunk(weight.shape[0])
    if targets.numel() <= rows:
        out = logits(F.linear(hidden, weight, bias)).float().flatten(0, -2)
        return F.cross_entropy(out, targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    loss = _ChunkedLoss(rows, logits, ignore_index, reduction, _compute_dtype(hidden))
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    given = [each for each in (hidden, weight, bias) if each is not None]
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        return _WithGradients.apply(hidden, weight, bias, targets, loss)
    return loss.of(hidden, weight, bias, targets)


def exceeds_chunk(head: nn.Module, hidden: Tensor) -> bool:
    """Return whether ``head`` is a plain ``nn.Linear`` whose logits for ``hidden`` would be more than one chunk.

    False for a head with hooks, adapters or a weight of another class, which does more than multiply.
    """
    return is_plain_linear(head) and hidden.shape[:-1].numel() > rows_per_chunk(head.out_features)


def is_plain_linear(head: Any, also: type | None = None) -> TypeGuard[nn.Linear]:
    """Return whether calling ``head`` is ``F.linear`` with its weight and bias, and nothing else.

    Parameters of the class ``also`` count as plain.
    """
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    if "weight" not in head._parameters:  # a parametrization computes it
        return False
    changed = "forward" in vars(head) or getattr(head, "_compiled_call_impl", None) is not None
    hooks = (
        head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks
    )  # fmt: skip
    return not changed and not any(hooks) and all(_is_plain(each, also) for each in (head.weight, head.bias))


def _is_plain(parameter: Tensor | None, also: type | None) -> bool:
    """Return whether ``parameter`` computes as a tensor does; one of a planner's trace, without bytes, does."""
    kinds = (nn.Parameter, Tensor, torch._subclasses.FakeTensor, also)
    return parameter is None or type(parameter) in kinds


@dataclass(frozen=True)
class _ChunkedLoss:
    """The loss of one call: how it is cut and computed."""

    rows: int
    logits: Elementwise
    ignore_index: int
    reduction: str
    dtype: torch.dtype
    """The dtype of the matrix products."""

    def of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the loss, without gradients."""
        with torch.no_grad(), _without_autocast(hidden):
            weight, bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
            total = torch.zeros((), device=hidden.device)
            for begin, end in self._chunks(targets):
                total = total + self._chunk(hidden[begin:end], weight, bias, targets[begin:end])
            return total if self.reduction == "sum" else total / self._count(targets)

    def with_gradients(
        self,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        targets: Tensor,
        needed: tuple[bool, ...],
        factor: Tensor,
    ) -> tuple[Tensor, Gradients]:
        """Return the loss, and the gradients of ``tensors`` that are ``needed``, times ``factor``."""
        hidden, weight, bias = tensors
        by_token, sums = torch.empty_like(hidden) if needed[0] else None, dict[int, Tensor]()
        factor = factor if self.reduction == "sum" else factor / self._count(targets)
        total = torch.zeros((), device=hidden.device)
        with torch.enable_grad(), _without_autocast(hidden):
            weight = weight.detach().to(self.dtype).requires_grad_(needed[1])
            bias = None if bias is None else bias.detach().to(self.dtype).requires_grad_(needed[2])
            for begin, end in self._chunks(targets):
                part = hidden[begin:end].detach().requires_grad_(needed[0])
                into = None if by_token is None else by_token[begin:end]
                total = total + self._add_gradients(
                    (part, weight, bias), targets[begin:end], factor, into, sums
                )
        value = total if self.reduction == "sum" else total / self._count(targets)
        return value, (by_token, sums.get(1), sums.get(2))

    def _add_gradients(
        self,
        leaves: tuple[Tensor, Tensor, Tensor | None],
        targets: Tensor,
        factor: Tensor,
        by_token: Tensor | None,
        sums: dict[int, Tensor],
    ) -> Tensor:
        """Return the sum of one chunk's losses; write its gradients to ``by_token``, and add them to ``sums``.

        Nothing of the chunk remains afterwards.
        """
        loss = self._chunk(*leaves, targets)
        wanted = {i: leaf for i, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad}
        grads = torch.autograd.grad(loss, [*wanted.values()], factor)
        for i, grad in zip(wanted, grads, strict=True):
            if i == 0 and by_token is not None:
                by_token.copy_(grad)
            elif i in sums:
                sums[i].add_(grad)
            else:
                sums[i] = grad.float()
        return loss.detach()

    def _chunk(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the sum of one chunk's losses."""
        out = self.logits(F.linear(hidden.to(self.dtype), weight, bias)).float()
        return F.cross_entropy(out, targets, ignore_index=self.ignore_index, reduction="sum")

    def _chunks(self, targets: Tensor) -> Iterator[tuple[int, int]]:
        tokens = len(targets)
        return ((begin, min(begin + self.rows, tokens)) for begin in range(0, tokens, self.rows))

    def _count(self, targets: Tensor) -> Tensor:
        return (targets != self.ignore_index).sum()


class _WithGradients(torch.autograd.Function):
    """The loss as a node of a graph that holds gradients, and no logits.

    In fp16 the gradients are computed in the backward pass, where the loss scale is known: without it they might
    underflow.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss: _ChunkedLoss
    ) -> Tensor:
        tensors, needed = (hidden, weight, bias), ctx.needs_input_grad[:3]
        ctx.loss, ctx.dtypes = loss, [None if each is None else each.dtype for each in tensors]
        ctx.later = loss.dtype == torch.float16
        if ctx.later:
            ctx.save_for_backward(*tensors, targets)
            return loss.of(*tensors, targets)
        one = torch.ones((), device=hidden.device)
        value, grads = loss.with_gradients(tensors, targets, needed, one)
        ctx.save_for_backward(*grads)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (factor,), grads = grad_outputs, ctx.saved_tensors
        if ctx.later:
            *tensors, targets = ctx.saved_tensors
            _, grads = ctx.loss.with_gradients(tuple(tensors), targets, ctx.needs_input_grad[:3], factor)
            factor = None
        made = [
            None if each is None else _rounded(each, factor, dtype)
            for each, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return (*made, None, None)


def _rounded(total: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``total`` times ``factor`` in ``dtype``, some rows at a time: no second fp32 tensor of its size exists."""
    if factor is None:
        return total.to(dtype)
    made = torch.empty_like(total, dtype=dtype)
    rows = rows_per_chunk(max(1, total[0].numel()))
    for part, source in zip(made.split(rows), total.split(rows), strict=True):
        part.copy_(source * factor)
    return made


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which ``F.linear`` would compute here."""
    kind = hidden.device.type
    if _autocast_on(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _without_autocast(hidden: Tensor) -> AbstractContextManager[object]:
    kind = hidden.device.type
    return torch.autocast(kind, enabled=False) if _autocast_on(kind) else nullcontext()


def _autocast_on(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str) -> None:
    """Raise ``BadInput`` for arguments that do not fit together."""
    if reduction not in REDUCTIONS:
        raise BadInput(f"reduction={reduction!r}: chunked_cross_entropy takes {' or '.join(REDUCTIONS)}")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1] or not weight.shape[0]:
        raise BadInput(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: give hidden [..., width] and weight"
            " [vocabulary, width]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadInput(f"bias {list(bias.shape)} for a weight {list(weight.shape)}: give [vocabulary]")
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise BadInput(
            f"targets {list(targets.shape)} of {targets.dtype} for hidden {list(hidden.shape)}: give int64"
            f" {list(hidden.shape[:-1])}"
        )
    dtypes = {each.dtype for each in (hidden, weight, bias) if each is not None}
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise BadInput(f"{' and '.join(map(str, sorted(dtypes, key=str)))}: give floating-point tensors")
    if len(dtypes) > 1 and not _autocast_on(hidden.device.type):
        raise BadInput(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: cast one, or use torch.autocast"
            + ("" if bias is None else f"; bias is {bias.dtype}")
        )
