"""Holdfast: training state that fits, survives and moves.

The names below are the public ones; everything else may be imported but may change. torch is imported when
the first of them is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .garbage import without_collection

if sys.platform == "win32":
    raise ImportError("Holdfast runs on Linux; macOS was not tried, and it does not run on Windows.")

__version__ = "0.1.0"

_HOME = {
    "offload": ".offload.api",
    "Budget": ".offload.setup.step_planning",
    "Clipping": ".offload.offload_options",
    "Durability": ".offload.offload_options",
    "IO": ".offload.offload_options",
    "Placement": ".offload.offload_options",
    "Precision": ".offload.offload_options",
    "Checkpointer": ".checkpointer",
    "Engine": ".offload.engine",
    "Exact": ".checkpoint.compression.codecs",
    "From": ".sources",
    "Int8": ".checkpoint.compression.lossy",
    "Keep": ".store.commit.retention",
    "LocalDisks": ".checkpoint.nodes.local_disks",
    "LossScale": ".offload.loss_scaling",
    "Preflight": ".offload.setup.preflight",
    "TopK": ".checkpoint.compression.lossy",
    "chunked_cross_entropy": ".chunked_loss",
    "empty_parameters": ".offload.model.blocks",
    "keyed_rng": ".offload.rng",
    "progress_bar": ".monitor.progress_bar",
    "loader": ".data.loader",
    "pretrained": ".models.pretrained",
    "tile_mlps": ".mlp_tiles",
    "HoldfastError": ".errors",
}

if TYPE_CHECKING:
    from .checkpoint.compression.codecs import Exact
    from .checkpoint.compression.lossy import Int8, TopK
    from .checkpoint.nodes.local_disks import LocalDisks
    from .checkpointer import Checkpointer
    from .chunked_loss import chunked_cross_entropy
    from .data.loader import loader
    from .errors import HoldfastError
    from .mlp_tiles import tile_mlps
    from .models.pretrained import pretrained
    from .monitor.progress_bar import progress_bar
    from .offload.api import offload
    from .offload.engine import Engine
    from .offload.loss_scaling import LossScale
    from .offload.model.blocks import empty_parameters
    from .offload.offload_options import IO, Clipping, Durability, Placement, Precision
    from .offload.rng import keyed_rng
    from .offload.setup.preflight import Preflight
    from .offload.setup.step_planning import Budget
    from .sources import From
    from .store.commit.retention import Keep

__all__ = [
    "IO",
    "Budget",
    "Checkpointer",
    "Clipping",
    "Durability",
    "Engine",
    "Exact",
    "From",
    "HoldfastError",
    "Int8",
    "Keep",
    "LocalDisks",
    "LossScale",
    "Placement",
    "Precision",
    "Preflight",
    "TopK",
    "chunked_cross_entropy",
    "empty_parameters",
    "keyed_rng",
    "loader",
    "offload",
    "pretrained",
    "progress_bar",
    "tile_mlps",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module(".optim", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    with without_collection():  # each collection would visit all objects of torch
        return getattr(import_module(_HOME[name], __name__), name)


class _Package(ModuleType):
    """The class of this package: ``holdfast.offload`` is the function, although a subpackage of that name exists."""

    @property
    def offload(self) -> Any:
        return __getattr__("offload")

    @offload.setter
    def offload(self, room: ModuleType) -> None:
        """Ignore the subpackage that the import system binds to its parent; the public name stays the function."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a name: Ray, Dask and joblib send functions with the modules they use, but not this kind."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Package
