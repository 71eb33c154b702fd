"""Runs of this library as sources, for everything that reads a state of any format, and any source as a run.

Every byte that is returned of a commit has been verified by the checksums of the manifest. A commit that is retired
while it is read is reported as such, and not as damage. A source is written as a run with one commit, which is
published last, so an interrupted conversion leaves no run that could be taken for whole. Called by ``opening``, and by
``convert``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BadInput, DiskFull
from ..quantities import MiB, format_bytes, packed
from ..state.encoding import joined
from ..state.layout.fragments import Fragment, Fragments, row_major
from ..state.layout.regions import Region
from ..state.tensor_entries import PENDING, TensorEntry, fragment
from ..store.format.manifest import FileRef, Manifest
from ..store.format.payload_files import VerifiedFiles
from ..store.format.payload_layout import CHECKSUM_BLOCK, METADATA, PAD, Layout
from ..store.reader import RunReader
from ..store.run_store import LocalStore
from .entry_keys import KEY, ShapeAndType, name_all
from .foreign_formats import format_of, is_of_others
from .load import read_flat
from .source import Source, SourceTensor, StoredArray, with_aliases
from .state_dict_progress import add_or_tell, progress_of, state_dict_of

if TYPE_CHECKING:
    from .pending_updates import PendingUpdates


class CommitSource(Source):
    """The commit of ``manifest`` in the run that ``reader`` reads.

    Raises ``CommitRetired`` wherever its writer has retired it meanwhile.
    """

    def __init__(self, reader: RunReader, manifest: Manifest) -> None:
        """Open the commit.

        Raises ``BadInput`` if its parts belong to several steps, ``Damaged`` if its files are damaged.
        """
        super().__init__(f"{reader.root}@{manifest.step}", "holdfast")
        if manifest.oldest_step < manifest.step:
            raise BadInput(
                f"{self.path} is a base whose parts are of steps {manifest.oldest_step} to {manifest.step}, and only"
                " its records bring them to one"
            )
        self.manifest = manifest
        self.reader, self._files = reader, VerifiedFiles(reader.disk)
        self._of_part: list[tuple[FileRef, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self.by_key: dict[str, SourceTensor] = {}
        """The tensors of a commit that ``dcp.save`` made, by their keys in the state dict."""
        self._pending: PendingUpdates | None = None
        told = joined([manifest.progress_of(stream) for stream in manifest.streams])
        with reader.listed(manifest):
            atoms = reader.atoms(manifest)
            if KEY in told:
                with state_dict_of(self.path):
                    told = self._told_of_state_dict(atoms.values(), **told[KEY])
            else:
                for atom in atoms.values():
                    self.add(self._stored(atom, manifest.files))
                if PENDING in told:
                    from .pending_updates import PendingUpdates

                    self._pending = PendingUpdates(told, self.atoms, self._read, manifest.path)
        self.aliases = told.pop("aliases", {})
        self.progress = {"step": manifest.step, **told}

    def read(self, part: int, offset: int, into: memoryview) -> None:
        self._read(part, offset, into)
        if self._pending is not None:
            self._pending.apply(part, offset, into)

    def _read(self, part: int, offset: int, into: memoryview) -> None:
        with self.reader.listed(self.manifest):
            self._files.read_tensor(*self._of_part[part], offset, into)

    def check(self, part: int) -> None:
        where = self.parts[part]
        buffer = memoryview(bytearray(min(where.nbytes, CHECKSUM_BLOCK)))
        for start in range(0, where.nbytes, CHECKSUM_BLOCK):
            self._read(part, start, buffer[: min(CHECKSUM_BLOCK, where.nbytes - start)])

    def identity(self) -> list[Any]:
        files = [[ref.path, ref.checksums] for ref in self.manifest.files.values()]
        return [self.path, self.progress, sorted(files)]

    @property
    def bytes_read(self) -> int:
        """The number of bytes that were read and verified."""
        return self._files.bytes_read

    def _told_of_state_dict(
        self, atoms: Iterable[dict[str, Any]], paths: dict[str, list[Any]], values: dict[str, Any]
    ) -> dict[str, Any]:
        """Add the tensors of a commit that ``dcp.save`` made, and return its progress.

        The writer did not have ``values``, which name the parameters that an optimizer knows by number.
        """
        ways = {key: tuple(path) for key, path in paths.items()}
        by_key = {atom[KEY]: atom for atom in atoms}
        kinds = {key: ShapeAndType(tuple(atom["shape"]), atom["dtype"]) for key, atom in by_key.items()}
        named = name_all(kinds, ways, values)
        rest = dict(values)
        for key, atom in by_key.items():
            name, slot = named.tensors[key]
            stored = self._stored({**atom, "name": name, "slot": slot}, self.manifest.files)
            self.by_key[key] = stored
            add_or_tell(self, key, stored, rest)
        found = {key: rest[key] for key in ways if key in rest}
        return progress_of(found, ways, named, self.path)

    def _stored(self, described: dict[str, Any], files: dict[str, FileRef]) -> SourceTensor:
        pieces = []
        for each in described["fragments"]:
            part, held = self._part(files[each["unit"]], each["key"])
            local, strides = Region.from_json(each["local"]), row_major(held)
            offset = sum(a * stride for a, stride in zip(local.start, strides, strict=True))
            pieces.append(Fragment(Region.from_json(each["global"]), part, offset, strides))
        atom = TensorEntry.from_json(described)
        return SourceTensor(atom, Fragments.of(pieces, len(atom.shape)))

    def _part(self, ref: FileRef, key: str) -> tuple[int, tuple[int, ...]]:
        """Return the part for the tensor ``key`` of a file, and the shape of that tensor. Raises ``Damaged``."""
        entry = self._files.entry(ref, key)
        number = self._numbers.get((ref.path, key))
        if number is None:
            number = self.add_part(StoredArray(ref.path, entry.offset, entry.nbytes, entry.dtype))
            self._numbers[ref.path, key] = number
            self._of_part.append((ref, key))
        return number, entry.shape


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
