"""``holdfast train --model`` on conversations: the template's own text, packed, held out, continued, ended early."""

from __future__ import annotations

import json

import pytest

from holdfast.offload.engine import Engine
from support.tiny_keys import STEP, words
from training import differing, stored

transformers = pytest.importorskip("transformers")

from tiny_folders import llama, write_folder  # noqa: E402  (needs transformers)

CONTEXT = 192
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}{{ '\\n' }}{{ m.content }}</s>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant{{ '\\n' }}{% endif %}"
)


def write_chat_folder(path):
    """A folder with a chat template, of a model with room for all conversations."""
    folder = write_folder(path, lambda: llama(max_position_embeddings=CONTEXT))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def chats(tmp_path):
    return write_chats(tmp_path / "chats.jsonl", 40)


def write_chats(path, count):
    """Conversations of one to four turns, with a few long ones."""
    lines = []
    for number in range(count):
        messages = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
        for turn in range(1 + number % 4):
            messages.append({"role": "user", "content": f"{number} and {turn}?"})
            messages.append({"role": "assistant", "content": f"{number + turn}" * (1 + number % 3)})
        lines.append({"messages": messages})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(run, chats, *more, steps=4):
    keys = STEP | {
        "run.dir": run, "data.text": chats, "model.context": CONTEXT, "train.steps": steps, "train.learning_rate": 0.01,
        "train.warmup_steps": 0, "offload.host_budget": "8GiB", "io.direct": "false",
    }  # fmt: skip
    return words(keys | dict(each.split("=", 1) for each in more))


def events(run, kind):
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in told if event["event"] == kind]


def one_line(result):
    return " ".join(result.out.split())


@pytest.fixture
def interrupted(monkeypatch):
    """``interrupted(n)``: step n of an engine fails; without n, none does."""
    step = Engine.step

    def call(number=None):
        def failing(self, *given):
            if number is not None and self.steps_done + 1 == number:
                raise OSError("the power is gone")
            return step(self, *given)

        monkeypatch.setattr(Engine, "step", failing)

    return call


@pytest.mark.slow
def test_packed_run_learns_and_continues(tmp_path, holdfast, folder, chats, interrupted):
    """Bit for bit, with the samples that come next."""
    whole, run, on = tmp_path / "whole", tmp_path / "run", "data.packing=on"
    result = holdfast("train", "--model", folder, *arguments(whole, chats, on))
    assert result.code == 0, result.err
    assert "Samples are packed into rows" in result.out
    losses = [event["loss"] for event in events(whole, "step")]
    assert losses[-1] < losses[0] - 0.1
    interrupted(3)
    assert holdfast("train", "--model", folder, *arguments(run, chats, on)).code != 0
    interrupted()
    result = holdfast("train", "--model", folder, *arguments(run, chats, on))
    assert result.code == 0, result.err
    assert "encoding the text" not in result.out and "packed into rows" not in result.out
    assert differing(stored(run), stored(whole)) == []
    assert {event["step"]: event["loss"] for event in events(run, "step")} == dict(enumerate(losses, 1))


@pytest.mark.slow
def test_model_that_mixes_samples_gets_sorted_ones(tmp_path, holdfast, folder, chats, monkeypatch):
    """And the run keeps to it."""
    run, on = tmp_path / "run", "data.packing=on"
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.cli.train.row_packing.packing_fault", lambda *_, **__: "as in a test")
        result = holdfast("train", "--model", folder, *arguments(run, chats, on, steps=1))
    assert result.code == 0, result.err
    assert (
        "this model mixes the samples of a row (as in a test). The samples of a step are sorted"
        in one_line(result)
    )
    assert 'packing = "lengths"' in (run / "config.toml").read_text()
    result = holdfast("train", "--model", folder, *arguments(run, chats, on, steps=2))
    assert result.code == 0, result.err
    assert "packed" not in result.out and 'packing = "lengths"' in (run / "config.toml").read_text()


@pytest.mark.slow
def test_run_that_stops_before_its_model_was_asked_asks_again(tmp_path, holdfast, folder, chats, monkeypatch):
    """Where it begins to pack when it is continued: otherwise the samples of a row would be mixed without a word."""
    run, on = tmp_path / "run", "data.packing=on"

    def stopped(*_, **__):
        raise OSError("the power is gone")

    assert holdfast("train", "--model", folder, *arguments(run, chats, steps=1)).code == 0
    monkeypatch.setattr("holdfast.cli.train.row_packing.packing_fault", stopped)
    assert holdfast("train", "--model", folder, *arguments(run, chats, on, steps=2)).code != 0
    monkeypatch.setattr("holdfast.cli.train.row_packing.packing_fault", lambda *_, **__: "as in a test")
    result = holdfast("train", "--model", folder, *arguments(run, chats, on, steps=2))
    assert result.code == 0, result.err
    assert "this model mixes the samples of a row (as in a test)" in one_line(result)
    assert 'packing = "lengths"' in (run / "config.toml").read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "chats.jsonl:3 has no message of the assistant"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "chats.jsonl:3, message 1: the chat template in",
        ),
        ({"text": "a"}, "lines with messages and other text besides"),
    ],
)
def test_wrong_line_is_one_error_and_nothing_is_written(tmp_path, holdfast, folder, line, said):
    path, run = write_chats(tmp_path / "chats.jsonl", 2), tmp_path / "run"
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    result = holdfast("train", "--model", folder, *arguments(run, path))
    assert result.code == 2 and said in " ".join(result.err.split()) and result.err.count("error:") == 1
    assert not run.exists()


@pytest.mark.slow
def test_run_ends_when_losses_no_longer_fall(tmp_path, holdfast, folder, chats, interrupted):
    """At the same step if it is interrupted, and no step later if it is started again."""
    held_out, run = write_chats(tmp_path / "held-out.jsonl", 6), tmp_path / "run"
    more = (
        f"data.validation={held_out}", "train.learning_rate=1e-30", "train.validate_every=1", "train.patience=3",
    )  # fmt: skip
    interrupted(3)
    assert holdfast("train", "--model", folder, *arguments(run, chats, *more, steps=9)).code != 0
    assert [each[0] for each in json.loads((run / "validation.json").read_text())["losses"]] == [0, 1, 2]
    interrupted()
    result = holdfast("train", "--model", folder, *arguments(run, chats, *more, steps=9))
    assert result.code == 0, result.err
    assert "40 samples and 6 held out" in one_line(result)
    assert "Ended after step 3 of 9, since 3 validation losses in a row were no lowest ones" in one_line(
        result
    )
    assert "at step 0" in one_line(result)
    result = holdfast("train", "--model", folder, *arguments(run, chats, *more, steps=9))
    assert result.code == 0 and "Ended after step 3 of 9" in one_line(result)
    assert [event["step"] for event in events(run, "step")] == [1, 2, 3]


def test_validation_without_held_out_text_is_refused(tmp_path, holdfast, folder, chats):
    more = ("data.validation_fraction=0", "train.validate_every=2")
    result = holdfast("train", "--model", folder, *arguments(tmp_path / "run", chats, *more))
    assert result.code == 2 and "train.validate_every = 2: nothing is held out" in result.err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of PEFT
def test_adapters_train_on_packed_rows(tmp_path, holdfast, folder, chats):
    """And their best weights are the folder of the model with the adapters merged in."""
    pytest.importorskip("peft")
    run = tmp_path / "run"
    more = ("data.packing=on", "lora.rank=4", "train.validate_every=2", "train.keep_best=true")
    result = holdfast("train", "--model", folder, *arguments(run, chats, *more))
    assert result.code == 0, result.err
    assert "Samples are packed into rows" in result.out
    [kept] = (run / "best").iterdir()
    found = transformers.AutoModelForCausalLM.from_pretrained(kept).state_dict()
    begun = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict()
    assert found.keys() == begun.keys()
    assert any(not value.equal(begun[name]) for name, value in found.items())


@pytest.mark.slow
def test_best_weights_are_kept_as_a_folder(tmp_path, holdfast, folder, chats):
    """The last of them, which are the newest ones of a run that learns."""
    run, more = tmp_path / "run", ("train.validate_every=2", "train.keep_best=true")
    result = holdfast("train", "--model", folder, *arguments(run, chats, *more))
    assert result.code == 0, result.err
    assert "the lowest so far" in result.out and f"its weights are in {run / 'best' / 'step-4'}" in one_line(
        result
    )
    assert [path.name for path in (run / "best").iterdir()] == ["step-4"]
    kept = transformers.AutoModelForCausalLM.from_pretrained(run / "best" / "step-4").state_dict()
    for name, value in stored(run).items():
        if name.endswith("/param"):
            assert kept[name.removesuffix("/param")].equal(value), name
    stale = run / "best" / "step-6"  # of a step that is trained again
    stale.mkdir()
    (stale / "config.json").write_text("{}")
    assert holdfast("train", "--model", folder, *arguments(run, chats, *more, steps=6)).code == 0
    assert [path.name for path in (run / "best").iterdir()] == ["step-6"]
    assert (stale / "model.safetensors").is_file()
