"""A run that was given nothing keeps the graphs of as many blocks as fit, once it has measured them in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.events import read_events
from holdfast.offload import recomputation
from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.setup import run_planning
from holdfast.offload.setup.block_measurement import measure
from plain_loops import Task, check
from streams import Apart
from support.grouped import grouped
from survive_run import digest
from training import adamw, batches, decoder

AMPLE = 1 << 40


def engine_of(path, blocks=5, dropout=0.0, **options):
    model = decoder(blocks=blocks, dropout=dropout)
    return holdfast.offload(model, adamw(model), path, **grouped(dtype="fp32", **options))


def again(engine, count=2, rows=2):
    """The fraction that was computed again in a step of ``count`` micro-batches of ``rows``."""
    engine.step(batches(engine.steps_done, count, rows))
    return engine.last["recomputed_fraction"]


def told(path):
    events = read_events(path / "events.jsonl")
    return [event["recomputed_fraction"] for event in events if event["event"] == "schedule"]


def free(monkeypatch, nbytes):
    monkeypatch.setattr(recomputation, "free_host_bytes", lambda: nbytes)
    monkeypatch.setattr(recomputation, "most_process_bytes", lambda: 0)


@pytest.fixture(autouse=True)
def ample(monkeypatch):
    """Much memory, whatever earlier tests of this process have taken."""
    free(monkeypatch, AMPLE)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_plain_run_keeps_graphs_and_bits(tmp_path, clip_norm):
    """With dropout, against a loop that keeps all of its graph."""
    check(tmp_path, Task(count=3, clip_norm=clip_norm, dropout=0.2, steps=3))
    assert told(tmp_path) == [1.0, 0.0]


def test_separate_device_keeps_graphs_and_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    monkeypatch.setattr(Apart, "free_bytes", lambda device: AMPLE)
    monkeypatch.setattr(recomputation.accelerators, "given_back_bytes", lambda device: 0)
    check(tmp_path, Task(count=3, dropout=0.2, steps=3))
    assert told(tmp_path) == [1.0, 0.0]


def test_graph_of_a_step_holds_what_tracing_predicts(tmp_path):
    with engine_of(tmp_path, dropout=0.2) as engine:
        again(engine)
        sizes: Any = engine._steps._recomputation._sizes
    model = decoder(blocks=5, dropout=0.2)
    traced = measure(model, find_blocks(model), batches(0, 1)[0], torch.float32)
    assert sizes.activation_bytes == (
        *traced.activation_bytes[:1] * 4,
        0,
    )  # tracing adds weights to the others
    assert sizes.input_bytes == traced.input_bytes


def test_larger_micro_batches_are_measured_first(tmp_path):
    with engine_of(tmp_path) as engine:
        assert [again(engine, rows=rows) for rows in (2, 2, 4, 4, 2, 3)] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
        assert again(engine, count=5) == 0.0
    assert told(tmp_path) == [1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_no_more_is_kept_than_fits(tmp_path, monkeypatch):
    """Each block that is kept takes its compute copy, and its graph for every micro-batch."""
    with engine_of(tmp_path / "ample") as engine:
        again(engine)
        held = engine._steps._recomputation._sizes.activation_bytes[0]
        copy = engine._plan.work.blocks[0].param_bytes
    for blocks in (0.5, 2.5):
        room = blocks * (2 * held + copy) + 60_000  # block inputs as well
        free(monkeypatch, room / (1 - recomputation.FREE_RESERVE))
        with engine_of(tmp_path / str(blocks)) as engine:
            found = [again(engine, count) for count in (2, 2, 1, 4)]
        kept = [round(4 * (1 - fraction)) for fraction in found]
        assert kept[0] == 0 and kept[1] == int(blocks) and kept[2] >= kept[1]
        assert kept[3] * (4 * held + copy) <= room


def test_memory_that_comes_back_is_not_free(tmp_path, monkeypatch):
    """What the process has held at most, it will hold again."""
    monkeypatch.setattr(recomputation, "most_process_bytes", lambda: AMPLE)
    with engine_of(tmp_path) as engine:
        assert [again(engine) for _ in range(2)] == [1.0, 1.0]


class Biased(nn.Module):
    """Attention with a bias that is computed, and fused only where that has no gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(16, 16), nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        y = self.linear(x)[:, None]  # one head
        return x + nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=-self.bias)[:, 0]


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Biased() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_bits_do_not_follow_memory_where_kernels_round_otherwise(tmp_path):
    """The first step of each process computes everything again, and others would not."""

    def trained(path, *parts):
        for steps in parts:
            model = Stack()
            with holdfast.offload(model, adamw(model), path, precision="fp32") as engine:
                for step in range(engine.steps_done, steps):
                    torch.manual_seed(step)
                    engine.step([(torch.randn(2, 32, 16),)])
                    assert engine.last["recomputed_fraction"] == 1.0
        return digest(dict(model.state_dict()))

    assert trained(tmp_path / "resumed", 2, 4) == trained(tmp_path / "whole", 4)


def test_unknown_memory_recomputes_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(recomputation, "most_process_bytes", lambda: None)
    with engine_of(tmp_path) as engine:
        assert [again(engine) for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize(
    "options",
    [
        {"recomputed_fraction": 1.0},
        {"params_on_host": 0.5},
        {"sample": batches(0, 1)[0], "micro_batches": 2},
        {"budget": holdfast.Budget(host="1TiB"), "sample": batches(0, 1)[0], "micro_batches": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_was_given_is_left_alone(tmp_path, options):
    with engine_of(tmp_path, **options) as engine:
        assert [again(engine) for _ in range(3)] == [1.0] * 3


def test_under_autocast_nothing_is_kept_or_measured(tmp_path):
    with engine_of(tmp_path) as engine:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert [again(engine) for _ in range(2)] == [1.0, 1.0]
        assert [again(engine) for _ in range(2)] == [1.0, 0.0]


def test_another_mode_is_measured_anew(tmp_path):
    with engine_of(tmp_path, dropout=0.5) as engine:
        engine._run.model.eval()
        assert [again(engine) for _ in range(2)] == [1.0, 0.0]
        engine._run.model.train()
        assert [again(engine) for _ in range(2)] == [1.0, 0.0]


class Sparse(torch.nn.Module):
    """A block that computes with a sparse matrix, whose bytes are in no storage."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("near", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x):
        return x + torch.sparse.mm(self.near, self.linear(x))


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Sparse() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def test_a_block_that_cannot_be_measured_is_computed_again(tmp_path):
    model = Graph()
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.offload(model, optimizer, tmp_path, blocks=model.blocks, precision="fp32") as engine:
        for _ in range(3):
            engine.step([{"x": torch.randn(4, 16)}])
        assert engine.last["recomputed_fraction"] == 1.0
