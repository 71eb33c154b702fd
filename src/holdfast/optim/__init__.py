"""Optimizers for plain loops and for out-of-core training: variants with less state, and joined ones."""

from .adamw import AdamW8bit, AdamWBF16
from .joined import Joined
from .low_rank import Apollo, Grass, apollo_mini
from .mezo import MeZO

__all__ = ["AdamW8bit", "AdamWBF16", "Apollo", "Grass", "Joined", "MeZO", "apollo_mini"]
