"""DeepSpeed: checkpoints of ZeRO-1, 2 and 3 read in place, and its universal folders read and written."""

from __future__ import annotations

from pathlib import Path

from ....errors import Damaged, HoldfastError
from ...source import Source
from .folder import is_deepspeed, is_universal, tag_folder
from .native import Native
from .ucp import Universal
from .write import write_deepspeed

__all__ = ["is_deepspeed", "open_deepspeed", "write_deepspeed"]


def open_deepspeed(path: Path) -> Source:
    """The checkpoint at ``path``: the folder of a tag, or the one above with ``latest`` (which is taken, if both are
    there, before ``latest_universal``).

    Raises ``Damaged`` if it is not whole, or of several; ``BadInput`` for what is not read.
    """
    folder = tag_folder(path)
    try:
        return Universal(folder) if is_universal(folder) else Native(folder)
    except HoldfastError:
        raise
    except (
        AttributeError,
        TypeError,
        LookupError,
        ValueError,
        OverflowError,
    ) as error:  # the files are anybody's
        raise Damaged(
            f"{folder} has what no DeepSpeed checkpoint has: {type(error).__name__}: {error}",
            path=str(folder),
        ) from error
