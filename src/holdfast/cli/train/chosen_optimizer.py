"""The optimizer that a configuration selects, over the parameters of a recipe's model."""

from __future__ import annotations

from typing import Any

import torch

from ...config import Config, literal
from ...errors import ConfigError
from ...offload.model.blocks import find_blocks
from ...optim import AdamW8bit, AdamWBF16, Apollo, Grass, Joined, MeZO, apollo_mini
from .recipe import Recipe

BETAS, EPSILON = (0.9, 0.95), 1e-8
"""Settings of AdamW."""

OF_MATRICES = ("muon", "apollo", "apollo-mini", "grass")
"""Optimizers that update the matrices of the blocks; AdamW updates all other parameters."""

Group = dict[str, Any]


def make_optimizer(recipe: Recipe, config: Config) -> torch.optim.Optimizer:
    """Build the optimizer. Weight decay applies to matrices, not to norms (by dimension) or the embedding.

    Raises ``ConfigError`` if the optimizer would have nothing to update.
    """
    kind, rate, decay = config.train.optimizer, config.train.highest_rate, config.train.weight_decay
    embeddings = recipe.embeddings()
    decayed = [p for p in recipe.model.parameters() if p.dim() >= 2 and id(p) not in embeddings]
    others = [p for p in recipe.model.parameters() if p.dim() < 2 or id(p) in embeddings]
    if kind in OF_MATRICES:
        return _of_matrices(recipe, config, decayed, _group(others, 0.0))
    groups = [*_group(decayed, decay), *_group(others, 0.0)]
    if kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    if kind == "mezo":
        return MeZO(groups, lr=rate, seed=config.run.seed)
    adamw = {"adamw": torch.optim.AdamW, "adamw-bf16": AdamWBF16, "adamw-8bit": AdamW8bit}[kind]
    return adamw(groups, lr=rate, betas=BETAS)


def _of_matrices(
    recipe: Recipe, config: Config, decayed: list[torch.nn.Parameter], others: list[Group]
) -> torch.optim.Optimizer:
    kind, rate, decay = config.train.optimizer, config.train.highest_rate, config.train.weight_decay
    in_blocks = {id(p) for block in find_blocks(recipe.model).modules for p in block.parameters()}
    matrices = [p for p in decayed if p.dim() == 2 and id(p) in in_blocks]
    if not matrices:
        raise ConfigError(
            f"train.optimizer = {literal(kind)}: the blocks of this model have no matrices, which it is for. Take"
            ' "adamw".'
        )
    known = {id(p) for p in matrices}
    rest = [*_group([p for p in decayed if id(p) not in known], decay), *others]
    if kind == "muon":  # scaled so that the learning rates of AdamW fit
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return Joined(muon, torch.optim.AdamW(rest, lr=rate, betas=BETAS)) if rest else muon
    by_adamw = {"rank": None, "betas": BETAS, "eps": EPSILON}
    groups = [*_group(matrices, decay), *(group | by_adamw for group in rest)]
    if kind == "apollo-mini":
        return apollo_mini(groups, lr=rate, seed=config.run.seed)
    projected = {"apollo": Apollo, "grass": Grass}[kind]
    return projected(groups, lr=rate, rank=config.train.rank, seed=config.run.seed)


def _group(parameters: list[torch.nn.Parameter], decay: float) -> list[Group]:
    """Return a list of one parameter group, or an empty list without parameters."""
    return [{"params": parameters, "weight_decay": decay}] if parameters else []
