"""Recovery from a copy of the state in memory, which a process left behind when it was killed.

The copy is a commit in the run's shared-memory store (``snapshot.memory_copies``). It counts if it lies on the run's
current timeline and the disk leads to no step as new; every byte is verified as it is loaded. Called by the log
backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...distributed import Ranks
from ...errors import Damaged, DiskFailed, NoCommit
from ...schedule.interval.tuner import MEAN_SECONDS_BETWEEN_FAILURES, mean_between_failures
from ...state.live_state import LiveState
from ...store.log.chain import Chain, payloads
from ...store.run_store import LocalStore
from ..replica import retained_state, shared_memory
from ..replica.retained_state import COPY
from ..user_state import ScriptState
from .lineage import Lineage
from .recovery_progress import RecoveryProgress
from .run_recovery import RecoveryResult, recover

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
        with shared_memory.opened(kept.path) as memory:
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
    timelines = sorted(store.timelines()[0].values(), key=lambda timeline: timeline.id)
    lost = sum(_is_elsewhere(before.writer, after.writer) for before, after in pairwise(timelines))
    seconds, _ = store.restarts()
    found = mean_between_failures(MEAN_SECONDS_BETWEEN_FAILURES, 1.0, max(seconds, 0.0), lost)
    return max(found, told_seconds or 0.0)


def _is_elsewhere(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether two writers ran on other hosts, or on one host that was started anew between them."""
    boots = {each[BOOT] for each in (before, after) if BOOT in each}
    return before.get("host") != after.get("host") or len(boots) > 1
