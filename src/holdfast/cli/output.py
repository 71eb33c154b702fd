"""The output of all verbs: tables, facts, JSON and progress bars, and the parsing of their options.

Output fits a terminal and reads as well from a file. Names come from files of others, so control characters are escaped
wherever they are printed, also in tables. Options that are numbers or paths are refused before anything is done.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..errors import ConfigError
from ..quantities import visible

PIPE_COLUMNS = 200
"""Columns of output that is no terminal: tables take the width of their lines, and wrap only beyond this."""
LEAST_TEXT = 10
"""The least columns of a text in a table, however narrow the terminal is."""


class Visible:
    """A stream that prints names verbatim but never as commands: control characters are escaped.

    ``Console`` writes to the stream below, with its own control sequences.
    """

    def __init__(self, stream: TextIO | Enduring) -> None:
        self.stream: Any = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.stream.write(visible(text, lines=True))
        return len(text)


class VisibleConsole(Console):
    """A console with its own styles that shows texts as ``Visible`` does."""

    def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **options):
            text, style, control = segment
            yield segment if control else Segment(visible(text, lines=True), style)


class _PlainTable(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(visible(cell) if isinstance(cell, str) else cell for cell in cells), **options)


@contextmanager
def names_shown() -> Iterator[None]:
    """Make standard output and error ``Visible`` in the block; a stream that a script has closed goes nowhere."""
    before = sys.stdout, sys.stderr
    streams = [Visible(each or open(os.devnull, "w", encoding="utf-8")) for each in before]  # noqa: SIM115
    sys.stdout, sys.stderr = streams  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def beside(stream: Any) -> Any:
    """Return the stream that ``Visible`` writes to."""
    return stream.stream if isinstance(stream, Visible) else stream


def console() -> Console:
    """Return a console on standard output."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return VisibleConsole(file=beside(sys.stdout), width=width, highlight=False)


class Enduring:
    """A stream that discards its output once its reader has left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            return self._let_go() or len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._let_go()

    def _let_go(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)


def error_console() -> Console:
    """Return a console on standard error."""
    return VisibleConsole(file=beside(sys.stderr))


def progress(*columns: ProgressColumn | str, quiet: bool = False) -> Progress:
    """Return a progress bar on standard error, if that is a terminal; it disappears at its end."""
    out = error_console()
    return Progress(*columns, console=out, transient=True, disable=quiet or not out.is_terminal)


def transfer_progress(what: str, *, quiet: bool) -> Progress:
    """Return a progress bar of bytes and their rate."""
    size, speed = DownloadColumn(binary_units=True), TransferSpeedColumn()
    return progress(what, BarColumn(), size, speed, TimeRemainingColumn(), quiet=quiet)


def plain_table(*columns: str) -> Table:
    """Return a table of left-aligned columns; those whose names begin with ``>`` are right-aligned."""
    table = _PlainTable(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for column in columns:
        right = column.startswith(">")
        justify = "right" if right else "left"
        table.add_column(column.lstrip(">"), justify=justify, no_wrap=right, overflow="fold")
    return table


def print_table(out: Console, table: Table) -> None:
    """Print ``table`` without trailing blanks. Its lines may exceed the width of ``out`` where numbers would be cut."""
    options = out.options.update(width=max(out.width, _least_width(table)))
    for line in out.render_lines(table, options, pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        out.print(text, soft_wrap=True)


def _least_width(table: Table) -> int:
    """Return the columns for all cells that do not wrap, and ``LEAST_TEXT`` for each text that does."""
    widths = [max(cell_len(str(cell)) for cell in (column.header, *column.cells)) for column in table.columns]
    return sum(
        (width if column.no_wrap else min(width, LEAST_TEXT)) + table.padding[1]
        for width, column in zip(widths, table.columns, strict=True)
    )


def print_facts(out: Console, facts: dict[str, str], indent: str = "") -> None:
    """Print names with their texts, which wrap between words."""
    names = max(map(len, facts)) + 3
    width = max(30, min(out.width, 100) - names - len(indent))
    for name, text in facts.items():
        for number, line in enumerate(textwrap.wrap(text, width) or [""]):
            label = Text("" if number else name, "dim")
            label.pad_right(names - label.cell_len)
            out.print(Text.assemble(indent, label, line), soft_wrap=True)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def atom_table(atoms: list[dict[str, Any]]) -> Table:
    """Return a table with one row for each name and all its slots, and the fragments of divided tensors."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for atom in sorted(atoms, key=lambda atom: atom["slot"] != "param"):
        by_name.setdefault(atom["name"], []).append(atom)
    cuts = {name: _cut_of(slots[0]) for name, slots in by_name.items()}
    shown = ["cut"] if any(cuts.values()) else []
    table = plain_table("tensor", ">shape", *shown, "slots")
    for name, slots in by_name.items():
        dtypes = dict.fromkeys(atom["dtype"] for atom in slots)
        held = (f"{kind} " + " ".join(a["slot"] for a in slots if a["dtype"] == kind) for kind in dtypes)
        shape = "x".join(map(str, slots[0]["shape"])) or "scalar"
        table.add_row(escape(name), shape, *(cuts[name] for _ in shown), ", ".join(held))
    return table


def _cut_of(atom: dict[str, Any]) -> str:
    """Describe the number of fragments and copies of a tensor; empty for a tensor that is stored whole, once."""
    parts, copies = atom["parts"], atom.get("copies", 1)
    return ", ".join([f"{parts:,} parts"] * (parts > 1) + [f"{copies:,} copies"] * (copies > 1))


T = TypeVar("T")


def parsed(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Return the result of ``parse`` for ``text``.

    Raises ``ConfigError``, which names ``flag``, for a ``ValueError``.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error


def refuse_no_directory(flag: str, file: Path | None) -> None:
    """Raise ``ConfigError`` if the directory of ``file``, given with ``flag``, does not exist."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {file}: there is no directory {file.absolute().parent}; make it first")
