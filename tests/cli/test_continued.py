"""``holdfast train`` continued: the decisions by losses on held-out text outlive a kill, and a recipe stays its own."""

from __future__ import annotations

import json
import math

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

    def call(run, recipe=None, **more):
        named = {key if "." in key else f"train.{key}": value for key, value in more.items()}
        return holdfast("train", *([recipe] if recipe else []), *words(keys | {"run.dir": run} | named))

    return call


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


def test_loss_that_is_no_number_ends_a_run_in_order(tmp_path, train, monkeypatch):
    monkeypatch.setattr(Engine, "evaluate", lambda self, batches: math.nan)
    result = train(tmp_path / "run", steps=1)
    assert result.code == 0 and "Validation loss nan; it was nan at step 0" in result.out, result.err


def test_losses_on_another_held_out_text_are_not_compared(tmp_path, train, monkeypatch):
    """The run says that they begin anew, in the end too."""
    run, held_out = tmp_path / "run", tmp_path / "held-out.txt"
    losses = iter((3.0, 4.0, 5.0, 8.0, 9.0))
    monkeypatch.setattr(Engine, "evaluate", lambda self, batches: next(losses))
    held_out.write_text(SENTENCE * 2)
    assert train(run, **{"data.validation": held_out}, steps=1, patience=2).code == 0
    held_out.write_text(SENTENCE[::-1] * 2)
    result = train(run, **{"data.validation": held_out}, steps=2, patience=2)
    assert "The held-out text has changed" in result.out, result.err
    assert "The lowest validation loss was 5.000, at step 1" in result.out
    assert "Validation loss 8.000; it was 5.000 at step 1" in result.out


def test_same_recipe_continues_where_nothing_is_packed(tmp_path, train):
    """Text in windows is not packed, and the recipe still asks for it."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\npacking = "on"\n')
    for steps in (1, 2):
        result = train(tmp_path / "run", recipe=recipe, steps=steps)
        assert result.code == 0 and "Nothing is packed" in result.out, result.err
        assert "data.packing" not in result.out


def test_held_out_text_neither_comes_nor_goes(tmp_path, train):
    """The share of the trained text that is held out would change with it."""
    held_out = tmp_path / "held-out.txt"
    held_out.write_text(SENTENCE * 2)
    given = {"data.validation": held_out}
    for run, first, then in (("without", {}, given), ("with", given, {})):
        assert train(tmp_path / run, **first, steps=1).code == 0
        result = train(tmp_path / run, **then, steps=2)
        wanted = f"--set data.validation={first.get('data.validation', '')} to go on as before"
        assert result.code == 2 and wanted in result.err, result.err
