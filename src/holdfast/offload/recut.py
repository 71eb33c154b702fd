"""Recutting: a commit that other ranks have made, read as the pieces that this one has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from ..errors import Damaged, NoCommit
from ..state.boxes import Box
from ..store.layout import Layout
from ..store.local import LocalStore
from ..store.manifest import FileRef, Manifest
from ..store.ranges import VerifiedFiles, read_box


class Recut:
    """A commit of an open run. Every byte is verified as it is read."""

    def __init__(self, store: LocalStore, manifest: Manifest) -> None:
        self._store, self._manifest, self._files = store, manifest, VerifiedFiles(store.disk)

    @cached_property
    def _atoms(self) -> dict[str, dict[str, Any]]:
        return self._store.atoms(self._manifest)

    def file(self, name: str, never_changes: bool) -> FileRef | None:
        """The file that the commit calls by a name that says what is in it: of what ``never_changes``, another commit's
        will do."""
        found = self._manifest.files.get(name)
        for ref in self._store.commits() if found is None and never_changes else ():
            with suppress(Damaged, NoCommit):
                found = found or self._store.load(ref).files.get(name)
        return found

    def fill(
        self, image: memoryview, layout: Layout, places: Mapping[str, tuple[tuple[int, ...], Box]]
    ) -> None:
        """Fill ``image`` with what the commit has of the regions at ``places`` of its atoms, by key."""
        image[:] = bytes(len(image))
        for entry in layout.entries:
            box = places[entry.key][1]
            image[entry.offset : entry.end] = read_box(
                self._files, self._manifest, self._atoms[entry.key], box
            )
