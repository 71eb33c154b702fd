"""Bases: commits of the whole state, made beside training, a bounded number of bytes in each step.

The state is divided into units. Each is copied at the end of some step, the next ones at the ends of later steps, and
written to a generation file of its own. The commit is of the step at which the last one was copied; it names for each
unit the step that the unit is of, and the records from there on bring it to the commit's step. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ..io.buffers import Buffer
from ..state.atoms import Atom
from ..state.boxes import Box
from ..state.live import BUFFERS, Held, LiveState
from ..store.generations import Generations
from ..store.layout import Layout
from ..store.local import LocalStore
from ..store.manifest import Manifest, Share
from ..units import MiB

UNIT_BYTES = 64 * MiB
"""About how large a unit is; a parameter with its optimizer state is not divided."""

METADATA = {"format": "holdfast", "version": "1"}


@dataclass
class _Unit:
    name: str
    owners: tuple[str, ...]
    files: Generations


@dataclass
class _Staged:
    unit: _Unit
    step: int
    generation: int
    future: Future[tuple[str, ...]]


class BaseMaker:
    """Makes one base at a time, or ``prefix``'s part of one. All but the writing happens on the training thread."""

    def __init__(self, store: LocalStore, state: LiveState, prefix: str = "") -> None:
        self._store, self._state, self._prefix = store, state, prefix
        self._units: list[_Unit] = []
        self._index: dict[str, Any] = {}
        self._atoms: dict[str, Atom] = {}
        self._left: list[_Unit] = []
        self._staged: list[_Staged] = []
        self._copying: list[tuple[Buffer, Future]] = []

    def watch(self, state: LiveState) -> None:
        """From here on bases are of ``state``. None is under way."""
        self._state = state

    @property
    def step(self) -> int:
        """At which the last unit was copied."""
        return self._staged[-1].step

    @property
    def under_way(self) -> bool:
        return bool(self._left or self._staged)

    @property
    def all_staged(self) -> bool:
        return not self._left

    @property
    def memory_bytes(self) -> int:
        """What copies of units take at present."""
        self._free_written()
        return sum(buffer.nbytes for buffer, _ in self._copying)

    @property
    def left_bytes(self) -> int:
        """What copies of the units that are left will take."""
        return sum(map(_bytes_of, self._left))

    def begin(self) -> None:
        """Divide the state as it is now; nothing is copied yet. Makes files where the state has changed its form."""
        owned = self._owned()
        atoms = _atoms_of(owned)
        if atoms != self._atoms:
            for unit in self._units:
                self._store.drop_unit(unit.files)
            self._units = [self._unit(number, group, owned) for number, group in enumerate(_groups(owned))]
            self._index = self._store.put_index(_index_of(self._units, owned, self._state))
            self._atoms = atoms
        self._left, self._staged = list(self._units), []

    def stage(self, step: int, most_bytes: int) -> None:
        """Copy units as they are at the end of ``step``, about ``most_bytes`` of them and one at least."""
        owned, copied = self._owned(), 0
        if _atoms_of(owned) != self._atoms:  # a state that was made, or grew, since the base was begun
            self.give_up()
            self.begin()
        while self._left and (not copied or copied + _bytes_of(self._left[0]) <= most_bytes):
            unit = self._left.pop(0)
            layout = unit.files.layout
            buffer = Buffer(layout.file_bytes, "base")
            for owner in unit.owners:
                for key, (_, tensor) in owned[owner].items():
                    _write_tensor(buffer.view, layout, key, tensor)
            generation = unit.files.acquire()
            future = unit.files.write(generation, buffer.view, kind="state", phase="base", priority=2)
            self._copying.append((buffer, future))
            self._staged.append(_Staged(unit, step, generation, future))
            copied += layout.file_bytes

    def wait(self) -> None:
        """Return when what is staged is written. Raises what a write failed with."""
        for staged in self._staged:
            staged.future.result()
        self._free_written()

    def publish(self, progress: dict[str, Any]) -> Manifest:
        """Make the base a commit of ``step``, of which ``progress`` is, once its units are written. Durable when this
        returns."""
        manifest = self._store.publish(self.step, *self._written(progress))
        self._store.prune_journal()
        self._free_written()
        self._staged = []
        return manifest

    def share(self, progress: dict[str, Any]) -> Share:
        """Instead of ``publish``, this rank's part of a commit of all ranks. Durable when this returns."""
        return self._store.share(self.step, *self._written(progress))

    def published(self) -> None:
        """The first rank has made the base, whose part was shared, a commit."""
        for staged in self._staged:
            staged.unit.files.release(staged.generation)
        self._free_written()
        self._staged = []

    def _written(self, progress: dict[str, Any]) -> tuple[dict, dict, dict, dict]:
        files = {s.unit.name: (s.generation, s.future.result()) for s in self._staged}
        return files, self._index, progress, {s.unit.name: s.step for s in self._staged}

    def give_up(self) -> None:
        """Forget a base that was begun. Returns when nothing of it is under way."""
        for staged in self._staged:
            staged.future.exception()
            staged.unit.files.release(staged.generation)
        self._left, self._staged = [], []
        self._free_written()

    def _owned(self) -> dict[str, Held]:
        owned = {p.name: self._state.owned(p) for p in self._state.stored}
        buffers = self._state.buffers()
        return {**owned, BUFFERS: buffers} if buffers else owned

    def _unit(self, number: int, owners: tuple[str, ...], owned: dict[str, Held]) -> _Unit:
        """The unit's name says its form, since a file is of one size for ever."""
        atoms = [atom for owner in owners for atom, _ in owned[owner].values()]
        layout = Layout.build([(atom.key, atom.dtype, atom.shape) for atom in atoms], METADATA)
        form = xxhash.xxh3_64_hexdigest(layout.header)[:8]
        files = self._store.unit(
            f"{self._prefix}unit_{number:03d}-{form}", layout, copies=self._store.retain + 1
        )
        files.create()
        return _Unit(files.name, owners, files)

    def _free_written(self) -> None:
        for buffer, _ in [item for item in self._copying if item[1].done()]:
            buffer.free()
        self._copying = [item for item in self._copying if not item[1].done()]


def _atoms_of(owned: dict[str, Held]) -> dict[str, Atom]:
    return {key: atom for held in owned.values() for key, (atom, _) in held.items()}


def _groups(owned: dict[str, Held]) -> list[tuple[str, ...]]:
    """Owners in order, joined to about ``UNIT_BYTES``."""
    groups: list[list[str]] = []
    filled = 0
    for owner, held in owned.items():
        nbytes = sum(atom.nbytes for atom, _ in held.values())
        if not groups or filled + nbytes > UNIT_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(owner)
        filled += nbytes
    return [tuple(group) for group in groups]


def _index_of(units: Sequence[_Unit], owned: dict[str, Held], state: LiveState) -> dict[str, Any]:
    atoms: dict[str, Any] = {}
    for unit in units:
        for owner in unit.owners:
            for key, (atom, _) in owned[owner].items():
                shape, box = state.place_of(atom)
                local = Box.whole(atom.shape)
                atoms[key] = {
                    "name": atom.name, "slot": atom.slot, "shape": list(shape), "dtype": atom.dtype,
                    "fragments": [
                        {"unit": unit.name, "key": key, "global": box.to_json(), "local": local.to_json()}
                    ],
                }  # fmt: skip
    return {"version": 1, "atoms": atoms}


def _bytes_of(unit: _Unit) -> int:
    return unit.files.layout.file_bytes


def _write_tensor(image: memoryview, layout: Layout, key: str, tensor: torch.Tensor) -> None:
    entry = layout[key]
    if entry.nbytes:
        place = torch.frombuffer(image[entry.offset : entry.end], dtype=tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
