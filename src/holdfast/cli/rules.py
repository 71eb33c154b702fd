"""The verb ``rules``: it prints the sharding of a run as rules, checks whether rules fit, and lists the packs.

Nothing is written. Called by ``main``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..formats import packs, rules_source
from ..quantities import counted
from ..state.rules.rule_language import Rules
from ..store.format.manifest import Manifest
from ..store.reader import RunReader
from .output import console, plain_table, print_json, print_table
from .runs import label, with_commits


def infer(commit: str) -> None:
    """Print the rules that build the tensors of a commit from what its ranks stored."""
    print(with_commits([commit], rules_source.infer), end="")


def check(rules: str, commit: str, values: Path | None, *, as_json: bool) -> bool:
    """Print what rules build from what the ranks of a commit stored; return whether it matches the commit's record."""
    found = packs.find(rules, values)
    return with_commits([commit], partial(_check, found, as_json=as_json))


def show_packs(name: str | None) -> None:
    """Print the names of all packs, or the text of one."""
    if name is not None:
        print(packs.text(name), end="")
        return
    table = plain_table("pack", "for")
    for pack, purpose in packs.names().items():
        table.add_row(pack, purpose)
    print_table(console(), table)


def _check(rules: Rules, reader: RunReader, manifest: Manifest, *, as_json: bool) -> bool:
    found, other = rules_source.check(rules, reader, manifest)
    if as_json:
        print_json(
            {
                "atoms": sorted(found.atoms), "otherwise": other, "aliases": found.aliases, "unused": found.unused,
                "dropped": found.dropped, "ambiguous": found.ambiguous,
            }
        )  # fmt: skip
        return not other
    print(f"{counted(len(found.atoms), 'tensor')} made of what {label(reader, manifest)} stores")
    for name, numbers in found.ambiguous.items():
        print(f"  ambiguous: {name} is matched by rules {', '.join(map(str, numbers))}; the first holds")
    for number in found.unused:
        print(f"  unused: {rules.rules[number - 1].label}")
    for name in found.dropped:
        print(f"  dropped: {name}")
    for key in other:
        print(f"  not as the run records it: {key}")
    return not other
