"""The rule files (TOML) for families of models, to be used as they are or as a start."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from ...errors import BadInput
from ...regular_files import home_path
from ...state.rules.rule_language import Rules, numbers_of

HERE = __name__


def names() -> dict[str, str]:
    """Return the names of all packs, with the purpose of each."""
    found = (path.name.removesuffix(".toml") for path in files(HERE).iterdir() if path.name.endswith(".toml"))
    return {name: _text(name).partition("\n")[0].removeprefix("# ") for name in sorted(found)}


def text(name: str) -> str:
    """Return the text of the pack ``name``. Raises ``BadInput`` if there is none."""
    if name not in names():
        raise BadInput(f"there is no pack {name!r} of rules; there are: {', '.join(names())}")
    return _text(name)


def load(name: str, values: Mapping[str, int] | None = None) -> Rules:
    """Return the rules of a pack; ``values`` are numbers of the model's configuration."""
    return Rules.parse(text(name), f"pack {name}", values)


def find(rules: str, values: Path | None, known: Mapping[str, int] | None = None) -> Rules:
    """Return the rules of the file ``rules``, or of the pack of that name. Raises ``BadInput``.

    Args:
        rules: A path or the name of a pack.
        values: A JSON file with numbers, such as a config.json.
        known: Numbers that apply where ``values`` has none.
    """
    try:
        numbers = dict(known or {}) | ({} if values is None else numbers_of(_read(values)))
    except ValueError as error:
        raise BadInput(f"{values} gives no values: {error}") from None
    path = home_path(rules)
    if not path.is_file() and rules in names():
        return load(rules, numbers)
    if path.name == rules and not path.suffix and not path.exists():  # the form of a pack's name
        raise BadInput(f"{rules} is no file, and no pack of rules; there are: {', '.join(names())}")
    return Rules.parse(_read(path), str(path), numbers)


def _read(path: Path) -> str:
    """Return the text of ``path``. Raises ``BadInput`` if it is not readable text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read as a text file: {error}") from None


def _text(name: str) -> str:
    return (files(HERE) / f"{name}.toml").read_text()
