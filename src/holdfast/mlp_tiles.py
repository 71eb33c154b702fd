"""MLPs that compute their tokens in tiles, so that the memory for their backward pass does not grow with the text.

An MLP keeps several values a token that are wider than the model, more than all else of a block. It computes each token
by itself, so tokens can go through it in pieces. In the backward pass each piece is computed again before its gradients
are, so that the values of one piece exist at a time. Used by scripts, before ``offload`` or in a loop of their own, and
by ``holdfast train``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from .errors import BadInput, ModelNotSupported

NAMES = ("mlp", "feed_forward", "feedforward", "ffn")
"""The names of the modules that are tiled by default."""
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Accepted difference of a tile from the whole, relative to the largest output, by dtype; 2**-6 in 16 bits."""


def tile_mlps(model: nn.Module, tokens: int, modules: Iterable[nn.Module] | None = None) -> int:
    """Make MLPs compute at most ``tokens`` tokens at once, and return the number of those MLPs.

    Matrix products of a tile may be rounded otherwise than those of the whole input. The backward pass computes each
    tile again, with the same random numbers, from the last tile to the first. The gradient of a weight is the sum over
    the tiles, in the dtype of the weight. Inputs of at most ``tokens`` tokens are computed whole, with the same bits as
    before. The first longer input of each MLP is checked: two tiles must give what both together give.

    Args:
        model: The model; its modules are changed in place.
        tokens: Number of tokens in a tile. An input [..., width] has one token for each row of ``width`` values.
        modules: The MLPs, each called with one tensor. By default all modules named mlp, feed_forward, feedforward or
            ffn.

    Raises:
        BadInput: ``tokens`` is no positive integer, or there is no MLP.
        ModelNotSupported: In a forward pass: a module does not compute each token by itself, or takes or returns
            something else than one tensor.

    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> tile_mlps(mlp, tokens=8, modules=[mlp])
    1
    >>> mlp(torch.ones(2, 50, 4)).shape
    torch.Size([2, 50, 4])
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise BadInput(f"tokens = {tokens!r} must be a positive integer: the tokens of a tile")
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    if modules is None:
        chosen = [module for module, name in names.items() if name.rpartition(".")[2] in NAMES]
    else:
        chosen = [*dict.fromkeys(modules)]
    if not chosen:
        raise BadInput(
            f"{type(model).__name__} has no module named {', '.join(NAMES)}. Pass modules=, the MLPs of its blocks."
        )
    for module in chosen:
        name, own = names.get(module, type(module).__name__), vars(module).get("forward")
        if isinstance(own, _Tiles):
            own.tokens = tokens
        elif own is not None:
            raise ModelNotSupported(
                f"other code has set the forward of {name}. Call tile_mlps before that code."
            )
        else:
            module.forward = _Tiles(module, name, tokens)
    return len(chosen)


class _Tiles:
    """The forward of an MLP that goes tile by tile."""

    def __init__(self, module: nn.Module, name: str, tokens: int) -> None:
        self.module, self.name, self.tokens = module, name, tokens
        self.is_verified = False

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not isinstance(input, Tensor) or input.dim() < 2:
            raise self._refusal("is not called with one tensor of tokens")
        rows = input.reshape(-1, input.shape[-1])
        if len(rows) <= self.tokens:
            return self._own(input)
        if not self.is_verified and not isinstance(input, FakeTensor):
            self._verify(rows.detach())
        tiles = [self._tile(tile) for tile in rows.split(self.tokens)]
        return torch.cat(tiles).view(*input.shape[:-1], tiles[0].shape[-1])

    def _tile(self, rows: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._own(rows)
        output = checkpoint(self._own, rows, use_reentrant=False)
        assert isinstance(output, Tensor)
        return output

    def _own(self, input: Tensor) -> Tensor:
        output = type(self.module).forward(self.module, input)
        if not isinstance(output, Tensor) or output.shape[:-1] != input.shape[:-1]:
            raise self._refusal("does not return one tensor with as many tokens")
        return output

    def _verify(self, rows: Tensor) -> None:
        """Compare two tiles with the whole of both. Raises ``ModelNotSupported`` if tokens depend on one another."""
        rows = rows[: 2 * self.tokens]
        training = [module for module in self.module.modules() if module.training]
        with torch.no_grad():
            try:
                for module in training:
                    module.training = False  # dropout would differ
                whole, cut = self._own(rows), torch.cat([self._own(tile) for tile in rows.split(self.tokens)])
            finally:
                for module in training:
                    module.training = True
            most = float((whole - cut).abs().max()) if whole.numel() else 0.0
            bound = BOUNDS.get(whole.dtype, 2**-6) * max(float(whole.abs().max()), 1e-30)
        if most > bound:
            raise self._refusal(
                f"gives another output for a part of its tokens (by {most:.1e} of {float(whole.abs().max()):.1e})"
            )
        self.is_verified = True

    def _refusal(self, why: str) -> ModelNotSupported:
        return ModelNotSupported(
            f"{self.name} {why}, so its tokens cannot be computed in tiles. Leave it out of tile_mlps (modules=)."
        )
