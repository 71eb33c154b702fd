"""The engine's device code is in order, and each fault put into it is found.

Eleven faults of the kinds that a device punishes: waits that are missing, memory that is given back too early or held
by nobody, memory of one stream that another uses. Ten are found by the order of accesses on the device that is played.
Who says that an operation is over is trusted there, and watched by a device whose copies come late (``streams.py``).
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import contextmanager, suppress

import pytest
import torch

from access_order import watched
from holdfast.errors import ChunkCorrupt
from holdfast.offload.memory import device
from holdfast.offload.memory.device import SeparateDevice
from holdfast.offload.setup import run_planning
from holdfast.schedule.operations import COMPUTE, DOWNLOAD, UPDATE, UPLOAD
from plain_loops import SETTINGS, train
from played_device import played  # noqa: F401
from streams import Apart


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_access_is_in_order(tmp_path, played, monkeypatch, setting):  # noqa: F811
    with watched(monkeypatch) as order:
        train(tmp_path, **SETTINGS[setting])
    assert order.problems == []
    assert order.accesses > 1000


def lane_without(first, second):
    """Operations of the lane ``second`` do not wait for those of ``first``."""

    @contextmanager
    def lane(self, op):
        stream = self._streams.get(op.lane)
        if stream is None:
            yield
            return
        for key in (*op.needs, *op.needs_previous):
            lane, mark = self._marks.get(key, (op.lane, None))
            pair = lane, op.lane
            if lane != op.lane and pair in self.ahead and pair != (first, second):
                stream.wait_event(mark)
        with self._on(stream):
            yield

    return {"lane": lane}


def ended_elsewhere(self, op, real=SeparateDevice.ended):
    """The event of the end is of the stream that computes."""
    streams = self._streams
    if op.lane in (UPLOAD, DOWNLOAD):
        self._streams = {**streams, op.lane: streams[COMPUTE]}
    try:
        return real(self, op)
    finally:
        self._streams = streams


def ended_at_once(self, op, real=SeparateDevice.ended):
    future = real(self, op)
    if future is None:
        return None
    over = Future()
    over.set_result(None)
    return over


def upload_unheld(self, tensors, done=None):
    there = [self._empty(tensor) for tensor in tensors]
    for target, source in zip(there, tensors, strict=True):
        self._copy(target, source)
    return there


def download_unheld(self, tensors, lend):
    here = lend(tensors)
    for target, source in zip(here, tensors, strict=True):
        self._copy(target, source)
    return here


def fetch_unwaited(self, tensor):
    return tensor.to("cpu", non_blocking=True)


def leave_beside(self, tensors):
    """On a stream that nobody waits for."""
    with self._on(self._streams.get(DOWNLOAD) or self._current_stream()):
        return {name: tensor.to("cpu", non_blocking=True, copy=True) for name, tensor in tensors.items()}


def empty_unrecorded(self, tensor):
    return torch.empty_like(tensor, device=self.torch_device)


def let_go_at_once(mark, tensors, done):
    if done is not None:
        done()


def let_go_before_the_end(mark, over, held, real=device._tell):
    while held:
        device._let_go(mark, *held.pop(0))
    real(mark, over, held)


FAULTS = {
    "computing does not wait for uploads": ("vertical", lane_without(UPLOAD, COMPUTE)),
    "downloads do not wait for computing": ("vertical", lane_without(COMPUTE, DOWNLOAD)),
    "an end is recorded on another stream": ("vertical", {"ended": ended_elsewhere}),
    "sources of uploads are held by nobody": ("horizontal", {"upload": upload_unheld}),
    "ends of downloads are held by nobody": ("horizontal", {"download": download_unheld}),
    "what is held goes before the copy is over": (
        "horizontal",
        {"_let_go": let_go_at_once, "_tell": let_go_before_the_end},
    ),
    "a number is read before it has come": ("kept", {"fetch": fetch_unwaited}),
    "copies for the host are made beside": ("host", {"leave": leave_beside}),
    "updates begin before gradients have come": (
        "vertical",
        {"ahead": SeparateDevice.ahead | {(DOWNLOAD, UPDATE)}},
    ),
    "uploads are not recorded for computing": ("vertical", {"_empty": empty_unrecorded}),
    "an operation is over when it was asked for": ("late", {"ended": ended_at_once}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(tmp_path, played, monkeypatch, fault):  # noqa: F811
    setting, changes = FAULTS[fault]
    for name, value in changes.items():
        monkeypatch.setattr(device if name in ("_let_go", "_tell") else SeparateDevice, name, value)
    problems = (
        found_late(tmp_path, monkeypatch) if setting == "late" else found(tmp_path, monkeypatch, setting)
    )
    assert problems


def found(directory, monkeypatch, setting):
    """By the order of accesses. A run that breaks on what was left out says nothing."""
    with watched(monkeypatch) as order:
        train(directory, **SETTINGS[setting])
    return order.problems


def found_late(directory, monkeypatch):
    """By a device that does what it was asked for late. The run may break on bytes that came too late."""
    late = Apart(delays=(0.002,))
    monkeypatch.setattr(run_planning, "open_device", lambda name: late)
    with suppress(ChunkCorrupt):
        train(directory, "cpu")
    return late.problems
