"""Integer expressions of sharding rules, and names with such expressions in braces.

Expressions have ``+ - * // %``, parentheses, numbers and names, and are read by the small parser below, so the text of
a rule is never executed. ``$1`` is the text that the first group of the rule's regex captured. In the braces of a
template, a number that comes first is a capture too, so ``layers.{1 + 12}`` is layer 17 where the group captured a 5. A
group that captured nothing counts as 0.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

Value = int | str
"""The value of a name. A capture is text, and a number where it is computed with."""
Tree = int | str | tuple[str, "Tree", "Tree"]
"""A number, a name, or an operator with its two operands."""
Values = Mapping[str, "Expression"]
"""The expressions that a text may name, by name."""
NONE: Values = {}
TOKEN = re.compile(r"\s*(?:(\d{1,18})(?!\w)|(\$\d+|[A-Za-z_]\w*)|(//|[-+*%()]))")
OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
LONGEST_TEXT, MOST_NODES, LARGEST = 200, 1000, 1 << 62


@dataclass(frozen=True)
class Expression:
    """An expression that computes an integer.

    Raises ``ValueError`` for a text that is no expression, and where one of its names has no value.

    >>> Expression.parse("($1 * pp_count + pp) * 4").value({"$1": "2", "pp": 1, "pp_count": 8})
    68
    """

    text: str
    tree: Tree

    @classmethod
    def parse(cls, text: str, values: Values = NONE) -> Expression:
        """Parse ``text``, with ``values`` inserted where they are named."""
        if len(text) > LONGEST_TEXT:
            raise ValueError(
                f"{text[:40]!r}... has {len(text)} characters, and {LONGEST_TEXT} are the most that are read"
            )
        return cls(text, _expanded(_Parser(text).parse(), values, text))

    @property
    def names(self) -> frozenset[str]:
        """The names that the expression needs."""
        return frozenset(_names(self.tree))

    def value(self, names: Mapping[str, Value]) -> int:
        result = _value(self.tree, names, self.text)
        if abs(result) >= LARGEST:
            raise ValueError(f"{self.text!r} is larger than any tensor")
        return result


@dataclass(frozen=True)
class Template:
    """A text with expressions in braces.

    >>> Template.parse("model.layers.{1 + 12 * pp}.{2}").text({"$1": "3", "$2": "bias", "pp": 1})
    'model.layers.15.bias'
    """

    pieces: tuple[str | Expression, ...]

    @classmethod
    def parse(cls, text: str, values: Values = NONE) -> Template:
        pieces: list[str | Expression] = []
        for number, piece in enumerate(re.split(r"\{([^{}]*)\}", text)):
            if number % 2:
                pieces.append(Expression.parse(re.sub(r"^\s*(\d+)", r"$\1", piece), values))
            elif "{" in piece or "}" in piece:
                raise ValueError(f"{text!r} has a brace without its other one")
            elif piece:
                pieces.append(piece)
        return cls(tuple(pieces))

    @property
    def names(self) -> frozenset[str]:
        """The names that the template needs."""
        return frozenset[str]().union(
            *(piece.names for piece in self.pieces if isinstance(piece, Expression))
        )

    def text(self, names: Mapping[str, Value]) -> str:
        """Return the text with its expressions filled in.

        A name alone is inserted as it is; any other expression is computed.
        """
        return "".join(piece if isinstance(piece, str) else _inserted(piece, names) for piece in self.pieces)


def _inserted(expression: Expression, names: Mapping[str, Value]) -> str:
    if isinstance(expression.tree, str):
        return str(_look_up(expression.tree, names))
    return str(expression.value(names))


class _Parser:
    """A parser of one text, read from left to right: sums of products of units."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens = text, []
        at, end = 0, len(text.rstrip())
        while at < end:
            token = TOKEN.match(text, at)
            if token is None:
                raise ValueError(f"{text!r} has {text[at:].strip()[0]!r} where a number, a name or one of"
                                 " + - * // % ( ) may be")  # fmt: skip
            self._tokens.append(token)
            at = token.end()

    def parse(self) -> Tree:
        tree = self._sum()
        if self._tokens:
            raise ValueError(
                f"{self._text!r} goes on with {self._tokens[0][0].strip()!r} where it should end"
            )
        return tree

    def _next(self, *operators: str) -> str | None:
        """Return the next operator and consume it, if it is one of ``operators``; else None."""
        if self._tokens and self._tokens[0][3] in operators:
            return self._tokens.pop(0)[3]
        return None

    def _sum(self) -> Tree:
        tree = self._product()
        while sign := self._next("+", "-"):
            tree = (sign, tree, self._product())
        return tree

    def _product(self) -> Tree:
        tree = self._unit()
        while sign := self._next("*", "//", "%"):
            tree = (sign, tree, self._unit())
        return tree

    def _unit(self) -> Tree:
        if self._next("-"):
            return ("-", 0, self._unit())
        if self._next("("):
            tree = self._sum()
            if not self._next(")"):
                raise ValueError(f"{self._text!r} has a '(' without its ')'")
            return tree
        if not self._tokens or self._tokens[0][3]:
            raise ValueError(f"{self._text!r} lacks a number or a name")
        token = self._tokens.pop(0)
        return int(token[1]) if token[1] else token[2]


def _expanded(tree: Tree, values: Values, text: str) -> Tree:
    """Return ``tree`` with the values in place of their names."""
    if isinstance(tree, str):
        found = values.get(tree)
        return tree if found is None else found.tree
    if isinstance(tree, int):
        return tree
    expanded = (tree[0], _expanded(tree[1], values, text), _expanded(tree[2], values, text))
    if _nodes(expanded) > MOST_NODES:
        raise ValueError(f"{text!r} is too long with its values put in")
    return expanded


def _nodes(tree: Tree) -> int:
    return 1 + _nodes(tree[1]) + _nodes(tree[2]) if isinstance(tree, tuple) else 1


def _names(tree: Tree) -> set[str]:
    if isinstance(tree, tuple):
        return _names(tree[1]) | _names(tree[2])
    return {tree} if isinstance(tree, str) else set()


def _value(tree: Tree, names: Mapping[str, Value], text: str) -> int:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        found = _look_up(tree, names)
        if isinstance(found, str) and not re.fullmatch(r"[0-9]{0,18}", found):
            raise ValueError(f"{text!r} works with {tree}, which is {found!r} and no number")
        return int(found or 0)
    sign, left, right = tree[0], _value(tree[1], names, text), _value(tree[2], names, text)
    if sign in ("//", "%") and not right:
        raise ValueError(f"{text!r} divides by zero")
    return OPERATORS[sign](left, right)


def _look_up(name: str, names: Mapping[str, Value]) -> Value:
    if name not in names:
        what = "the regex has no such group" if name.startswith("$") else "give it under [values]"
        raise ValueError(f"nothing says what {name} is: {what}")
    return names[name]
