"""Packs: rules for families of models, as TOML files beside this one, to use as they are or to begin a file with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from ...errors import BadInput
from ...regular import home_path
from ...state.rules import Rules, numbers_of

HERE = __name__


def names() -> dict[str, str]:
    """Of all packs, with what each is for."""
    found = (path.name.removesuffix(".toml") for path in files(HERE).iterdir() if path.name.endswith(".toml"))
    return {name: _text(name).partition("\n")[0].removeprefix("# ") for name in sorted(found)}


def text(name: str) -> str:
    """The file. Raises ``BadInput`` if there is none of that name."""
    if name not in names():
        raise BadInput(f"there is no pack {name!r} of rules; there are: {', '.join(names())}")
    return _text(name)


def load(name: str, values: Mapping[str, int] | None = None) -> Rules:
    """The rules of a pack; ``values`` are what it takes from the configuration of the model."""
    return Rules.parse(text(name), f"pack {name}", values)


def find(rules: str, values: Path | None, known: Mapping[str, int] | None = None) -> Rules:
    """Those of a file, or of a pack of that name; ``values`` is a JSON file with numbers, such as a config.json, which
    hold before those that are ``known``."""
    try:
        numbers = dict(known or {}) | ({} if values is None else numbers_of(_read(values)))
    except ValueError as error:
        raise BadInput(f"{values} gives no values: {error}") from None
    path = home_path(rules)
    if not path.is_file() and rules in names():
        return load(rules, numbers)
    if path.name == rules and not path.suffix and not path.exists():  # as packs are named
        raise BadInput(f"{rules} is no file, and no pack of rules; there are: {', '.join(names())}")
    return Rules.parse(_read(path), str(path), numbers)


def _read(path: Path) -> str:
    """Raises ``BadInput`` if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read as a text file: {error}") from None


def _text(name: str) -> str:
    return (files(HERE) / f"{name}.toml").read_text()
