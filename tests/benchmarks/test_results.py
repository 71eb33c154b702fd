"""The page of results is the one that is made of the kept measurements."""

from __future__ import annotations

from pathlib import Path

from results import page, table

DOCS = Path(__file__).parents[2] / "docs"


def test_page_is_made_of_kept_measurements():
    assert (DOCS / "results.md").read_text(encoding="utf-8") == page()


def test_a_row_without_a_key_has_an_empty_cell():
    rows = [{"a": 1, "b_c": 0.123456}, {"a": "x|y"}]
    assert list(table(rows)) == ["| a | b c |", "|---|---|", "| 1 | 0.1235 |", "| x\\|y |  |"]
