"""Profiles: what a machine can do, and what a model is made of, as TOML files.

Those beside this file are for planning without the machine at hand; ``holdfast probe`` writes one of the machine
that it runs on. A key is declared once, as a field of ``MachineProfile`` or ``ModelProfile``; reading, the errors and
the written file are made from that. Sizes and rates are text such as ``"80GB"`` and ``"12GB/s"``.
"""

from .files import known, load_machine, load_model, to_toml
from .machine import MachineProfile
from .model import ModelProfile

__all__ = ["MachineProfile", "ModelProfile", "known", "load_machine", "load_model", "to_toml"]
