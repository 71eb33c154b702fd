"""The cells of the matrix: a source and a target each, and the table that is made of what became of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from combined import CAMPAIGN

WRITTEN, STEPS = 3, 8
"""How many steps a source is trained, and up to which a target goes on."""
SIZES = {
    "plain": 1, "ddp2": 2, "ddp4": 4, "fsdp2": 2, "fsdp3": 3, "fsdp4": 4, "hsdp2x2": 4, "tp2": 2, "tp4": 4,
    "fsdp2xtp2": 4, "pp2": 2, "pp4": 4, "pp2v2": 2, "ep2": 2, "ep4": 4, "engine": 1,
}  # fmt: skip
"""The ranks of each topology, all of which are targets and sources."""
ZERO = {f"zero{stage}x{ranks}": (stage, ranks) for stage in (1, 2, 3) for ranks in (2, 3, 4)}
"""DeepSpeed's, which are sources: stage and ranks."""
ROUNDED = ("ddp4",)
"""Topologies that go on from themselves within rounding and not to the last bit: DDP of more than two ranks forms its
buckets anew after the first backward pass of a process."""
TRAINED, BUFFERS, FAILED = "p", "b", "failed"


def trains_odd(*topologies: str) -> bool:
    """Whether the scalar and the empty tensor are parameters. FSDP2 and DeepSpeed do not take a scalar one."""
    return not any("sdp" in each or each in ZERO for each in topologies)


def form_of(*topologies: str) -> tuple[int, int, bool]:
    """The heads, the key-value heads, and whether odd tensors are trained, that all of ``topologies`` can have."""
    heads = (12, 4) if any("tp4" in each for each in topologies) else (6, 2)
    return *heads, trains_odd(*topologies)


NAMES = [*SIZES]
COUPLES = {name: (name, NAMES[number - len(NAMES) // 2]) for number, name in enumerate(NAMES)}
"""Each with one of another kind."""
IN_COUPLES = [each for name in NAMES[: len(NAMES) // 2] for each in product(COUPLES[name], repeat=2)]
CELLS = [*product(NAMES, repeat=2)] if CAMPAIGN else IN_COUPLES
"""Source and target: all of them in a campaign, otherwise two of each row and column, one on the diagonal."""


def form_of_cell(source: str, target: str) -> tuple[int, int, bool]:
    """Outside a campaign the four cells of a couple have one form, so that each topology trains once."""
    return form_of(source, target) if CAMPAIGN or source in ZERO else form_of(*COUPLES[source])


def merged(ranks: list[dict[str, Any]], step: int) -> dict[str, str]:
    """The digests of all tensors at ``step``, which no two ranks may have otherwise."""
    found: dict[str, str] = {}
    assert all(rank.get("finished") for rank in ranks), [rank.get("trace", rank)[-900:] for rank in ranks]
    for rank in ranks:
        for key, digest in rank["digests"][str(step)].items():
            assert found.setdefault(key, digest) == digest, key
    return found


def passed(source: str, target: str) -> str:
    """What stands in a cell that passed."""
    return TRAINED if form_of_cell(source, target)[-1] else BUFFERS


def table(cells: Mapping[tuple[str, str], str]) -> Iterable[str]:
    """Lines of Markdown: a row for each source, a column for each target."""
    targets = [each for each in SIZES if any(target == each for _, target in cells)]
    yield "| from \\ to | " + " | ".join(targets) + " |"
    yield "|---" * (len(targets) + 1) + "|"
    for source in (*SIZES, *ZERO):
        if any((source, target) in cells for target in targets):
            found = [cells.get((source, target), "") for target in targets]
            yield f"| {source} | " + " | ".join(found) + " |"


def told(reports: Mapping[str, Iterable[Any]]) -> Iterable[str]:
    """The table of those cells that were tried, by pytest's reports; nothing if there are none."""
    cells = {}
    for outcome in ("passed", "failed", "error"):
        for report in reports.get(outcome, ()):
            found = re.search(r"test_matrix\.py::\w+\[(\w+)-(\w+)\]$", getattr(report, "nodeid", ""))
            if found:
                cells[found.groups()] = passed(*found.groups()) if outcome == "passed" else FAILED
    return table(cells) if cells else ()
