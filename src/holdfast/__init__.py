"""Holdfast: training state that fits, survives and moves.

The names below are the public ones; everything else may be imported but may change. torch is imported when
the first of them is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("Holdfast runs on Linux; macOS was not tried, and it does not run on Windows.")

__version__ = "0.1.0"

_HOME = {
    "offload": ".offload.entry",
    "Budget": ".offload.planning",
    "Checkpointer": ".checkpointer",
    "Engine": ".offload.engine",
    "Exact": ".delta.codecs",
    "From": ".sources",
    "Int8": ".delta.lossy",
    "Keep": ".store.retention",
    "LossScale": ".offload.scaling",
    "Preflight": ".offload.preflight",
    "TopK": ".delta.lossy",
    "empty_parameters": ".offload.blocks",
    "keyed_rng": ".offload.rng",
    "progress_bar": ".watch.recovery",
    "loader": ".data.loader",
    "pretrained": ".folders.pretrained",
    "HoldfastError": ".errors",
}

if TYPE_CHECKING:
    from .checkpointer import Checkpointer
    from .data.loader import loader
    from .delta.codecs import Exact
    from .delta.lossy import Int8, TopK
    from .errors import HoldfastError
    from .folders.pretrained import pretrained
    from .offload.blocks import empty_parameters
    from .offload.engine import Engine
    from .offload.entry import offload
    from .offload.planning import Budget
    from .offload.preflight import Preflight
    from .offload.rng import keyed_rng
    from .offload.scaling import LossScale
    from .sources import From
    from .store.retention import Keep
    from .watch.recovery import progress_bar

__all__ = [
    "Budget",
    "Checkpointer",
    "Engine",
    "Exact",
    "From",
    "HoldfastError",
    "Int8",
    "Keep",
    "LossScale",
    "Preflight",
    "TopK",
    "empty_parameters",
    "keyed_rng",
    "loader",
    "offload",
    "pretrained",
    "progress_bar",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module(".optim", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


class _Package(ModuleType):
    """The class of this package: ``holdfast.offload`` is the function, although a subpackage of that name exists."""

    @property
    def offload(self) -> Any:
        return __getattr__("offload")

    @offload.setter
    def offload(self, room: ModuleType) -> None:
        """Ignore the subpackage that the import system binds to its parent; the public name stays the function."""


sys.modules[__name__].__class__ = _Package
