"""The files of frozen chunks, which snapshots name again while their content stays equal.

A chunk is equal to its file if two comparisons say so: change counters and addresses of its tensors, by the training
thread, and then its bytes with the checksums of the file, by the recorder's thread. The second finds changes that
nothing counts. Called by ``snapshot_writer``, which copies and writes what differs. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from ...accelerators import devices_of, marks, new_stream, on_stream
from ...quantities import MiB
from ...state.capture import changes_of
from ...state.live_state import Held
from ...store.format.manifest import FileRef
from ...store.format.payload_layout import CHECKSUM_BLOCK
from ..log.recorder import InlineRecorder, Recorder, RecorderTask
from .snapshot_chunks import SnapshotChunk
from .snapshot_image import SnapshotImage

COMPARED_BYTES_PER_STEP = 512 * MiB
"""Bytes of frozen chunks that are given to the recorder's thread at the end of one step, to be compared.

Records wait for it meanwhile, some 50 ms.
"""
COMPARED_AT_ONCE = CHECKSUM_BLOCK
"""Bytes of frozen chunks that the training thread compares itself, because that takes less than a millisecond."""
DEVICE_TURNS = 8
"""The number of snapshots beside training in which all bytes of a frozen chunk on a device are compared."""

Differences = tuple[str, ...] | None
"""Keys of the tensors in the first block of a file that differs; None if none does."""
Comparison = Callable[[Callable[[], None]], Differences]
"""Function that compares a chunk with its file. It calls its argument after each block."""


@dataclass
class StagedChunk:
    """A chunk as it was at the end of ``step``, on its way to a file or in it."""

    unit: SnapshotChunk
    step: int
    generation: int = -1
    written: Future[tuple[str, ...]] | None = None
    marks: list[tuple[int, int]] | None = None
    """Address and change count of each tensor of a frozen chunk as its file has it; None if that is not known."""
    is_whole: bool = True
    """False for a file of an earlier process until all of its bytes have been compared."""

    @property
    def is_written(self) -> bool:
        return self.written is not None and self.written.done() and self.written.exception() is None

    @property
    def checksums(self) -> tuple[str, ...]:
        """The checksums of the file, once it is written."""
        assert self.written is not None
        return self.written.result()


class FrozenChunks:
    """The frozen chunks of a writer's snapshots that have a file, and which of them are equal to it."""

    def __init__(self, recorder: Recorder | InlineRecorder, waits: bool) -> None:
        """Begin without any file.

        Args:
            recorder: Its thread compares bytes.
            waits: Have training wait meanwhile, because the script may change frozen chunks in each step.
        """
        self._recorder, self._waits = recorder, waits
        self._named: dict[str, StagedChunk] = {}
        """The last copy of each chunk, by name. Its file holds the content."""
        self._equal: set[str] = set()
        self._compared: dict[str, Future[Differences]] = {}
        """The differences of chunks from their files, by the name of the chunk."""
        self._turn = 0

    def find(
        self, units: Iterable[SnapshotChunk], files: Mapping[str, FileRef]
    ) -> list[tuple[StagedChunk, FileRef]]:
        """Return the chunks that the newest snapshot of the run has in its ``files``, each with its file.

        All others are without a file from now on.
        """
        found = []
        for unit in units:
            ref = files.get(unit.name) if unit.is_frozen else None
            if ref is None or ref.bytes != unit.layout.file_bytes:
                continue
            if not ref.path.startswith(f"{unit.folder}/{unit.name}."):
                continue
            named, known = (
                StagedChunk(unit, -1, written=_done(ref), is_whole=False),
                self._named.get(unit.name),
            )
            if known is not None and known.is_written and known.checksums == ref.checksums:
                named.marks, named.is_whole = known.marks, known.is_whole
            found.append((named, ref))
        self._named = {named.unit.name: named for named, _ in found}
        return found

    def begin(self, units: Iterable[SnapshotChunk], owned: Mapping[str, Held]) -> None:
        """Begin a snapshot of ``units``: the chunks that seem equal to their files are to be compared."""
        self._equal = {unit.name for unit in units if self.seems_equal(unit, owned)}
        self._compared = {}
        self._turn += 1

    def distrust(self) -> None:
        """Note that all tensors are new copies, of which only the bytes tell what has changed."""
        for known in self._named.values():
            known.marks, known.is_whole = None, False

    def is_equal(self, unit: SnapshotChunk) -> bool:
        """Return whether the snapshot under way names the file of ``unit`` again, as far as is known."""
        return unit.name in self._equal

    def seems_equal(self, unit: SnapshotChunk, owned: Mapping[str, Held]) -> bool:
        """Return whether a file holds the content of ``unit``, as far as counters and addresses tell."""
        known = self._named.get(unit.name)
        return known is not None and known.is_written and known.marks in (None, marks_of(unit, owned))

    def holds(self, staged: StagedChunk) -> bool:
        """Return whether later snapshots may name the file of ``staged``."""
        return self._named.get(staged.unit.name) is staged

    def compare(self, waiting: Sequence[SnapshotChunk], owned: Mapping[str, Held]) -> bool:
        """Have the chunks ``waiting`` compared with their files, some in each step. Return whether all are."""
        are_small = sum(unit.layout.file_bytes for unit in waiting) <= COMPARED_AT_ONCE
        on_device = any(devices_of(unit.tensors_of(owned).values()) for unit in waiting)
        at_once = self._waits or (are_small and not on_device)  # training would wait for a device
        under_way = 0
        for unit in waiting:
            if unit.name not in self._compared and under_way < COMPARED_BYTES_PER_STEP:
                done = self._compared[unit.name] = Future()
                comparison = self._comparison(unit, owned, whole=at_once or are_small)
                if at_once:
                    done.set_result(comparison(lambda: None))
                else:
                    task = partial(_set_result, done, comparison, self._recorder.heartbeat)
                    self._recorder.put(RecorderTask(task, at_once=True))
            if unit.name not in self._compared or not self._compared[unit.name].done():
                under_way += unit.layout.file_bytes
        return not under_way

    def differences(self) -> dict[str, tuple[str, ...]]:
        """Return the keys of tensors that differ, by the name of the chunk, once all chunks have been compared."""
        return {name: keys for name, each in self._compared.items() if (keys := each.result()) is not None}

    def differences_now(self, unit: SnapshotChunk, owned: Mapping[str, Held]) -> Differences:
        """Compare all bytes of ``unit`` with its file, while training waits."""
        comparison = self._comparison(unit, owned, whole=True)
        return self._recorder.do(lambda: comparison(self._recorder.heartbeat))

    def name_again(self, unit: SnapshotChunk, step: int) -> StagedChunk:
        """Return the copy of ``unit`` whose file holds its content, as of ``step``."""
        known = self._named[unit.name]
        known.step, known.is_whole = step, True
        return known

    def forget(self, names: Iterable[str]) -> list[StagedChunk]:
        """Return the copies of the chunks called ``names``, which differ from their files, and forget them."""
        names = [*names]
        self._equal.difference_update(names)
        for name in names:
            self._compared.pop(name, None)
        return [self._named.pop(name) for name in names]

    def replace(self, staged: StagedChunk, owned: Mapping[str, Held]) -> list[StagedChunk]:
        """Note ``staged``, a new copy of a frozen chunk, and return the one that it replaces, if there is one."""
        staged.marks = marks_of(staged.unit, owned)
        before = self._named.get(staged.unit.name)
        self._named[staged.unit.name] = staged
        return [] if before is None else [before]

    def _comparison(self, unit: SnapshotChunk, owned: Mapping[str, Held], whole: bool) -> Comparison:
        """Return a function that compares ``unit`` with its file.

        Of a chunk on a device only some bytes are compared, unless ``whole``, or if it was not compared yet.
        """
        known, tensors = self._named[unit.name], unit.tensors_of(owned)
        checksums, devices = known.checksums, devices_of(tensors.values())
        first, turns = (self._turn, DEVICE_TURNS) if devices and not whole and known.is_whole else (0, 1)
        known.marks = marks_of(unit, owned)
        events, image = marks(devices), SnapshotImage(unit.layout, tensors)

        def compare(beat: Callable[[], None]) -> Differences:
            for event in events:
                event.synchronize()
            with on_stream(new_stream(devices[0])) if devices else nullcontext():
                blocks = range(first % turns, len(checksums), turns)
                return image.first_difference(checksums, blocks, beat)

        return compare


def marks_of(unit: SnapshotChunk, owned: Mapping[str, Held]) -> list[tuple[int, int]]:
    """Return address and change count of each tensor of ``unit``."""
    return [
        (tensor.data_ptr(), changes_of(tensor))
        for owner in unit.owners
        for _, tensor in owned[owner].values()
    ]


def _set_result(done: Future[Differences], compare: Comparison, beat: Callable[[], None]) -> None:
    done.set_result(compare(beat))


def _done(ref: FileRef) -> Future[tuple[str, ...]]:
    """Return a future whose result are the checksums of ``ref``."""
    done: Future[tuple[str, ...]] = Future()
    done.set_result(ref.checksums)
    return done
