"""The best bases by a metric stay, whatever comes after them, and the run remembers why."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import holdfast
from checkpoint.loops import cut_small, manifests, same
from holdfast.cli.inspect import ls
from holdfast.errors import BadInput
from holdfast.events import read_events
from holdfast.integrations.dcp import StorageWriter
from holdfast.store.commit.pruning import prune
from holdfast.store.commit.retention import Keep
from holdfast.store.run_store import LocalStore
from test_checkpointer import go_on, reference, start

BEST = Keep(1, best=2, metric="loss")


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    cut_small(monkeypatch, 1)


def trained(root, values, keep=BEST, resume=None, **options):
    """Train a step for each of the ``values``, which is measured there; None measures nothing."""
    loop, checkpointer = start(root, keep=keep, base_every=1000, **options)
    with checkpointer:
        done = checkpointer.resume(step=resume)
        for i, value in enumerate(values, done):
            metrics = None if value is None else {"loss": value, "step": i}
            loop.iteration(i, partial(checkpointer.step, metrics=metrics))
    return loop


def bases(root):
    return sorted(manifest.step for manifest in manifests(root))


def test_best_bases_stay_and_are_those_of_their_steps(tmp_path):
    """NaN is never best, and of two equal ones the older is better."""
    states, _ = reference(8)
    trained(tmp_path, [3.0, float("nan"), 2.0, 2.0, 5.0, torch.tensor(1.0), None, 1.5])
    assert bases(tmp_path) == [6, 8]
    trained(tmp_path, [1.5, 9.0, float("nan")])
    assert bases(tmp_path) == [6, 8]
    loop, checkpointer = start(tmp_path, keep=BEST)
    with checkpointer:
        assert checkpointer.resume(step=6) == 6
        assert same(loop.state(), states[6])


def test_larger_is_better_where_the_mode_says_so(tmp_path):
    trained(tmp_path, [3.0, 1.0, 2.0, 0.5], keep=Keep(1, best=2, metric="loss", mode="max"))
    assert bases(tmp_path) == [1, 3]


def test_step_that_is_not_among_the_best_makes_no_base(tmp_path):
    trained(tmp_path, [1.0, 2.0, 3.0, math.inf, 4.0])
    assert bases(tmp_path) == [1, 2]
    found = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "metrics"]
    assert [event["step"] for event in found] == [1, 2, 3, 4, 5]
    assert found[0]["metrics"] == {"loss": 1.0, "step": 0}


def test_line_that_was_left_has_its_own_best(tmp_path):
    """The best of the steps that a resume went back from are kept until the new line has come so far."""
    trained(tmp_path, [5.0, 4.0, 1.0, 2.0])
    assert bases(tmp_path) == [3, 4]
    trained(tmp_path, [7.0], resume=3)
    with LocalStore.read(tmp_path) as reader:
        assert {(ref.timeline, ref.step) for ref in reader.commits()} >= {(1, 3)}
        assert [(m.step, m.metrics["loss"]) for m in map(reader.load, reader.line())][-1] == (3, 1.0)
    trained(tmp_path, [0.5, 0.7])
    assert bases(tmp_path) == [5, 6]


def test_state_that_was_changed_after_the_measurement_has_no_metrics(tmp_path):
    trained(tmp_path, [1.0, 2.0])
    loop, checkpointer = start(tmp_path, keep=BEST, base_every=1000)
    with checkpointer:
        assert checkpointer.resume(step=2) == 2
        checkpointer.save()
        assert {m.step: m.metrics["loss"] for m in manifests(tmp_path)} == {1: 1.0, 2: 2.0}
        with torch.no_grad():
            loop.model.scale.add_(1)
        checkpointer.save()
    found = {(m.timeline, m.step): m.metrics.get("loss") for m in manifests(tmp_path)}
    assert found == {(1, 1): 1.0, (1, 2): 2.0, (2, 2): None}


def test_best_go_last_where_there_is_no_room(tmp_path):
    loop, checkpointer = start(tmp_path, keep=Keep(1, best=2, metric="loss"), base_every=1000)
    with checkpointer:
        checkpointer.resume()
        for i, value in enumerate([2.0, 1.0, 3.0, 3.0]):
            loop.iteration(i, partial(checkpointer.step, metrics={"loss": value}))
            checkpointer.save()
        store = checkpointer._store
        assert bases(tmp_path) == [1, 2, 4]
        assert store.drop_oldest().step == 1  # the worse one, though 2 is older than the newest as well
        assert store.drop_oldest() is None and store.dropped_best[0].step == 1
    assert bases(tmp_path) == [2, 4]


def test_removal_of_a_best_base_is_a_warning(tmp_path):
    loop, checkpointer = start(tmp_path, keep=BEST, base_every=1000)
    with checkpointer:
        checkpointer.resume()
        for i in range(3):
            loop.iteration(i, partial(checkpointer.step, metrics={"loss": float(i)}))
        checkpointer.save()
        checkpointer._store.drop_oldest()
        with pytest.warns(UserWarning, match="step 1, one of the best, was removed"):
            go_on(loop, checkpointer, 4)


def test_prune_and_ls_know_the_best(tmp_path, capsys):
    trained(tmp_path, [1.0, 3.0, 2.0], keep=Keep(9, best=3, metric="loss"))
    ls(tmp_path, as_json=False)
    assert "loss 2, step 2" in capsys.readouterr().out
    prune(tmp_path, Keep(1, best=1, metric="loss", mode="max"))
    assert bases(tmp_path) == [2, 3]


@pytest.mark.parametrize(
    "options", [{"best": 3}, {"metric": "loss"}, {"best": 0, "metric": "loss"}, {"best": 1, "metric": 3},
                {"best": 1, "metric": "loss", "mode": "low"}]
)  # fmt: skip
def test_half_a_policy_is_refused(options):
    with pytest.raises(BadInput, match="Keep"):
        Keep(**options)


@pytest.mark.parametrize(
    "metrics, why", [({"acc": 1.0}, "ranks by 'loss'"), ({"loss": "low"}, "a number"), ([1.0], "dictionary"),
                     ({"loss": torch.ones(2)}, "a number"), ({"loss": True}, "a number")]
)  # fmt: skip
def test_metrics_that_mean_nothing_are_refused_and_the_step_is_not_lost(tmp_path, metrics, why):
    loop, checkpointer = start(tmp_path, keep=BEST)
    with checkpointer:
        checkpointer.resume()
        with pytest.raises(BadInput, match=why):
            loop.iteration(0, partial(checkpointer.step, metrics=metrics))
        checkpointer.step()
    assert checkpointer.durable_step == 1


def test_metrics_without_a_step_are_refused(tmp_path):
    loop, checkpointer = start(tmp_path, keep=BEST)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 1)
        with pytest.raises(BadInput, match="no optimizer has stepped"):
            checkpointer.step(metrics={"loss": 1.0})


@pytest.mark.parametrize("options", [{"replica": True}, {"storage": "4kB"}])
def test_best_that_cannot_be_kept_are_refused_before_anything_is_written(tmp_path, options):
    with pytest.raises(BadInput, match="best"):
        start(tmp_path / "run", keep=holdfast.Keep(2, best=4, metric="loss"), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keep", [BEST, Keep(weights=5)])
def test_saves_without_steps_refuse_what_only_a_checkpointer_keeps(tmp_path, keep):
    with pytest.raises(BadInput, match=r"dcp\.save"):
        StorageWriter(tmp_path, keep=keep)
