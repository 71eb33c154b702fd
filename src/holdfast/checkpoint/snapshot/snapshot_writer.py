"""The writer of snapshots: commits of the whole state, made beside training, some bytes in each step.

The state is divided into chunks (``SnapshotChunk``): some parameters with what belongs to them, or some rows of a large
one. Each chunk is copied at the end of some step and written to a generation file of its own. The commit is of the step
at which the last chunk was copied. It names the step of each chunk, and the log records from there on bring the chunk
to the commit's step. Sizes are bytes. In the code a snapshot is a *base*.

A chunk of frozen parameters is written once. Later snapshots name its file again:

1. Before anything is copied, each such chunk is compared: change counters and addresses by the training thread, and
   then its bytes with the checksums of the file, by the recorder's thread.
2. Only when all have been compared, the others are copied. A chunk that differs is copied like any other.

Chunks on a device are copied into one of two pinned buffers. The writing thread waits for these copies, not the
training thread.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast import failpoints

from ...accelerators import devices_of, synchronize
from ...errors import DoesNotFit, PoolExhausted
from ...io.buffers import Buffer
from ...quantities import PAGE, format_bytes, round_up, shown
from ...state.live_state import Held, LiveState
from ...state.tensor_entries import TensorEntry
from ...store.format.manifest import FileRef, Manifest, RankShare
from ...store.run_store import LocalStore
from ..capture.staging_buffers import DeviceCopies, pinned
from ..log.recorder import InlineRecorder, Recorder, RecorderTask
from .frozen_chunks import FrozenChunks, StagedChunk
from .snapshot_chunks import SnapshotChunk, atoms_of, chunks_of, divided, frozen_in, of_one_base, owned_by
from .snapshot_image import SnapshotImage, place_in, write_tensor


class PinnedChunks:
    """Two pinned buffers, each of ``unit_bytes``, for copies of chunks on ``devices``.

    The training thread takes them. They are given back when their content is on the disk.
    """

    def __init__(self, devices: Sequence[torch.device], unit_bytes: int) -> None:
        self.departures, self.unit_bytes = DeviceCopies(devices), unit_bytes
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self.is_made = False

    def make(self) -> None:
        """Allocate two buffers, if they can be pinned. Called by the writing thread, because pinning takes a while."""
        for _ in range(2):
            buffer = Buffer(round_up(self.unit_bytes), "base")
            np.frombuffer(buffer.view, np.uint8)[::PAGE] = 0  # fault every page in
            buffer.unpin = pinned(buffer.view, self.departures.devices[0], "copies for bases")
            if buffer.unpin is None:
                return buffer.free()
            self.give(buffer)
        self.is_made = True

    def take(self, nbytes: int) -> Buffer | None:
        """Return a buffer for a chunk; None if none is free, or if they are too small."""
        with self._lock:
            return self._free.pop() if self._free and nbytes <= self.unit_bytes else None

    def takes(self, nbytes: int) -> bool:
        """Return whether a buffer for such a chunk exists, free or not."""
        return self.is_made and nbytes <= self.unit_bytes

    def give(self, buffer: Buffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def free(self) -> None:
        """Unpin and free all buffers that are not in use."""
        with self._lock:
            for buffer in self._free:
                assert buffer.unpin is not None
                buffer.unpin()
                buffer.free()
            self._free.clear()


class SnapshotWriter:
    """Writer of one snapshot at a time, or of this rank's share of one (``prefix``).

    The training thread divides and copies. The recorder's thread does all that touches the disk, so that a hanging disk
    is noticed by that thread's deadline.
    """

    def __init__(
        self,
        store: LocalStore,
        state: LiveState,
        recorder: Recorder | InlineRecorder,
        prefix: str = "",
        sized: Callable[[], None] = lambda: None,
        waits: bool = False,
    ) -> None:
        """Prepare a writer.

        Args:
            sized: Called when the size of a snapshot has changed, before any file is made.
            waits: Have training wait while frozen chunks are compared, because the script may change them in each step.
        """
        self._store, self._state, self._recorder, self._prefix = store, state, recorder, prefix
        self._sized, self._warns = sized, True
        self._frozen: set[str] = set()
        """The frozen parameters when the state was divided last."""
        self._chunks = FrozenChunks(recorder, waits)
        self._units: list[SnapshotChunk] = []
        self._expected = 0, 0
        """The newest result of ``expected_bytes``, for the tensor entries ``_expected_of``."""
        self._expected_of: dict[str, TensorEntry] | None = None
        self._index: dict[str, Any] = {}
        self._atoms: dict[str, TensorEntry] = {}
        self._left: list[SnapshotChunk] = []
        self._staged: list[StagedChunk] = []
        self._counting = threading.Lock()
        self.memory_bytes = 0
        """The bytes that copies of chunks take at present."""
        self.written_bytes = 0
        self.write_seconds = 0.0
        """The approximate seconds in which there was something to write."""
        self._last_write = 0.0
        self._landing: PinnedChunks | None = None
        """None unless the state is on a device."""
        self.keeps_buffers = False
        """True if the memory of copies is kept for the next snapshot, since fresh memory makes copying slower."""
        self._spare: dict[int, list[Buffer]] = {}
        """Memory of copies that are written, by size."""

    def watch(self, state: LiveState, is_copy: bool = False) -> None:
        """Make the following snapshots of ``state``, and divide it again. Called while none is under way.

        With ``is_copy`` its tensors are new copies of the training's, of which only the bytes tell what has changed.
        """
        self._state, self._atoms, self._expected_of = state, {}, None
        if is_copy:
            self._warns = False  # the trainer has seen the change
            self._chunks.distrust()

    @property
    def under_way(self) -> bool:
        return bool(self._left or self._staged)

    @property
    def all_staged(self) -> bool:
        return not self._left

    @property
    def next_bytes(self) -> int:
        """The bytes that a copy of the next chunk takes; 0 if no chunk is to be copied."""
        return next((unit.layout.file_bytes for unit in self._left if not self._chunks.is_equal(unit)), 0)

    @property
    def left_bytes(self) -> int:
        """The bytes that copies of the remaining chunks will take."""
        return sum(unit.layout.file_bytes for unit in self._left if not self._chunks.is_equal(unit))

    @property
    def late_bytes(self) -> int:
        """The remaining bytes that must be copied at the end of one step, after all others."""
        return sum(unit.layout.file_bytes for unit in self._left if unit.late)

    @property
    def full_bytes(self) -> int:
        """The bytes that every snapshot writes, as the state was divided last."""
        return sum(unit.layout.file_bytes for unit in self._units if not unit.is_frozen)

    @property
    def frozen_bytes(self) -> int:
        """The bytes of frozen parameters, which a snapshot names and writes only where they have changed."""
        return sum(unit.layout.file_bytes for unit in self._units if unit.is_frozen)

    def begin(self) -> None:
        """Divide the state into chunks, without copying any. Makes files if the form of the state has changed."""
        owned, frozen = owned_by(self._state), frozen_in(self._state)
        atoms = atoms_of(owned)
        if atoms != self._atoms or frozen != self._frozen or not self._units:
            before = self._units
            self._units, index = divided(owned, self._state, self._prefix, frozen)
            self._free_spare()
            self._atoms, self._frozen, base = atoms, frozen, self._store.newest_base
            files = {} if base is None else base.files
            self._place(files)
            named = self._chunks.find(self._units, files)
            self._sized()
            self._recorder.put(
                RecorderTask(partial(self._make, before, self._units, index, named), at_once=True)
            )
        self._left, self._staged = list(self._units), []
        self._chunks.begin(self._units, owned)

    def _place(self, files: Mapping[str, FileRef]) -> None:
        """Choose the folder of each chunk, which names its drive. Frozen chunks stay where their ``files`` are."""
        used: set[str] = set()
        for is_frozen in (False, True):
            units = [unit for unit in self._units if unit.is_frozen == is_frozen]
            folders = self._store.folders_for([unit.layout.file_bytes for unit in units])
            used.update(folders)
            for unit, folder in zip(units, folders, strict=True):
                there = files[unit.name].path.rpartition("/")[0] if is_frozen and unit.name in files else ""
                unit.folder = there if there in used else folder

    def expected_bytes(self) -> tuple[int, int]:
        """Return ``full_bytes`` and ``frozen_bytes``, also before the first snapshot of this process."""
        if self._units:
            return self.full_bytes, self.frozen_bytes
        state, owned = self._state, owned_by(self._state)
        atoms = atoms_of(owned)
        if atoms != self._expected_of:  # an optimizer's state appears with its first step
            units = chunks_of(owned, state, self._prefix, frozen_in(state))
            frozen = sum(unit.layout.file_bytes for unit in units if unit.is_frozen)
            self._expected = sum(unit.layout.file_bytes for unit in units) - frozen, frozen
            self._expected_of = atoms
        return self._expected

    def is_as_in(self, base: Manifest) -> bool:
        """Return whether the published snapshot ``base`` holds the state as it is now, by all of its bytes.

        Changes through ``.data`` or NumPy are found only so. All chunks of ``base`` are of its step. Training waits.
        """
        state, owned = self._state, owned_by(self._state)
        units = chunks_of(owned, state, self._prefix, frozen_in(state))
        files = base.files
        if any(unit.name not in files for unit in units):
            return False
        images = {unit.name: SnapshotImage(unit.layout, unit.tensors_of(owned)) for unit in units}
        settle_devices(tensor for held in owned.values() for _, tensor in held.values())

        def is_equal(name: str) -> bool:
            checksums = files[name].checksums
            blocks = range(len(checksums))
            return images[name].first_difference(checksums, blocks, self._recorder.heartbeat) is None

        return self._recorder.do(lambda: all(map(is_equal, images)))

    def name_again(self, step: int) -> bool:
        """Name the files of the frozen chunks that have not changed, and return whether this is done.

        False while chunks are being compared, if one of them differs, which is copied then, and if the snapshot was
        begun again. Nothing is copied before this returns True.
        """
        waiting = [unit for unit in self._left if self._chunks.is_equal(unit)]
        if not waiting:
            return True
        owned = self._owned_now()
        if owned is None or not self._chunks.compare(waiting, owned):
            return False
        if differ := self._chunks.differences():
            self._copy_changed(differ, [key for keys in differ.values() for key in keys])
            return False
        self._staged += [self._chunks.name_again(unit, step) for unit in waiting]
        self._left = [unit for unit in self._left if not self._chunks.is_equal(unit)]
        return True

    def _copy_changed(self, units: Collection[str], keys: Sequence[str]) -> None:
        """Copy the frozen chunks ``units`` in this snapshot, and warn that their files have other ``keys``."""
        before = self._chunks.forget(units)
        self._recorder.put(RecorderTask(partial(self._release, before), at_once=True))
        if not self._warns:
            return
        names = shown(list(dict.fromkeys(key.rpartition("/")[0] for key in keys)))
        warnings.warn(
            f"frozen parameters ({names}, or some of these) changed in a way that nothing counts (through .data or"
            " NumPy), or since the resume. The base that is being made has the new values; the bases and records"
            " since the change have the old ones. Call save() after such a change.",
            stacklevel=7,
        )

    def stage(self, step: int, most_bytes: int) -> bool:
        """Copy chunks as they are at the end of ``step``, at most ``most_bytes`` of them.

        Late chunks are copied only if all that is left is copied. Returns False, with nothing copied, where
        ``name_again`` does, or the state has changed its form and the snapshot was begun again.
        """
        if not self.name_again(step):
            return False
        owned = self._owned_now()
        if owned is None:
            return False
        late_too = self.left_bytes <= most_bytes
        while self._left and self.next_bytes <= most_bytes and (late_too or not self._left[0].late):
            unit = self._left[0]
            tensors = unit.tensors_of(owned)
            copied = self._copied(unit, tensors, now=late_too)
            if copied is None:
                break
            self._left.pop(0)
            most_bytes -= unit.layout.file_bytes
            self._staged.append(staged := self._copy_of(unit, step, owned))
            self._recorder.put(RecorderTask(partial(self._write, staged, *copied), at_once=True))
            failpoints.reach("after_unit_staged")
        return True

    def _copied(
        self, unit: SnapshotChunk, tensors: dict[str, torch.Tensor], now: bool
    ) -> tuple[Buffer, Sequence[Any]] | None:
        """Copy the tensors of ``unit``, and return the buffer with the events of copies under way into it.

        Returns None where a later step will find a pinned buffer free. With ``now`` training waits for the copies
        instead.
        """
        nbytes, devices = unit.layout.file_bytes, devices_of(tensors.values())
        largest = max(
            (each.layout.file_bytes for each in self._units if not each.late and not each.is_frozen),
            default=0,
        )
        if devices and largest and self._landing is None:
            self._landing = PinnedChunks(devices, largest)
            self._recorder.put(RecorderTask(self._landing.make, at_once=True))
        landing = self._landing if devices else None
        buffer = landing.take(nbytes) if landing is not None else None
        if landing is not None and buffer is not None:
            self._count(nbytes)
            places = [place_in(buffer.view, unit.layout, key, tensor) for key, tensor in tensors.items()]
            return buffer, landing.departures.send(places, list(tensors.values()))
        if landing is not None and landing.takes(nbytes) and not now:
            return None
        buffer = self._buffer(nbytes)
        for key, tensor in tensors.items():
            write_tensor(buffer.view, unit.layout, key, tensor)
        return buffer, ()

    def release(self) -> None:
        """Free the memory that is kept between snapshots. Called while nothing is under way."""
        self._free_spare()
        if self._landing is not None:
            self._landing.free()
            self._landing = None

    def write_next(self, step: int) -> None:
        """Write the next chunk as it is at the end of ``step``, without a copy; training waits for it.

        Raises the error of a failed write, and ``WriterHung``.
        """
        owned = self._owned_now()
        if owned is None:
            return
        unit = self._left.pop(0)
        tensors = unit.tensors_of(owned)
        settle_devices(tensors.values())
        if self._chunks.is_equal(unit):
            differ = self._chunks.differences_now(unit, owned)
            if differ is None:
                self._staged.append(self._chunks.name_again(unit, step))
                return
            self._copy_changed([unit.name], differ)
        self._staged.append(staged := self._copy_of(unit, step, owned))
        self._recorder.do(partial(self._write_through, staged, tensors))

    def _copy_of(self, unit: SnapshotChunk, step: int, owned: Mapping[str, Held]) -> StagedChunk:
        """Return the copy of ``unit`` at ``step``. That of a frozen chunk replaces the one before it."""
        staged = StagedChunk(unit, step)
        if unit.is_frozen and (before := self._chunks.replace(staged, owned)):
            self._recorder.put(RecorderTask(partial(self._release, before), at_once=True))
        return staged

    def publish(self, progress: dict[str, Any], again: bool = False) -> Manifest:
        """Publish the snapshot as a commit once all its chunks are written. It is durable when this returns.

        The commit is of the step at which the last chunk was copied. Called by the recorder's thread.

        Args:
            progress: The progress of that step.
            again: Replace an existing commit of the same step.
        """
        manifest = self._store.publish(self._staged[-1].step, *self._all_written(progress), again)
        self._store.prune_journal()
        self._store.measure()
        return manifest

    def share(self, progress: dict[str, Any]) -> RankShare:
        """Write this rank's share of a commit of all ranks, instead of ``publish``. It is durable when this returns."""
        share = self._store.share(self._staged[-1].step, *self._all_written(progress))
        failpoints.reach("after_share_written")
        return share

    def published(self) -> None:
        """Release the files of the shared snapshot, which the first rank has published."""
        for staged in self._staged:
            assert staged.unit.files is not None
            staged.unit.files.release(staged.generation)
        self.end()

    def end(self) -> None:
        """Note that the published snapshot is not under way any more."""
        self._staged = []

    def _all_written(self, progress: dict[str, Any]) -> tuple[dict, dict, dict, dict]:
        files = {}
        for staged in self._staged:
            files[staged.unit.name] = (staged.generation, staged.checksums)
            self._recorder.heartbeat()
        index = of_one_base(self._index, self._store.timeline, self._staged[-1].step, self._prefix)
        return (
            files,
            self._store.put_index(index),
            progress,
            {staged.unit.name: staged.step for staged in self._staged},
        )

    def give_up(self) -> None:
        """Abandon the snapshot under way. Its files are free again when running writes have ended."""
        staged, self._left, self._staged = self._staged, [], []
        if staged:
            self._recorder.put(RecorderTask(partial(self._release, staged), at_once=True))

    def _owned_now(self) -> dict[str, Held] | None:
        """Return the tensors to store.

        Returns None if optimizer state appeared or grew, or a frozen chunk that was to be named again has changed, and
        the snapshot was begun again.
        """
        owned = owned_by(self._state)
        named = [unit for unit in self._left if self._chunks.is_equal(unit)]
        if atoms_of(owned) == self._atoms and all(self._chunks.seems_equal(unit, owned) for unit in named):
            return owned
        self.give_up()
        self.begin()
        return None

    def _buffer(self, nbytes: int) -> Buffer:
        self._count(nbytes)
        with self._counting:
            spare = self._spare.get(nbytes)
            if spare:
                return spare.pop()
        return Buffer(nbytes, "base")

    def _free_spare(self) -> None:
        """Free the memory that is kept for the next snapshot."""
        with self._counting:
            spare, self._spare = self._spare, {}
        for buffer in (each for several in spare.values() for each in several):
            buffer.free()

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.memory_bytes += nbytes

    # Called by the recorder's thread from here on.

    def _make(
        self,
        before: list[SnapshotChunk],
        units: list[SnapshotChunk],
        index: dict[str, Any],
        named: Sequence[tuple[StagedChunk, FileRef]],
    ) -> None:
        """Make files for ``units``, and drop those of ``before``. Chunks in ``named`` have a file already.

        The name of a chunk encodes its form, since the size of a file never changes. Raises ``DoesNotFit``.
        """
        for unit in before:
            if unit.files is not None:
                self._store.drop_unit(unit.files)
        for unit in units:
            copies = 1 if unit.is_frozen and self._store.keep is not None else min(self._store.retain, 2) + 1
            unit.files = self._store.unit(unit.name, unit.layout, copies, unit.folder)
        for known, ref in named:
            assert known.unit.files is not None
            known.generation = known.unit.files.generation_of(ref.path)
        files = [unit.files for unit in units if unit.files is not None]
        nbytes, store = self._store.space_needed(files), self._store
        if nbytes and not store.make_room(nbytes):
            full = self.full_bytes + self.frozen_bytes
            least = int((store.used_bytes + nbytes + full) / store.cap_share)
            who = "what this rank stores" if store.cap_share < 1 else "the run"
            raise DoesNotFit(
                f"storage = {format_bytes(store.run_cap_bytes)} is too little: of"
                f" {store.root}, {who} takes {format_bytes(store.used_bytes)}, and the files for bases of"
                f" {format_bytes(full)} take {format_bytes(nbytes)} more. Give more than {least} bytes,"
                " since records take some as well."
            )
        for each in files:
            each.create()
            self._recorder.heartbeat()
        store.measure()
        self._index = index

    def _write(self, staged: StagedChunk, buffer: Buffer, marks: Sequence[Any]) -> None:
        """Wait for a copy and begin to write it. The buffer is freed or given back once it is written."""
        files, nbytes = staged.unit.files, staged.unit.layout.file_bytes
        assert files is not None
        for mark in marks:
            mark.synchronize()
        began = time.perf_counter()
        staged.generation = self._free_generation(staged.unit)
        staged.written = files.write(
            staged.generation, buffer.view[:nbytes], kind="state", phase="base", priority=2
        )
        staged.written.add_done_callback(lambda _: self._written(buffer, nbytes, began))

    def _written(self, buffer: Buffer, nbytes: int, began: float) -> None:
        now = time.perf_counter()
        if buffer.unpin is None and self.keeps_buffers:
            with self._counting:
                self._spare.setdefault(nbytes, []).append(buffer)
        elif buffer.unpin is None:
            buffer.free()
        elif self._landing is not None:
            self._landing.give(buffer)
        self._count(-nbytes)
        self._wrote(nbytes, began, now)

    def _wrote(self, nbytes: int, began: float, now: float) -> None:
        with self._counting:
            self.written_bytes += nbytes
            self.write_seconds += now - max(began, self._last_write)
            self._last_write = now

    def _write_through(self, staged: StagedChunk, tensors: dict[str, torch.Tensor]) -> None:
        files = staged.unit.files
        assert files is not None
        began = time.perf_counter()
        staged.generation = self._free_generation(staged.unit)
        checksums = files.write_through(
            staged.generation, SnapshotImage(staged.unit.layout, tensors).fill, phase="base", priority=2,
            beat=self._recorder.heartbeat,
        )  # fmt: skip
        staged.written = Future()
        staged.written.set_result(checksums)
        self._wrote(staged.unit.layout.file_bytes, began, time.perf_counter())

    def _free_generation(self, unit: SnapshotChunk) -> int:
        assert unit.files is not None
        try:
            return self._store.free_generation(unit.files)
        except PoolExhausted:
            if not unit.is_frozen:
                raise
            raise DoesNotFit(
                f"storage = {format_bytes(self._store.run_cap_bytes)} is too little: frozen parameters have changed and"
                f" are written again, which takes {format_bytes(unit.layout.file_bytes)} more until older bases are"
                " gone. Give more, or leave storage= out."
            ) from None

    def _release(self, staged: list[StagedChunk]) -> None:
        """Free the files of copies that no snapshot will name."""
        for each in staged:
            if self._chunks.holds(each):
                continue  # the next snapshot names it, and until then nobody may write to it or remove it
            if each.written is not None and each.unit.files is not None:
                each.written.exception()
                each.unit.files.release(each.generation)
            self._recorder.heartbeat()


def settle_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for running work on the devices of ``tensors``, before another thread reads them."""
    for device in devices_of(tensors):
        synchronize(device)
