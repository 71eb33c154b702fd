"""The parsing and formatting of bytes and seconds, and small functions on numbers and texts.

Sizes are text such as ``"20GiB"``, and what is formatted for a person is rounded. Names from elsewhere are made visible
before they are shown, so that they cannot control a terminal. All rooms use this module; it uses none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
PAGE = 4096
"""Bytes of a page. Offsets, lengths and addresses of direct I/O are multiples of it."""
KiB, MiB, GiB = 1024, 1024**2, 1024**3
_FACTORS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4, "tb": 1000**4,
    "ki": KiB, "kib": KiB, "mi": MiB, "mib": MiB, "gi": GiB, "gib": GiB, "ti": 1024**4, "tib": 1024**4,
}  # fmt: skip
_TURNS = "\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff"
_OBEYED = re.compile(f"[\\x00-\\x1f\\x7f-\\x9f{_TURNS}]")
_OBEYED_IN_LINES = re.compile(f"[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f{_TURNS}]")
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str | int) -> int:
    """Return the bytes of ``"20GiB"``, ``"1.5 GB"``, ``"4096"`` or a number. Raises ``ValueError``.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*?)(?:/s)?\s*", text)
    if not match or match[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a number of bytes; write it like 20GiB, 1.5GB or 4096")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def parse_seconds(text: str) -> float:
    """Return the seconds of ``"30min"``, ``"250 ms"``, ``"1.5h"`` or ``"90"``. Raises ``ValueError``.

    >>> parse_seconds("30min"), parse_seconds("0.5")
    (1800.0, 0.5)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _SECONDS:
        raise ValueError(f"{text!r} is not a time; write it like 30min, 0.25s, 10ms, 12h or 90 (seconds)")
    return float(match[1]) * _SECONDS[match[2]]


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error from elsewhere; its class if it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def format_bytes(count: float) -> str:
    """Format ``count`` bytes with a binary unit.

    >>> format_bytes(20 * 1024**3), format_bytes(999)
    ('20.0 GiB', '999 B')
    """
    for unit, size in (("TiB", 1024**4), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def ample_budget(count: int) -> str:
    """Return a budget, as text, for ``count`` bytes plus 1 % that two processes may differ by, in whole MiB.

    >>> ample_budget(454_817_800)
    '439MiB'
    """
    return f"{-(-count * 101 // (100 * MiB))}MiB"


def format_seconds(seconds: float) -> str:
    """Format ``seconds`` with suitable units.

    >>> format_seconds(0.25), format_seconds(75), format_seconds(7500)
    ('0.2 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def counted(count: int, noun: str) -> str:
    """Format ``count`` and ``noun``, in the plural unless there is one.

    >>> counted(1, "file"), counted(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def shown(names: Collection[str], most: int = 3) -> str:
    """Format the first ``most`` of ``names``, and the number of the others.

    >>> shown(["a", "b"]), shown(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(islice(names, most)) + more


def visible(text: str, lines: bool = False) -> str:
    """Return ``text`` with escapes for everything that a terminal would obey instead of showing it.

    Those are control characters, characters that change the direction of writing, and bytes of a name that are no
    UTF-8. Line ends and tabs are escaped as well, unless ``lines`` is true.

    >>> visible("a\\x1b[31mb"), visible("a\\udcffb"), visible("a\\nb"), visible("a\\nb", lines=True)
    ('a\\\\x1b[31mb', 'a\\\\xffb', 'a\\\\nb', 'a\\nb')
    """
    return (_OBEYED_IN_LINES if lines else _OBEYED).sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return ascii(match[0])[1:-1]


def round_up(count: int, multiple: int = PAGE) -> int:
    """Return the smallest multiple of ``multiple`` that is >= ``count``."""
    return -(-count // multiple) * multiple


def packed(items: Iterable[T], nbytes: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield ``items`` in their order, in groups of at most ``most_bytes``; a larger item is a group by itself.

    >>> list(packed([3, 4, 5, 20, 1], lambda size: size, 8))
    [[3, 4], [5], [20], [1]]
    """
    group: list[T] = []
    filled = 0
    for item in items:
        size = nbytes(item)
        if group and filled + size > most_bytes:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    if group:
        yield group
