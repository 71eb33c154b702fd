"""Parsing of options that are numbers or paths; bad values are refused before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import ConfigError

T = TypeVar("T")


def parsed(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Return the result of ``parse`` for ``text``.

    Raises ``ConfigError``, which names ``flag``, for a ``ValueError``.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error


def refuse_no_directory(flag: str, file: Path | None) -> None:
    """Raise ``ConfigError`` if the directory of ``file``, given with ``flag``, does not exist."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {file}: there is no directory {file.absolute().parent}; make it first")
