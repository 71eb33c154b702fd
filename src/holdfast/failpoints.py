"""Named places at which a test can end the process, as a failing machine would.

``HOLDFAST_FAILPOINT=after_manifest_rename`` kills at the first arrival, ``...:3`` at the third. In a process that forks
its children a test sets ``armed`` instead of the environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import chain

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
"""Failpoints of a commit, in the order of its protocol."""
RECORDING: list[str] = [
    "after_gradients_copied",
    "after_step_sealed",
    "after_step_put",
    "before_records_write",
    "after_unit_staged",
]
"""Failpoints of recording: a step on its way from training to the writer thread, then a part of a snapshot."""
RANKS: list[str] = ["after_share_written"]
"""The failpoint of several ranks: a part of a snapshot is durable, and no commit names it yet."""
JOURNAL: list[str] = [
    "after_segment_made",
    "after_records_write",
    "after_records_sync",
    "before_segment_unlink",
]
"""Failpoints of log records, in the order in which records become durable and are removed."""
LIFECYCLE: list[str] = ["after_compacted", "before_retired_unlink"]
"""Failpoints of ``holdfast compact`` and ``prune``."""
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
"""Failpoints of a replica, in the order in which a step reaches it; the first four are in the trainer.

A state is *kept* when the trainer has died.
"""
REDO: list[str] = ["before_redo", "before_redone_update", "after_redone_update", "before_redone_write"]
"""Failpoints of a block that is updated again, in order."""
NODES: list[str] = [
    "before_copy_sync",
    "after_copy_sync",
    "after_copy_written",
    "after_copy_renamed",
    "before_node_publish",
    "after_node_publish",
]
"""Failpoints of runs without a shared directory: copies at the partner, then a commit in another node's directory."""
MEMORY: list[str] = ["after_chunk_copied"]
"""The failpoint of copies in memory: a part of the state is copied, and no commit names it yet."""
KNOWN = frozenset(chain(NAMES, RECORDING, RANKS, JOURNAL, LIFECYCLE, REPLICA, REDO, NODES, MEMORY))
armed: str = os.environ.get("HOLDFAST_FAILPOINT", "")
_arrivals: dict[str, int] = {}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


action: Callable[[], None] = kill
"""The action at the armed point; a power-cut test replaces it."""


def reach(name: str) -> None:
    """Act if the point ``name`` is armed and its count is reached. Called by the code that arrives there."""
    assert name in KNOWN, name
    if not armed:
        return
    wanted, _, count = armed.partition(":")
    if wanted != name:
        return
    _arrivals[name] = _arrivals.get(name, 0) + 1
    if _arrivals[name] == int(count or 1):
        action()
