"""Optimizers for plain loops and out of core alike: ``torch.optim`` ones with less state, or of whole matrices."""

from .update.adamw import AdamW8bit, AdamWBF16
from .update.apollo import Apollo, apollo_mini
from .update.joined import Joined

__all__ = ["AdamW8bit", "AdamWBF16", "Apollo", "Joined", "apollo_mini"]
