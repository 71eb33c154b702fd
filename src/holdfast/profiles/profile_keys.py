"""Keys: how a profile declares a key, and how a TOML value becomes one of ours or a clear error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from ..errors import ConfigError
from ..quantities import parse_bytes

T = TypeVar("T")

NOUNS = {
    "text": 'text in quotes, like "this"',
    "bytes": 'a size, like "80GB" or "24GiB"',
    "rate": 'bytes per second, like "12GB/s"',
    "number": "a number above 0, like 180e12",
    "seconds": "a number of seconds, 0 or more, like 0.004",
    "count": "a whole number, 0 or more",
    "flag": "true or false",
}
"""A description of a valid value, by kind."""


def key(path: str, kind: str, doc: str, default: Any = MISSING) -> Any:
    """Declare a field that ``path`` of the file sets, ``"section.key"`` or ``"key"``.

    A key without a default is required.
    """
    return field(default=default, metadata={"path": path, "kind": kind, "doc": doc})


def path_of(declared: Field) -> str:
    """Return the path of a field in the file."""
    return declared.metadata["path"]


def from_document(kind: type[T], document: Mapping[str, Any], what: str) -> T:
    """Return a profile from parsed TOML. Raises ``ConfigError``, which names ``what`` and the key."""
    declared = {path_of(f): f for f in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for path, value in _flatten(document):
        if path not in declared:
            raise ConfigError(f"{what}: {_unknown(path, list(declared))}")
        values[declared[path].name] = _converted(declared[path], value, what)
    missing = [path for path, f in declared.items() if f.default is MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"{what}: {', '.join(missing)} must be given; docs/plan.md describes every key")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error


def _flatten(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, content in document.items():
        if isinstance(content, dict):
            found += [(f"{name}.{inner}", value) for inner, value in content.items()]
        else:
            found.append((name, content))
    return found


def _unknown(path: str, known: list[str]) -> str:
    same = [candidate for candidate in known if candidate.split(".")[-1] == path.split(".")[-1]]
    nearest = same or get_close_matches(path, known, n=1, cutoff=0.5)
    return f"unknown key {path}; " + (
        f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
    )


def _converted(declared: Field, value: Any, what: str) -> Any:
    kind = declared.metadata["kind"]
    try:
        return _CONVERT[kind](value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{what}: {path_of(declared)} = {value!r} is not {NOUNS[kind]}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or (size := parse_bytes(value)) < 0:
        raise ValueError
    return size


def _rate(value: Any) -> int:
    if not (rate := _bytes(value)):
        raise ValueError
    return rate


def _number(value: Any) -> float:
    if isinstance(value, (bool, str)) or not 0 < float(value) < math.inf:
        raise ValueError
    return float(value)


def _seconds(value: Any) -> float:
    if isinstance(value, (bool, str)) or not 0 <= float(value) < math.inf:
        raise ValueError
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


_CONVERT = {
    "text": _text,
    "bytes": _bytes,
    "rate": _rate,
    "number": _number,
    "seconds": _seconds,
    "count": _count,
    "flag": _flag,
}
