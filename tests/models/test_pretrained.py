"""Folders of Hugging Face as models on meta and their weights; what is no such folder is refused by name."""

from __future__ import annotations

import json
import signal
import sys

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, Damaged, ModelNotSupported, RunMismatch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

import tiny_folders  # noqa: E402
from holdfast import libraries  # noqa: E402
from holdfast.models.tokenizer import Tokenizer  # noqa: E402
from tiny_folders import write_folder, write_tokenizer  # noqa: E402


def begun(folder, run):
    """The state that a fresh run begins with."""
    model, weights = holdfast.pretrained(folder)
    assert all(p.is_meta for p in model.parameters()) and model.training
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.offload(model, optimizer, run, source=weights, precision="fp32") as engine:
        return engine.state_dict()


def changed(folder, **values):
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("make", tiny_folders.EVERY.values(), ids=tiny_folders.EVERY)
def test_a_run_begins_with_the_values_that_transformers_loads(tmp_path, make, dtype):
    """Experts that are stored one by one in one tensor, tied matrices, names without the prefix of the head's model."""
    folder = write_folder(tmp_path / "folder", make, dtype=dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    found = begun(folder, tmp_path / "run")
    assert found.keys() >= {name for name, _ in make().named_parameters()}
    assert all(torch.equal(value, loaded[name]) for name, value in found.items())


def test_a_folder_of_the_model_below_the_head_has_its_names_completed(tmp_path):
    """As GPT-2 was published; what of its files the model ignores is not missed."""
    folder = write_folder(tmp_path / "folder", tiny_folders.gpt2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    path = folder / "model.safetensors"
    save_file({name.removeprefix("transformer."): value for name, value in load_file(path).items()}, path)
    found = begun(folder, tmp_path / "run")
    assert all(torch.equal(value, loaded[name]) for name, value in found.items())


def test_a_folder_without_a_head_becomes_a_causal_language_model(tmp_path):
    folder = write_folder(tmp_path / "folder", lambda: tiny_folders.gpt2().transformer)
    assert type(holdfast.pretrained(folder)[0]) is transformers.GPT2LMHeadModel


def test_a_tensor_that_is_missing_is_named_and_nothing_is_trained_from_random_values(tmp_path):
    folder = write_folder(tmp_path / "folder")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(
        RunMismatch, match=r"has no model\.norm\.weight, so the model would begin with random"
    ):
        begun(folder, tmp_path / "run")


def test_a_tensor_that_nothing_wants_is_told(tmp_path):
    folder = write_folder(tmp_path / "folder")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"another.weight": torch.zeros(3)}, path)
    with pytest.warns(UserWarning, match=r"nothing here wants its another\.weight"):
        begun(folder, tmp_path / "run")


def test_an_expert_that_is_missing_is_damage(tmp_path):
    folder = write_folder(tmp_path / "folder", tiny_folders.mixtral)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    [name] = [name for name in tensors if "layers.1." in name and ".experts.11.w1." in name]
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(Damaged, match=r"layers\.1\.mlp\.experts\.gate_up_proj do not fit together"):
        begun(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda f: (f / "config.json").unlink(), BadInput, "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), BadInput, "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), BadInput, "is no JSON object"),
        (lambda f: changed(f, model_type="nothing"), ModelNotSupported, "is no causal language model"),
        (lambda f: changed(f, model_type="vit"), ModelNotSupported, "is no causal language model"),
        (lambda f: changed(f, quantization_config={"bits": 4}), ModelNotSupported, "quantised by something"),
        (
            lambda f: changed(f, auto_map={"AutoModel": "m.M"}),
            ModelNotSupported,
            "Python code that lies in it",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            BadInput,
            "no index of several but pytorch_model.bin",
        ),
    ],
)
def test_what_is_no_folder_that_can_be_trained_is_refused_by_name(tmp_path, spoil, error, said):
    folder = write_folder(tmp_path / "folder")
    spoil(folder)
    with pytest.raises(error, match=said):
        holdfast.pretrained(folder)


def test_a_name_of_a_model_on_the_network_is_refused():
    with pytest.raises(BadInput, match=r"gpt2-xl is not a directory: .* Nothing is downloaded"):
        holdfast.pretrained("gpt2-xl")


def test_without_transformers_one_error_says_what_to_install(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadInput, match=r"needs transformers.*pip install 'holdfast\[models\]'"):
        holdfast.pretrained(folder)


def test_a_tokenizer_knows_its_marks_and_is_known_again(tmp_path):
    folder = write_folder(tmp_path / "folder")
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(["the bay", "é"])
    assert [tokenizer.decode(each) for each in ids] == ["the bay", "é"]
    assert tokenizer.decode(tokenizer.begin + tokenizer.end) == ""
    assert len(tokenizer.begin) == len(tokenizer.end) == 1 and tokenizer.begin != tokenizer.end
    assert Tokenizer(folder).digest == tokenizer.digest
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text + " ")
    assert Tokenizer(folder).digest != tokenizer.digest


@pytest.mark.parametrize("first", ["<s>", "</s>"])
def test_the_mark_that_begins_a_text_may_be_the_one_that_ends_it(tmp_path, first):
    folder = write_folder(tmp_path / "folder")
    write_tokenizer(folder, first)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    number = {each["content"]: each["id"] for each in added}
    tokenizer = Tokenizer(folder)
    assert (tokenizer.begin, tokenizer.end) == ([number[first]], [number["</s>"]])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    folder = write_folder(tmp_path / "folder")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(BadInput, match="has no tokenizer that can be loaded"):
        Tokenizer(folder)


@pytest.mark.parametrize("where", ["import", "config", "tokenizer"])
def test_a_key_press_while_transformers_imports_is_no_error_of_the_folder(tmp_path, monkeypatch, where):
    write_folder(tmp_path)
    write_tokenizer(tmp_path)

    def importing(*args, **options):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("cannot import this") from error
        return transformers if where == "import" else load(*args, **options)

    of = {"config": transformers.AutoConfig, "tokenizer": transformers.AutoTokenizer}.get(where)
    load = getattr(of, "from_pretrained", None)
    if of is None:
        monkeypatch.setattr(libraries, "import_module", importing)
    else:
        monkeypatch.setattr(of, "from_pretrained", importing)
    with pytest.raises(KeyboardInterrupt):
        holdfast.pretrained(tmp_path) if where == "config" else Tokenizer(tmp_path)
