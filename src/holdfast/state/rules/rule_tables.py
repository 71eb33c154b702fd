"""The values of a rule file, read by key and type; errors say what is wrong and where.

A key that nobody has read is an error, so that a mistyped one is never ignored. Called by ``rule_language``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from ...errors import RuleError
from .expressions import NONE, Expression, Template, Values

NO_TEXTS: Mapping[str, str] = {}
TYPES = {int: "a number", str: "text", bool: "true or false", list: "a list", dict: "a table"}


class Table:
    """One table, called ``place`` in errors. ``done`` refuses keys that nothing asked for."""

    def __init__(
        self, content: Any, place: str, values: Values = NONE, patterns: Mapping[str, str] = NO_TEXTS
    ) -> None:
        """Wrap ``content``; expressions may name ``values``, and regexes ``patterns``."""
        self.place = place
        self._values, self._patterns = values, patterns
        self._asked: set[str] = set()
        if not isinstance(content, dict):
            self.wrong(f"is {content!r}, which should be a table: {{key = value}}")
        self._content: Mapping[str, Any] = content

    def __contains__(self, key: str) -> bool:
        return key in self._content

    @property
    def names(self) -> list[str]:
        return list(self._content)

    def wrong(self, text: str) -> NoReturn:
        raise RuleError(f"{self.place} {text}")

    @contextmanager
    def named(self, key: str) -> Iterator[None]:
        """Add the key to a ``ValueError`` of the block, as a ``RuleError``."""
        try:
            yield
        except ValueError as error:
            if isinstance(error, RuleError):
                raise
            raise RuleError(f"{self.place}, {key}: {error}") from None

    def done(self, known: Iterable[str] = ()) -> None:
        """Raise ``RuleError`` if there are keys that nothing asked for. ``known`` are further valid keys."""
        odd = [key for key in self._content if key not in self._asked]
        if odd:
            self.wrong(f"has {', '.join(map(repr, odd))}, which nothing reads here. It may have:"
                       f" {', '.join(sorted(self._asked | set(known)))}")  # fmt: skip

    def get(self, key: str, kind: type, default: Any) -> Any:
        self._asked.add(key)
        if key not in self._content:
            return default
        value = self._content[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.wrong(f"has {key} = {value!r}, which should be {TYPES[kind]}")
        return value

    def required(self, key: str, kind: type) -> Any:
        if key not in self._content:
            self.wrong(f"lacks `{key}`")
        return self.get(key, kind, None)

    def inner(self, key: str, most: int = 100) -> Iterator[Table]:
        """Yield the table of that key, or each of a list of them.

        Each table is checked by ``done`` when the next one is requested.
        """
        value = self.get(key, object, [])
        several = value if isinstance(value, list) else [value]
        if len(several) > most:
            self.wrong(f"has {len(several)} of `{key}`, and {most} can be")
        for one in several:
            table = self.of(one, key)
            yield table
            table.done()

    def of(self, content: Any, key: str) -> Table:
        """Return a table within this one."""
        return Table(content, f"{self.place}, {key}", self._values, self._patterns)

    def one_of(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.required(key, str)
        if value not in choices:
            self.wrong(f"has {key} = {value!r}, which should be one of {', '.join(choices)}")
        return value

    def regex(self, key: str) -> re.Pattern[str]:
        text = self.required(key, str)
        try:
            return re.compile(re.sub(r"\{([A-Za-z_]\w*)\}", lambda m: self._patterns.get(m[1], m[0]), text))
        except re.error as error:
            self.wrong(f"has {key} = {text!r}, which is no regex: {error}")

    def texts(self, key: str) -> list[str]:
        """Return one text, or a list of them, as a list."""
        value = self.get(key, object, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
            self.wrong(f"has {key} = {value!r}, which should be text, or a list of it")
        return found

    def integers(self, key: str) -> list[int]:
        """Return one number, or a list of them, as a list. Raises ``RuleError`` for negative ones."""
        value = self.get(key, object, None)
        found = value if isinstance(value, list) else [value]
        if not all(type(one) is int and one >= 0 for one in found):
            self.wrong(f"has {key} = {value!r}, which should be numbers")
        return found

    def dim(self) -> int:
        value = self.required("dim", int)
        if not 0 <= value < 64:
            self.wrong(f"has dim = {value}, which no tensor has")
        return value

    def template(self, key: str) -> Template:
        text = self.required(key, str)
        with self.named(key):
            return Template.parse(text, self._values)

    def expression(self, key: str) -> Expression:
        return self.as_expression(key, self.required(key, object))

    def maybe(self, key: str) -> Expression | None:
        self._asked.add(key)
        return self.expression(key) if key in self._content else None

    def expressions(self, key: str) -> tuple[Expression, ...]:
        return tuple(self.as_expression(key, one) for one in self.required(key, list))

    def as_expression(self, key: str, value: Any) -> Expression:
        """Return the expression of a number, or of text that computes one."""
        if type(value) is int and value >= 0:
            return Expression(str(value), value)
        if not isinstance(value, str):
            self.wrong(f"has {key} = {value!r}, which should be a number, or text that works one out")
        with self.named(key):
            return Expression.parse(value, self._values)
