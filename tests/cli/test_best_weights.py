"""``holdfast train`` with ``train.validate_every``: what it decides by losses on held-out text outlives a kill."""

from __future__ import annotations

import json

import pytest

from holdfast.offload.engine import Engine
from support.tiny_keys import IN_MEMORY, TINY, words

SENTENCE = "Three lanterns hung from the mast; the captain counted them twice.\n"


@pytest.fixture
def train(tmp_path, holdfast):
    (tmp_path / "text.txt").write_text(SENTENCE * 20)
    keys = TINY | IN_MEMORY | {
        "data.text": tmp_path / "text.txt", "data.validation_fraction": 0.1, "train.validate_every": 1,
        "train.learning_rate": 0.01, "train.warmup_steps": 0,
    }  # fmt: skip
    return lambda run, **more: holdfast(
        "train",
        *words(keys | {"run.dir": run} | {f"train.{key}": value for key, value in more.items()}),
    )


def test_last_loss_is_kept_after_a_kill_before_it(tmp_path, train, monkeypatch):
    """The step was durable, and a run without that loss is not finished."""
    run, evaluate = tmp_path / "run", Engine.evaluate

    def failing(self, batches):
        if self.steps_done == 2:
            raise OSError("the power is gone")
        return evaluate(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "evaluate", failing)
        assert train(run, steps=2, keep_best="true").code != 0
    assert [path.name for path in (run / "best").iterdir()] == ["step-1"]
    result = train(run, steps=2, keep_best="true")
    assert result.code == 0 and "Finished step 2 of 2" in result.out, result.err
    assert [step for step, _ in json.loads((run / "validation.json").read_text())["losses"]] == [0, 1, 2]
    assert [path.name for path in (run / "best").iterdir()] == ["step-2"]
    assert f"{run} is finished" in train(run, steps=2, keep_best="true").out


def test_run_without_patience_says_how_it_continues(tmp_path, train, monkeypatch):
    """More steps alone would not: it is over until it has more patience."""
    run = tmp_path / "run"
    monkeypatch.setattr(Engine, "evaluate", lambda self, batches: 3.0)
    result = train(run, steps=9, patience=1)
    assert "Ended after step 1 of 9" in result.out
    [extend] = [line for line in result.out.splitlines() if line.startswith("  extend")]
    assert extend.endswith(" --set train.patience=2") and extend.count("train.patience") == 1
    assert "train.steps=9 " in extend
    assert "Ended after step 2 of 9" in train(run, steps=9, patience=2).out
