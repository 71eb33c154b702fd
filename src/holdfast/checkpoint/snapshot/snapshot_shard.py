"""One writer's share of a snapshot, loaded into a live state. A writer's part of a run is called a stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import torch

from ...io.buffers import Buffer
from ...state.layout.flat_ranges import FLAT, AnyRegion, regions_of
from ...state.layout.regions import Region
from ...state.live_state import BUFFERS, LiveState
from ...state.tensor_entries import CARRIED, RESIDUAL, SUBSPACE
from ...store.format.manifest import FileRef, Manifest
from ...store.format.payload_files import index_of_stream, read_file
from ...store.run_store import LocalStore
from ..capture.staging_buffers import tensors_of


class SnapshotShard:
    """The share of ``stream`` in the snapshot ``base``.

    Its tensors have *owners*: the parameter that they belong to, or all buffers.
    """

    def __init__(self, store: LocalStore, base: Manifest, stream: str) -> None:
        self._store, self._base, self._stream = store, base, stream

    @cached_property
    def atoms(self) -> dict[str, dict[str, Any]]:
        """The tensor entries of the share, by key."""
        return index_of_stream(self._store.disk, self._base, self._stream)["atoms"]

    @cached_property
    def boxes(self) -> dict[str, AnyRegion]:
        """The region of each parameter that the writer stored."""
        return {
            atom["name"]: regions_of(atom["shape"], atom["fragments"])[0]
            for atom in self.atoms.values()
            if atom["slot"] == "param"
        }

    @property
    def files(self) -> dict[str, FileRef]:
        """The files of the share, by chunk."""
        return self._base.files_of(self._stream)

    @property
    def progress(self) -> dict[str, Any]:
        return self._base.progress_of(self._stream)

    @property
    def has_foreign_residuals(self) -> bool:
        """Return whether the share has residuals of parameters that its writer does not store.

        That is so where each rank had residuals of its own.
        """
        return any(
            atom["slot"] == RESIDUAL and f"{atom['name']}/param" not in self.atoms
            for atom in self.atoms.values()
        )

    @property
    def residual_step(self) -> int:
        """The step of the share's residuals; that of the snapshot if it has none."""
        carried = [atom for atom in self.atoms.values() if atom["slot"] in CARRIED]
        return min((self._step_of(f) for atom in carried for f in atom["fragments"]), default=self._base.step)

    @property
    def steps_loaded(self) -> dict[str, int]:
        """The step of each owner's content that is loaded first: all of it, or some rows."""
        return {
            _owner(atom): min(self._step_of(fragment) for fragment in atom["fragments"])
            for atom in self.atoms.values()
            if atom["slot"] not in CARRIED  # always of the commit's own step
        }

    def later_rows(self, names: Collection[str]) -> dict[int, set[str]]:
        """Return by step the chunks with rows of the parameters ``names`` whose other rows are of an earlier step.

        They are loaded when replay has reached that step. Until then replay updates these rows, too, and the result is
        discarded.
        """
        found: dict[int, set[str]] = {}
        for atom in self.atoms.values():
            if atom["name"] not in names:
                continue
            steps = [self._step_of(fragment) for fragment in atom["fragments"]]
            for fragment, step in zip(atom["fragments"], steps, strict=True):
                if step > min(steps):
                    found.setdefault(step, set()).add(fragment["unit"])
        return found

    def load(
        self,
        state: LiveState,
        units: Collection[str],
        wanted: Collection[str],
        loaded: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Load from the files of ``units`` the content of the owners ``wanted``.

        Args:
            units: The chunks to read.
            wanted: The owners to load. With ``RESIDUAL`` among them, the parameters' residuals as well.
            loaded: Called with the bytes of each file.
        """
        files = {unit: file for unit, file in self.files.items() if unit in units}
        for unit, tensors in _read(self._store, files, loaded):
            told = {self._placed[unit, there]: tensor for there, tensor in tensors.items()}
            found = [(*at, each) for at, each in told.items() if self._is_wanted(at[0], wanted, state)]
            if all(box is None for _, box, _ in found):
                state.load({key: tensor for key, _, tensor in found})
                continue
            # one by one, since an optimizer keeps its state in the order in which it is given
            for key, box, tensor in found:
                if box is None:
                    state.load({key: tensor})
                else:
                    atom = self.atoms[key]
                    state.load_part(atom["name"], atom["slot"], tensor, box)

    @cached_property
    def _placed(self) -> dict[tuple[str, str], tuple[str, Region | None]]:
        """The tensor entry and the region of each stored tensor, by chunk and name in its file.

        The region is None for a tensor that is all that its writer stored of the entry, in that shape.
        """
        return {
            (fragment["unit"], fragment["key"]): (
                key,
                Region.from_json(fragment["global"]) if atom["fragments"][1:] or FLAT in fragment else None,
            )
            for key, atom in self.atoms.items()
            for fragment in atom["fragments"]
        }

    def _is_wanted(self, key: str, wanted: Collection[str], state: LiveState) -> bool:
        """Return whether a tensor belongs to the owners ``wanted``, or is one of this rank's residuals.

        False for subspaces, which an earlier version stored and nothing uses.
        """
        owner, slot = _owner(self.atoms[key]), self.atoms[key]["slot"]
        if slot == SUBSPACE:
            return False
        return owner in wanted or (slot == RESIDUAL and RESIDUAL in wanted and owner in state.boxes)

    def _step_of(self, fragment: dict[str, Any]) -> int:
        step = self._base.files[fragment["unit"]].step
        return self._base.step if step is None else step


def _owner(atom: dict[str, Any]) -> str:
    return BUFFERS if atom["slot"] == "buffer" else atom["name"]


def _read(
    store: LocalStore, files: Mapping[str, FileRef], loaded: Callable[[int], None]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the verified tensors of each of ``files``, by chunk. Their memory is reused two files later."""
    units, refs = list(files), list(files.values())
    buffers = [Buffer(max((file.bytes for file in refs), default=1), "recovery") for _ in range(2)]
    futures: list[tuple[memoryview, Future]] = []
    try:
        for number in range(len(refs) + 1):
            if number < len(refs):
                view = buffers[number % 2].view[: refs[number].bytes]
                futures.append((view, read_file(store.disk, store.queue, refs[number], view)))
            if number:
                view, future = futures[number - 1]
                future.result()
                loaded(len(view))
                yield units[number - 1], tensors_of(view)
    finally:
        for _, future in futures:
            future.exception()
        for buffer in buffers:
            buffer.free()
