"""The tables of benchmarks/results/*.jsonl as a page: `python benchmarks/results.py > docs/results.md`.

Of each file and each model, ratio or case in it, the newest line becomes tables, under the first paragraph of the
benchmark's module. Figures are copied; a list of repeated measurements is shown as its median, least and most. A
benchmark that keeps a page of its own beside its file is linked.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent

# What every line says of itself, and what is too long for a table.
ABOUT = {"benchmark", "machine", "system", "commit", "date", "load", "machine_profile"}
LEFT_OUT = {"step", "times", "on_host", "busiest"}


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Results\n\nMade by `python benchmarks/results.py` from `benchmarks/results/`. Not edited by hand."
    yield "A list of repeated measurements is shown as median (least to most). Older lines stay in the files.\n"
    for path in sorted((HERE / "results").rglob("*.jsonl")):
        name = path.relative_to(HERE / "results").with_suffix("")
        about = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
        yield f"## {str(name).replace('_', ' ')}\n\n{about.partition(chr(10) * 2)[0]}\n"
        if path.with_suffix(".md").exists():
            yield f"[Tables](../benchmarks/results/{path.stem}.md), [lines](../benchmarks/results/{path.name}).\n"
            continue
        for line in _newest_of_each_model(path):
            for name, rows in _tables(line):
                if name:
                    yield f"*{name.replace('_', ' ')}*\n"
                yield from table(rows)
                yield ""
            yield f"Commit {line['commit']}, {line['date']}, {line['machine']}, {line['system']}.\n"


def _newest_of_each_model(path: Path) -> list[dict[str, Any]]:
    newest: dict[tuple[str, ...], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        one = " ".join(
            str(line[key])
            for key in ("model", "measurement", "size", "ssd_limit", "precision")
            if line.get(key)
        )
        cases = [
            f"{one} {count} {case}"
            for count, found in line.get("by_micro_batches", {}).items()
            for case in found.get("tokens_per_second", [])
        ]
        names = tuple(line.get("models") or line.get("ratios") or cases or [one])
        newest.pop(names, None)
        newest[names] = line
    seen: set[str] = set()
    kept = []
    for names, line in reversed(newest.items()):
        if not seen.issuperset(names):
            seen.update(names)
            kept.append(line)
    return kept


def _tables(line: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (name, rows) for each group of figures in ``line``."""
    rows = line.get("rows") or line.get("samples")
    if isinstance(rows, list):
        yield "", rows
        return
    figures = {key: value for key, value in line.items() if key not in ABOUT}
    apart = {
        key: value
        for key, value in figures.items()
        if isinstance(value, dict) or (isinstance(value, list) and isinstance(next(iter(value), {}), dict))
    }
    if single := {key: value for key, value in figures.items() if key not in apart}:
        yield "", [single]
    for key, value in apart.items():
        if value:
            yield key, list(_rows(value))


def _rows(value: Any, names: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for part in value:
            yield _flat(part)
    elif value and all(isinstance(part, dict) for part in value.values()):
        for name, part in value.items():
            yield from _rows(part, (*names, name))
    else:
        yield ({"name": ", ".join(names)} if names else {}) | _flat(value)


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, part in value.items():
        if key in LEFT_OUT:
            continue
        if isinstance(part, dict):
            row |= {f"{key} {name}": figure for name, figure in part.items() if not isinstance(figure, dict)}
        else:
            row[key] = part
    return row


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
    if isinstance(value, list) and len(value) > 2 and all(isinstance(part, int | float) for part in value):
        return f"{_cell(float(median(value)))} ({_cell(float(min(value)))} to {_cell(float(max(value)))})"
    text = ", ".join(map(_cell, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(page(), end="")
