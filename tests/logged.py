"""Logs of events made by hand, as an engine and a Checkpointer write them, and steps of which every number is known."""

from __future__ import annotations

import json

LANES = ["compute", "ssd_read", "ssd_write", "upload", "download", "update", "commit"]
KINDS = ["backward", "commit", "forward", "load_params", "update", "upload_params"]
BEGAN = 1_700_000_000.0

MOVES = {"ssd_read": {"load_params": 1000}, "ssd_write": {"store_state": 3000}}


def span(lane, kind, start, end, step, phase="", block=-1, micro_batch=-1, nbytes=0):
    return [LANES.index(lane), KINDS.index(kind), start, end, step, phase, block, micro_batch, nbytes]


SPANS = [
    span("update", "update", -1.0, 0.5, 2, block=0),
    span("compute", "forward", 0.0, 4.0, 3, block=0, micro_batch=0),
    span("ssd_read", "load_params", 3.0, 5.5, 3, "backward", 0, nbytes=1000),
    span("upload", "upload_params", 5.5, 5.6, 3, "backward", 0, nbytes=1000),
    span("compute", "backward", 6.0, 10.0, 3, block=0, micro_batch=0),
    span("commit", "commit", 9.0, 11.5, 3),
]
"""Of step 3, which returned after 10 s: computing waits from 4 to 6, for a read until 5.5 and a copy until 5.6."""


def timeline(**other):
    event = {
        "event": "timeline",
        "time": BEGAN + 40,
        "step": 3,
        "of_sitting": 3,
        "began": BEGAN + 20,
        "seconds": 10.0,
    }
    return {**event, "lanes": LANES, "kinds": KINDS, "spans": SPANS, **other}


def engine(first_step=0, **other):
    return {
        "event": "engine", "time": BEGAN, "first_step": first_step, "pid": 1, "host": "elsewhere", "device": "cpu",
        "unified": True, "blocks": 2, "parameters": 1000, "state_bytes": 12000, "host_budget": 4 * 2**30,
        "device_budget": None, "host_bytes_predicted": 2**30, "device_bytes_predicted": None,
        "process_bytes": 300 * 2**20,
        "memory_predicted": {"host": {"state": 5000, "optimizer_on_host": 1000, "workspace": 700}, "device": {}},
        **other,
    }  # fmt: skip


def schedule():
    return {
        "event": "schedule", "time": BEGAN, "schedule": "vertical", "micro_batches": 2, "clip": False, "commit": True,
        "num_operations": 6, "moves": MOVES,
    }  # fmt: skip


def step(number, **other):
    return {
        "event": "step", "time": BEGAN + 10.0 * number, "step": number, "loss": 5.0 - number / 10, "grad_norm": 1.0,
        "seconds": 10.0, "tokens": 2000, "learning_rate": [1e-3], "durable_step": number - 1, "read_bytes": 1000,
        "written_bytes": 3000, "host_bytes": 2**29, "skipped": None, "micro_batches": 2, "commit": True,
        "moved": MOVES, "buffers": {"optimizer state": 4096, "export": 1}, **other,
    }  # fmt: skip


def engine_log(steps=6, **closed):
    """An engine that was opened, stepped and closed."""
    steps_taken = [step(number) for number in range(1, steps + 1)]
    end = {
        "event": "closed",
        "time": BEGAN + 100,
        "step": steps,
        "durable_step": steps,
        "moved": {"ssd_write": {"x": 50_000}},
    }
    return [engine(), schedule(), *steps_taken[:4], timeline(), *steps_taken[4:], end | closed]


def checkpointer_log():
    """A Checkpointer whose short steps were logged together."""
    begun = {
        "event": "checkpointer", "time": BEGAN, "first_step": 0, "pid": 1, "host": "elsewhere", "ranks": 2,
        "codec": "Exact", "replica": False, "memory": 4 * 2**30,
        "storage": None, "ring_bytes": 800, "staging_bytes": 2**30,
    }  # fmt: skip
    lines = [
        {"event": "step", "time": BEGAN + number / 10, "step": number, "steps": 10, "seconds": 0.1,
         "stall_seconds": 0.01, "longest_stall_seconds": 0.05, "durable_step": number - 3, "written_bytes": 7000,
         "waiting_bytes": 300, "staged_bytes": 0}
        for number in (10, 20, 30)
    ]  # fmt: skip
    base = {"event": "base", "time": BEGAN + 2.5, "step": 20, "durable_step": 22}
    return [begun, *lines, base]


def write(path, events):
    """The events as a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path
