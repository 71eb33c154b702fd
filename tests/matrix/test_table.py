"""The table of the matrix in the documents is the one that is printed when all of it passes."""

from __future__ import annotations

from pathlib import Path

from matrix.cells import SIZES, ZERO, passed, table

MOVES = Path(__file__).parents[2] / "docs" / "moves.md"


def test_the_table_in_the_documents_is_that_of_the_tests():
    every = {(source, target): passed(source, target) for source in (*SIZES, *ZERO) for target in SIZES}
    assert "\n".join(table(every)) in MOVES.read_text()
