"""Processes of these tests, and the comparison of what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from gpu.training import DEVICE
from holdfast.events import read_events

HERE = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
TESTS = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]), "OMP_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TEST_DEVICE": DEVICE,
}  # fmt: skip


def started(*words, **environment):
    """A fresh interpreter: a fork of a process that has used the device could not use it."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, env={**ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process, code=0):
    """What the process printed. It ends with ``code``, or with one of several."""
    out, err = process.communicate(timeout=110)
    assert process.returncode in (code if isinstance(code, tuple) else (code,)), (
        f"ended with {process.returncode}, not {code}:\n{out[-2000:]}\n{err[-6000:]}"
    )
    return out


def events(root, name):
    return [event for event in read_events(root / "events.jsonl") if event["event"] == name]


def largest_differences(one, other):
    """The largest differences of two states, by name of the tensor; empty if they are the same bits."""
    assert one.keys() == other.keys(), (sorted(one), sorted(other))
    apart = {
        name: (one[name].cpu(), other[name].cpu())
        for name in one
        if not torch.equal(one[name].cpu(), other[name].cpu())
    }
    return {name: float((a.double() - b.double()).abs().max()) for name, (a, b) in apart.items()}
