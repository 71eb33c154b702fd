"""Bases: commits of the whole state, made beside training, a bounded number of bytes in each step.

The state is divided into units: some parameters with what belongs to them, or some rows of a large one. Each is copied
at the end of some step, the next ones at the ends of later steps, and written to a generation file of its own. The
commit is of the step at which the last one was copied; it names for each unit the step that the unit is of, and the
records from there on bring it to the commit's step. Sizes are bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast import failpoints

from ..errors import DoesNotFit
from ..io.buffers import Buffer
from ..state.atoms import Atom
from ..state.live import Held, LiveState
from ..store.local import LocalStore
from ..store.manifest import Manifest, Share
from ..units import format_bytes
from .division import Unit, atoms_of, divided, of_one_base, owned_by
from .image import Image, write_tensor
from .recorder import Inline, Recorder, Task


@dataclass
class _Staged:
    unit: Unit
    step: int
    generation: int = -1
    written: Future[tuple[str, ...]] | None = None


class BaseMaker:
    """Makes one base at a time, or ``prefix``'s part of one. The training thread divides and copies; what touches the
    disk is done by the recorder's thread, so that a disk that hangs is seen by its deadline."""

    def __init__(
        self,
        store: LocalStore,
        state: LiveState,
        recorder: Recorder | Inline,
        prefix: str = "",
        sized: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """``sized`` is told how large a base is when that has changed, before anything is made for it."""
        self._store, self._state, self._recorder, self._prefix = store, state, recorder, prefix
        self._sized = sized
        self._units: list[Unit] = []
        self._index: dict[str, Any] = {}
        self._atoms: dict[str, Atom] = {}
        self._left: list[Unit] = []
        self._staged: list[_Staged] = []
        self._counting = threading.Lock()
        self.memory_bytes = 0
        """What copies of units take at present."""
        self.written_bytes = 0
        self.write_seconds = 0.0
        """For which there was something to write, about."""
        self._last_write = 0.0

    def watch(self, state: LiveState) -> None:
        """From here on bases are of ``state``, which is divided anew. None is under way."""
        self._state, self._atoms = state, {}

    @property
    def under_way(self) -> bool:
        return bool(self._left or self._staged)

    @property
    def all_staged(self) -> bool:
        return not self._left

    @property
    def next_bytes(self) -> int:
        """What a copy of the next unit takes."""
        return self._left[0].layout.file_bytes

    @property
    def left_bytes(self) -> int:
        """What copies of the units that are left will take."""
        return sum(unit.layout.file_bytes for unit in self._left)

    @property
    def late_bytes(self) -> int:
        """Of them, what has to be copied at the end of one step, after all others."""
        return sum(unit.layout.file_bytes for unit in self._left if unit.late)

    @property
    def full_bytes(self) -> int:
        """Of a base as it was divided last."""
        return sum(unit.layout.file_bytes for unit in self._units)

    def begin(self) -> None:
        """Divide the state as it is now; nothing is copied yet. Files are made where it has changed its form."""
        owned = owned_by(self._state)
        atoms = atoms_of(owned)
        if atoms != self._atoms or not self._units:
            before = self._units
            self._units, index = divided(owned, self._state, self._prefix)
            self._atoms = atoms
            self._sized(self.full_bytes)
            self._recorder.put(Task(partial(self._make, before, self._units, index), at_once=True))
        self._left, self._staged = list(self._units), []

    def stage(self, step: int, most_bytes: int) -> bool:
        """Copy units as they are at the end of ``step``, ``most_bytes`` of them; late ones only if all that is left is
        copied. False, with nothing copied, where the state has changed its form and the base is begun again."""
        owned = self._owned_now()
        if owned is None:
            return False
        late_too = self.left_bytes <= most_bytes
        while self._left and self.next_bytes <= most_bytes and (late_too or not self._left[0].late):
            unit = self._left.pop(0)
            most_bytes -= unit.layout.file_bytes
            buffer = self._buffer(unit.layout.file_bytes)
            for key, tensor in unit.tensors_of(owned).items():
                write_tensor(buffer.view, unit.layout, key, tensor)
            self._staged.append(staged := _Staged(unit, step))
            self._recorder.put(Task(partial(self._write, staged, buffer), at_once=True))
            failpoints.reach("after_unit_staged")
        return True

    def write_next(self, step: int) -> None:
        """Write the next unit as it is now, at the end of ``step``, without a copy: training waits for it. Raises what
        the write failed with, and ``WriterHung``."""
        owned = self._owned_now()
        if owned is None:
            return
        unit = self._left.pop(0)
        self._staged.append(staged := _Staged(unit, step))
        tensors = unit.tensors_of(owned)
        settle_devices(tensors.values())
        self._recorder.do(partial(self._write_through, staged, tensors))

    def publish(self, progress: dict[str, Any], again: bool = False) -> Manifest:
        """Make the base a commit of the step at which the last unit was copied, of which ``progress`` is, once all are
        written; one of this step gives way if there is to be one ``again``. Durable when this returns. On the
        recorder's thread."""
        manifest = self._store.publish(self._staged[-1].step, *self._all_written(progress), again)
        self._store.prune_journal()
        self._store.measure()
        return manifest

    def share(self, progress: dict[str, Any]) -> Share:
        """Instead of ``publish``, this rank's part of a commit of all ranks. Durable when this returns."""
        share = self._store.share(self._staged[-1].step, *self._all_written(progress))
        failpoints.reach("after_share_written")
        return share

    def published(self) -> None:
        """The first rank has made the base, whose part was shared, a commit."""
        for staged in self._staged:
            assert staged.unit.files is not None
            staged.unit.files.release(staged.generation)
        self.end()

    def end(self) -> None:
        """The base that was published is not under way any more."""
        self._staged = []

    def _all_written(self, progress: dict[str, Any]) -> tuple[dict, dict, dict, dict]:
        files = {}
        for staged in self._staged:
            assert staged.written is not None
            files[staged.unit.name] = (staged.generation, staged.written.result())
            self._recorder.beat()
        index = of_one_base(self._index, self._store.timeline, self._staged[-1].step, self._prefix)
        return (
            files,
            self._store.put_index(index),
            progress,
            {staged.unit.name: staged.step for staged in self._staged},
        )

    def give_up(self) -> None:
        """Forget a base that was begun; its files can be used again when what is under way has ended."""
        staged, self._left, self._staged = self._staged, [], []
        if staged:
            self._recorder.put(Task(partial(self._release, staged), at_once=True))

    def _owned_now(self) -> dict[str, Held] | None:
        """None where a state was made, or grew, since the base was begun: it is begun again."""
        owned = owned_by(self._state)
        if atoms_of(owned) == self._atoms:
            return owned
        self.give_up()
        self.begin()
        return None

    def _buffer(self, nbytes: int) -> Buffer:
        with self._counting:
            self.memory_bytes += nbytes
        return Buffer(nbytes, "base")

    # On the recorder's thread

    def _make(self, before: list[Unit], units: list[Unit], index: dict[str, Any]) -> None:
        """Files for ``units`` instead of those ``before``. A unit's name says its form, since a file is of one size for
        ever."""
        for unit in before:
            if unit.files is not None:
                self._store.drop_unit(unit.files)
        for unit in units:
            unit.files = self._store.unit(unit.name, unit.layout, copies=min(self._store.retain, 2) + 1)
        files = [unit.files for unit in units if unit.files is not None]
        nbytes, store = self._store.space_needed(files), self._store
        if nbytes and not store.make_room(nbytes):
            least = int((store.used_bytes + nbytes + self.full_bytes) / store.cap_share)
            who = "what this rank stores" if store.cap_share < 1 else "the run"
            raise DoesNotFit(
                f"storage = {format_bytes(store.told_cap_bytes)} is too little: of"
                f" {store.root}, {who} takes {format_bytes(store.used_bytes)}, and the files for bases of"
                f" {format_bytes(self.full_bytes)} take {format_bytes(nbytes)} more. Give more than {least} bytes,"
                " since records take some as well."
            )
        for each in files:
            each.create()
            self._recorder.beat()
        store.measure()
        self._index = index

    def _write(self, staged: _Staged, buffer: Buffer) -> None:
        """Begin to write a copy, which goes when it is written."""
        files = staged.unit.files
        assert files is not None
        began = time.perf_counter()
        staged.generation = self._store.free_generation(files)
        staged.written = files.write(staged.generation, buffer.view, kind="state", phase="base", priority=2)
        staged.written.add_done_callback(lambda _: self._written(buffer, began))

    def _written(self, buffer: Buffer, began: float) -> None:
        nbytes, now = buffer.nbytes, time.perf_counter()
        buffer.free()
        with self._counting:
            self.memory_bytes -= nbytes
        self._wrote(nbytes, began, now)

    def _wrote(self, nbytes: int, began: float, now: float) -> None:
        with self._counting:
            self.written_bytes += nbytes
            self.write_seconds += now - max(began, self._last_write)
            self._last_write = now

    def _write_through(self, staged: _Staged, tensors: dict[str, torch.Tensor]) -> None:
        files = staged.unit.files
        assert files is not None
        began = time.perf_counter()
        staged.generation = self._store.free_generation(files)
        checksums = files.write_through(
            staged.generation, Image(staged.unit.layout, tensors).fill, kind="state", phase="base", priority=2,
            beat=self._recorder.beat,
        )  # fmt: skip
        staged.written = Future()
        staged.written.set_result(checksums)
        self._wrote(staged.unit.layout.file_bytes, began, time.perf_counter())

    def _release(self, staged: list[_Staged]) -> None:
        for each in staged:
            if each.written is not None and each.unit.files is not None:
                each.written.exception()
                each.unit.files.release(each.generation)
            self._recorder.beat()


def settle_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Another thread reads ``tensors``: what was begun on their devices has ended."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        torch.accelerator.synchronize()
