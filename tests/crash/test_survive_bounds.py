"""Thousands of steps: nothing grows but the step."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import nn

from checkpoint.loops import make
from combined import CAMPAIGN
from dist.test_ranks_storage import watched
from holdfast.checkpoint.log.recorder import BOUND
from holdfast.checkpointer import Checkpointer
from holdfast.io.queue import Throttle
from holdfast.offload.setup.process_settings import give_back_freed, process_bytes
from holdfast.store.commit.retention import Keep
from survive_run import FEATURE, OPTIMIZER

STEPS, BASE_EVERY, RETAIN, CAP = 10_000 if CAMPAIGN else 3_000, 50, 2, 2_500_000
GROWTH = (8 << 20) * STEPS // 10_000
"""The most bytes that four fifths of the steps may add: 1 KB for each."""


def disk_bytes(root):
    """What the run takes of the disk, but for the log of events."""
    found = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if name != "events.jsonl":
                found += os.stat(os.path.join(folder, name)).st_blocks * 512
    return found


@pytest.mark.crash
@pytest.mark.timeout(600)
def test_nothing_grows_in_thousands_of_steps(in_memory):
    """And the disk has no more of the run than its cap whenever one looks, which is too little now and then."""
    loop = make(OPTIMIZER, FEATURE)
    seen = []
    with (
        watched(in_memory, 0.02) as taken,
        Checkpointer(
            in_memory,
            model=loop.model,
            optimizer=loop.optimizers,
            base_every=BASE_EVERY,
            keep=Keep(RETAIN),
            storage=CAP,
        ) as checkpointer,
    ):
        checkpointer.resume()
        for i in range(STEPS):
            loop.iteration(i, checkpointer.step)
            if (i + 1) % (STEPS // 20) == 0:
                loop.losses.clear()
                descriptors = len(os.listdir("/proc/self/fd"))
                # CPython copies its table of interned strings (8 or 15 MB, by what ran before in this process) each
                # time the names of 100,000 files, which are gone, have filled it: by whichever thread names the next
                # one, and glibc keeps the old one for that thread.
                give_back_freed()
                seen.append((threading.active_count(), descriptors, process_bytes(), disk_bytes(in_memory)))
    threads, descriptors, memory, disk = zip(*seen, strict=True)
    assert len(set(threads)) == 1
    assert max(descriptors[1:]) <= descriptors[0] + 2  # a segment and a manifest that are just open
    assert max(memory[4:]) - memory[3] < GROWTH
    assert max(disk) < 2 * disk[0]
    assert CAP / 2 < max(taken) <= CAP and len(taken) > STEPS / 10
    names = [
        len(os.listdir(in_memory / folder)) for folder in ("commits", "data", "index", "journal/rank-00000")
    ]
    assert names[:3] == [RETAIN, RETAIN + 1, RETAIN] and names[3] <= 10, names


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.parametrize("base_every", [7, 1000])
@pytest.mark.parametrize("cap_mib, copies", [(200, BOUND), (100, 4)])
def test_memory_keeps_to_its_cap_on_a_disk_ten_times_too_slow(tmp_path, cap_mib, copies, base_every):
    """And no step is further from the disk than was declared: 8, or as many as the cap holds copies of."""
    cap, steps = cap_mib << 20, 20
    model = nn.Linear(1500, 1500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train():
        model(torch.randn(8, 1500)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        train()
    started = time.perf_counter()
    for _ in range(10):
        train()
    record_bytes = 1500 * 1501 * 4
    bytes_per_second = record_bytes * 10 / (time.perf_counter() - started)
    before, seen, behind = process_bytes(), [], []
    with Checkpointer(
        tmp_path, model=model, optimizer=optimizer, memory=cap, base_every=base_every, direct=False
    ) as checkpointer:
        checkpointer.resume()
        checkpointer._queue._throttles[True] = Throttle(bytes_per_second / 10)
        for _ in range(steps):
            train()
            checkpointer.step()
            seen.append(process_bytes() - before)
            behind.append(checkpointer.steps_done - checkpointer.durable_step)
        slots = len(checkpointer._backend.pool.slots)
    assert min(behind) >= 0 and max(behind) == slots == copies  # it was held up, and no later than it may
    assert max(seen) < cap + (16 << 20), f"{max(seen) >> 20} MiB"
