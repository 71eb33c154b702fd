"""``every=``: bases alone, or what ``"auto"`` chooses. What is called durable comes back bit for bit, with no record
between two bases, and across each change from the one to the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from checkpoint.loops import cut_small, make, manifests, same
from holdfast.checkpoint.snapshot.snapshot_scheduler import SnapshotScheduler
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, DiskFull
from holdfast.events import read_events
from holdfast.schedule.interval import step_cadence
from support.switching import EVERY, SMALL, switch_often
from test_checkpointer import ADAMW, go_on, reference, start

ROUND = 2 * SMALL["BLOCK_STEPS"] + SMALL["COPIED_STEPS"]


def left(checkpointer):
    """As a kill leaves the run, but for what is under way: that is written."""
    checkpointer.close(save=False)


def train(loop, checkpointer, steps):
    """Train to ``steps``, each base written before the next step."""
    while checkpointer.steps_done < steps:
        loop.iteration(checkpointer.steps_done, checkpointer.step)
        checkpointer._backend.recorder.drain()


def choices(root):
    return [event for event in read_events(root / "events.jsonl") if event["event"] == "every"]


# Bases alone


@pytest.mark.parametrize(
    "feature", ["", "batchnorm", "schedule", "scaler", "ema", "two", "accumulate", "frozen"]
)
def test_a_run_of_bases_alone_goes_on_from_the_newest_bit_for_bit(tmp_path, feature):
    states, losses = reference(13, feature)
    loop, checkpointer = start(tmp_path, feature, every=4)
    checkpointer.resume()
    train(loop, checkpointer, 10)
    assert checkpointer.durable_step == 8
    left(checkpointer)
    loop, checkpointer = start(tmp_path, feature, every=4)
    with checkpointer:
        assert checkpointer.resume() == 8
        assert same(loop.state(), states[8])
        go_on(loop, checkpointer, 13)
    assert same(loop.state(), states[13])
    assert loop.losses == losses[len(losses) - len(loop.losses) :]


def test_a_close_after_buffers_have_changed_loses_no_step_and_says_so(tmp_path):
    """A forward pass has moved the running statistics on from step 5, which no record holds."""
    loop, checkpointer = start(tmp_path, every=4)
    checkpointer.resume()
    train(loop, checkpointer, 5)
    generators = torch.get_rng_state()
    loop.model(torch.randn(5, 7), spare=False)
    torch.set_rng_state(generators)
    with pytest.warns(UserWarning, match="buffers were changed after step 5, which has no record"):
        checkpointer.close()
    state = loop.state()
    loop, checkpointer = start(tmp_path, every=4)
    with checkpointer:
        assert checkpointer.resume() == 5
        assert same(loop.state(), state)


def test_no_record_is_written_and_every_base_is_of_one_step(tmp_path, monkeypatch):
    cut_small(monkeypatch)
    loop, checkpointer = start(tmp_path, every=3, keep=holdfast.Keep(9))
    checkpointer.resume()
    for i in range(12):
        loop.iteration(i, checkpointer.step)
        checkpointer._backend.recorder.drain()
        assert checkpointer.durable_step == (i + 1) // 3 * 3
    assert checkpointer._backend.recorder.written_bytes == 0
    left(checkpointer)
    found = manifests(tmp_path)
    assert [manifest.step for manifest in found] == [12, 9, 6, 3, 0]
    assert all(manifest.oldest_step == manifest.step for manifest in found)


@pytest.mark.parametrize("how", ["close", "save", "wait"])
def test_a_step_between_two_bases_is_durable_once_it_is_waited_for(tmp_path, how):
    states, _ = reference(5)
    loop, checkpointer = start(tmp_path, every=4)
    checkpointer.resume()
    go_on(loop, checkpointer, 5)
    getattr(checkpointer, how)()
    assert checkpointer.durable_step == 5
    if how != "close":
        left(checkpointer)
    loop, checkpointer = start(tmp_path, every=4)
    with checkpointer:
        assert checkpointer.resume() == 5 and same(loop.state(), states[5])


def test_steps_that_the_end_of_the_script_loses_are_named(tmp_path, capfd):
    loop, checkpointer = start(tmp_path, every=4)
    checkpointer.resume()
    train(loop, checkpointer, 6)
    checkpointer._backend.recorder.end_with_process()
    assert "of its steps to 6 those after 4 are not durable" in capfd.readouterr().err
    left(checkpointer)


def test_a_run_may_change_between_records_and_bases_alone_at_a_resume(tmp_path):
    states, _ = reference(16)
    for every, stop, newest in ((1, 5, 5), (3, 11, 9), (1, 13, 13), (2, 16, 16)):
        loop, checkpointer = start(tmp_path, every=every)
        resumed = checkpointer.resume()
        assert same(loop.state(), states[resumed])
        train(loop, checkpointer, stop)
        left(checkpointer)
        loop, checkpointer = start(tmp_path, every=every)
        assert checkpointer.resume() == newest and same(loop.state(), states[newest])
        left(checkpointer)


def test_a_parameter_that_comes_later_is_in_the_bases_that_follow(tmp_path):
    def build(grown):
        loop = make(ADAMW)
        bias = loop.model.first.bias
        loop.optimizers[0].param_groups[0]["params"] = [p for p in loop.model.parameters() if p is not bias]
        if grown:
            loop.optimizers[0].add_param_group({"params": [bias], "lr": 0.5})
        return loop

    loop = build(False)
    checkpointer = Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers, every=4)
    checkpointer.resume()
    for i in range(8):
        if i == 2:
            loop.optimizers[0].add_param_group({"params": [loop.model.first.bias], "lr": 0.5})
        loop.iteration(i, checkpointer.step)
        checkpointer._backend.recorder.drain()
    left(checkpointer)
    ended, loop = loop.state(), build(True)
    with Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers, every=4) as checkpointer:
        assert checkpointer.resume() == 8 and same(loop.state(), ended)


def test_what_the_script_changes_between_steps_is_in_the_next_base_without_a_word(tmp_path):
    """With records it is not reproducible, and a warning says so."""
    loop, checkpointer = start(tmp_path, every=4)
    checkpointer.resume()
    for i in range(4):
        if i == 2:
            with torch.no_grad():
                loop.model.second.weight.mul_(0.5)
        loop.iteration(i, checkpointer.step)
        checkpointer._backend.recorder.drain()
    left(checkpointer)
    other, checkpointer = start(tmp_path, every=4)
    with checkpointer:
        assert checkpointer.resume() == 4 and same(other.state(), loop.state())


def test_bases_that_are_kept_for_good_stay(tmp_path):
    loop, checkpointer = start(tmp_path, every=2, keep=holdfast.Keep(2, every=6))
    with checkpointer:
        checkpointer.resume()
        for i in range(20):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
    assert [manifest.step for manifest in manifests(tmp_path)] == [20, 18, 12, 6]


def test_a_state_that_memory_does_not_hold_is_written_while_training_waits(tmp_path, monkeypatch):
    cut_small(monkeypatch)
    states, _ = reference(6)
    loop, checkpointer = start(tmp_path, every=3, memory=10_000)
    checkpointer.resume()
    train(loop, checkpointer, 6)
    assert checkpointer.durable_step == 6
    left(checkpointer)
    loop, checkpointer = start(tmp_path, every=3)
    with checkpointer:
        assert checkpointer.resume() == 6 and same(loop.state(), states[6])


def test_a_write_that_fails_is_an_error_of_the_next_step(tmp_path):
    loop, checkpointer = start(tmp_path, every=2)
    checkpointer.resume()

    def full(*_):
        raise DiskFull("no space left")

    checkpointer._store.publish = full
    with pytest.raises(DiskFull):
        for i in range(9):
            loop.iteration(i, checkpointer.step)
            if checkpointer.steps_done == 2:
                checkpointer._backend.recorder._thread.join()
    assert checkpointer.steps_done == 3 and checkpointer.durable_step == 0
    with pytest.raises(DiskFull):
        left(checkpointer)


# Chosen


@pytest.fixture
def switching(monkeypatch):
    switch_often(monkeypatch.setattr)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("feature", ["ema", "batchnorm", "scaler"])
@pytest.mark.slow
def test_across_every_change_the_newest_durable_step_comes_back_bit_for_bit(tmp_path, switching, feature):
    last = 4 * ROUND
    states, losses = reference(last + 4, feature)
    each = len(losses) // (last + 4)
    for stop in range(2, last, 5):
        root = tmp_path / str(stop)
        loop, checkpointer = start(root, feature, every="auto")
        checkpointer.resume()
        go_on(loop, checkpointer, stop)
        durable = checkpointer.durable_step
        left(checkpointer)
        loop, checkpointer = start(root, feature, every="auto")
        resumed = checkpointer.resume()
        assert durable <= resumed <= stop and same(loop.state(), states[resumed])
        go_on(loop, checkpointer, stop + 4)
        checkpointer.close()
        assert loop.losses == losses[each * resumed : each * (stop + 4)]


class Diary:
    """A text that grows, of which records hold the new end."""

    text = "begun " * 1000

    def state_dict(self):
        return {"text": self.text}

    def load_state_dict(self, state):
        self.text = state["text"]


@pytest.mark.parametrize("waits", [False, True])
def test_records_that_begin_again_right_after_a_base_follow_what_it_holds(
    tmp_path, switching, monkeypatch, waits
):
    """The last choice of bases alone ends with one; then the script changes something that no record has.

    Training ``waits`` for that base where one of several ranks has no memory for a copy.
    """
    monkeypatch.setattr(step_cadence, "LEAST_STEPS", 6)
    if waits:
        really = SnapshotScheduler._begin

        def save(self, step, whole=False):
            return self.save_snapshot(step) if whole else really(self, step)

        monkeypatch.setattr(SnapshotScheduler, "_begin", save)

    def begin():
        loop, diary = make(ADAMW), Diary()
        things = {"every": "auto", "also": {"diary": diary}}
        return loop, diary, Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers, **things)

    def write():
        diary.text += f"{checkpointer.steps_done} "
        checkpointer.step()

    loop, diary, checkpointer = begin()
    checkpointer.resume()
    while checkpointer.steps_done < 18:
        ended = not checkpointer._backend.records_steps
        loop.iteration(checkpointer.steps_done, write)
        checkpointer._backend.recorder.drain()
        if ended and checkpointer._backend.records_steps:
            assert checkpointer.steps_done % EVERY == 0
            with torch.no_grad():
                loop.model.first.weight[0, 0] = 7.0
    checkpointer.wait()
    left(checkpointer)
    again, text, checkpointer = begin()
    with checkpointer:
        assert checkpointer.resume() == 18
        assert same(again.state(), loop.state()) and text.text == diary.text


def test_it_changes_in_both_directions_and_says_so(tmp_path, switching, caplog):
    loop, checkpointer = start(tmp_path, every="auto")
    with checkpointer, caplog.at_level("INFO", logger="holdfast"):
        checkpointer.resume()
        recorded = []
        for i in range(8 * ROUND):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
            recorded.append(checkpointer.durable_step == i + 1)
    found = choices(tmp_path)
    assert [(event["was"], event["every"]) for event in found[:3]] == [(1, EVERY), (EVERY, 1), (1, EVERY)]
    assert all(event["plain_seconds"] > 0 and event["lost_steps"] == 1.0 for event in found)
    said = [record.message for record in caplog.records if "A failure loses" in record.message]
    assert len(said) == len(found) and f"{tmp_path}: a base every 3 steps" in said[0]
    alone = range(found[0]["step"] + 2, found[0]["step"] + SMALL["LEAST_STEPS"])
    assert [recorded[step - 1] for step in alone] == [step % EVERY == 0 for step in alone]
    records = range(found[1]["step"] + 2, found[1]["step"] + SMALL["LEAST_STEPS"])
    assert all(recorded[step - 1] for step in records)


def test_what_was_measured_is_not_measured_again_after_a_resume(tmp_path, switching):
    loop, checkpointer = start(tmp_path, every="auto")
    checkpointer.resume()
    train(loop, checkpointer, choices_at(loop, checkpointer, tmp_path) + EVERY)
    left(checkpointer)
    loop, checkpointer = start(tmp_path, every="auto")
    with checkpointer:
        checkpointer.resume()
        cadence = checkpointer._backend.pace.cadence
        assert cadence.rates is not None and not cadence.is_measuring


def choices_at(loop, checkpointer, root):
    """The step of the first choice, trained to."""
    while not choices(root):
        loop.iteration(checkpointer.steps_done, checkpointer.step)
    return checkpointer.steps_done


def test_where_memory_holds_no_copy_of_the_state_every_step_is_recorded(tmp_path, switching, monkeypatch):
    cut_small(monkeypatch)
    model = nn.Linear(64, 64)  # of 16 KiB, and thrice that with the state of the optimizer
    optimizer = ADAMW(model.parameters())
    with Checkpointer(
        tmp_path, model=model, optimizer=optimizer, every="auto", memory=148_000
    ) as checkpointer:
        checkpointer.resume()
        with pytest.warns(
            UserWarning, match=r"records every step, since a copy of the state .* Give at least"
        ):
            for _ in range(12):
                model(torch.ones(64)).sum().backward()
                optimizer.step()
                checkpointer.step()
        checkpointer.wait()
        assert checkpointer.durable_step == 12 and checkpointer._backend.pace.cadence.records
    [event] = choices(tmp_path)
    assert event["every"] == 1 and "memory=" in event["why"]


# Refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"every": 0}, "every = 0 is neither whole steps"),
        ({"every": True}, "every = True is neither"),
        ({"every": 2.5}, "every = 2.5 is neither"),
        ({"every": "often"}, "every = 'often' is neither"),
        ({"every": 5, "base_every": 10}, "so does base_every = 10"),
        ({"every": "auto", "base_every": 10}, "so does base_every = 10"),
        ({"every": "auto", "codec": holdfast.TopK(0.1)}, "changes training"),
        ({"every": 5, "codec": holdfast.Int8(16)}, "changes training"),
        ({"every": "auto", "wait_each_step": True}, "wait_each_step= keeps each"),
        ({"every": 5, "replica": True}, "a replica has none to leave out"),
    ],
)
def test_what_cannot_be_kept_together_is_refused_with_nothing_written(tmp_path, options, message):
    model = nn.Linear(3, 2)
    with pytest.raises(BadInput, match=message):
        Checkpointer(tmp_path / "run", model=model, optimizer=ADAMW(model.parameters()), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("every", [1, "auto"])
def test_a_time_between_failures_that_was_given_is_what_intervals_are_chosen_by(tmp_path, every):
    _, checkpointer = start(tmp_path, every=every, mean_seconds_between_failures=90.0)
    with checkpointer:
        checkpointer.resume()
        assert checkpointer._backend.pace.tuner.measured.mean_seconds_between_failures == 90.0


@pytest.mark.parametrize(
    "options, text",
    [
        ({"mean_seconds_between_failures": 0}, "must be a positive number of seconds"),
        ({"mean_seconds_between_failures": float("inf")}, "must be a positive number of seconds"),
        ({"mean_seconds_between_failures": "1h"}, "must be a positive number of seconds"),
        ({"mean_seconds_between_failures": True}, "must be a positive number of seconds"),
        ({"mean_seconds_between_failures": 60, "base_every": 3}, "with base_every= nothing is chosen"),
        ({"mean_seconds_between_failures": 60, "every": 3}, "with every= nothing is chosen"),
        ({"mean_seconds_between_failures": 60, "replica": True}, "with replica= nothing is chosen"),
    ],
)
def test_a_time_between_failures_that_nothing_is_chosen_by_is_refused(tmp_path, options, text):
    loop = make(ADAMW)
    with pytest.raises(BadInput, match=text):
        Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers, **options)
    assert not (tmp_path / "run").exists()
