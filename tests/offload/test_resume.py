"""A run that was stopped, however and wherever, continues with the bits of one that never was."""

from __future__ import annotations

import copy
import random
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.data.loader import SampleLoader, micro_batches_of
from holdfast.offload.memory import transient_buffers
from holdfast.offload.ops import state_ops as state
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import CONTEXT, VOCABULARY, adamw, batches, decoder, differing, stored, warm_up

STEPS, COUNT, ROWS = 6, 2, 2


class Numbers:
    """A dataset whose samples are a function of their number; an epoch is two and a half steps."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (CONTEXT + 1,), generator=generator)
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


def loader():
    return SampleLoader(
        Numbers(), COUNT * ROWS, seed=3, collate=lambda samples: micro_batches_of(samples, ROWS)
    )


class Leave(Exception):
    """The script fails between two steps."""


@dataclass
class Record:
    """What a script saw."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    drawn: list[tuple] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


def train(directory, stop_at, record, *, leave=None, error=Leave, **options):
    """A user's script: it draws from all generators between steps, and is run again to continue."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model, data = decoder(blocks=4, dropout=0.2), loader()
    model.blocks[2].mlp.up.weight.requires_grad_(False)
    optimizer = adamw(model)
    scheduler = warm_up(optimizer)
    settings = {"dtype": "fp32", "clip_norm": 0.5, "scheduler": scheduler, "loader": data, **options}
    engine = holdfast.offload(model, optimizer, directory, **grouped(**settings))
    record.starts.append(engine.steps_done)
    with engine:
        while engine.steps_done < stop_at:
            record.drawn.append(
                (random.random(), np.random.rand(), np.random.normal(), torch.rand(2).tolist())
            )
            record.rates.append(optimizer.param_groups[1]["lr"])
            record.losses.append(engine.step(next(data)))
            if leave is not None and engine.steps_done == leave:
                raise error
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By dtype: the record and the state of a run that was never stopped."""
    runs = {}
    for dtype in ("fp32", "bf16"):
        directory = tmp_path_factory.mktemp("whole")
        train(directory, STEPS, record := Record(), dtype=dtype)
        runs[dtype] = record, stored(directory)
    return runs


def check(directory, record, whole, dtype="fp32"):
    expected, state = whole[dtype]
    assert (record.losses, record.rates) == (expected.losses, expected.rates)
    assert record.drawn == expected.drawn
    assert differing(stored(directory), state) == []
    assert LocalStore.read(directory).head().step == STEPS


WAYS = [
    {},
    {"params_on_host": 1.0, "optimizer_on_host": 1.0},
    {"params_on_host": 0.5, "optimizer_on_host": 0.5, "activations_on_host": 0.0},
    {"schedule": "horizontal", "activations_on_host": 0.0},
    {"schedule": "horizontal", "optimizer_on_host": 1.0, "commit_every": 3},
    {"commit_every": 2, "optimizer_on_host": 0.5},
    {"retain": 1},
    {"retain": 3, "update_workers": 1, "io_threads": 1},
    {"direct": False},
]


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("second", range(len(WAYS)))
@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_may_be_stopped_and_continued_in_any_other_way(tmp_path, whole, stop, second):
    record = Record()
    train(tmp_path, stop, record, **WAYS[second - stop])
    train(tmp_path, STEPS, record, **WAYS[second])
    assert record.starts == [0, stop]
    check(tmp_path, record, whole)


@pytest.mark.slow
def test_a_run_may_be_stopped_after_every_step(tmp_path, whole):
    record = Record()
    for step in range(STEPS):
        train(tmp_path, step + 1, record, **WAYS[step])
    assert record.starts == list(range(STEPS))
    check(tmp_path, record, whole)


@pytest.mark.slow
def test_bf16_copies_are_made_again_from_the_masters(tmp_path, whole):
    record = Record()
    train(tmp_path, 3, record, dtype="bf16")
    train(tmp_path, STEPS, record, dtype="bf16", params_on_host=1.0)
    check(tmp_path, record, whole, "bf16")


@pytest.mark.slow
def test_a_run_continues_after_a_script_that_failed(tmp_path, whole):
    """What was on its way to the disk is finished."""
    record = Record()
    with pytest.raises(Leave):
        train(tmp_path, STEPS, record, leave=4, write_limit=400_000)
    train(tmp_path, STEPS, record)
    assert record.starts == [0, 4]
    check(tmp_path, record, whole)


@pytest.mark.slow
def test_after_a_key_press_what_was_lost_is_done_again_with_the_same_bits(tmp_path, whole):
    record = Record()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, STEPS, record, leave=4, error=KeyboardInterrupt, write_limit=400_000)
    again = Record()
    train(tmp_path, STEPS, again)
    (start,) = again.starts
    assert start == 3
    assert again.losses[: 4 - start] == record.losses[start:]
    names = ("losses", "rates", "drawn")
    joined = Record(*(getattr(record, name)[:start] + getattr(again, name) for name in names))
    check(tmp_path, joined, whole)


@pytest.mark.slow
def test_a_finished_run_may_be_extended(tmp_path, whole):
    record = Record()
    train(tmp_path, 3, record)
    train(tmp_path, 3, record)
    train(tmp_path, STEPS, record)
    assert record.starts == [0, 3, 3]
    check(tmp_path, record, whole)


def test_the_number_of_micro_batches_may_change_from_step_to_step_and_run_to_run(tmp_path):
    def run(directory, stops):
        for stop in stops:
            model = decoder(blocks=3)
            with holdfast.offload(model, adamw(model), directory, precision="fp32") as engine:
                while engine.steps_done < stop:
                    engine.step(batches(engine.steps_done, 1 + engine.steps_done))
        return stored(directory)

    assert differing(run(tmp_path / "stopped", [2, 4]), run(tmp_path / "whole", [4])) == []


@pytest.mark.slow
def test_the_model_is_given_back_as_it_was_last(tmp_path):
    model = train(tmp_path, 2, Record())
    state = stored(tmp_path)
    given = {f"{name}/param": p for name, p in model.named_parameters()}
    assert differing(state, given) == []
    assert all(p.grad is None for p in model.parameters())


# When commits are made


def steps_kept(directory):
    return [ref.step for ref in LocalStore.read(directory).commits()]


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("retain", [3, 1, 2])
def test_the_newest_steps_are_kept_as_many_as_asked_for(tmp_path, retain):
    train(tmp_path, 4, Record(), retain=retain)
    assert steps_kept(tmp_path) == [4, 3, 2][:retain]


@pytest.mark.parametrize("options", [{}, {"optimizer_on_host": 1.0, "params_on_host": 1.0}])
def test_every_third_step_is_a_commit_and_the_last_one_when_closed(tmp_path, five_steps, options):
    model = decoder(blocks=3)
    with holdfast.offload(
        model, adamw(model), tmp_path, **grouped(dtype="fp32", commit_every=3, **options)
    ) as engine:
        durable = []
        for step in range(5):
            engine.step(batches(step, 1))
            engine.wait()
            durable.append(engine.durable_step)
        assert durable == [0, 0, 3, 3, 3]
    assert steps_kept(tmp_path) == [5, 3]
    assert differing(stored(tmp_path), five_steps) == []


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory):
    directory, model = tmp_path_factory.mktemp("five"), decoder(blocks=3)
    with holdfast.offload(model, adamw(model), directory, precision="fp32") as engine:
        for step in range(5):
            engine.step(batches(step, 1))
    return stored(directory)


@pytest.mark.parametrize(
    "options", [{}, {"optimizer_on_host": 1.0}, {"optimizer_on_host": 0.5, "clip_norm": 9.0}]
)
def test_without_commits_only_what_is_saved_is_kept(tmp_path, five_steps, options):
    model = decoder(blocks=3)
    with holdfast.offload(
        model, adamw(model), tmp_path, **grouped(dtype="fp32", commit_every=0, **options)
    ) as engine:
        for step in range(3):
            engine.step(batches(step, 1))
        engine.save()
        assert engine.durable_step == 3
        assert steps_kept(tmp_path) == [3, 0]
        at_three = stored(tmp_path)
        engine.step(batches(3, 1))
    assert steps_kept(tmp_path) == [3, 0]
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path, **grouped(dtype="fp32", **options)) as engine:
        assert engine.steps_done == 3
        assert differing(stored(tmp_path), at_three) == []
        for step in range(3, 5):
            engine.step(batches(step, 1))
    assert differing(stored(tmp_path), five_steps) == []


def test_what_is_saved_twice_or_at_a_commit_is_saved_once(tmp_path):
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        engine.save()
        engine.step(batches(0, 1))
        engine.save()
        assert engine.durable_step == 1
        files = sorted(path.name for path in (tmp_path / "commits").iterdir())
        engine.save()
        assert sorted(path.name for path in (tmp_path / "commits").iterdir()) == files


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"optimizer_on_host": 1.0, "params_on_host": 1.0}, {"clip_norm": 0.5}]
)
def test_a_step_is_durable_at_the_latest_when_the_next_one_returns(tmp_path, options):
    """However slow the disk is."""
    model = decoder(blocks=3)
    engine = holdfast.offload(
        model, adamw(model), tmp_path, **grouped(dtype="fp32", write_limit=800_000, **options)
    )
    with engine:
        behind = []
        for step in range(4):
            engine.step(batches(step, 1))
            behind.append(engine.steps_done - engine.durable_step)
        assert max(behind) <= 1
        engine.wait()
        assert engine.durable_step == 4


@pytest.mark.slow
def test_every_resume_opens_a_timeline_of_its_own(tmp_path):
    for step in range(3):
        train(tmp_path, step + 1, Record())
    found = [(ref.step, ref.timeline) for ref in LocalStore.read(tmp_path).commits()]
    assert found == [(3, 3), (2, 2)]


# What is skipped


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(
    "options", [{}, {"optimizer_on_host": 1.0, "params_on_host": 1.0}, {"schedule": "horizontal"}]
)
def test_a_step_with_a_nan_is_skipped_whole_and_the_next_one_goes_on(tmp_path, options, clip_norm):
    model = decoder(blocks=3)
    optimizer = adamw(model)
    settings = {"dtype": "fp32", "clip_norm": clip_norm, "scheduler": warm_up(optimizer), **options}
    with holdfast.offload(model, optimizer, tmp_path, **grouped(**settings)) as engine:
        engine.step(batches(0, 3))
        engine.wait()
        before = stored(tmp_path)
        handle = model.head.register_forward_hook(nan_in_the_second())
        assert np.isnan(engine.step(batches(1, 3)))
        handle.remove()
        engine.wait()
        assert "the loss of micro-batch 1 is nan" in engine.last["skipped"]
        assert (engine.steps_done, engine.skipped_steps, engine.durable_step) == (2, 1, 2)
        assert differing(stored(tmp_path), before) == []
        rate = optimizer.param_groups[0]["lr"]
        engine.step(batches(2, 3))
        assert engine.last["skipped"] is None
        assert engine.last["learning_rate"][0] == rate
    found = stored(tmp_path)
    model = decoder(blocks=3)
    optimizer = adamw(model, fused=True)
    scheduler = warm_up(optimizer)
    for step in range(3):
        for batch in batches(step, 3) if step != 1 else ():
            (model(**batch) / 3).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if step != 1:
            optimizer.step()
        else:
            optimizer._opt_called = True
        scheduler.step()
        optimizer.zero_grad()
    assert differing(found, {f"{name}/param": p.detach() for name, p in model.named_parameters()}) == []
    assert {value.item() for name, value in found.items() if name.endswith("/step")} == {2.0}
    resumed = decoder(blocks=3)
    optimizer = adamw(resumed)
    setting = {"dtype": "fp32", "scheduler": warm_up(optimizer), "clip_norm": clip_norm}
    with holdfast.offload(resumed, optimizer, tmp_path, **grouped(**setting)) as engine:
        assert (engine.steps_done, engine.skipped_steps) == (3, 1)


def nan_in_the_second():
    calls = []

    def hook(module, args, output):
        calls.append(1)
        return output * float("nan") if len(calls) == 2 else output

    return hook


def test_a_gradient_that_overflows_skips_the_step_too(tmp_path):
    """The loss is finite, and the norm is not."""
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32", clipping=1.0) as engine:
        engine.step(batches(0, 2))
        engine.wait()
        before = stored(tmp_path)
        handle = model.norm.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 1e38 * 1e38,)
        )
        engine.step(batches(1, 2))
        handle.remove()
        assert "the gradient norm is " in engine.last["skipped"]
        engine.wait()
        assert differing(stored(tmp_path), before) == []
        engine.step(batches(2, 2))
        assert engine.last["skipped"] is None
        engine.wait()
        assert differing(stored(tmp_path), before) != []


@pytest.mark.parametrize("on_host", [0.0, 0.5, 1.0])
def test_a_commit_after_a_skipped_step_holds_what_the_steps_before_it_changed(tmp_path, on_host):
    model = decoder(blocks=3)
    with holdfast.offload(
        model,
        adamw(model),
        tmp_path,
        precision="fp32",
        durability=holdfast.Durability(commit_every=2),
        placement=holdfast.Placement(optimizer_on_host=on_host),
    ) as engine:
        engine.step(batches(0, 2))
        handle = model.head.register_forward_hook(nan_in_the_second())
        engine.step(batches(1, 2))
        handle.remove()
        engine.wait()
        assert engine.durable_step == 2
        found = stored(tmp_path)
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path / "one step", precision="fp32") as engine:
        engine.step(batches(0, 2))
    assert differing(found, stored(tmp_path / "one step")) == []


# Buffers


class WithStatistics(nn.Module):
    """A prologue that counts its calls and an epilogue with running statistics."""

    def __init__(self):
        super().__init__()
        self.embed, self.statistics = nn.Embedding(VOCABULARY, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, tokens, targets):
        self.calls += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.statistics(x.flatten(0, 1)).square().mean() + (x.mean(-1) - targets).square().mean()


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_a_buffer_that_is_changed_after_a_step_is_not_in_its_commit(tmp_path, monkeypatch, schedule):
    """The update goes on beside the script: here it waits until the script has changed the buffer."""
    apply, changed = state.apply, threading.Event()

    def late(run, step, unit, *rest):
        assert unit is not run.resident or changed.wait(10)
        apply(run, step, unit, *rest)

    monkeypatch.setattr(state, "apply", late)
    model = decoder(blocks=2)
    model.norm.register_buffer("temperature", torch.zeros(()))
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32", schedule=schedule) as engine:
        model.norm.temperature.fill_(5)
        engine.step(batches(0, 2))
        model.norm.temperature.fill_(-1)
        changed.set()
        engine.wait()
        assert stored(tmp_path)["norm.temperature/buffer"] == 5
        engine.step(batches(1, 2))
    assert stored(tmp_path)["norm.temperature/buffer"] == -1


def test_buffers_outside_of_blocks_are_part_of_every_commit(tmp_path):
    torch.manual_seed(0)
    start = WithStatistics()
    plain = copy.deepcopy(start)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    for step in range(4):
        for batch in batches(step, 2):
            (plain(**batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stop in (2, 4):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdfast.offload(model, optimizer, tmp_path, precision="fp32") as engine:
            while engine.steps_done < stop:
                engine.step(batches(engine.steps_done, 2))
            state = engine.state_dict()
        assert state.keys() == model.state_dict().keys()
        assert differing(state, model.state_dict()) == []
    buffers = {f"{name}/buffer": value for name, value in plain.named_buffers() if name != "table"}
    assert buffers["calls/buffer"].item() == 8
    assert differing(stored(tmp_path), buffers) == []
    assert differing(model.state_dict(), plain.state_dict()) == []
    assert "table/buffer" not in stored(tmp_path)


class WithCaches(WithStatistics):
    """Two buffers that are not persistent and follow the texts: one changes in place, the other is replaced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.first, self.count = self.table, 0  # another name of the table as it was made

    def forward(self, tokens, targets):
        self.count += 1
        self.mean.lerp_(tokens[:, :8].float().mean(0), 0.5)
        self.table = self.table * 0.5 + self.count
        return super().forward(tokens, targets + self.mean.mean() + self.table.sum())


def train_with_caches(directory, *stops):
    """A process for each of ``stops``, all but the last one given up when its last step is durable."""
    losses = []
    for stop in stops:
        torch.manual_seed(0)
        model = WithCaches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with holdfast.offload(model, optimizer, directory, precision="fp32") as engine:
            while engine.steps_done < stop:
                losses.append(engine.step(batches(engine.steps_done, 2)))
            engine.wait()
            if stop != stops[-1]:
                engine.give_up()
    return losses, model


def test_buffers_that_are_not_persistent_go_on_as_training_left_them(tmp_path):
    losses, whole = train_with_caches(tmp_path / "whole", 5)
    again, model = train_with_caches(tmp_path / "run", 2, 3, 5)
    assert again == losses
    assert torch.equal(model.mean, whole.mean) and torch.equal(model.table, whole.table)
    assert model.count == whole.count == 10 and torch.equal(model.first, torch.ones(3))


def test_a_buffer_that_is_not_persistent_and_too_large_is_told_of(tmp_path, monkeypatch):
    _, whole = train_with_caches(tmp_path / "whole", 2)
    monkeypatch.setattr(transient_buffers, "MOST_BYTES", 16)  # of the table alone
    with pytest.warns(UserWarning, match="buffer mean is registered with persistent=False"):
        _, model = train_with_caches(tmp_path / "run", 1, 2)
    assert torch.equal(model.table, whole.table) and not torch.equal(model.mean, whole.mean)
