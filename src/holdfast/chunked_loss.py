"""The cross entropy of a head in chunks of tokens, so that the logits never exist whole.

A head's logits take about 16 bytes per token and word of the vocabulary: 67 GB for 32,768 tokens and 128,256 words.
Here head, softmax and loss are computed for ``rows_per_chunk`` tokens at a time, and a chunk's gradients with them.
What remains is the gradient of the hidden states, and one fp32 sum as large as the head.

The order of the sums, all in fp32: the losses of the chunks are added in the order of the tokens, then divided by the
number of tokens that count. The gradients of weight and bias are added in the same order, each chunk's as its matrix
product rounds it, and rounded to the dtype of the parameter once, at the end. The products with the weight of a large
vocabulary, for logits and for its gradient, are made tile by tile (``tiles_of``); the gradient of the hidden states is
one product over all words. Tokens that fit into one chunk take the ordinary path, ``F.linear`` and
``F.cross_entropy``, with its bits.

A weight with a ``PartCollector`` gets its gradient tile after tile in the backward pass, so neither the sum nor the
gradient is ever whole. The logits of a tile are computed once more for that, by the same product, and the softmax from
what is kept of each token: the largest logit, and the logarithm of the sum. So the bits are the same.

Used by ``models.decoder``, by the engine for models of transformers, and by scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .errors import BadInput
from .token_chunks import pieces, rows_at_once, rows_per_chunk, tiles_of

Elementwise = Callable[[Tensor], Tensor]
"""Function from the output of a head to its logits, each from its own element."""
Tensors = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states, weight and bias, if there is one."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of hidden states, weight and bias; None where none is needed."""

Place = tuple[slice, slice]
"""Some rows and columns of a weight."""
Part = tuple[Place, Tensor]
"""A place, and the gradient there, in the dtype in which autograd would have it."""
ALL = slice(None)

REDUCTIONS = ("mean", "sum")
COLLECTOR = "_holdfast_part_collector"
"""Attribute of a weight that holds its ``PartCollector``."""


class PartCollector:
    """Takes the gradient of one weight in parts.

    If more than one loss in chunks uses the weight in a forward pass, autograd sums the gradients as it always does.
    A gradient that comes from elsewhere in the same graph is added by itself. A backward pass for other gradients, or
    one that returns this gradient to its caller (``torch.autograd.grad``), collects nothing.
    """

    def __init__(self, collect: Callable[[Iterable[Part]], object]) -> None:
        """``collect`` must use up the parts, which cover the weight once."""
        self.collect = collect
        self._uses, self._is_backward = 0, False

    def count_use(self) -> None:
        """Count a use of the weight in a forward pass. One that a checkpoint repeats was counted."""
        if torch._C._current_graph_task_id() == -1:
            self._uses, self._is_backward = (1 if self._is_backward else self._uses + 1), False

    def is_only_use(self) -> bool:
        """Return, in the backward pass, whether the forward pass has used the weight once."""
        self._is_backward = True
        # none is counted if the forward pass of a reentrant checkpoint was the only one
        return self._uses <= 1

    def collect_or_return(
        self, weight: Any, parts: Iterable[Part], empty: Callable[[], Tensor], is_alone: bool = False
    ) -> Tensor | None:
        """Collect ``parts``, or return the gradient whole where this backward pass needs it so; None otherwise.

        Args:
            weight: The node of the weight in the graph of this backward pass.
            parts: The gradient, not computed yet.
            empty: Returns memory for the whole gradient.
            is_alone: True if the parts are collected however often the weight is used.
        """
        try:
            if not torch._C._will_engine_execute_node(weight):
                return None
            is_returned = False
        except RuntimeError:  # torch.autograd.grad is to return the gradient
            is_returned = True
        if not is_returned and (is_alone or self.is_only_use()):
            self.collect(parts)
            return None
        made = empty()
        for place, grad in parts:
            made[place] = grad
        return made


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
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in given)):
        return loss.of(hidden, weight, bias, targets)
    collector = getattr(weight, COLLECTOR, None) if len(tiles_of(weight.shape[0])) > 1 else None
    if collector is not None:
        collector.count_use()
    return _WithGradients.apply(hidden, weight, bias, targets, loss, collector)


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
            for tokens in self._chunks(targets):
                out = self._head(hidden[tokens].to(self.dtype), weight, bias)
                total = total + self._loss(out, targets[tokens])
            return total if self.reduction == "sum" else total / self._count(targets)

    def with_gradients(
        self, tensors: Tensors, targets: Tensor, needed: tuple[bool, ...], factor: Tensor,
        softmax_stats: Tensor | None,
    ) -> tuple[Tensor, Gradients]:  # fmt: skip
        """Return the loss, and the gradients of ``tensors`` that are ``needed``, times ``factor``.

        Args:
            tensors: Hidden states, weight and bias.
            targets: One for each token.
            needed: True for each of ``tensors`` whose gradient is computed.
            factor: Factor of the gradients.
            softmax_stats: fp32 [2, tokens] to write, or None. Row 0 gets the largest logit of each token. Row 1 gets
                the logarithm of the sum that its softmax divides by, relative to that logit.
        """
        hidden, weight, bias = tensors
        by_token = torch.empty_like(hidden) if needed[0] else None
        by_word = torch.empty(weight.shape, device=hidden.device) if needed[1] else None
        of_bias = torch.empty(len(weight), device=hidden.device) if needed[2] else None
        total = torch.zeros((), device=hidden.device)
        factor = self._share(factor, targets)
        with torch.no_grad(), _without_autocast(hidden):
            weight, bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
            for tokens in self._chunks(targets):
                part = hidden[tokens].to(self.dtype)
                grad = self._head(part, weight, bias)  # the output, until its gradient is in its place
                into = None if softmax_stats is None else softmax_stats[:, tokens]
                total = total + self._chunk(grad, targets[tokens], factor, into)
                if by_token is not None:
                    by_token[tokens] = grad.mm(weight)
                if by_word is not None:
                    for words in tiles_of(len(weight)):
                        _add(by_word[words], grad[:, words].contiguous().t().mm(part), not tokens.start)
                if of_bias is not None:
                    _add(of_bias, grad.sum(0), not tokens.start)
                del grad
        value = total if self.reduction == "sum" else total / self._count(targets)
        return value, (by_token, by_word, of_bias)

    def parts(
        self, tensors: Tensors, targets: Tensor, softmax_stats: Tensor, factor: Tensor, outer: Tensor | None,
        dtype: torch.dtype,
    ) -> Iterator[Part]:  # fmt: skip
        """Yield the gradient of the weight, tile by tile, with the bits of ``with_gradients``.

        Args:
            tensors: Hidden states, weight and bias.
            targets: One for each token.
            softmax_stats: What ``with_gradients`` wrote.
            factor: The same factor as there.
            outer: Another factor, by which the sum is multiplied in the end, or None.
            dtype: The dtype of the parts.
        """
        hidden, weight, bias = tensors
        factor = self._share(factor, targets)
        for words in tiles_of(len(weight)):
            total: Tensor | None = None
            with torch.no_grad(), _without_autocast(hidden):
                tile = weight[words].to(self.dtype)
                shift = None if bias is None else bias[words].to(self.dtype)
                for tokens in self._chunks(targets):
                    part = hidden[tokens].to(self.dtype)
                    out = F.linear(part, tile, shift)
                    grad = self._tile(out, words, targets[tokens], factor, softmax_stats[:, tokens])
                    product = grad.t().mm(part)
                    total = product.float() if total is None else total.add_(product)
                    del out, grad, product
                assert total is not None
                made = _rounded(total, outer, dtype)
                del total
            yield (words, ALL), made
            del made

    def _head(self, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the head, [tokens, words], for the hidden states ``part``, [tokens, width]."""
        tiles = tiles_of(len(weight))
        if len(tiles) == 1:
            return F.linear(part, weight, bias)
        out = part.new_empty(len(part), len(weight))
        for words in tiles:
            out[:, words] = F.linear(part, weight[words], None if bias is None else bias[words])
        return out

    def _chunk(self, out: Tensor, targets: Tensor, factor: Tensor, softmax_stats: Tensor | None) -> Tensor:
        """Return the sum of one chunk's losses, and put the gradient of ``out`` in the place of ``out``.

        The softmax of a token is its own, so it is computed for a few tokens at a time.

        Args:
            out: Output of the head, [tokens, words].
            targets: One for each token.
            factor: Factor of the gradients.
            softmax_stats: The chunk's columns of that of ``with_gradients``, to write; or None.
        """
        losses = torch.empty(len(out), device=out.device)
        for rows in pieces(len(out), rows_at_once(out.shape[1])):
            leaf = out[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits = self.logits(leaf).float()
                log_probabilities = F.log_softmax(logits, -1)
                each = F.nll_loss(
                    log_probabilities, targets[rows], ignore_index=self.ignore_index, reduction="none"
                )
            if softmax_stats is not None:
                softmax_stats[0, rows], at = logits.detach().max(-1)
                softmax_stats[1, rows] = -log_probabilities.detach().gather(-1, at[:, None])[:, 0]
            losses[rows] = each.detach()
            del logits, log_probabilities
            out[rows] = torch.autograd.grad(each, [leaf], factor.expand_as(each))[0]
        return self._sum(losses, targets)

    def _tile(
        self, out: Tensor, words: slice, targets: Tensor, factor: Tensor, softmax_stats: Tensor
    ) -> Tensor:
        """Return the gradient of ``out``, [tokens, words of the tile], with the bits of ``_chunk``.

        Another column stands for all other words, so that a row of gradients has the sum of the whole row.

        Args:
            out: Output of the head for the tile, [tokens, words of the tile].
            words: The words of the tile.
            targets: One for each token, of all words.
            factor: Factor of the gradients.
            softmax_stats: What ``_chunk`` wrote for these tokens.
        """
        leaf, others = out.requires_grad_(), out.shape[1]
        with torch.enable_grad():
            logits = self.logits(leaf).float()
        log_probabilities = logits.new_zeros(len(logits), others + 1)
        inner = log_probabilities[:, :others]
        torch.sub(logits.detach(), softmax_stats[0][:, None], out=inner)
        inner -= softmax_stats[1][:, None]
        is_here = (targets >= words.start) & (targets < words.stop)
        at = torch.where(is_here, targets - words.start, others)
        given = torch.where(targets == self.ignore_index, torch.zeros_like(factor), -factor)
        grads = torch.zeros_like(log_probabilities).scatter_(1, at[:, None], given[:, None])
        grads = torch.ops.aten._log_softmax_backward_data(grads, log_probabilities, 1, torch.float32)
        (grad,) = torch.autograd.grad(logits, [leaf], grads[:, :others])
        return grad.contiguous()

    def _loss(self, out: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of one chunk's losses, without gradients."""
        losses = torch.empty(len(out), device=out.device)
        for rows in pieces(len(out), rows_at_once(out.shape[1])):
            losses[rows] = F.cross_entropy(
                self.logits(out[rows]).float(),
                targets[rows],
                ignore_index=self.ignore_index,
                reduction="none",
            )
        return self._sum(losses, targets)

    def _sum(self, losses: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of tokens, in the order in which torch adds those of one call."""
        counts = torch.where(targets == self.ignore_index, -100, 0)
        return F.nll_loss(-losses[:, None], counts, reduction="sum")

    def _share(self, factor: Tensor, targets: Tensor) -> Tensor:
        """Return ``factor`` for each token."""
        return factor if self.reduction == "sum" else factor / self._count(targets)

    def _chunks(self, targets: Tensor) -> list[slice]:
        """Return the tokens of each chunk."""
        return pieces(len(targets), self.rows)

    def _count(self, targets: Tensor) -> Tensor:
        return (targets != self.ignore_index).sum()


def _add(total: Tensor, product: Tensor, is_first: bool) -> None:
    """Add ``product`` to the fp32 sum ``total``, which begins with it if it ``is_first``."""
    if is_first:
        total.copy_(product)
    else:
        total.add_(product)


class _WithGradients(torch.autograd.Function):
    """The loss as a node of a graph that holds gradients, and no logits.

    In fp16 the gradients are computed in the backward pass, where the loss scale is known: without it they might
    underflow. A weight with a collector gets its gradient there, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        loss: _ChunkedLoss,
        collector: PartCollector | None,
    ) -> Tensor:
        tensors, needed = (hidden, weight, bias), ctx.needs_input_grad[:3]
        ctx.loss, ctx.dtypes = loss, [None if each is None else each.dtype for each in tensors]
        ctx.later = loss.dtype == torch.float16
        ctx.collector = collector if needed[1] else None
        ctx.needed = (needed[0], needed[1] and ctx.collector is None, needed[2])
        if ctx.later:
            ctx.save_for_backward(*tensors, targets)
            return loss.of(*tensors, targets)
        softmax_stats = None if ctx.collector is None else _empty_stats(targets)
        value, grads = loss.with_gradients(tensors, targets, ctx.needed, _one(hidden), softmax_stats)
        again = (*tensors, targets, softmax_stats) if ctx.collector is not None else (None,) * 5
        ctx.save_for_backward(*grads, *again)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (outer,), saved = grad_outputs, ctx.saved_tensors  # read once: a checkpoint gives them no second time
        if ctx.later:
            *tensors, targets = saved
            factor, outer, softmax_stats = (
                outer,
                None,
                None if ctx.collector is None else _empty_stats(targets),
            )
            _, grads = ctx.loss.with_gradients(tuple(tensors), targets, ctx.needed, factor, softmax_stats)
        else:
            grads, (*tensors, targets, softmax_stats) = saved[:3], saved[3:]
            factor = _one(outer)
        made = [
            None if each is None else _rounded(each, outer, dtype)
            for each, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        del grads, saved
        if ctx.collector is not None:
            parts = ctx.loss.parts(tuple(tensors), targets, softmax_stats, factor, outer, ctx.dtypes[1])
            made[1] = ctx.collector.collect_or_return(
                ctx.next_functions[1][0], parts, lambda: torch.empty_like(tensors[1])
            )
        return (*made, None, None, None)


def _empty_stats(targets: Tensor) -> Tensor:
    """Return memory for the ``softmax_stats`` of ``with_gradients``, [2, tokens]."""
    return torch.empty(2, len(targets), device=targets.device)


def _one(like: Tensor) -> Tensor:
    return torch.ones((), device=like.device)


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
