"""The readers of Megatron's distributed checkpoints (``torch_dist``, ``megatron_reader``), in place."""

from __future__ import annotations

from pathlib import Path

from ...errors import Damaged, HoldfastError
from ..source import Source
from .megatron_contents import folder_of, is_megatron, newest_of
from .megatron_reader import FsdpDtensor, TorchDist, is_fsdp_dtensor

__all__ = ["is_megatron", "open_megatron"]


def open_megatron(path: Path) -> Source:
    """Open the checkpoint at ``path``: the folder of an iteration, or its parent, which names the newest one.

    Raises ``Damaged`` if it is incomplete or damaged, ``BadInput`` for unsupported checkpoints.
    """
    newest = newest_of(path)
    of_fsdp = is_fsdp_dtensor(newest)
    folder = newest if of_fsdp else folder_of(newest)
    try:
        return FsdpDtensor(folder) if of_fsdp else TorchDist(folder)
    except HoldfastError:
        raise
    except (AttributeError, TypeError, LookupError, ValueError, OverflowError, RecursionError) as error:
        raise Damaged(
            f"{folder} has what no checkpoint of Megatron has: {type(error).__name__}: {error}",
            path=str(folder),
        ) from error
