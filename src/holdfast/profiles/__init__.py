"""The TOML files that describe what a machine attains and what a model is made of.

The files beside this one serve planning without the machine at hand; ``holdfast probe`` writes one of the machine that
it runs on. A key is declared once, as a field of ``MachineProfile`` or ``ModelProfile``. Reading, the errors and the
written file follow from that. Sizes and rates are text such as ``"80GB"`` and ``"12GB/s"``.
"""

from .adapted_model import BASES, AdaptedModel
from .profile_files import known, load_machine, load_model, to_toml
from .profile_types import MachineProfile, ModelProfile, Precision, RoutedExperts

__all__ = [
    "BASES",
    "AdaptedModel",
    "MachineProfile",
    "ModelProfile",
    "Precision",
    "RoutedExperts",
    "known",
    "load_machine",
    "load_model",
    "to_toml",
]
