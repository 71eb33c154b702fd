"""Reading of a commit that other ranks have made, as the fragments that this rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from ...errors import Damaged, NoCommit
from ...state.layout.regions import Region
from ...store.format.file_names import Layout
from ...store.format.manifest import FileRef, Manifest
from ...store.format.payload_ranges import VerifiedFiles, read_box
from ...store.run_store import LocalStore


class ReshardedCommit:
    """A commit of an open run. Every byte is verified as it is read."""

    def __init__(self, store: LocalStore, manifest: Manifest) -> None:
        self._store, self._manifest, self._files = store, manifest, VerifiedFiles(store.disk)

    @cached_property
    def _atoms(self) -> dict[str, dict[str, Any]]:
        return self._store.atoms(self._manifest)

    def file(self, name: str, never_changes: bool, is_here: Callable[[str], bool]) -> FileRef | None:
        """Return the commit's file called ``name``, whose name identifies its content.

        For a file that ``never_changes``, a file of another commit may be returned: one with the same content that
        ``is_here`` is preferred.
        """
        found = self._manifest.files.get(name)
        if not never_changes or (found is not None and is_here(found.path)):
            return found
        for ref in self._store.commits():
            with suppress(Damaged, NoCommit):
                other = self._store.load(ref).files.get(name)
                if other is not None and (found is None or (_is_same(found, other) and is_here(other.path))):
                    return other
        return found

    def fill(
        self, image: memoryview, layout: Layout, places: Mapping[str, tuple[tuple[int, ...], Region]]
    ) -> None:
        """Fill ``image`` with the commit's values of the regions at ``places``, by key of the tensor entry."""
        image[:] = bytes(len(image))
        for entry in layout.entries:
            box = places[entry.key][1]
            image[entry.offset : entry.end] = read_box(
                self._files, self._manifest, self._atoms[entry.key], box
            )


def _is_same(one: FileRef, other: FileRef) -> bool:
    return (one.bytes, one.checksums) == (other.bytes, other.checksums)
