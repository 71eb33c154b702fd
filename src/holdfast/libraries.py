"""The import of libraries that only some features need, and that are named in an error where they are missing.

Called by all parts of the library at the moment in which such a feature is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .errors import BadInput


def library(name: str, what: str, way_out: str) -> Any:
    """Return the module ``name``.

    Args:
        name: The name to import.
        what: The thing that needs the module, for the error.
        way_out: What to do without the module, for the error.

    Raises ``BadInput`` if the module cannot be imported.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise BadInput(f"{what} needs {name}, which cannot be imported ({error}): {way_out}") from error
