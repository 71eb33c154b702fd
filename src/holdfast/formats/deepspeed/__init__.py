"""The readers of ZeRO-1, 2 and 3 checkpoints of DeepSpeed, in place, and reader and writer of universal folders."""

from __future__ import annotations

from pathlib import Path

from ...errors import Damaged, HoldfastError
from ..source import Source
from .deepspeed_contents import is_deepspeed, is_universal, tag_folder
from .deepspeed_writer import write_deepspeed
from .native_checkpoint import NativeCheckpoint
from .universal_checkpoint import UniversalCheckpoint

__all__ = ["is_deepspeed", "open_deepspeed", "write_deepspeed"]


def open_deepspeed(path: Path) -> Source:
    """Open the checkpoint at ``path``: the folder of a tag, or its parent with ``latest`` or ``latest_universal``.

    ``latest`` wins if both exist. Raises ``Damaged`` if the checkpoint is incomplete or mixes several, ``BadInput`` if
    it is of an unsupported kind.
    """
    folder = tag_folder(path)
    try:
        return UniversalCheckpoint(folder) if is_universal(folder) else NativeCheckpoint(folder)
    except HoldfastError:
        raise
    except (
        AttributeError,
        TypeError,
        LookupError,
        ValueError,
        OverflowError,
    ) as error:  # the files may hold anything
        raise Damaged(
            f"{folder} has what no DeepSpeed checkpoint has: {type(error).__name__}: {error}",
            path=str(folder),
        ) from error
