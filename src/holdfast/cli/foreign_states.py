"""The states of any format as the command line names them, and the verbs for layouts that are not this library's.

A name is a run, a step of it, or a path that one of the readers recognizes. ``show`` and ``verify`` of a foreign format
say whether its state is whole as far as the format has checksums. ``rules`` prints the sharding of a run as rules,
checks whether rules fit, and lists the packs. Nothing is written. Called by ``main``, ``convert``, ``diff`` and
``inspect``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn

from ..errors import Damaged
from ..formats import packs, rules_source
from ..formats.load import in_threads, unequal_copies
from ..formats.readers.safetensors_files import BITS
from ..formats.run_directory import CommitSource
from ..formats.source import Source, SourceTensor
from ..opening import source_of
from ..quantities import counted, format_bytes
from ..state.rules.rule_language import Rules
from ..store.format.manifest import Manifest
from ..store.reader import RunReader
from .output import atom_table, console, plain_table, print_facts, print_json, print_table, progress
from .runs import label, open_run, summary, while_training, with_commits

T = TypeVar("T")


def with_sources(texts: Sequence[str], read: Callable[..., T]) -> T:
    """Return the result of ``read``, given the source that each of ``texts`` names."""
    return while_training(texts, lambda: read(*(source_of(text, open_run) for text in texts)))


def named(source: Source) -> str:
    """Return the name of a source for the next command, with its format if it is no run."""
    if isinstance(source, CommitSource):
        return label(source.reader, source.manifest)
    return source.path if source.format == "holdfast" else f"{source.path} ({source.format})"


def about(source: Source) -> dict[str, Any]:
    """Return the JSON description of a state."""
    if isinstance(source, CommitSource):
        return summary(source.manifest)
    nbytes = sum(stored.atom.nbytes for stored in source.atoms.values())
    return {
        "path": source.path,
        "format": source.format,
        "writer": source.writer,
        "step": source.progress.get("step"),
        "bytes": nbytes,
    }


def show(source: Source, *, as_json: bool) -> None:
    """Print the content of a state of another library."""
    atoms = [stored.atom for stored in source.atoms.values()]
    rows = [_row(stored) for stored in source.atoms.values()]
    if as_json:
        for row, stored in zip(rows, source.atoms.values(), strict=True):
            row["cuts"] = _cuts_of(stored)
        told = {"aliases": dict(source.aliases), "progress": source.progress, "unread": list(source.unread)}
        told["passed_over"] = source.passed_over
        print_json({**about(source), **told, "atoms": rows})
        return
    sizes = [atom.elements for atom in atoms if atom.slot == "param"]
    files = {part.path for part in source.parts}
    nbytes = sum(atom.nbytes for atom in atoms)
    facts = {"format": source.format, "size": f"{format_bytes(nbytes)} in {counted(len(files), 'file')}"}
    if source.writer:
        facts["written by"] = source.writer
    if source.progress.get("step") is not None:
        facts = {"step": f"{source.progress['step']:,}", **facts}
    facts["parameters"] = f"{sum(sizes):,} in {counted(len(sizes), 'tensor')}"
    if source.aliases:
        facts["tied"] = ", ".join(f"{alias} is {name}" for alias, name in source.aliases.items())
    if source.unread:
        facts["not read"] = ", ".join(source.unread)
    if source.passed_over:
        facts["passed over"] = passed_over(source)
    out = console()
    print_facts(out, facts)
    out.print()
    print_table(out, atom_table(rows))


def _row(stored: SourceTensor) -> dict[str, Any]:
    """Describe a tensor: ``parts`` counts the stored arrays that hold it, ``copies`` how often it is stored."""
    counts = {"parts": len(np.unique(stored.pieces.part)), "copies": 1 + len(stored.copies)}
    return stored.atom.to_json() | counts


def _cuts_of(stored: SourceTensor) -> list[list[list[int]]]:
    """Return the stored regions of a tensor by start and stop. There may be millions."""
    pieces = stored.pieces
    return [list(box) for box in zip(pieces.start.tolist(), pieces.stop.tolist(), strict=True)]


def verify(source: Source, *, as_json: bool) -> bool:
    """Print whether a state of another library is whole, as far as its format can tell, and return that."""
    damaged = _damaged(source, quiet=as_json) + _of_unknown_types(source)
    checked = sum(part.has_checksum for part in source.parts)
    if as_json:
        texts = [{"path": error.path, "text": str(error)} for error in damaged]
        print_json({**about(source), "whole": not damaged, "with_checksum": checked, "damaged": texts})
    elif damaged:
        print(f"{named(source)} is damaged in {counted(len(damaged), 'place')}:")
        for error in damaged:
            print(f"  {error}")
    else:
        print(f"{named(source)}: every tensor is there once, and no two copies differ")
        arrays = counted(len(source.parts), "stored array")
        if checked:
            print(f"Checksums: {checked:,} of {arrays} have one, and it agrees")
        else:
            print(f"Checksums: none of {arrays} has one, so a flipped bit would not be seen")
        if source.passed_over:
            print(f"Passed over, since Holdfast has no such type: {passed_over(source)}")
    return not damaged


def passed_over(source: Source) -> str:
    """Describe the tensors that are not read, with their dtypes."""
    return ", ".join(f"{name} ({dtype})" for name, dtype in source.passed_over.items())


def _of_unknown_types(source: Source) -> list[Damaged]:
    """Return an error for each tensor of a dtype that the safetensors library lacks."""
    return [
        Damaged(
            f"{name} is of the type {dtype!r}, which no version of safetensors known here has",
            path=source.path,
        )
        for name, dtype in source.passed_over.items()
        if dtype not in BITS
    ]


def _damaged(source: Source, *, quiet: bool) -> list[Damaged]:
    """Return the damage in the order of the stored arrays, of which several are read at once."""
    found: list[Damaged] = []

    def check(part: int) -> Damaged | None:
        try:
            source.check(part)
        except Damaged as error:
            return error
        return None

    with progress("reading", BarColumn(), MofNCompleteColumn(), quiet=quiet) as bar:
        task = bar.add_task("reading", total=len(source.parts))

        def note(error: Damaged | None) -> None:
            bar.advance(task)
            found.extend([] if error is None else [error])

        in_threads((partial(check, part) for part in range(len(source.parts))), note)
    return found + list(unequal_copies(source, source.atoms.values()))


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
