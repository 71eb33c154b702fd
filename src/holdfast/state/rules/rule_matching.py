"""The rule for each stored tensor: the first whose regex matches its whole name.

Rules that were applied are noted, and so are tensors that several rules match, because a person should know. Called by
``assembly``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ...errors import RuleError
from ...quantities import shown
from ..layout.fragments import Fragment, Fragments, row_major
from ..layout.regions import Region
from ..layout.sharding import Names, Shape, TensorLayout
from .expressions import Value
from .rule_language import Rule, Rules

MOST_LISTED = 10
PARAM = "param"
"""The slot of the tensor itself; the state of another slot may be one scalar for the whole tensor."""
ANYTHING = ".*"
"""The regex of a last rule for everything left. A match before it does not count as ambiguous."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a rank stored it.

    Attributes:
        part: The number of the stored array that holds it.
        at: The rank's index on each axis of the mesh, and the length of the axis.
        offset: The first element in the part.
        strides: In elements; C order if None.
    """

    part: int
    name: str
    shape: Shape
    dtype: str
    slot: str = PARAM
    at: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    offset: int = 0
    strides: Shape | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """A stored tensor, or one within flat partitions.

    After matching, it has the number of its rule, from 1, and the ``names`` that the rule's expressions may use.
    """

    name: str
    slot: str
    at: Mapping[str, tuple[int, int]]
    laid: TensorLayout
    number: int = 0
    names: Names = field(default_factory=dict)

    @classmethod
    def of(cls, stored: StoredTensor) -> Row:
        for axis, (index, count) in stored.at.items():
            if not 0 <= index < count:
                raise RuleError(f"{stored.name} is said to be at {axis} {index} of {count}")
        strides = row_major(stored.shape) if stored.strides is None else stored.strides
        piece = Fragment(Region.whole(stored.shape), stored.part, stored.offset, strides)
        laid = TensorLayout(stored.shape, stored.dtype, (Fragments.of([piece], len(stored.shape)),))
        return cls(stored.name, stored.slot, stored.at, laid)


class Matcher:
    """One application of ``rules``.

    ``used`` holds the numbers of the applied rules. ``ambiguous`` holds the names that several rules match with the
    numbers of all these, of which the first was applied.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules.rules
        self._absent = {name: n for axis in rules.axes for name, n in ((axis, 0), (f"{axis}_count", 1))}
        self._known: dict[tuple[str, str], list[tuple[int, dict[str, Value]]]] = {}
        self.used: set[int] = set()
        self.ambiguous: dict[str, tuple[int, ...]] = {}

    def matched(self, rows: Iterable[Row], *, from_flat: bool = False) -> list[Row]:
        """Return ``rows``, each with its rule.

        Tensors from flat partitions do not match rules for flat partitions again. Raises ``RuleError`` listing
        everything that no rule matches.
        """
        found, unmatched = [], dict[str, None]()
        for row in rows:
            fit = [
                (number, more)
                for number, more in self._matches(row)
                if not from_flat or not self._rule(number).tensors
            ]
            if fit:
                found.append(self._with_rule(row, fit))
            else:
                unmatched[f"{row.name}/{row.slot} {list(row.laid.shape)}"] = None
        if unmatched:
            raise RuleError(
                f"no rule matches {shown(unmatched, MOST_LISTED)}. Write a rule for each, or one with `drop = true` for"
                " what is not wanted."
            )
        return found

    def _with_rule(self, row: Row, fit: Sequence[tuple[int, dict[str, Value]]]) -> Row:
        (number, captures), *others = fit
        odd = [other for other, _ in others if self._rule(other).match.pattern != ANYTHING]
        if odd:
            self.ambiguous[row.name] = (number, *odd)
        self.used.add(number)
        coordinates = {axis: index for axis, (index, _) in row.at.items()}
        counts = {f"{axis}_count": count for axis, (_, count) in row.at.items()}
        return replace(row, number=number, names={**self._absent, **coordinates, **counts, **captures})

    def _matches(self, row: Row) -> Iterator[tuple[int, dict[str, Value]]]:
        key = row.name, row.slot
        if key not in self._known:
            self._known[key] = list(self._by_name(*key))
        for number, captures in self._known[key]:
            if all(row.at.get(axis, (0, 1))[0] in at for axis, at in self._rule(number).where.items()):
                yield number, captures

    def _by_name(self, name: str, slot: str) -> Iterator[tuple[int, dict[str, Value]]]:
        """Yield the rules that match, and what they capture."""
        for number, rule in enumerate(self._rules, 1):
            match = rule.match.fullmatch(name)
            if match and (rule.slots is None or rule.slots.fullmatch(slot)):
                numbered = {f"${n}": text for n, text in enumerate(match.groups(""), 1)}
                yield number, {**numbered, **match.groupdict("")}

    def _rule(self, number: int) -> Rule:
        return self._rules[number - 1]


@contextmanager
def explained(rule: Rule, rows: Sequence[Row]) -> Iterator[None]:
    """Add the rule and the tensor to a ``ValueError`` of the block, as a ``RuleError``."""
    try:
        yield
    except RuleError:
        raise
    except ValueError as error:
        raise RuleError(f"{rule.label}: {rows[0].name}/{rows[0].slot}: {error}") from None
