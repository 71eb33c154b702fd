"""The losses on held-out text: which is the lowest, when a run is over, and what of them a resume takes."""

from __future__ import annotations

import math

from holdfast.cli.train.validations import Validations, drop_later_weights, keep_weights, kept_losses

TEXT = {"tokens": 9}


def test_run_is_over_after_losses_that_are_no_lowest():
    """An equal loss and one that is no number are none."""
    losses = Validations(3, TEXT, {})
    found = [losses.add(step, loss) for step, loss in enumerate((math.nan, 3.0, 4.0, 2.0, math.nan, 2.0))]
    assert found == [False, True, False, True, False, False]
    assert losses.best == (3, 2.0) and not losses.is_over
    losses.add(9, 5.0)
    assert losses.is_over and losses.best == (3, 2.0)
    losses.patience = 0
    assert not losses.is_over


def test_losses_without_a_number_end_a_run():
    losses = Validations(2, TEXT, {0: math.nan})
    assert losses.best is None and not losses.is_over
    losses.add(1, math.inf)
    assert losses.is_over


def test_losses_of_later_steps_and_other_text_are_left_out(tmp_path):
    Validations(2, TEXT, {0: 3.5, 10: math.nan, 20: 2.25}).write(tmp_path)
    kept = kept_losses(tmp_path, TEXT, 15)
    assert kept.keys() == {0, 10} and kept[0] == 3.5 and math.isnan(kept[10])
    assert kept_losses(tmp_path, TEXT, 20)[20] == 2.25
    assert kept_losses(tmp_path, {"tokens": 8}, 20) == {}
    (tmp_path / "validation.json").write_text("{")
    assert kept_losses(tmp_path, TEXT, 20) == {}
    assert kept_losses(tmp_path / "nowhere", TEXT, 20) == {}


def test_best_weights_of_later_steps_are_dropped(tmp_path):
    """A step that is trained again may have other weights, and its folder would pass for theirs."""
    for name in ("step-9", "step-10", "step-11", "mine"):
        (tmp_path / "best" / name).mkdir(parents=True)
        (tmp_path / "best" / name / "config.json").write_text("{}")
    drop_later_weights(tmp_path, 10)
    assert {path.name for path in (tmp_path / "best").iterdir()} == {"step-9", "step-10", "mine"}
    drop_later_weights(tmp_path / "nowhere", 0)


def test_weights_of_an_earlier_step_go_after_a_kill(tmp_path):
    """The kill came when the new folder was complete and the one before was still there."""
    for name in ("step-9", "step-10"):
        (tmp_path / "best" / name).mkdir(parents=True)
        (tmp_path / "best" / name / "config.json").write_text("{}")
    keep_weights(tmp_path, 10)
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-10"]
