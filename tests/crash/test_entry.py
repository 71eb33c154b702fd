"""An engine that cannot be made leaves what it was given as it was: the model, the run, the generators."""

from __future__ import annotations

import threading

import pytest
import torch

import holdfast
from crash_run import engine_of, model, take_steps, train
from holdfast.errors import DiskFull, RunMismatch
from holdfast.store.run_store import LocalStore
from training import adamw


def contents(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", ["publish", "put_index", "begin"])
def test_a_full_disk_at_the_first_commit_leaves_the_model_its_values(tmp_path, monkeypatch, method):
    made, expected = model(), model().state_dict()

    def full(*_, **__):
        raise DiskFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, method, full)
        with pytest.raises(DiskFull):
            holdfast.offload(made, adamw(made), tmp_path / "full", precision="fp32")
    state = made.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert [thread.name for thread in threading.enumerate() if "holdfast" in thread.name] == []
    with holdfast.offload(made, adamw(made), tmp_path / "roomy", precision="fp32") as engine:
        assert engine.durable_step == 0


@pytest.mark.slow
def test_other_data_is_refused_and_nothing_is_written(tmp_path, text):
    train(tmp_path / "run", text, 2)
    before = contents(tmp_path / "run")
    other = tmp_path / "other.txt"
    other.write_bytes(b"something else " * 40)
    with pytest.raises(RunMismatch, match="the data is not what the run was trained on"):
        engine_of(tmp_path / "run", other)
    assert contents(tmp_path / "run") == before
    with engine_of(tmp_path / "run", text) as engine:
        assert engine.resumed_from == 2


@pytest.mark.slow
def test_a_batch_that_was_fetched_and_not_trained_on_comes_again(tmp_path, text):
    """The position that ``save`` keeps is that of the last step, not of a loader that was asked for more."""
    engine = engine_of(tmp_path / "run", text, commit_every=3)
    with engine:
        engine.step(next(engine.loader))
        untrained = next(engine.loader)
        engine.save()
        engine.step(untrained)
        untrained = next(engine.loader)
    with engine_of(tmp_path / "run", text, commit_every=3) as engine:
        assert engine.resumed_from == 2
        for found, expected in zip(next(engine.loader), untrained, strict=True):
            assert torch.equal(found["tokens"], expected["tokens"])
    reader = LocalStore.read(tmp_path / "run")
    assert reader.at(1).progress["loader"]["consumed"] == 4


@pytest.mark.slow
def test_the_loader_of_a_user_may_be_a_step_ahead(tmp_path, text, reference):
    """``for batches in loader`` with the condition inside."""
    for steps in (3, 6):
        engine = engine_of(tmp_path / "run", text, commit_every=4)
        with engine:
            for batches in engine.loader:
                if engine.steps_done == steps:
                    break
                engine.step(batches)
    losses = take_steps(engine_of(tmp_path / "run", text), 10)
    assert losses == reference.losses[6:]
