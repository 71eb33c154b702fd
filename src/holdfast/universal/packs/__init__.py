"""Packs: rules for families of models, as TOML files beside this one, to use as they are or to begin a file with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from ...errors import BadInput
from ...state.rules import Rules

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


def _text(name: str) -> str:
    return (files(HERE) / f"{name}.toml").read_text()
