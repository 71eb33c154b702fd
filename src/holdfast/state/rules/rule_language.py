"""The grammar of rules: readable TOML that describes the layout of tensors where a format does not record it.

A rule has a regex over the whole name of a stored tensor, the way in which its parts make one tensor (``cut``), and the
operations that give that tensor its canonical form. The first rule that matches is applied. docs/rules.md describes the
language with examples; this module has its grammar, ``state/rules/assembly.py`` its meaning.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import RuleError
from ..layout.regions import Region
from ..layout.sharding import (
    Average,
    Blocks,
    Flat,
    RegionSharding,
    Replicate,
    Shard,
    Sharding,
    SharedHeads,
    Unique,
    Widths,
)
from ..tensor_entries import DTYPE_BYTES
from .expressions import Expression, Template
from .layouts import WIDTHS
from .rule_tables import Table

VERSION = 1
KINDS = ("unique", "replicate", "average", "shard", "grid", "blocks", "boxes", "flat")
OPTIONS: dict[str, set[str]] = {
    "unique": set(), "replicate": {"some"}, "average": set(), "shard": {"dim", "widths", "size"},
    "grid": {"dims", "widths"}, "blocks": {"dim", "sizes", "widths", "count"}, "boxes": {"at"},
    "flat": {"shape", "tensors", "buckets", "align", "tensor_align"},
}  # fmt: skip
TEXTS = ("rename", "slot", "alias_of")
RESERVED = ("size", "part", "index")
"""Names that expressions may use and that no value may have."""
LAYOUTS = ("block", "interleaved")


class Pad(NamedTuple):
    """Padding: ``dim`` is longer than ``size``."""

    dim: int
    size: Expression


class Split(NamedTuple):
    """A division of ``dim`` among several tensors, named by ``{part}``; into equal sizes if none are given."""

    dim: int
    names: tuple[str, ...]
    sizes: tuple[Expression, ...] | None


class Join(NamedTuple):
    """A join: this tensor is the part named ``part`` of a tensor that is made by concatenation along ``dim``."""

    dim: int
    names: tuple[str, ...]
    part: Template


class Stacked(NamedTuple):
    """A stack: this tensor is slice ``index``, along the extra dimension ``dim``, of a larger tensor."""

    dim: int
    index: Template
    count: Expression | None


class Permute(NamedTuple):
    """Another row order, along ``dim``, of a fused projection of queries, keys and values."""

    dim: int
    interleave: bool
    heads: Expression
    kv_heads: Expression
    head_dim: Expression | None


class Tensors(NamedTuple):
    """A flat partition of several tensors, in order: their names, shapes and padding."""

    axes: tuple[str, ...]
    names: tuple[Template, ...]
    shapes: tuple[tuple[Expression, ...], ...]
    buckets: tuple[int, ...]
    align: Expression | None
    tensor_align: Expression


@dataclass(frozen=True)
class Rule:
    """One rule; ``label`` names it in errors.

    ``tensors`` describes a flat partition of many tensors, which are matched again.
    """

    label: str
    match: re.Pattern[str]
    slots: re.Pattern[str] | None = None
    where: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cuts: tuple[Sharding, ...] = ()
    tensors: Tensors | None = None
    rename: Template | None = None
    slot: Template | None = None
    alias_of: Template | None = None
    drop: bool = False
    dtype: str | None = None
    pads: tuple[Pad, ...] = ()
    unstack: int | None = None
    join: Join | None = None
    permute: Permute | None = None
    split: Split | None = None
    transpose: tuple[int, ...] | bool = False
    stacked: Stacked | None = None


@dataclass(frozen=True)
class Rules:
    """The rules of one text.

    Attributes:
        axes: The default division over an axis that a rule does not mention.
        files: Regexes over the names of files, whose groups are axes.
        mesh: The length of each axis.
    """

    rules: tuple[Rule, ...]
    axes: Mapping[str, Sharding] = field(default_factory=dict)
    files: tuple[re.Pattern[str], ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)
    source: str = "rules"

    @classmethod
    def parse(cls, text: str, source: str = "rules", values: Mapping[str, int] | None = None) -> Rules:
        """Parse ``text``; ``values`` are added to its own and take precedence.

        Raises ``RuleError``, which names ``source`` and the line or the number of the rule.

        >>> rules = Rules.parse('''
        ... version = 1
        ... [[rule]]
        ... match = 'h[.](\\\\d+)[.]up'
        ... rename = "layers.{1 + 1}.up"
        ... shard = "tp"
        ... dim = 0
        ... ''')
        >>> [(rule.match.pattern, str(rule.cuts[0])) for rule in rules.rules]
        [('h[.](\\\\d+)[.]up', 'shard over tp')]
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RuleError(f"{source} is not TOML: {error}") from None
        top = Table(document, source)
        version = top.required("version", int)
        if version != VERSION:
            top.wrong(f"has version {version}, and {VERSION} is the one that is known: take a newer holdfast")
        tables = top.get("rule", list, [])
        if not tables:
            top.wrong("has no rule: a table [[rule]] with a regex, `match`, is one")
        known = _values(Table(top.get("values", dict, {}), f"{source}, [values]"), values or {})
        patterns = _patterns(Table(top.get("patterns", dict, {}), f"{source}, [patterns]"))
        axes = _axes(Table(top.get("axes", dict, {}), f"{source}, [axes]"))
        lines = _lines(text, len(tables))
        rules = tuple(
            _rule(Table(table, f"{source}, rule {number}{lines[number - 1]}", known, patterns))
            for number, table in enumerate(tables, 1)
        )
        mesh = Table(top.get("mesh", dict, {}), f"{source}, [mesh]")
        lengths = {axis: mesh.required(axis, int) for axis in mesh.names}
        files = tuple(_file(each, lengths) for each in top.inner("files"))
        top.done()
        return cls(rules, axes, files, lengths, source)

    def place_of_file(self, name: str) -> dict[str, tuple[int, int]]:
        """Return the index on the mesh of the rank that wrote a file, and the axis length, by axis.

        Raises ``RuleError`` unless exactly one regex of ``files`` matches.
        """
        found = [match for match in (regex.fullmatch(name) for regex in self.files) if match]
        if len(found) != 1:
            raise RuleError(
                f"{self.source}: {len(found)} of {len(self.files)} [[files]] match {name!r}, and one has to: it says"
                " with (?P<tp>\\d+) where on the axis tp the rank was that wrote it"
            )
        groups = {axis: text for axis, text in found[0].groupdict().items() if text is not None}
        return {axis: (int(text), self.mesh[axis]) for axis, text in groups.items()}


def numbers_of(text: str) -> dict[str, int]:
    """Return the whole numbers of a JSON table, such as a model's config.json.

    Raises ``ValueError``.

    >>> numbers_of('{"vocab_size": 37, "tied": true}')
    {'vocab_size': 37}
    """
    try:
        table = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(table, dict):
        raise ValueError("it holds no table of names and numbers")
    return {name: value for name, value in table.items() if type(value) is int and value >= 0}


def _file(table: Table, mesh: Mapping[str, int]) -> re.Pattern[str]:
    regex = table.regex("match")
    unknown = [axis for axis in regex.groupindex if axis not in mesh]
    if unknown:
        table.wrong(
            f"names the axis {unknown[0]!r}, and [mesh] does not say how long it is: {unknown[0]} = 2"
        )
    odd = [name for name in regex.groupindex if re.search(rf"\(\?P<{name}>\\d[+*]?\)", regex.pattern) is None]
    if odd:
        table.wrong(
            f"has a group {odd[0]!r} that is not (?P<{odd[0]}>\\d+): it should be where on an axis a rank is"
        )
    return regex


def _lines(text: str, count: int) -> list[str]:
    """Return the line where each rule begins, if that can be found reliably."""
    found = [n for n, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    return [f" (line {line})" for line in found] if len(found) == count else [""] * count


def _values(table: Table, given: Mapping[str, int]) -> dict[str, Expression]:
    """Return the values by name. Each may use those before it, and names that are known where it is used."""
    found = {name: Expression(str(n), n) for name, n in given.items() if name not in RESERVED}
    for number, name in enumerate(table.names):
        expression = Table({name: table.get(name, object, 0)}, table.place, found).expression(name)
        later = sorted(expression.names & set(table.names[number:]) - set(given))
        if later:
            table.wrong(f"has {name} = {expression.text!r}, which names {later[0]} before it is given")
        found.setdefault(name, expression)
    return found


def _patterns(table: Table) -> dict[str, str]:
    """Return the patterns by name. Each may use those before it."""
    found: dict[str, str] = {}
    for name in table.names:
        inner = Table({name: table.get(name, object, "")}, table.place, patterns=found)
        found[name] = f"(?:{inner.regex(name).pattern})"
    return found


def _axes(table: Table) -> dict[str, Sharding]:
    kinds = {"replicate": Replicate, "unique": Unique}
    return {name: kinds[table.one_of(name, tuple(kinds))]((name,)) for name in table.names}


def _rule(table: Table) -> Rule:
    pattern = table.required("match", str)
    table.place += f" (match {pattern!r})"
    where = table.of(table.get("where", dict, {}), "where")
    inline = [kind for kind in KINDS if kind in table]
    cuts = [_cut(each) for each in table.inner("cut")] + ([_cut(table)] if inline else [])
    if inline and "cut" in table:
        table.wrong(f"has both `cut` and `{inline[0]}`: put all into `cut`, the outermost first")
    lists = [cut for cut in cuts if isinstance(cut, Tensors)]
    if lists and len(cuts) > 1:
        table.wrong("has other cuts beside a flat partition of several tensors: they have rules of their own")
    rule = Rule(
        label=table.place,
        match=table.regex("match"),
        slots=table.regex("slots") if "slots" in table else None,
        where={axis: tuple(where.integers(axis)) for axis in where.names},
        cuts=tuple(one for cut in cuts if not isinstance(cut, Tensors) for one in cut),
        tensors=lists[0] if lists else None,
        drop=table.get("drop", bool, False),
        dtype=table.one_of("dtype", tuple(DTYPE_BYTES)) if "dtype" in table else None,
        pads=tuple(Pad(pad.dim(), pad.expression("size")) for pad in table.inner("pad")),
        unstack=next((each.dim() for each in table.inner("unstack", 1)), None),
        join=next((_join(each) for each in table.inner("join", 1)), None),
        permute=next((_permute(each) for each in table.inner("permute", 1)), None),
        split=next((_split(each) for each in table.inner("split", 1)), None),
        stacked=next((_stacked(each) for each in table.inner("stacked", 1)), None),
        transpose=_transpose(table),
        **{key: table.template(key) for key in TEXTS if key in table},
    )
    table.done((*KINDS, *TEXTS, "slots", "dtype"))
    return rule


def _cut(table: Table) -> tuple[Sharding, ...] | Tensors:
    """Return the division of the one kind that ``table`` names; a grid is a shard of each of its dims."""
    kinds = [kind for kind in KINDS if kind in table]
    if len(kinds) != 1:
        table.wrong(f"names {' and '.join(kinds) or 'none'} of the kinds of cuts; one is: {', '.join(KINDS)}")
    [kind] = kinds
    for option in sorted({option for each in OPTIONS.values() for option in each} - OPTIONS[kind]):
        if option in table:
            table.wrong(f"gives `{option}`, which is nothing to `{kind}`")
    axes = tuple(table.texts(kind))
    if kind == "grid":
        dims = table.integers("dims")
        widths = table.required("widths", list) if "widths" in table else [None] * len(dims)
        if not len(dims) == len(widths) == len(axes):
            table.wrong(f"has {len(axes)} axes, {len(dims)} dims and widths of {len(widths)}")
        return tuple(Shard((axis,), dim, _width(table, each)) for axis, dim, each in zip(axes, dims, widths))
    if kind == "shard":
        widths, size = _width(table, table.get("widths", object, None)), table.maybe("size")
        if size is not None and widths is None:
            table.wrong("gives `size` without `widths`, so nothing says which part is how wide")
        return (Shard(axes, table.dim(), widths, size),)
    if kind == "blocks":
        return (_blocks(table, axes),)
    if kind == "boxes":
        return (RegionSharding(axes, tuple(_box(table, value) for value in table.required("at", list))),)
    if kind == "flat":
        return _tensors(table, axes) if "tensors" in table else (Flat(axes, table.expressions("shape")),)
    if kind == "replicate":
        return (Replicate(axes, table.get("some", bool, False)),)
    return ({"unique": Unique, "average": Average}[kind](axes),)


def _blocks(table: Table, axes: tuple[str, ...]) -> Blocks:
    sizes = table.expressions("sizes") * table.get("count", int, 1)
    given = table.get("widths", object, "even")
    nested = isinstance(given, list)
    if nested and len(given) != len(sizes):
        table.wrong(f"has {len(sizes)} blocks, and widths of {len(given)}")
    each = given if nested else [given] * len(sizes)
    return Blocks(axes, table.dim(), sizes, tuple(_width(table, one) or "even" for one in each))


def _tensors(table: Table, axes: tuple[str, ...]) -> Tensors:
    listed = [table.of(one, "tensors") for one in table.required("tensors", list)]
    names = tuple(one.template("name") for one in listed)
    shapes = tuple(one.expressions("shape") for one in listed)
    for one in listed:
        one.done()
    each = table.get("buckets", object, None)
    buckets = [1] * len(names) if each == "each" else table.integers("buckets") if each else [len(names)]
    if sum(buckets) != len(names):
        table.wrong(f"has {len(names)} tensors, and buckets of {sum(buckets)}")
    every = table.maybe("tensor_align") or Expression.parse("1")
    return Tensors(axes, names, shapes, tuple(buckets), table.maybe("align"), every)


def _width(table: Table, value: Any) -> Widths:
    if value is None or value in WIDTHS:
        return value
    if isinstance(value, list):
        return tuple(table.as_expression("widths", one) for one in value)
    if isinstance(value, dict) and set(value) == {"repeat"}:
        return SharedHeads(table.as_expression("repeat", value["repeat"]))
    return table.wrong(
        f"has widths {value!r}: {', '.join(WIDTHS)}, a list, or {{repeat = the number of heads}}"
    )


def _box(table: Table, value: Any) -> Region | None:
    if value == []:
        return None
    try:
        start, stop = (tuple(end) for end in value)
        if not all(type(number) is int for number in start + stop):
            raise TypeError
        return Region(start, stop)
    except (TypeError, ValueError):
        return table.wrong(f"has {value!r} in `at`, which is no box: [[starts], [stops]], or [] for nothing")


def _join(table: Table) -> Join:
    return Join(table.dim(), _names(table), table.template("part"))


def _split(table: Table) -> Split:
    names = _names(table)
    sizes = table.expressions("sizes") if "sizes" in table else None
    if sizes is not None and len(sizes) != len(names):
        table.wrong(f"has {len(names)} names and {len(sizes)} sizes")
    return Split(table.dim(), names, sizes)


def _names(table: Table) -> tuple[str, ...]:
    names = tuple(table.texts("names"))
    if len(set(names)) != len(names):
        table.wrong("names one of its parts twice")
    return names


def _stacked(table: Table) -> Stacked:
    return Stacked(table.dim(), table.template("index"), table.maybe("count"))


def _permute(table: Table) -> Permute:
    before, after = (table.one_of(key, LAYOUTS) for key in ("from", "to"))
    if before == after:
        table.wrong(f"is from {before} to {after}, which changes nothing")
    heads, kv_heads = table.expression("heads"), table.expression("kv_heads")
    return Permute(table.dim(), after == "interleaved", heads, kv_heads, table.maybe("head_dim"))


def _transpose(table: Table) -> tuple[int, ...] | bool:
    value = table.get("transpose", object, False)
    if isinstance(value, bool):
        return value
    axes = tuple(table.integers("transpose"))
    if sorted(axes) != list(range(len(axes))):
        table.wrong(f"transposes to {list(axes)}, which is no order of dims")
    return axes
