"""When bases are made: as told or tuned, within memory and storage; and what a disk that is behind, or hangs, does."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import deque
from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import holdfast
from checkpoint.loops import cut_small, make, manifests, same
from holdfast.checkpoint.log.recorder import Recorder
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpoint.snapshot import snapshot_scheduler as pace_module
from holdfast.checkpoint.snapshot import snapshot_writer as bases
from holdfast.checkpoint.snapshot.snapshot_scheduler import SnapshotScheduler
from holdfast.checkpoint.snapshot.snapshot_writer import SnapshotWriter
from holdfast.checkpointer import Checkpointer
from holdfast.cli.inspect import show
from holdfast.errors import BadInput, DoesNotFit, WriterHung
from holdfast.events import read_events
from holdfast.formats.rules_source import check, infer
from holdfast.io.queue import Throttle
from holdfast.state.rules.rule_language import Rules
from holdfast.store.commit.retention import Keep, used_bytes
from holdfast.store.disk import Disk
from holdfast.store.log.segments import read_segment, segments
from holdfast.store.run_store import LocalStore
from test_checkpointer import Orthogonal, go_on, reference, start


@pytest.fixture
def small_units(monkeypatch):
    """A base is of several units, one of them in each step; a segment holds three groups."""
    cut_small(monkeypatch, 3)


def events(root, *names):
    return [event for event in read_events(root / "events.jsonl") if event["event"] in names]


def resumed_at(root, step, states, feature="batchnorm", **options):
    """Whether the run comes back at ``step``, bit for bit."""
    other, again = start(root, feature, **options)
    with again:
        return again.resume(step=step) == step and same(other.state(), states[step])


@pytest.mark.parametrize("best", [None, 1])
def test_log_leaves_the_storage_that_bases_need(tmp_path, best):
    """A segment is reserved in advance, for hundreds of steps of a small model."""
    model = nn.Linear(300, 300)
    full_bytes = 3 * 4 * 300 * 300
    keep = Keep(2) if best is None else Keep(2, best=best, metric="loss")
    checkpointer = Checkpointer(
        tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()), storage=int(4.4 * full_bytes),
        keep=keep, base_every=3,
    )  # fmt: skip
    with checkpointer:
        checkpointer.resume()
        for step in range(9):
            model(torch.ones(1, 300)).sum().backward()
            checkpointer._training.optimizers[0].step()
            checkpointer.step(metrics={"loss": -step})
    assert checkpointer.durable_step == 9


def test_storage_without_room_for_another_base_is_named(tmp_path, monkeypatch):
    loop, checkpointer = start(tmp_path, keep=Keep(1, best=3, metric="loss"))
    with suppress(DoesNotFit), checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 1)
        checkpointer.save()
        monkeypatch.setattr(LocalStore, "make_room", lambda self, nbytes: False)
        with pytest.raises(DoesNotFit, match=r"storage = .* is too little: .* takes .* for the next base"):
            for step in range(1, 6):
                loop.iteration(step, lambda: checkpointer.step(metrics={"loss": -checkpointer.steps_done}))


@pytest.mark.parametrize(("frozen", "saves"), [(False, True), (True, True), (False, False)])
def test_a_resumed_run_expects_bases_of_the_size_that_they_have(tmp_path, frozen, saves):
    """Also where the base that was loaded is of step 0, without the optimizer's state."""

    def opened():
        model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
        model[0].weight.requires_grad_(not frozen)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        return model, optimizer, Checkpointer(tmp_path, model=model, optimizer=optimizer)

    for steps in (2, 0):
        model, optimizer, checkpointer = opened()
        with checkpointer:
            checkpointer.resume()
            expected = checkpointer._backend.pace.bases.expected_bytes()
            for _ in range(steps):
                model(torch.rand(4, 300)).sum().backward()
                optimizer.step()
                checkpointer.step()
            if saves or not steps:
                checkpointer.save()
            newest = checkpointer._store.newest_base
            checkpointer.close(save=saves)
    assert sum(expected) == newest.total_bytes and bool(expected[1]) == frozen


# How often


def test_bases_are_begun_as_far_apart_as_told(tmp_path, small_units):
    loop, checkpointer = start(tmp_path, base_every=20, keep=holdfast.Keep(9))
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 70)
    begun = sorted(manifest.oldest_step for manifest in manifests(tmp_path))
    assert [b - a for a, b in pairwise(begun[1:])] == [20, 20]
    assert all(m.step > m.oldest_step for m in manifests(tmp_path) if m.step)


def test_without_a_number_it_is_tuned_and_every_change_is_an_event(tmp_path):
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 30)
        while checkpointer._backend.pace.tuner.steps == 100:  # until a base was written, on whatever disk
            go_on(loop, checkpointer, checkpointer.steps_done + 10)
        steps = checkpointer._backend.pace.tuner.steps
    changes = events(tmp_path, "cadence")
    assert changes[0]["was"] == 100
    assert changes[-1]["base_every"] == steps
    assert changes[0]["measured"]["step_seconds"] < 1.0


def test_a_resume_tells_the_tuner_what_replay_took_and_how_often_the_run_began(tmp_path):
    for steps in (10, 20, 30):
        loop, checkpointer = start(tmp_path)
        with checkpointer:
            checkpointer.resume()
            go_on(loop, checkpointer, steps)
    measured = checkpointer._backend.pace.tuner.measured
    assert measured.replay_seconds != measured.step_seconds / 10
    assert measured.mean_seconds_between_failures < 86400 / 2  # two restarts in a few seconds


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recovery_seconds": 0}, "recovery_seconds must be positive"),
        ({"storage": -1}, "storage_bytes must be positive"),
        ({"bandwidth_share": 2.0}, "bandwidth_share must lie above 0"),
        ({"keep": 3}, "keep = 3 is no holdfast.Keep"),
    ],
)
def test_limits_that_cannot_be_are_refused_with_nothing_written(tmp_path, options, message):
    with pytest.raises(BadInput, match=message):
        start(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_base_asked_for_at_a_step_of_which_one_is_on_its_way_is_that_one(tmp_path):
    loop, checkpointer = start(tmp_path, base_every=1, keep=holdfast.Keep(99))
    with checkpointer:
        checkpointer.resume()
        for i in range(6):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
            assert checkpointer._backend.pace.base_step == i + 1
    assert [manifest.step for manifest in manifests(tmp_path)] == [6, 5, 4, 3, 2, 1, 0]


def test_what_is_changed_after_a_base_made_beside_training_is_in_that_of_save(tmp_path, small_units):
    """Parts of the first base are of earlier steps, so that it cannot be compared."""
    loop, checkpointer = start(tmp_path, base_every=3)
    with checkpointer:
        checkpointer.resume()
        while not 0 < checkpointer.steps_done == checkpointer._backend.base_step:
            loop.iteration(checkpointer.steps_done, checkpointer.step)
            checkpointer._backend.recorder.drain()
            assert checkpointer.steps_done < 60
        newest = checkpointer._store.newest_base
        assert newest.oldest_step < newest.step == checkpointer.steps_done
        next(loop.model.parameters()).data.mul_(2)
        checkpointer.save()
        newest = checkpointer._store.newest_base
        assert newest.oldest_step == newest.step == checkpointer.steps_done
        written = checkpointer._backend.pace.bases.written_bytes
        checkpointer.save()
        assert checkpointer._backend.pace.bases.written_bytes == written
        for _ in range(2):
            loop.iteration(checkpointer.steps_done, checkpointer.step)
        steps, state = checkpointer.steps_done, loop.state()
    again, checkpointer = start(tmp_path, base_every=3)
    with checkpointer:
        assert checkpointer.resume() == steps and same(again.state(), state)


def test_close_waits_for_a_base_of_the_last_step_without_comparing_it(tmp_path, monkeypatch):
    loop, checkpointer = start(tmp_path, every=3)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        monkeypatch.setattr(SnapshotScheduler, "complete", False)  # it is still being written
        monkeypatch.setattr(SnapshotWriter, "is_as_in", lambda *_: pytest.fail("compared"))
    assert manifests(tmp_path)[0].step == 3


# A disk that is behind


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "commit"])
def test_a_gap_ends_with_a_base_and_everything_after_it_comes_back(tmp_path, small_units, policy):
    states, _ = reference(200)
    loop, checkpointer = start(tmp_path, when_behind=policy, base_every=1000)
    with checkpointer, pytest.warns(UserWarning, match="was not recorded"):
        checkpointer.resume()
        checkpointer._queue._throttles[True] = Throttle(100_000)
        go_on(loop, checkpointer, 30)
        checkpointer._queue._throttles[True] = Throttle(None)
        checkpointer._backend.recorder.drain()
        for i in range(30, 200):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
            if not checkpointer._backend.pace.gap and i > 40:
                break
        assert not checkpointer._backend.pace.gap
        end = min(checkpointer.steps_done + 10, 200)
        for i in range(checkpointer.steps_done, end):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
        checkpointer.wait()
        assert checkpointer.durable_step == end
    [newest, *_] = manifests(tmp_path)
    assert (newest.oldest_step < newest.step) == (policy == "skip")  # made beside training, or all at once
    other, again = start(tmp_path)
    with again:
        assert again.resume() == end
        assert same(other.state(), states[end])


def test_while_a_base_is_made_beside_a_gap_nothing_later_is_called_durable(tmp_path, small_units):
    loop, checkpointer = start(tmp_path, when_behind="skip", base_every=1000)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 5)
        checkpointer.wait()
        with pytest.warns(UserWarning, match="was not recorded"):
            checkpointer._backend.pace.open_gap(5)
        release, real = threading.Event(), checkpointer._store.publish
        checkpointer._store.publish = lambda *a: (release.wait(60), real(*a))[1]
        loop.iteration(5, checkpointer.step)  # lost, and the base begins
        for i in range(6, 14):
            loop.iteration(i, checkpointer.step)
            time.sleep(0.02)
        until = time.monotonic() + 60
        while checkpointer._backend.recorder._written_step <= 5 and time.monotonic() < until:
            time.sleep(0.01)
        assert (
            checkpointer._backend.pace.bases.all_staged and checkpointer._backend.recorder._written_step > 5
        )
        assert checkpointer.durable_step == 5
        release.set()
        checkpointer.wait()
        assert checkpointer.durable_step == 14


def test_a_step_lost_while_the_base_that_ends_a_gap_is_published_begins_another_gap(tmp_path, small_units):
    states, _ = reference(40)
    loop, checkpointer = start(tmp_path, when_behind="skip", base_every=1000)
    with checkpointer, pytest.warns(UserWarning, match="was not recorded"):
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        checkpointer.wait()
        checkpointer._backend.pace.open_gap(3)
        release, real = threading.Event(), checkpointer._store.publish
        checkpointer._store.publish = lambda *a: (release.wait(10), real(*a))[1]
        i = 3
        while (
            not checkpointer._backend.pace.bases.all_staged or not checkpointer._backend.pace.bases.under_way
        ):
            loop.iteration(i, checkpointer.step)
            i += 1
        take_slot, checkpointer._backend.recorder.take_slot = (
            checkpointer._backend.recorder.take_slot,
            lambda wait: None,
        )
        loop.iteration(i, checkpointer.step)  # lost
        checkpointer._backend.recorder.take_slot = take_slot
        release.set()
        checkpointer._backend.recorder.drain()
        assert checkpointer.durable_step <= i and not checkpointer._backend.pace.complete
        go_on(loop, checkpointer, 40)
        checkpointer.wait()
    other, again = start(tmp_path)
    with again:
        assert again.resume() == 40 and same(other.state(), states[40])


@pytest.mark.parametrize("lost_when_shared, gap", [(1, True), (2, False)])
def test_a_base_of_several_ranks_of_which_all_was_copied_before_a_loss_does_not_end_the_gap(
    lost_when_shared, gap
):
    """One that the first rank publishes after the step was lost."""
    pace = SimpleNamespace(
        _together=SimpleNamespace(see_published=lambda bases: 7), _recorder=SimpleNamespace(put=lambda task: None),
        _store=SimpleNamespace(measure=None), _published=deque(), _losses=2, _losses_when_shared=lost_when_shared,
        bases=None, tuner=None, gap=True, _whole=False,
    )  # fmt: skip
    SnapshotScheduler._see_published(pace)
    assert pace.base_step == 7 and pace.gap == gap


# A disk that hangs while a base is made


def whole_base(loop, checkpointer):
    checkpointer.save()


def gap_base(loop, checkpointer):
    checkpointer._backend.pace.gap = True
    go_on(loop, checkpointer, 40)


def adapted(loop, checkpointer):
    loop.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    loop.model.extra = loop.optimizers[0].param_groups[-1]["params"][0]
    go_on(loop, checkpointer, 40)


def new_form(loop, checkpointer):
    go_on(loop, checkpointer, 60)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("act", [whole_base, gap_base, adapted, new_form])
@pytest.mark.parametrize("call", ["allocate", "sync", "write_bytes", "sync_dir", "rename"])
def test_a_disk_that_hangs_while_a_base_is_made_is_an_error_and_no_hang(tmp_path, monkeypatch, act, call):
    loop, checkpointer = start(tmp_path, "", base_every=5)
    checkpointer.resume()
    go_on(loop, checkpointer, 1)
    checkpointer.wait()
    checkpointer._backend.recorder._deadline = 0.4
    release, real = threading.Event(), getattr(checkpointer._store.disk, call)
    monkeypatch.setattr(checkpointer._store.disk, call, lambda *a, **k: (release.wait(20), real(*a, **k))[1])
    started = time.monotonic()
    try:
        with pytest.raises(WriterHung, match="nothing has been written"):
            act(loop, checkpointer)
        with pytest.raises(WriterHung):
            checkpointer.close()
        assert time.monotonic() - started < 10
    finally:
        release.set()
        checkpointer._backend.recorder._thread.join()
        checkpointer._let_go()


# Memory


class Wide(nn.Module):
    """One parameter that is most of the model."""

    def __init__(self, *shape):
        super().__init__()
        self.big = nn.Parameter(torch.randn(shape))
        self.small = nn.Linear(4, 4)

    def forward(self, x):
        return self.small(x).sum() * self.big.view(-1)[:7].sum() + self.big.mean()


def copies_of(monkeypatch):
    """The sizes of the copies that are made for bases."""
    copied = []
    real = bases.SnapshotWriter._buffer
    monkeypatch.setattr(bases.SnapshotWriter, "_buffer", lambda self, n: (copied.append(n), real(self, n))[1])
    return copied


def test_a_unit_larger_than_the_copies_may_be_is_written_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.checkpointer.BASE_BYTES_PER_STEP", 1 << 16)
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 1 << 16)
    torch.manual_seed(0)
    model = Wide(1, 300_000)  # one row is not divided
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    copied = copies_of(monkeypatch)
    with Checkpointer(
        tmp_path, model=model, optimizer=optimizer, memory=4_000_000, base_every=3
    ) as checkpointer:
        checkpointer.resume()
        share = checkpointer._backend.staging_bytes
        for _ in range(12):
            model(torch.randn(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            assert checkpointer._backend.pace.bases.memory_bytes <= share
        checkpointer._backend.recorder.drain()
    assert copied and max(copied) <= share < 3 * 4 * 300_000
    assert manifests(tmp_path)[0].step > 3
    other = Wide(1, 300_000)
    again = Checkpointer(tmp_path, model=other, optimizer=torch.optim.AdamW(other.parameters(), lr=0.01))
    with again:
        assert again.resume() == 12
        assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("shape", [(3_000, 100), (300_000,), (7, 3, 11_000)])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam"])
def test_rows_of_a_large_parameter_are_copied_each_at_a_step_of_their_own(tmp_path, monkeypatch, shape, name):
    monkeypatch.setattr("holdfast.checkpointer.BASE_BYTES_PER_STEP", 1)
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 1 << 19)
    options = {"momentum": 0.9} if name == "SGD" else {}

    def made(seed):
        torch.manual_seed(seed)
        model = Wide(*shape)
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)

    model, optimizer = made(0)
    copied, states = copies_of(monkeypatch), {}
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=3, keep=Keep(9)) as checkpointer:
        checkpointer.resume()
        for step in range(1, 16):
            model(torch.randn(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            states[step] = state_of(model, optimizer)
    with LocalStore.read(tmp_path) as reader:
        base = next(m for m in map(reader.load, reader.line()) if m.oldest_step < m.step)
        fragments = reader.atoms(base)["big/param"]["fragments"]
    assert len(fragments) > 2 and len({base.files[f["unit"]].step for f in fragments}) == len(fragments)
    assert max(copied) < (1 << 19) * 1.2
    for step in range(base.step, 16):
        other, its = made(1)
        shutil.copytree(tmp_path, copy := tmp_path.with_name(f"{tmp_path.name}-{step}"))
        checkpointer = Checkpointer(copy, model=other, optimizer=its, base_every=None)
        assert checkpointer.resume(step=step) == step
        checkpointer.close()
        assert same(state_of(other, its), states[step])


def state_of(model, optimizer):
    return deepcopy([dict(model.state_dict()), optimizer.state_dict()["state"]])


def test_show_and_rules_take_rows_that_one_rank_divided_for_one_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 1 << 19)
    model = Wide(3_000, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
    show(str(tmp_path), as_json=False)
    shown = capsys.readouterr().out
    assert "3000x100" in shown and "parts" not in shown
    show(str(tmp_path), as_json=True)
    atoms = {atom["name"]: atom for atom in json.loads(capsys.readouterr().out)["atoms"]}
    assert len(atoms["big"]["fragments"]) == 3
    with LocalStore.read(tmp_path) as reader:
        commit = reader.load(reader.head())
        rules = Rules.parse(infer(reader, commit), "inferred")
        assert check(rules, reader, commit)[1] == []


@pytest.mark.parametrize("shape", [(5, 3), (1_500_000,), ()])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_file_written_through_has_the_bytes_of_one_that_was_copied(shape, transposed):
    torch.manual_seed(0)
    tensors = {"a/param": torch.randn(shape), "b/param": torch.arange(7), "c/param": torch.randn(7, 1001)}
    if transposed:
        tensors["c/param"] = torch.randn(1001, 7).t()
    layout = snapshot_chunks.Layout.build(
        [
            (key, {torch.float32: "F32", torch.int64: "I64"}[t.dtype], tuple(t.shape))
            for key, t in tensors.items()
        ],
        snapshot_chunks.METADATA,
    )
    whole = bytearray(layout.file_bytes)
    for key, tensor in tensors.items():
        bases.write_tensor(memoryview(whole), layout, key, tensor)
    whole[: len(layout.header)] = layout.header
    image, pieces = bases.SnapshotImage(layout, tensors), bytearray(layout.file_bytes)
    for offset in range(0, layout.file_bytes, 4096):
        image.fill(memoryview(pieces)[offset : offset + 4096], offset)
    assert pieces == whole


def test_a_base_of_one_step_waits_where_the_state_changes_its_form_meanwhile(tmp_path, small_units):
    """An optimizer that is not elementwise makes its state while a base waits for memory."""
    loop = make(Orthogonal, "")
    with Checkpointer(
        tmp_path,
        model=loop.model,
        optimizer=loop.optimizers,
        base_every=2,
        keep=holdfast.Keep(9),
        memory="1GiB",
    ) as checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        checkpointer._backend.recorder.drain()
        maker = checkpointer._backend.pace.bases
        maker.memory_bytes += 1 << 40  # no room for now
        go_on(loop, checkpointer, 6)
        assert maker.under_way and not maker._staged
        loop.optimizers[0].state[loop.model.scale]["late"] = torch.zeros(50)  # the form changes
        maker.memory_bytes -= 1 << 40
        maker.stage(checkpointer.steps_done, maker.left_bytes)
        assert not maker._staged and maker.under_way
        maker.give_up()


# Storage


def on_disk(root):
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(root)
        for name in names
        if name not in ("events.jsonl", "lock")
    )


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("policy", ["block", "skip", "commit"])
def test_a_run_never_takes_more_of_the_disk_than_it_may(tmp_path, small_units, policy):
    """A cap that is far too small for the cadence asked for: bases are made for want of room."""
    cap, states = 1_000_000, {}
    loop, checkpointer = start(tmp_path, when_behind=policy, base_every=100_000, storage=cap)
    most = 0
    with checkpointer:
        checkpointer.resume()
        with pytest.warns(UserWarning, match="is not within storage") if policy != "block" else nullcontext():
            for i in range(600):
                loop.iteration(i, checkpointer.step)
                states[i + 1] = loop.state()
                if policy != "block":
                    checkpointer._backend.recorder.drain()  # the disk is not behind, it is full
                if i % 5 == 0:
                    most = max(most, on_disk(tmp_path))
        checkpointer.wait()
        assert checkpointer.durable_step == 600
    assert cap / 2 < max(most, on_disk(tmp_path)) <= cap
    assert len(manifests(tmp_path)) == 2
    assert events(tmp_path, "storage")
    assert len(events(tmp_path, "base")) > 4
    assert resumed_at(tmp_path, 600, states)


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_the_cap_before_its_first_base(tmp_path, small_units):
    for steps in (200, 400):
        loop, checkpointer = start(tmp_path, base_every=100_000, storage=1_000_000)
        with checkpointer:
            for i in range(checkpointer.resume(), steps):
                loop.iteration(i, checkpointer.step)
                if i % 5 == 0:
                    assert on_disk(tmp_path) <= 1_000_000


@pytest.mark.slow
def test_what_is_kept_for_good_gives_way_to_the_cap_oldest_first(tmp_path, small_units):
    loop, checkpointer = start(tmp_path, base_every=10, keep=holdfast.Keep(2, every=10), storage=2_000_000)
    most = 0
    with checkpointer:
        checkpointer.resume()
        for i in range(400):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
            if i % 5 == 0:
                most = max(most, on_disk(tmp_path))
    steps = sorted(manifest.step for manifest in manifests(tmp_path))
    assert 1_000_000 < most <= 2_000_000
    assert 2 < len(steps) < 39 and steps[-1] >= 380  # the newest stay
    assert steps[0] > 10
    dropped = [event["dropped_step"] for event in events(tmp_path, "storage") if "dropped_step" in event]
    assert dropped == sorted(dropped) and dropped


def test_a_cap_that_no_two_bases_fit_in_is_refused_with_what_would_do(tmp_path):
    loop, checkpointer = start(tmp_path, storage=20_000)
    with pytest.raises(DoesNotFit, match=r"storage = 19\.5 KiB is too little: .* Give more than \d+ bytes"):
        checkpointer.resume()
        go_on(loop, checkpointer, 5)
    with suppress(DoesNotFit):
        checkpointer.close()


def test_the_default_cap_is_twenty_times_the_state_and_what_is_kept_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr(pace_module, "LEAST_STORAGE", 1 << 20)
    _, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        assert checkpointer._store.cap_bytes == 1 << 20
        monkeypatch.setattr(pace_module, "LEAST_STORAGE", 1)
        monkeypatch.setattr(LocalStore, "for_good_bytes", 5000)
        checkpointer._backend.pace._set_cap()
        assert checkpointer._store.cap_bytes == 20 * checkpointer._backend.pace.bases.full_bytes + 5000
        assert checkpointer._backend.pace.tuner.limits.storage_bytes == checkpointer._store.cap_bytes - 5000


def test_the_cap_is_known_before_files_are_made_for_a_base(tmp_path, monkeypatch):
    seen, real_make, real_put = [], bases.SnapshotWriter._make, Recorder.put

    def make_files(self, *args):
        seen.append(self._store.cap_bytes)
        real_make(self, *args)

    def put(self, item):
        real_put(self, item)
        while self._at_once:  # the thread is faster
            time.sleep(0.001)

    monkeypatch.setattr(bases.SnapshotWriter, "_make", make_files)
    monkeypatch.setattr(Recorder, "put", put)
    loop, checkpointer = start(tmp_path, base_every=2, storage=10_000_000)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 4)
    assert seen == [10_000_000] * len(seen) and len(seen) > 1


def test_a_segment_that_is_begun_while_room_is_counted_is_not_counted_as_free_alone():
    """As the recorder's thread does it between any two of the numbers."""

    class Rolling:
        pending_bytes = pending = header_bytes = 0
        left_bytes = Recorder.left_bytes

        @property
        def _journal(self):
            store.used_bytes += 100
            return SimpleNamespace(free_bytes=100)

    store = SimpleNamespace(used_bytes=900, cap_bytes=1000)
    pace = SimpleNamespace(_store=store, _recorder=Rolling(), _margin=lambda nbytes: 0)
    assert not SnapshotScheduler._is_room(pace, 150)


def test_files_that_are_made_for_a_base_count_at_once(tmp_path, monkeypatch):
    """And not only when it is published: records go on meanwhile."""
    uncounted, real_make, real_free = [], bases.SnapshotWriter._make, LocalStore.free_generation

    def count(store, limit):
        uncounted.append(used_bytes(store.disk) - store.used_bytes < limit)

    def make_files(self, before, units, *more):
        real_make(self, before, units, *more)
        count(self._store, units[0].layout.file_bytes)

    def free_generation(self, unit):
        found = real_free(self, unit)
        count(self, unit.layout.file_bytes)
        return found

    monkeypatch.setattr(bases.SnapshotWriter, "_make", make_files)
    monkeypatch.setattr(LocalStore, "free_generation", free_generation)
    loop, checkpointer = start(tmp_path, base_every=2, keep=holdfast.Keep(9))
    with checkpointer:
        checkpointer.resume()
        for i in range(16):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
    assert all(uncounted) and len(uncounted) > 8


def test_segments_hold_the_records_to_the_next_base(tmp_path):
    loop, checkpointer = start(tmp_path, base_every=11)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 1)
        checkpointer.wait()
        [ref] = segments(Disk(tmp_path), "rank-00000")
        [record] = read_segment(Disk(tmp_path), ref)[0]
        assert os.path.getsize(tmp_path / ref.path) == 11 * record.end
