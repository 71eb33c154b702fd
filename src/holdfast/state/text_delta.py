"""The new end of a long text, which is all that a log record stores of it.

A log that a script keeps is the same in every record except for its end, so storing it whole would take the square of
the run's length. This covers texts of ``LONG`` characters or more that are directly in the user state. The addition
joins the text of the record before, and in the end that of a snapshot, which has all of it. So reading needs all
records from the snapshot on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LONG = 4096
ADDED, TO = "__added__", "to"
"""The keys of a shortened text: its end, and the number of characters before that."""


def shorten(progress: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``progress``, as JSON, for a record that follows the one of ``before``.

    ``before`` is whole as well; None means that there is no such record, or that it is unknown.

    >>> before, now = ({"things": {"loader": {"log": text}}} for text in ("a" * 5000, "a" * 5000 + "b"))
    >>> shorten(now, before)
    {'things': {'loader': {'log': {'__added__': 'b', 'to': 5000}}}}
    >>> lengthen([before, shorten(now, before)]) == now
    True
    """
    if before is None or "things" not in progress:
        return progress
    were = before.get("things", {})
    things = {name: _shortened(state, were.get(name)) for name, state in progress["things"].items()}
    return {**progress, "things": things}


def _shortened(state: Any, before: Any) -> Any:
    if not isinstance(state, dict) or not isinstance(before, dict):
        return state
    return {key: _end_of(value, before.get(key)) for key, value in state.items()}


def _end_of(text: Any, before: Any) -> Any:
    both = isinstance(text, str) and isinstance(before, str)
    if both and len(before) >= LONG and text.startswith(before) and _is_plain(text):
        return {ADDED: text[len(before) :], TO: len(before)}
    return text


def _is_plain(text: str) -> bool:
    """Return whether ``text`` has no halves of characters.

    JSON gives two such halves back as one character.
    """
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def lengthen(progress: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last ``progress`` as it was before ``shorten``.

    ``progress`` holds those of a snapshot and of all log records after it. Raises ``ValueError`` if these do not
    belong together.
    """
    last = progress[-1]
    things = {
        name: {key: _whole(progress, name, key) if _is_end(value) else value for key, value in state.items()}
        for name, state in last.get("things", {}).items()
        if isinstance(state, dict) and any(map(_is_end, state.values()))
    }
    return {**last, "things": {**last["things"], **things}} if things else last


def _is_end(value: Any) -> bool:
    return isinstance(value, dict) and ADDED in value


def _whole(progress: Sequence[dict[str, Any]], name: str, key: str) -> str:
    states = [each.get("things", {}).get(name) for each in progress]
    values: list[Any] = [state.get(key) if isinstance(state, dict) else None for state in states]
    first = max((i for i, value in enumerate(values) if isinstance(value, str)), default=0)
    parts: list[str] = []
    length = 0
    for value in values[first:]:
        part, to = (value[ADDED], value[TO]) if _is_end(value) else (value, 0)
        if not isinstance(part, str) or to != length:
            raise ValueError(f"{name}[{key!r}] goes on a text of {to} characters, and there are {length}")
        parts.append(part)
        length += len(part)
    return "".join(parts)
