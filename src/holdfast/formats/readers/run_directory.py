"""The commits of this library as sources, for everything that reads a state of any format.

Every byte that is returned has been verified by the checksums of the manifest. A commit that is retired while it is
read is reported as such, and not as damage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...errors import BadInput
from ...state.encoding import joined
from ...state.layout.fragments import Fragment, Fragments, row_major
from ...state.layout.regions import Region
from ...state.tensor_entries import PENDING, TensorEntry
from ...store.format.manifest import FileRef, Manifest
from ...store.format.payload_files import VerifiedFiles
from ...store.format.payload_layout import CHECKSUM_BLOCK
from ...store.reader import RunReader
from ..entry_keys import KEY, ShapeAndType, name_all
from ..source import Source, SourceTensor, StoredArray
from ..state_dict_progress import add_or_tell, progress_of, state_dict_of

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
        for fragment in described["fragments"]:
            part, held = self._part(files[fragment["unit"]], fragment["key"])
            local, strides = Region.from_json(fragment["local"]), row_major(held)
            offset = sum(a * stride for a, stride in zip(local.start, strides, strict=True))
            pieces.append(Fragment(Region.from_json(fragment["global"]), part, offset, strides))
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
