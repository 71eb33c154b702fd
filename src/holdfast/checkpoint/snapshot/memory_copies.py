"""Copies of the whole state in the memory of this host, which outlive the process and not the machine.

They lie in the run's shared-memory store, as what a replica keeps does, in two slots of which one is whole at any time:

1. The training thread copies the state into the free slot at the end of a step.
2. A thread hashes the slot and publishes it as the store's commit.
3. The commit before is removed, so that its slot is free for the next copy.

A kill at any moment leaves a whole commit. The next process recovers from it if it lies on the run's current timeline
and the disk leads to no step as new (``newest_copy``); every byte is verified as it is loaded. Called by the snapshot
scheduler, and by the log backend for a recovery. Sizes are bytes.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast import failpoints

from ...distributed import Ranks
from ...errors import Damaged, DiskFailed, DoesNotFit, NoCommit
from ...io.threads import open_file, use_cpus
from ...measure.free_memory import free_host_bytes
from ...quantities import format_bytes
from ...schedule.interval.tuner import MEAN_SECONDS_BETWEEN_FAILURES, mean_between_failures
from ...state.live_state import Held, LiveState
from ...state.tensor_entries import TensorEntry
from ...store.disk import Disk
from ...store.log.chain import Chain, payloads
from ...store.run_store import LocalStore
from ..recovery.lineage import Lineage
from ..recovery.recovery_progress import RecoveryProgress
from ..recovery.run_recovery import RecoveryResult, recover
from ..replica import retained_state, shared_memory
from ..replica.retained_state import COPY
from ..user_state import ScriptState
from .snapshot_chunks import SnapshotChunk, atoms_of, divided, owned_by
from .snapshot_image import write_tensor

SLOTS = 2
"""The copies that memory holds: one that is whole, and one that is being made."""
FREE_SHARE = 0.5
"""The share of the free memory that the slots may take."""
LEAVE_SECONDS = 60.0
"""The longest time that a replica of an earlier process may take to end, when nothing waits for it any more."""


def why_unavailable(store: LocalStore, num_ranks: int, has_nodes: bool) -> str:
    """Return why the run in ``store`` can have no copies in memory; empty if it can."""
    if num_ranks > 1 or has_nodes:
        return "copies in memory are for one process"
    if not isinstance(store.disk, Disk):
        return "copies in memory are for runs in a directory"
    if not shared_memory.MEMORY.is_dir():
        return f"this machine has no {shared_memory.MEMORY}"
    return ""


def remove_left_copy(store: LocalStore) -> None:
    """Remove the copy that an earlier process of the run in ``store`` left. What a replica kept stays."""
    place = shared_memory.place_for(store.disk.root, shared_memory.MEMORY, store.run_key())
    if retained_state.is_copy(place, store.queue):
        _remove_kept(place)


class MemoryCopies:
    """The copies of the run that ``store`` writes, in its current timeline.

    Args:
        kept_step: The step of the copy that training continues from, which stays until a newer one is whole; -1 for
            none. Any other copy is removed now.
        cpus: CPUs of the thread that hashes; none leaves it where it is.
    """

    def __init__(self, store: LocalStore, kept_step: int, cpus: Collection[int] = ()) -> None:
        self._run = store
        self._mark = retained_state.mark([store.opened.id, store.opened.key], retained_state.COPY)
        self.place = shared_memory.place_for(store.disk.root, shared_memory.MEMORY, store.run_key())
        """The directory of the shared-memory store."""
        self._path = self.place / retained_state.KEPT
        self.step = kept_step
        """The step of the whole copy; -1 if there is none."""
        self._memory: LocalStore | None = None
        self._units: list[SnapshotChunk] = []
        self._slots: dict[str, list[memoryview]] = {}
        """The memory of each chunk's two files, by the chunk's name."""
        self._index: dict[str, Any] = {}
        self._atoms: dict[str, TensorEntry] = {}
        self._thread = ThreadPoolExecutor(1, "holdfast-copies", use_cpus, (tuple(cpus),))
        self._under_way: Future[None] | None = None
        if kept_step < 0:
            self._remove()

    @property
    def nbytes(self) -> int:
        """The memory that the slots take."""
        return SLOTS * sum(unit.layout.file_bytes for unit in self._units)

    def take(self, state: LiveState, step: int, progress: Mapping[str, Any]) -> None:
        """Copy ``state`` at the end of ``step``. The copy counts once it is hashed, beside training.

        Waits for the copy before. Raises ``DoesNotFit`` or ``DiskFull`` where memory is too small, and the error of the
        copy before.
        """
        self._wait()
        owned = owned_by(state)
        if self._memory is None or atoms_of(owned) != self._atoms:
            self._memory = self._divide(owned, state)
        chosen = {}
        for unit in self._units:
            assert unit.files is not None
            generation = chosen[unit.name] = unit.files.acquire()
            image = self._slots[unit.name][generation]
            for key, tensor in unit.tensors_of(owned).items():
                write_tensor(image, unit.layout, key, tensor.detach())
            failpoints.reach("after_chunk_copied")
        publish = partial(self._publish, self._memory, step, chosen, {**progress, **self._mark})
        self._under_way = self._thread.submit(publish)

    def free(self, durable_step: int) -> None:
        """Give the memory back if the disk has a step as new as the copy. The next ``take`` makes slots again."""
        if self._memory is None and self.step < 0:
            return
        if self._under_way is not None and not self._under_way.done():
            return
        with suppress(Exception):  # the copy before counts, and is whole
            self._wait()
        if self.step <= durable_step:
            self._leave_memory()
            self._remove()

    def close(self, durable_step: int) -> bool:
        """End the thread, and remove the copy unless it is newer than ``durable_step``. Return whether it stays."""
        with suppress(Exception):  # the copy before counts, and is whole
            self._wait()
        self._thread.shutdown()
        self._leave_memory()
        if self.step <= durable_step:
            self._remove()
        return self.step >= 0

    def _wait(self) -> None:
        """Wait until no copy is being hashed. Raises the error of that."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _leave_memory(self) -> None:
        """Close the store and unmap the slots, whose content stays."""
        self._slots, self._units, self._atoms = {}, [], {}
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _remove(self) -> None:
        """Remove the copy and both slots, and the store if a replica has left nothing there."""
        self.step = -1
        _remove_kept(self.place)

    def _divide(self, owned: dict[str, Held], state: LiveState) -> LocalStore:
        """Make both slots for the form that ``state`` has now. A copy of an earlier form goes first."""
        units, index = divided(owned, state)
        if self._memory is not None:
            self._leave_memory()
            self._remove()
        memory = self._opened()
        try:
            for unit in units:
                unit.files = memory.unit(unit.name, unit.layout, SLOTS)
            files = [unit.files for unit in units if unit.files is not None]
            self._refuse_little(memory.space_needed(files), memory.free_bytes())
            for each in files:
                each.create()
                self._slots[each.name] = [_mapped(self._path / each.path(slot)) for slot in range(SLOTS)]
            self._units, self._atoms, self._index = units, atoms_of(owned), memory.put_index(index)
        except BaseException:
            self._slots = {}
            memory.close()
            raise
        return memory

    def _opened(self) -> LocalStore:
        """Return the store in memory, made if absent, open for writing."""
        shared_memory.make(self.place)
        retained_state.make_earlier_one_leave(self.place, str(self._run.root), LEAVE_SECONDS, takes=False)
        (self.place / retained_state.SOCKET).unlink(missing_ok=True)  # of one that was killed
        shared_memory.say_owner(self.place, self._run.disk.root, self._run.run_key())
        memory = LocalStore(
            self._path, retain=SLOTS - 1, disk=Disk(self._path), queue=self._run.queue, direct=False
        )
        memory.enter()
        newest = next(iter(memory.commits()), None)
        memory.begin(None if newest is None else memory.load(newest))  # which frees one slot, after a kill
        return memory

    def _refuse_little(self, nbytes: int, free_bytes: int) -> None:
        """Raise ``DoesNotFit`` if the slots take ``nbytes`` more, and that is too much of what is free."""
        free = min(free_host_bytes(), free_bytes)
        if nbytes > FREE_SHARE * free:
            raise DoesNotFit(
                f"two copies of the state take {format_bytes(nbytes)} of memory, and {format_bytes(free)} are free, of"
                " which they may take half"
            )

    # Called by the thread.

    def _publish(
        self, memory: LocalStore, step: int, chosen: Mapping[str, int], progress: dict[str, Any]
    ) -> None:
        written = {}
        for unit in self._units:
            assert unit.files is not None
            slot = chosen[unit.name]
            written[unit.name] = slot, unit.files.note_written(slot, self._slots[unit.name][slot])
        memory.publish(step, written, self._index, progress)
        self.step = step


def _remove_kept(place: Path) -> None:
    """Remove what is kept in ``place``, and the store if a replica has left nothing there."""
    shared_memory.remove(place / retained_state.KEPT)
    if not any((place / name).exists() for name in (retained_state.SYNC, retained_state.SOCKET)):
        shared_memory.remove(place)


def _mapped(path: Path) -> memoryview:
    """Return the memory of the file at ``path``, whose space is reserved, with all of its pages present."""
    with open_file(path, write=True, direct=False) as file:
        return memoryview(mmap.mmap(file.fd, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)))


BOOT = "boot"
"""The key in a timeline's record that names the start of the writer's machine."""


def newest_copy(
    store: LocalStore, target: int | None, exact: bool, found_step: int | None = None
) -> retained_state.RetainedState | None:
    """Return the copy in memory of a step that is newer than all that the disk of the run has; None without one.

    What a replica kept is left to replicas.

    Args:
        target: The greatest step that is wanted; None for the newest.
        exact: Accept no step but ``target``.
        found_step: The step that the disk was found to lead to; None to believe its headers.
    """
    found = [
        each
        for place in shared_memory.places_of(store.disk.root, shared_memory.MEMORY, store.run_key())
        for each in retained_state.look(place, store)
        if each.cut == COPY and (target is None or each.last <= target)
    ]
    newest = max(found, key=lambda each: each.last, default=None)
    if newest is None:
        return None
    if newest.last <= (retained_state.newest(store, target) if found_step is None else found_step):
        return None
    return None if exact and newest.last != target else newest


def disk_step(store: LocalStore, target: int) -> int:
    """Return the newest step, at most ``target``, to which the disk of the run leads; -1 without one.

    The records that may have been on their way when the writer died are read: their headers do not show that they are
    whole. Earlier ones had been durable.
    """
    for ref in store.line():
        if ref.step <= target:
            with suppress(Damaged, DiskFailed):
                line = Lineage.of(store, store.load(ref), target)
                return min(_whole_step(store, line, chain) for chain in line.chains.values())
    return -1


def _whole_step(store: LocalStore, line: Lineage, chain: Chain) -> int:
    step = max(line.base.step, min(line.acknowledged, line.step))
    with suppress(Damaged, DiskFailed):
        for record, _ in payloads(
            store.disk, store.queue, [each for each in chain.records if each.step > step]
        ):
            step = record.step
    return step


def recover_copy(
    store: LocalStore,
    kept: retained_state.RetainedState,
    state: LiveState,
    script: ScriptState,
    watch: RecoveryProgress,
) -> RecoveryResult | None:
    """Restore model, optimizers and user state from the copy ``kept``; None if it is damaged.

    A damaged copy is removed, with a warning that names the step which the disk has. Raises ``RunMismatch`` for
    another model, with nothing changed.
    """
    try:
        with shared_memory.opened(kept.path, store.queue) as memory, memory.unchanging():
            found = recover(memory, state, script, ranks=Ranks(), watch=watch)
            if found.point.step == kept.last:
                return replace(found, point=retained_state.ForkPoint(kept.last, kept.timeline, kept.key))
            why = found.problems[0] if found.problems else "it ends before that step"
    except (Damaged, NoCommit) as error:
        why = str(error)
    shared_memory.remove(kept.path)
    warnings.warn(
        f"the copy of step {kept.last} in memory is not whole, and was removed. The run continues from the disk: {why}",
        stacklevel=5,
    )
    return None


def this_machine() -> dict[str, str]:
    """Return the entry of a timeline's record that names the present start of this machine."""
    try:
        return {BOOT: Path("/proc/sys/kernel/random/boot_id").read_text().strip()}
    except OSError:
        return {}


def machine_seconds(store: LocalStore, told_seconds: float | None) -> float:
    """Return the mean seconds between failures that memory does not survive, as the run's resumes show them.

    A resume on another host, or after a new start of the host, counts as one. One a day is believed at first, and not
    more of them than failures in all, ``told_seconds`` apart.
    """
    timelines = store.timelines_at_begin
    lost = sum(_is_elsewhere(before.writer, after.writer) for before, after in pairwise(timelines))
    seconds, _ = store.restarts()
    found = mean_between_failures(MEAN_SECONDS_BETWEEN_FAILURES, max(seconds, 0.0), lost)
    return max(found, told_seconds or 0.0)


def _is_elsewhere(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether two writers ran on other hosts, or on one host that was started anew between them."""
    boots = {each[BOOT] for each in (before, after) if BOOT in each}
    return before.get("host") != after.get("host") or len(boots) > 1
