"""Optimizers for plain loops and for out-of-core training: variants with less state, and joined ones."""

from .update.adamw import AdamW8bit, AdamWBF16
from .update.apollo import Apollo, apollo_mini
from .update.grass import Grass
from .update.joined import Joined
from .update.mezo import MeZO

__all__ = ["AdamW8bit", "AdamWBF16", "Apollo", "Grass", "Joined", "MeZO", "apollo_mini"]
