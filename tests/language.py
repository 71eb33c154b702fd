"""Lint for docstrings: the first word says what a thing is or does.

    python tests/language.py src

A docstring begins with a verb in the imperative or with a noun phrase. One that begins with a preposition, a question
word or a pronoun can only be understood with the signature beside it. Prints each, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

REFUSED = {
    "Also", "As", "At", "Beside", "By", "For", "From", "How", "If", "In", "It", "Likewise", "Not", "Of", "On", "So",
    "Than", "That", "These", "They", "Those", "To", "Under", "Until", "What", "When", "Where", "Whether", "Which",
    "Who", "Whose",
    "With", "Without",
}  # fmt: skip


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield strings that stand as statements: docstrings, and those below an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value


def main(folders: list[str]) -> int:
    found = 0
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        for docstring in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            words = str(docstring.value).split(maxsplit=1)
            if words and words[0].strip("`,.:") in REFUSED:
                print(f"{path}:{docstring.lineno}: a docstring begins with {words[0]!r}")
                found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
