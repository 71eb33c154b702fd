"""Optimizers for plain loops and out of core alike: ``torch.optim`` ones with less state, or of whole matrices."""

from .update.adamw import AdamW8bit, AdamWBF16
from .update.apollo import Apollo, apollo_mini
from .update.grass import Grass
from .update.joined import Joined
from .update.mezo import MeZO

__all__ = ["AdamW8bit", "AdamWBF16", "Apollo", "Grass", "Joined", "MeZO", "apollo_mini"]
