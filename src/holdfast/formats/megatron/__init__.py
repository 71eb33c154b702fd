"""The reader of Megatron's distributed checkpoints (``torch_dist``), in place."""

from __future__ import annotations

from pathlib import Path

from ...errors import Damaged, HoldfastError
from ..source import Source
from .megatron_folder import folder_of, is_megatron
from .megatron_reader import TorchDist

__all__ = ["is_megatron", "open_megatron"]


def open_megatron(path: Path) -> Source:
    """Open the checkpoint at ``path``: the folder of an iteration, or its parent, which names the newest one.

    Raises ``Damaged`` if it is incomplete or damaged, ``BadInput`` for unsupported checkpoints.
    """
    folder = folder_of(path)
    try:
        return TorchDist(folder)
    except HoldfastError:
        raise
    except (AttributeError, TypeError, LookupError, ValueError, OverflowError, RecursionError) as error:
        raise Damaged(
            f"{folder} has what no checkpoint of Megatron has: {type(error).__name__}: {error}",
            path=str(folder),
        ) from error
