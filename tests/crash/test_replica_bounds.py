"""Thousands of steps beside a replica: nothing grows in either process, nor in memory that they share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from checkpoint.loops import make
from combined import CAMPAIGN
from holdfast.checkpoint.replica import replica_process, shared_memory
from holdfast.checkpointer import Checkpointer
from holdfast.offload.setup.process_settings import process_bytes
from replica_run import Forked
from survive_run import FEATURE, OPTIMIZER

STEPS = 10_000 if CAMPAIGN else 3_000
GROWTH = (8 << 20) * STEPS // 10_000
"""The most bytes that six tenths of the steps may add: 1.4 KB for each."""


def own_bytes(pid):
    """What the process has to itself."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_", "Shared_Dirty")))


def shared_bytes(place):
    return sum(file.stat().st_blocks * 512 for file in place.rglob("*") if file.is_file())


@pytest.mark.crash
@pytest.mark.timeout(600)
def test_nothing_grows_in_thousands_of_steps(in_memory, monkeypatch):
    monkeypatch.setattr(replica_process, "start_process", Forked)
    place, loop, seen = shared_memory.place_of(in_memory, shared_memory.MEMORY), make(OPTIMIZER, FEATURE), []
    with Checkpointer(
        in_memory, model=loop.model, optimizer=loop.optimizers, base_every=50, replica=True
    ) as checkpointer:
        checkpointer.resume()
        pid = checkpointer._backend.replica._helper._process.pid
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
            if (i + 1) % (STEPS // 10) == 0:
                loop.losses.clear()
                descriptors = (len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{pid}/fd")))
                tasks = (threading.active_count(), len(os.listdir(f"/proc/{pid}/task")))
                seen.append((descriptors, tasks, process_bytes(), own_bytes(pid), shared_bytes(place)))
    descriptors, tasks, memory, replica, shared = zip(*seen, strict=True)
    assert len(set(tasks)) == 1, tasks
    assert max(a for a, _ in descriptors[1:]) <= descriptors[0][0]
    assert max(b for _, b in descriptors[1:]) <= descriptors[0][1] + 2  # a manifest that is just open
    assert max(memory[4:]) - memory[3] < GROWTH, memory
    assert max(replica[4:]) - replica[3] < GROWTH, replica
    # The ring has no name, and no state is kept while the trainer lives: there is the page that names the owner.
    assert set(shared) == {4096}, shared
    assert not place.exists()
