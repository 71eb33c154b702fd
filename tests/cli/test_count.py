"""``train.micro_batches = "auto"``: chosen once, said, kept by the run, and refused where it cannot be chosen."""

import random

import pytest

from holdfast.cli.train import micro_batch_choice
from holdfast.cli.train.micro_batch_choice import CountFound
from holdfast.config import load_config
from holdfast.errors import ConfigError
from holdfast.events import read_events
from support.tiny_keys import TINY, words

KEYS = TINY | {
    "train.micro_batches": "auto", "train.warmup_steps": 2, "train.steps": 2, "train.learning_rate": 1e-2,
    "model.dropout": 0.1,
}  # fmt: skip


@pytest.fixture
def train(tmp_path, holdfast):
    """Runs ``holdfast train`` in a directory, with other keys over the tiny ones."""
    text = tmp_path / "text"
    text.write_text("".join(random.Random(0).choices(["def ", "self", "(", ")", ":\n"], k=2000)))

    def call(name, **sets):
        keys = KEYS | {"run.dir": tmp_path / name, "data.text": text}
        return holdfast(
            "train", *words(keys | {key.replace("__", "."): value for key, value in sets.items()})
        )

    return call


@pytest.fixture
def chooses(monkeypatch):
    """Lets the search choose a number; None: the search must not be asked."""

    def choose(count):
        def fewest(*_, **__):
            assert count is not None, "a number was chosen again"
            return CountFound(count, {count: 0.5}, "gain")

        monkeypatch.setattr(micro_batch_choice, "fewest_micro_batches", fewest)

    return choose


@pytest.mark.slow
def test_auto_is_chosen_for_the_machine(tmp_path, train):
    result = train("run")
    assert (result.code, result.err) == (0, "")
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    count = next(event for event in events if event["event"] == "run")["config"]["train.micro_batches"]
    assert count in [2**k for k in range(7)]
    assert load_config(tmp_path / "run" / "config.toml").train.micro_batches == count
    assert {event["micro_batches"] for event in events if event["event"] == "step"} == {count}
    assert f"Chosen: {count} micro-batch" in result.out and f"of 2, {2 * count} samples a step" in result.out


@pytest.mark.slow
def test_a_resume_keeps_the_number(tmp_path, train, chooses, holdfast):
    """Bits are those of a run to which the number was given."""
    chooses(3)
    assert train("run").code == 0
    chooses(None)
    assert train("run", train__steps=3).code == 0
    assert train("given", train__micro_batches=3).code == 0
    assert train("given", train__steps=3, train__micro_batches=3).code == 0
    assert holdfast("diff", tmp_path / "run", tmp_path / "given").code == 0
    changed = train("run", train__steps=4, train__micro_batches=5)
    assert "Changed from here on: train.steps 3 -> 4, train.micro_batches 3 -> 5." in changed.out


@pytest.mark.slow
def test_a_lost_number_is_not_chosen_again(tmp_path, train, chooses):
    chooses(3)
    assert train("run", train__steps=1).code == 0
    chooses(None)
    record = tmp_path / "run" / "config.toml"
    text = record.read_text()
    record.write_text(text.replace("micro_batches = 3", 'micro_batches = "auto"'))
    result = train("run")
    assert result.code == 2 and "keeps the number that it was begun with" in result.err
    record.unlink()
    result = train("run")
    assert result.code == 2 and "Give the number, with --set train.micro_batches=N" in result.err
    assert len(result.err.splitlines()) == 1
    assert train("run", train__micro_batches=3).code == 0


FRACTIONS = (
    "params_on_host",
    "optimizer_on_host",
    "activations_on_host",
    "delayed_fraction",
    "recomputed_fraction",
)


@pytest.mark.parametrize(
    "sets, said",
    [
        ({"train__optimizer": "mezo"}, "with mezo nothing is measured"),
        ({f"offload__{name}": 1 for name in FRACTIONS}, "nothing is planned where all of params_on_host"),
    ],
)
def test_no_choice_is_one_line(tmp_path, train, sets, said):
    result = train("run", **sets)
    assert result.code == 2 and said in result.err
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_several_ranks_are_refused():
    with pytest.raises(ConfigError, match="with 2 ranks nothing is measured"):
        micro_batch_choice.require_planned_steps(load_config(sets=["train.micro_batches=auto"]), 2)
