"""``holdfast train --model``: a folder of Hugging Face is fine-tuned out of core, and given back."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch

from support.tiny_keys import STEP, words
from training import differing, stored

transformers = pytest.importorskip("transformers")

import tiny_folders  # noqa: E402  (needs transformers)
from tiny_folders import TEXT, write_folder, write_pairs  # noqa: E402


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text(TEXT * 4)
    return tmp_path / "text"


def arguments(run, text, steps, *more):
    keys = STEP | {
        "run.dir": run, "data.text": text, "model.context": 16, "train.steps": steps, "train.learning_rate": 0.01,
        "train.warmup_steps": 0, "offload.host_budget": "8GiB", "io.direct": "false",
    }  # fmt: skip
    return [*words(keys), *more]


def events(run, kind):
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in told if event["event"] == kind]


def logits_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(20)[None] * 13 % 300).logits


@pytest.mark.slow
def test_folder_run_chooses_micro_batches(tmp_path, holdfast, llama, text):
    """The trial plan leaves the folder's model as it was: the bits are those of the given number."""
    runs = tmp_path / "auto", tmp_path / "given"
    auto = ("--model", llama, "--set", "train.micro_batches=auto")
    assert holdfast("train", *arguments(runs[0], text, 1, *auto)).code == 0
    given = ("--model", llama, "--set", f"train.micro_batches={events(runs[0], 'step')[0]['micro_batches']}")
    assert holdfast("train", *arguments(runs[1], text, 1, *given)).code == 0
    assert not differing(stored(runs[0]), stored(runs[1]))


@pytest.mark.slow
def test_a_folder_is_fine_tuned_and_given_back(tmp_path, holdfast, llama, text):
    run, back = tmp_path / "run", tmp_path / "back"
    result = holdfast("train", "--model", llama, *arguments(run, text, 12))
    assert result.code == 0, result.err
    assert "Finished step 12 of 12, which is durable" in result.out
    assert f"convert {run} OUT --to huggingface" in result.out
    losses = [event["loss"] for event in events(run, "step")]
    assert losses[-1] < losses[0] - 0.5
    assert holdfast("convert", run, back, "--to", "huggingface").code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert model.dtype == torch.float32
    for name, value in stored(run).items():
        if name.endswith("/param"):
            assert torch.equal(model.state_dict()[name.removesuffix("/param")], value), name
    assert not torch.equal(logits_of(back), logits_of(llama))
    others = {path.name for path in llama.iterdir()} - {"model.safetensors", "config.json"}
    assert "tokenizer.json" in others and "LICENSE" in others
    for name in others:
        assert (back / name).read_bytes() == (llama / name).read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(back)("bay")["input_ids"][0] == 256 + 62


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("make", tiny_folders.EVERY.values(), ids=tiny_folders.EVERY)
def test_a_folder_that_was_not_trained_comes_back_bit_for_bit(tmp_path, holdfast, make, text):
    """Through blocks in the store: of every kind of model, in several files, under the names that it had."""
    folder = write_folder(tmp_path / "folder", make, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    run, back = tmp_path / "run", tmp_path / "back"
    assert holdfast("train", "--model", folder, *arguments(run, text, 1)).code == 0
    result = holdfast("convert", f"{run}@0", back, "--to", "huggingface", "--dtype", "bf16")
    assert result.code == 0, result.err
    assert names_in(back) == names_in(folder)
    assert torch.equal(logits_of(back), logits_of(folder))


def names_in(folder):
    from safetensors import safe_open

    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(
    "kind, optimizer", [("text", "adamw"), ("pairs", "adamw"), ("text", "mezo"), ("pairs", "muon")]
)
def test_a_killed_run_goes_on_without_its_folder_bit_for_bit(
    tmp_path, holdfast, holdfast_process, llama, text, kind, optimizer
):
    """With the position in the encoded text, which is not encoded again."""
    data = text if kind == "text" else write_pairs(tmp_path / "pairs.jsonl")
    folder, whole, run = tmp_path / "folder", tmp_path / "whole", tmp_path / "run"
    shutil.copytree(llama, folder)
    by = ("--set", f"train.optimizer={optimizer}")
    assert holdfast("train", "--model", folder, *arguments(whole, data, 5, *by)).code == 0
    process = holdfast_process(
        "train", "--model", folder, *arguments(run, data, 5, *by, "--set", "io.write_limit=1MB")
    )
    while not (run / "events.jsonl").exists() or len(events(run, "step")) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert len(events(run, "step")) < 5
    shutil.rmtree(folder)
    result = holdfast("train", "--model", folder, *arguments(run, data, 5, *by))
    assert result.code == 0, result.err
    assert "encoding the text" not in result.out and "Continuing after step" in result.out
    assert differing(stored(run), stored(whole)) == []
    after = {event["step"]: event["loss"] for event in events(run, "step")}
    assert after == {event["step"]: event["loss"] for event in events(whole, "step")}


@pytest.mark.slow
def test_other_text_or_another_tokenizer_is_refused_when_a_run_goes_on(tmp_path, holdfast, llama, text):
    run = tmp_path / "run"
    assert holdfast("train", "--model", llama, *arguments(run, text, 2)).code == 0
    (text / "0.txt").write_text(TEXT * 5)
    result = holdfast("train", "--model", llama, *arguments(run, text, 4))
    assert result.code == 2 and "the data is not what the run was trained on" in result.err
    assert json.loads(holdfast("ls", run, "--json").out)[0]["step"] == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", "model.width=512"], "model.width = 512 is of the reference decoder"),
        (["--set", "model.context=65"], "has 64 positions"),
        (["--set", "data.text=nowhere.txt"], "does not exist"),
    ],
)
def test_what_does_not_fit_the_folder_is_one_error(tmp_path, holdfast, llama, text, more, said):
    run = tmp_path / "run"
    result = holdfast("train", "--model", llama, *arguments(run, text, 2), *more)
    assert result.code == 2 and said in result.err and result.err.count("error:") == 1
    assert not run.exists()


def test_a_file_in_the_place_of_the_run_is_told_before_the_text_is_encoded(tmp_path, holdfast, llama, text):
    run = tmp_path / "run"
    run.write_text("mine")
    result = holdfast("train", "--model", llama, *arguments(run, text, 1))
    assert result.code == 2 and "is a file. Give a directory for the run" in result.err
    assert "encoding" not in result.out and run.read_text() == "mine"


def test_a_quantised_folder_is_refused_as_nothing_but_embeddings_would_be_trained(tmp_path, holdfast, text):
    folder, run = write_folder(tmp_path / "folder"), tmp_path / "run"
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(told))
    result = holdfast("train", "--model", folder, *arguments(run, text, 1))
    assert result.code == 2 and "holds quantised weights (quantization_config)" in result.err
    assert not run.exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path, holdfast, text):
    folder = write_folder(tmp_path / "folder", lambda: tiny_folders.llama(vocab_size=300))
    result = holdfast("train", "--model", folder, *arguments(tmp_path / "run", text, 2))
    assert result.code == 2 and "has vectors for 300. Is it another model's?" in result.err


@pytest.mark.slow
def test_pairs_are_trained_on_their_completions_alone(tmp_path, holdfast, llama):
    pairs, run = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "run"
    result = holdfast("train", "--model", llama, *arguments(run, pairs, 12))
    assert result.code == 0, result.err
    assert "39 samples and 1 held out" in " ".join(result.out.split())
    losses = [event["loss"] for event in events(run, "step")]
    assert losses[-1] < losses[0] - 0.5
