"""Named places at which a test can end the process, as a failing machine would.

``HOLDFAST_FAILPOINT=after_manifest_rename`` kills at the first arrival, ``...:3`` at the third.
In a process that forks its children a test sets ``armed`` instead of the environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

NAMES: list[str] = [
    "before_data_sync",
    "after_data_sync",
    "after_manifest_write",
    "after_manifest_sync",
    "after_manifest_rename",
    "after_directory_sync",
    "before_retire",
    "after_retire_unlink",
    "after_retire_sync",
    "after_timeline_opened",
]
"""In the order of the commit protocol."""

RECORDING: list[str] = [
    "after_gradients_copied",
    "after_step_sealed",
    "after_step_put",
    "before_records_write",
    "after_unit_staged",
]
"""In the order in which a step gets from training to the thread that writes it, and then of a base's."""

RANKS: list[str] = ["after_share_written"]
"""Of several ranks, besides the others: a part of a base is durable, and no commit names it yet."""

JOURNAL: list[str] = [
    "after_segment_made",
    "after_records_write",
    "after_records_sync",
    "before_segment_unlink",
]
"""In the order in which records become durable, and go."""

LIFECYCLE: list[str] = ["after_compacted", "before_retired_unlink"]
"""Of ``holdfast compact`` and ``prune``, besides the others."""

REPLICA: list[str] = [
    "after_gradient_copied",
    "before_step_handed",
    "after_step_handed",
    "after_state_handed",
    "before_replica_update",
    "in_replay",
    "after_replica_update",
    "before_replica_kept",
    "after_replica_kept",
]
"""In the order in which a step reaches a replica: the first four in the trainer. A state is *kept* when the trainer has
died."""

REDO: list[str] = ["before_redo", "before_redone_update", "after_redone_update", "before_redone_write"]
"""In the order in which a block is updated again, besides the others."""

armed: str = os.environ.get("HOLDFAST_FAILPOINT", "")
_arrivals: dict[str, int] = {}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


action: Callable[[], None] = kill
"""What happens at the armed point; a power-cut test replaces it."""


def reach(name: str) -> None:
    """Called by the code when it arrives at the point ``name``."""
    assert any(name in names for names in (NAMES, RECORDING, RANKS, JOURNAL, LIFECYCLE, REPLICA, REDO)), name
    if not armed:
        return
    wanted, _, count = armed.partition(":")
    if wanted != name:
        return
    _arrivals[name] = _arrivals.get(name, 0) + 1
    if _arrivals[name] == int(count or 1):
        action()
