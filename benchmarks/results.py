"""The tables of benchmarks/results/*.jsonl as a page: `python benchmarks/results.py > docs/results.md`.

The newest line of each file with rows of one shape (``rows``, ``samples``, or ``found`` by name) becomes a table, under
what the benchmark's module says of itself. Figures are copied, not computed. Of other files the names are listed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Results\n\nMade by `python benchmarks/results.py` from `benchmarks/results/`. Not edited by hand.\n"
    others = []
    for path in sorted((HERE / "results").glob("*.jsonl")):
        newest = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        if rows := _rows(newest):
            about = ast.get_docstring(ast.parse((HERE / f"{path.stem}.py").read_text(encoding="utf-8"))) or ""
            yield f"## {path.stem.replace('_', ' ')}\n\n{about.partition(chr(10) * 2)[0]}\n"
            yield from table(rows)
            yield f"\nCommit {newest['commit']}, {newest['date']}, {newest['machine']}, {newest['system']}.\n"
        else:
            others.append(f"[{path.stem}](../benchmarks/results/{path.name})")
    yield f"Also measured, with figures in [status.md](status.md): {', '.join(others)}."


def _rows(newest: dict[str, Any]) -> list[dict[str, Any]]:
    by_name = newest.get("found", {})
    named = [{"name": name, **row} for name, row in by_name.items()]
    return newest.get("rows") or newest.get("samples") or named


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Return the lines of a Markdown table with a row for each of ``rows`` and a column for each key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    yield "| " + " | ".join(key.replace("_", " ") for key in keys) + " |"
    yield "|---" * len(keys) + "|"
    for row in rows:
        yield "| " + " | ".join(_cell(row.get(key, "")) for key in keys) + " |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(page(), end="")
