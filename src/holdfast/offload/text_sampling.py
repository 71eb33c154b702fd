"""The sampling of tokens that continue texts, a token of each text at a time.

Each choice depends only on the logits and the seed. Called by ``Engine.generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import BadInput

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ROWS = 8
"""The most texts that share one forward pass of the model, which bounds its memory."""
Model = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Function that returns the last token's logits, fp32[B, vocabulary], for each window of tokens, int64[B, T]."""
Choose = Callable[[torch.Tensor], torch.Tensor]
"""Function that draws a token, int64[1], from logits fp32[vocabulary]."""


def checked_rows(tokens: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each text as int64[T] on the host. Raises ``BadInput`` for what is no text."""
    are_rows = isinstance(tokens, (list, tuple)) or (isinstance(tokens, torch.Tensor) and tokens.dim() == 2)
    rows = list(tokens) if are_rows else []
    wrong = [row for row in rows if not isinstance(row, torch.Tensor) or row.dim() != 1 or not row.numel()]
    if not rows or wrong or any(row.dtype not in INTEGERS for row in rows):
        raise BadInput(
            "tokens to continue are one tensor of integers of shape (texts, length), or a list of tensors of shape"
            " (length,), each with at least one token"
        )
    return [row.to("cpu", torch.int64, copy=True) for row in rows]


def last_logits(value: Any) -> torch.Tensor:
    """Return the last token's logits, fp32[B, vocabulary] in host memory, of a model's result.

    The result is logits of shape (B, T, vocabulary), alone or as ``.logits``.
    """
    logits = value if isinstance(value, torch.Tensor) else value.logits
    return logits[:, -1].float().cpu()


def continued(
    model: Model,
    rows: list[torch.Tensor],
    count: int,
    choosers: list[Choose],
    context: int | None,
    at_once: int,
) -> list[torch.Tensor]:
    """Return ``rows``, each int64[T], followed by ``count`` more tokens.

    Each token is drawn by its row's function from the logits for the last ``context`` tokens before it. Up to
    ``at_once`` rows of one length are one window of the model.
    """
    for _ in range(count):
        windows = [row if context is None else row[-context:] for row in rows]
        groups = _by_length(windows, at_once)
        values = model([torch.stack([windows[i] for i in group]) for group in groups])
        for group, logits in zip(groups, values, strict=True):
            for i, of_row in zip(group, logits, strict=True):
                rows[i] = torch.cat([rows[i], choosers[i](of_row)])
    return rows


def _by_length(windows: list[torch.Tensor], at_once: int) -> list[list[int]]:
    """Return the indices of ``windows`` in groups of one length, of at most ``at_once`` each."""
    of_length: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        of_length.setdefault(len(window), []).append(index)
    return [same[at : at + at_once] for same in of_length.values() for at in range(0, len(same), at_once)]


def chooser(temperature: float, top_k: int | None, seed: int) -> Choose:
    """Return a function that draws a token among the ``top_k`` likeliest.

    A temperature of 0 takes the likeliest. Raises ``BadInput``.
    """
    if not temperature >= 0:
        raise BadInput(f"temperature = {temperature} must be at least 0; 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise BadInput(f"top_k = {top_k} must be at least 1; None takes all tokens")
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1, keepdim=True)
        if top_k is not None:
            likeliest = logits.topk(min(top_k, logits.shape[-1]))
            logits = logits.masked_fill(logits < likeliest.values[-1:], float("-inf"))
        return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)

    return choose
