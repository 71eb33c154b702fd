"""The default job of ``holdfast train``: measured, sized, said, and continued with the size that it has."""

import itertools
import random
import re

import pytest

import killed
from holdfast import failpoints
from holdfast.cli.train import sizing
from holdfast.cli.train.kept_config import changes_to_run
from holdfast.cli.train.sizing import LEAST_STEPS, SHAPES, size_for
from holdfast.config import load_config
from holdfast.errors import RunMismatch

TINY = ("model.blocks=1", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.context=16")


def machine(speed):
    """The seconds of a step of each tried shape: some overhead, and its arithmetic."""
    return {shape: 0.02 + 6 * shape.parameters * sizing.TOKENS / speed for shape in sizing.TRIED}


def test_faster_machines_are_given_more():
    """Two cores with AVX2 alone, with AVX-512, with AMX, and an accelerator; and speeds between."""
    sizes = [size_for(machine(10.0**power), 170) for power in (9.5, 10, 10.5, 11, 11.5, 12, 13)]
    for slow, fast in itertools.pairwise(sizes):
        assert slow.shape.width <= fast.shape.width
        assert slow.loss > fast.loss
    assert sizes[0].shape.width < sizes[-1].shape.width
    for size in sizes:
        assert 160 < size.steps * size.step_seconds <= 170


def test_one_measured_shape_is_enough():
    measured = {SHAPES[0]: 0.1}
    assert size_for(measured, 100).steps * size_for(measured, 100).step_seconds == pytest.approx(
        100, rel=0.05
    )
    assert size_for(measured, 0.0) == sizing.Size(SHAPES[0], LEAST_STEPS, 0.1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("".join(random.Random(0).choices(["def ", "self", "(", ")", ":\n"], k=2000)))
    return path


@pytest.fixture
def never_measured(monkeypatch):
    def measured(*_):
        raise AssertionError("the machine was measured")

    monkeypatch.setattr(sizing, "_tried", measured)


@pytest.fixture
def smallest(monkeypatch):
    small = sizing.Shape(1, 16, 3e-3, SHAPES[0].losses)
    monkeypatch.setattr(sizing, "SHAPES", (small,))
    monkeypatch.setattr(sizing, "TRIED", (small,))
    monkeypatch.setattr(sizing, "LEAST_STEPS", 3)


@pytest.mark.usefixtures("smallest")
@pytest.mark.slow
def test_default_job_ends_and_talks(tmp_path, text, holdfast, monkeypatch):
    """Started again, also with more steps, it has the size that it recorded."""
    run = tmp_path / "run"
    words = ("train", "--set", f"run.dir={run}", "--set", f"data.text={text}", "--seconds", 1)
    done = holdfast(*words)
    assert (done.code, done.err) == (0, "")
    assert "Chosen: 1 block of width 16, 3 steps of 1,024 bytes" in done.out
    assert re.search(
        r"Expected: the loss \(of Python's own source\) falls from 5\.5 to about \d\.\d", done.out
    )
    assert "Finished step 3 of 3, which is durable" in done.out
    assert {path.name for path in tmp_path.iterdir()} == {"run", "text"}
    kept = load_config(run / "config.toml")
    assert (kept.model.width, kept.train.steps, kept.offload.params_on_host) == (16, 3, 0)
    monkeypatch.setattr(sizing, "_tried", None)
    assert "step 3 is durable and whole" in holdfast(*words).out
    more = load_config(None, [f"run.dir={run}", f"data.text={text}", "train.steps=99"])
    continued = sizing.sized(more, {"run.dir", "train.steps"}, sizing.Wish(1, 0.0), 1, print)
    assert (continued.model, continued.train.steps) == (kept.model, 99)
    by_two = sizing.sized(more, {"run.dir", "train.steps"}, sizing.Wish(None, 0.0), 2, print)
    changed = changes_to_run(by_two, {"train.steps", *sizing.may_change(())})
    assert changed.pop("train.steps") == (3, 99)
    assert changed == {"train.micro_batches": (1, 2), "train.micro_batch_size": (8, 4)}
    (run / "config.toml").unlink()
    with pytest.raises(RunMismatch, match="which has its size, is not there"):
        sizing.sized(load_config(None, [f"run.dir={run}"]), {"run.dir"}, sizing.Wish(1, 0.0), 1, print)


@pytest.mark.usefixtures("never_measured")
def test_given_sizes_are_not_measured(tmp_path, text, holdfast):
    config = tmp_path / "config.toml"
    config.write_text("[model]\nwidth = 16\nheads = 2\nkv_heads = 1\n")
    for given in ([config], [word for key in TINY for word in ("--set", key)], ["--set", "train.steps=1"]):
        refused = holdfast("train", *given, "--set", "data.text=/nowhere")
        assert refused.err.startswith("error: the text '/nowhere' does not exist")
        contradicted = holdfast("train", *given, "--set", f"run.dir={tmp_path / 'run'}", "--seconds", 9)
        assert contradicted.code == 2
        assert contradicted.err.startswith("error: --seconds chooses the size, and ")
        assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("smallest")
@pytest.mark.parametrize(
    ("failpoint", "measured_again"), [("after_manifest_sync", True), ("after_directory_sync", False)]
)
@pytest.mark.slow
def test_kill_around_first_commit_continues(
    tmp_path, text, holdfast, monkeypatch, kill_at, failpoint, measured_again
):
    """A run with its first commit has the record of its size; before that commit the record binds nothing."""
    tried, measured = sizing._tried, []

    def tried_first(*arguments):
        monkeypatch.setattr(failpoints, "armed", "")
        measured.append(tried(*arguments))
        if len(measured) == 1:
            kill_at(failpoint)
        return measured[-1]

    monkeypatch.setattr(sizing, "_tried", tried_first)
    words = ("train", "--set", f"run.dir={tmp_path / 'run'}", "--set", f"data.text={text}", "--seconds")
    with pytest.raises(killed.Killed):
        holdfast(*words, 1)
    assert (tmp_path / "run/config.toml").exists()
    monkeypatch.setattr(failpoints, "armed", "")
    continued = holdfast(*words, 1)
    assert (continued.code, continued.err) == (0, "")
    assert re.search(r"Finished step (\d+) of \1, which is durable", continued.out)
    assert len(measured) == 1 + measured_again
