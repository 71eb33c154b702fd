"""Shares: what one stream has of a base, loaded into a live state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import torch

from ..io.buffers import Buffer
from ..state.atoms import CARRIED, RESIDUAL, SUBSPACE
from ..state.boxes import Box
from ..state.live import BUFFERS, LiveState
from ..state.stretches import FLAT, Region, regions_of
from ..store.local import LocalStore
from ..store.manifest import FileRef, Manifest
from ..store.reading import index_of_stream, read_file
from .slots import tensors_of


class Share:
    """What ``stream`` has of ``base``. Its tensors have *owners*: a parameter that they are of, or all buffers."""

    def __init__(self, store: LocalStore, base: Manifest, stream: str) -> None:
        self._store, self._base, self._stream = store, base, stream

    @cached_property
    def atoms(self) -> dict[str, dict[str, Any]]:
        """By key."""
        return index_of_stream(self._store.disk, self._base, self._stream)["atoms"]

    @cached_property
    def boxes(self) -> dict[str, Region]:
        """By parameter the region that the writer stored."""
        return {
            atom["name"]: regions_of(atom["shape"], atom["fragments"])[0]
            for atom in self.atoms.values()
            if atom["slot"] == "param"
        }

    @property
    def files(self) -> dict[str, FileRef]:
        """By unit."""
        return self._base.files_of(self._stream)

    @property
    def progress(self) -> dict[str, Any]:
        return self._base.progress_of(self._stream)

    @property
    def has_foreign_residuals(self) -> bool:
        """Whether it has residuals of parameters that its writer does not store: each rank had residuals of its own."""
        return any(
            atom["slot"] == RESIDUAL and f"{atom['name']}/param" not in self.atoms
            for atom in self.atoms.values()
        )

    @property
    def residual_step(self) -> int:
        """The step of its residuals; that of the base if it has none."""
        carried = [atom for atom in self.atoms.values() if atom["slot"] in CARRIED]
        return min((self._step_of(f) for atom in carried for f in atom["fragments"]), default=self._base.step)

    @property
    def steps_loaded(self) -> dict[str, int]:
        """By owner, the step of what is loaded of it first: of all that is there of it, or of some rows."""
        return {
            _owner(atom): min(self._step_of(fragment) for fragment in atom["fragments"])
            for atom in self.atoms.values()
            if atom["slot"] not in CARRIED  # always of the commit's own step
        }

    def later_rows(self, names: Collection[str]) -> dict[int, set[str]]:
        """By step the units that hold rows of one of the parameters ``names`` of which other rows are of an earlier
        step. They are loaded when replay has come there; until then it updates those rows too, for nothing."""
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
        """Of what the files of ``units`` hold load what is of owners that are ``wanted``; residuals, which are of
        parameters as well, with ``RESIDUAL`` among them. ``loaded`` is told bytes."""
        files = {unit: file for unit, file in self.files.items() if unit in units}
        for unit, tensors in _read(self._store, files, loaded):
            told = {self._placed[unit, there]: tensor for there, tensor in tensors.items()}
            found = [(*at, each) for at, each in told.items() if self._is_wanted(at[0], wanted, state)]
            if all(box is None for _, box, _ in found):
                state.load({key: tensor for key, _, tensor in found})
                continue
            # one by one: an optimizer has its slots in the order in which they are given
            for key, box, tensor in found:
                if box is None:
                    state.load({key: tensor})
                else:
                    atom = self.atoms[key]
                    state.load_part(atom["name"], atom["slot"], tensor, box)

    @cached_property
    def _placed(self) -> dict[tuple[str, str], tuple[str, Box | None]]:
        """By unit and name in its file, of which atom a tensor is, and, if it is not all that its writer stored of that
        as a tensor of that shape, which region."""
        return {
            (fragment["unit"], fragment["key"]): (
                key,
                Box.from_json(fragment["global"]) if atom["fragments"][1:] or FLAT in fragment else None,
            )
            for key, atom in self.atoms.items()
            for fragment in atom["fragments"]
        }

    def _is_wanted(self, key: str, wanted: Collection[str], state: LiveState) -> bool:
        """Whether a tensor is of one of the owners ``wanted``, or a residual of this rank's own; nothing goes on with
        subspaces, which an earlier version stored."""
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
    """The verified tensors of each of ``files``, by unit, whose memory is used again for the next but one."""
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
