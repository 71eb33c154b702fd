"""The writing of any source as a run directory of this library with one commit.

The commit is published last, so an interrupted conversion leaves no run that could be taken for whole. Called by
``convert``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadInput, DiskFull
from ..quantities import MiB, format_bytes, packed
from ..state.layout.regions import Region
from ..state.tensor_entries import fragment
from ..store.format.manifest import Manifest
from ..store.format.payload_layout import METADATA, PAD, Layout
from ..store.run_store import LocalStore
from .load import read_flat
from .readers import format_of, is_of_others
from .source import Source, SourceTensor, with_aliases

UNIT_BYTES = 256 * MiB
"""The approximate size of a file; the tensors of one parameter stay together."""


def write_run(source: Source, root: Path, report: Callable[[int], None] = lambda nbytes: None) -> Manifest:
    """Write ``source`` as a new run in ``root`` with one commit, at the step of the source. Durable on return.

    Raises ``BadInput`` if ``root`` holds a run or a checkpoint of another library, ``DiskFull`` if there is no room;
    nothing is written then.
    """
    if reserved := next((key for key in source.atoms if key.startswith(PAD)), None):
        raise BadInput(f"{reserved}: names that begin with {PAD} are reserved in a run. Rename it, by rules.")
    if is_of_others(root):
        raise BadInput(f"{root} holds {format_of(root)}; name a directory that is not there")
    with LocalStore(root) as store:
        if store.disk.exists("commits") and store.commits():
            raise BadInput(f"{root} holds a run already; name a directory that is not there")
        units = {f"unit_{number:03d}": group for number, group in enumerate(_grouped(source))}
        layouts = {name: _layout(group) for name, group in units.items()}
        needed, free = sum(layout.file_bytes for layout in layouts.values()), store.free_bytes()
        if needed > free:
            raise DiskFull(f"{root} takes {format_bytes(needed)}, and {format_bytes(free)} are free there")
        store.enter()
        store.begin(None)
        files = {
            name: store.write_unit(name, layout, partial(_fill, source, layout, report))
            for name, layout in layouts.items()
        }
        source.refuse_rewritten()
        index = store.put_index({"version": 1, "atoms": dict(_index(units))})
        origin = {"converted_from": {"path": source.path, "format": source.format}}
        return store.publish(
            source.progress.get("step") or 0, files, index, {**with_aliases(source), **origin}
        )


def _grouped(source: Source) -> Iterator[list[SourceTensor]]:
    """Yield tensor entries grouped by parameter, in files of about ``UNIT_BYTES``."""
    by_name: dict[str, list[SourceTensor]] = {}
    for stored in source.atoms.values():
        by_name.setdefault(stored.atom.name, []).append(stored)

    def nbytes(atoms: list[SourceTensor]) -> int:
        return sum(each.atom.nbytes for each in atoms)

    for group in packed(by_name.values(), nbytes, UNIT_BYTES):
        yield [each for atoms in group for each in atoms]


def _layout(group: list[SourceTensor]) -> Layout:
    return Layout.build([(each.atom.key, each.atom.dtype, each.atom.shape) for each in group], METADATA)


def _index(units: dict[str, list[SourceTensor]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, group in units.items():
        for atom in (stored.atom for stored in group):
            whole = fragment(name, atom.key, Region.whole(atom.shape))
            yield atom.key, atom.to_json() | {"fragments": [whole]}


def _fill(
    source: Source, layout: Layout, report: Callable[[int], None], view: memoryview, start: int
) -> None:
    """Fill ``view`` with the bytes of a file of ``layout``, from ``start`` on."""
    stop = start + len(view)
    piece = np.frombuffer(view, dtype=np.uint8)
    piece[:] = 0
    head = layout.header[start:stop]
    view[: len(head)] = head
    for key in layout.keys_between(start, stop):
        entry, stored = layout[key], source.atoms[key]
        first, last = max(entry.offset, start), min(entry.end, stop)
        size = stored.atom.itemsize
        values = read_flat(source, stored, (first - entry.offset) // size, (last - entry.offset) // size)
        piece[first - start : last - start] = values.view(np.uint8)
        report(values.nbytes)
