"""Attention over packed rows, sample by sample instead of over the whole mask.

A packed row of n samples has a block-diagonal mask, and a kernel that is given a mask computes all of it: the square of
the row's tokens, where the sum of the samples' squares would do. So the attention of transformers is called for each
block of the diagonal. What a token attends to is the same, and so is its result but for rounding.

Called by ``holdfast train`` where it packs. Masks on a device are left whole, since finding the blocks would wait for
the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

Block = tuple[int, int, bool]
"""First token, end, and whether each token attends to itself and to all earlier ones of the block."""


def attend_by_sample() -> None:
    """Replace the attention "sdpa" of transformers in this process, so that packed rows are computed by sample."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    whole = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(whole, BySample):
        ALL_ATTENTION_FUNCTIONS.register("sdpa", BySample(whole))


class BySample:
    """An attention function of transformers that calls ``whole`` for each block of a mask's diagonal.

    Query, key and value are [batch, heads, tokens, size], the mask is bool[batch or 1, 1, tokens, tokens], True where a
    token attends. Any other mask is left to ``whole``, and every one without values (fake, ``meta``) or a version
    counter (of ``torch.inference_mode``).
    """

    def __init__(self, whole: Callable[..., Any]) -> None:
        self._whole = whole
        self._known: Any = WeakTensorKeyDictionary()
        """The blocks of each row by mask, with the version of the mask."""

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        blocks = self._blocks(query, key, attention_mask, options)
        if blocks is None:
            return self._whole(module, query, key, value, attention_mask, **options)
        is_causal = options.get("is_causal") is not False and getattr(module, "is_causal", True)
        rows = []
        # split, since the gradient of a slice is as large as what it was cut from
        each_row = zip(query.split(1), key.split(1), value.split(1), blocks, strict=True)
        for row, (*tensors, row_blocks) in enumerate(each_row):
            parts = []
            mask = attention_mask[row % len(attention_mask)][None]
            sizes = [end - begin for begin, end, _ in row_blocks]
            cut = zip(*(tensor.split(sizes, 2) for tensor in tensors), row_blocks, strict=True)
            for *pieces, (begin, end, is_triangle) in cut:
                needed = None if is_triangle and is_causal else mask[:, :, begin:end, begin:end]
                found, _ = self._whole(module, *pieces, needed, **options)
                parts.append(found)
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows), None

    def _blocks(
        self, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> list[list[Block]] | None:
        """Return the blocks of each row; None if each row is one block, or the mask cannot be divided."""
        tokens = query.shape[2]
        if (
            not isinstance(mask, Tensor)
            or isinstance(mask, FakeTensor)
            or mask.dtype != torch.bool
            or mask.device.type != "cpu"
            or mask.is_inference()
            or mask.shape[1:] != (1, tokens, tokens)
            or len(mask) not in (1, len(query))
            or key.shape[2] != tokens
            or options.get("position_bias") is not None
            or options.get("cache") is not None
        ):
            return None
        known = self._known.get(mask)
        if known is None or known[0] != mask._version:
            known = mask._version, [diagonal_blocks(row[0]) for row in mask]
            self._known[mask] = known
        blocks = known[1]
        return None if all(len(each) == 1 for each in blocks) else blocks * (len(query) // len(blocks))


def diagonal_blocks(mask: Tensor) -> list[Block]:
    """Return the blocks into which ``mask``, bool[tokens, tokens], falls along its diagonal.

    No token attends to one of another block. A token that attends to none counts as one that attends to all.

    >>> diagonal_blocks(torch.block_diag(torch.ones(2, 2).tril(), torch.ones(3, 3)).bool())
    [(0, 2, True), (2, 5, False)]
    """
    tokens = len(mask)
    values, places = mask.to(torch.uint8), torch.arange(1, tokens, device=mask.device)
    first, last = values.argmax(1), tokens - 1 - values.flip(1).argmax(1)
    begins = first.flip(0).cummin(0).values.flip(0)[1:] >= places  # no later token attends to an earlier one
    begins &= last.cummax(0).values[:-1] < places  # and no earlier token to a later one
    firsts = [0, *(begins.nonzero().flatten() + 1).tolist()]
    ends = [*firsts[1:], tokens]
    triangle = torch.ones_like(mask).tril()
    return [
        (begin, end, torch.equal(mask[begin:end, begin:end], triangle[: end - begin, : end - begin]))
        for begin, end in zip(firsts, ends, strict=True)
    ]
