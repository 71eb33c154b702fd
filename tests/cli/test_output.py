"""Tables in terminals that are too narrow for them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.cli.output import plain_table, print_table

ROW = ("1,234,567", "12", "123.4 GiB", "2026-01-01 12:00", "a base, and records to step 1,240,000")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_number_is_cut_and_no_word_is_lost(width):
    table = plain_table(">step", ">timeline", ">size", "written", "")
    table.add_row(*ROW)
    out = Console(file=io.StringIO(), width=width, highlight=False)
    print_table(out, table)
    header, *lines = out.file.getvalue().splitlines()
    assert header.split() == ["step", "timeline", "size", "written"]
    assert lines[0].split()[:4] == ["1,234,567", "12", "123.4", "GiB"]
    assert sorted(" ".join(lines).split()) == sorted(" ".join(ROW).split())
