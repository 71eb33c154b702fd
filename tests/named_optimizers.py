"""Optimizers that are run out of core, by names that tests give them: functions of a model."""

from __future__ import annotations

import torch

from holdfast.optim import AdamW8bit, AdamWBF16, Apollo, Grass, Joined, apollo_mini


def matrices(model):
    return [p for p in model.parameters() if p.dim() == 2]


def vectors(model):
    return [p for p in model.parameters() if p.dim() != 2]


def two_groups(kind, **options):
    """One group decays, the other does not."""
    return lambda model: kind(
        [{"params": matrices(model), "weight_decay": 0.1}, {"params": vectors(model), "weight_decay": 0.0}],
        lr=1e-2,
        **options,
    )


def muon_and_adamw(model):
    return Joined(
        torch.optim.Muon(matrices(model), lr=1e-2), torch.optim.AdamW(vectors(model), lr=1e-2, fused=True)
    )


def apollo_with_embeddings_of_adamw(model):
    embedding = next(model.parameters())
    rest = [p for p in model.parameters() if p is not embedding]
    return Apollo(
        [{"params": [embedding], "rank": None}, {"params": rest}], lr=1e-2, rank=3, update_gap=3, seed=7
    )


OPTIMIZERS = {
    "muon and adamw": muon_and_adamw,
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.1),
    "apollo": two_groups(Apollo, rank=4, update_gap=3),
    "apollo, embeddings of adamw": apollo_with_embeddings_of_adamw,
    "apollo-mini": two_groups(apollo_mini, update_gap=3),
    "grass": two_groups(Grass, rank=4, update_gap=3),
    "grass, rows by chance": two_groups(Grass, rank=4, update_gap=3, sampled=True, seed=7),
    "adamw in bf16": two_groups(AdamWBF16),
    "adamw in bytes": two_groups(AdamW8bit),
    "several": lambda model: Joined(
        AdamW8bit(matrices(model)[:3], lr=1e-2),
        torch.optim.SGD(vectors(model), lr=1e-2, momentum=0.9, fused=True),
        Apollo(matrices(model)[3:], lr=1e-2, rank=2),
    ),
}
