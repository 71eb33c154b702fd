"""The sampling of tokens that continue a text, one forward pass for each token.

Each choice depends only on the logits and the seed. Called by ``Engine.generate``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import BadInput


def continued(
    model: Callable[[torch.Tensor], Any],
    tokens: torch.Tensor,
    count: int,
    choose: Callable[[torch.Tensor], torch.Tensor],
    context: int | None,
) -> torch.Tensor:
    """Return ``tokens`` (int64, shape (1, T)) followed by ``count`` more, on the device of ``tokens``.

    Each is chosen from the logits of ``model`` for the last ``context`` tokens before it. The model returns logits of
    shape (1, T, vocabulary), alone or as ``.logits``.
    """
    given, tokens = tokens.device, tokens.cpu()
    for _ in range(count):
        value = model(tokens if context is None else tokens[:, -context:])
        logits = value if isinstance(value, torch.Tensor) else value.logits
        tokens = torch.cat([tokens, choose(logits[:, -1].float().cpu())], dim=1)
    return tokens.to(given)


def chooser(temperature: float, top_k: int | None, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that draws a token from logits of shape (1, vocabulary), among the ``top_k`` likeliest.

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
            logits = logits.masked_fill(logits < likeliest.values[:, -1:], float("-inf"))
        return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)

    return choose
