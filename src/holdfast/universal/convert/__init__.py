"""The formats: one reader each, of what the format says, as a ``Source``."""

from __future__ import annotations

from pathlib import Path

from ...errors import BadInput
from ..source import Source


def open_source(path: str | Path) -> Source:
    """The training state at ``path``, of whatever format it is. Raises ``BadInput`` if it is of none that is known,
    ``Damaged`` if it is not whole."""
    raise BadInput(f"{path} is no training state of a format that is known")
