"""``convert`` to what others load: each export is opened by its own library, and lacks nothing there."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import holdfast as library

transformers = pytest.importorskip("transformers")

import tiny_folders  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage", "ignore:.is_gradient_checkpointing"
)


class Tied(nn.Module):
    """A model with a tied weight, a buffer, a frozen parameter and two parameter groups."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def made():
    torch.manual_seed(1)
    model = Tied()
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": matrices}], lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(model, optimizer, scheduler, steps, seed, ckpt=None):
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.randint(0, 7, (5,))).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if ckpt is not None:
            ckpt.step()


@pytest.fixture
def run(tmp_path):
    """A run of three steps, and what the script had in memory then."""
    there = made()
    things = dict(zip(("model", "optimizer", "scheduler"), there, strict=True))
    with library.Checkpointer(tmp_path / "run", **things) as ckpt:
        ckpt.resume()
        train(*there, 3, 0, ckpt)
    return tmp_path / "run", there


def of_transformers(model, path, **options):
    """A run of one step of ``model``."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with library.Checkpointer(path, model=model, optimizer=optimizer, **options) as ckpt:
        ckpt.resume()
        tokens = torch.arange(8)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        ckpt.step()
    return path


@pytest.mark.slow
def test_plain_loop_goes_on_bit_equal(run, tmp_path, holdfast):
    path, before = run
    result = holdfast("convert", path, tmp_path / "ckpt.pt", "--to", "torch")
    assert result.code == 0, result.err
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    after = made()
    for key, thing in zip(("model", "optimizer", "scheduler"), after, strict=True):
        thing.load_state_dict(saved[key])
    assert saved["step"] == 3 and saved["optimizer"].keys() == before[1].state_dict().keys()
    assert saved["model"]["head.weight"].data_ptr() == saved["model"]["embed.weight"].data_ptr()
    for each in (before, after):
        train(*each, 2, 5)
    pairs = zip(before[0].state_dict().values(), after[0].state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
def test_torch_file_is_the_same_state(run, tmp_path, holdfast):
    assert holdfast("convert", run[0], tmp_path / "ckpt.pt", "--to", "torch").code == 0
    assert holdfast("verify", tmp_path / "ckpt.pt").code == 0
    assert holdfast("diff", run[0], tmp_path / "ckpt.pt").code == 0
    again = holdfast("convert", run[0], tmp_path / "ckpt.pt", "--to", "torch")
    assert again.code == 2 and "is there already" in again.err


def test_keys_of_a_script_come_back(tmp_path, holdfast):
    """As nanoGPT saves its checkpoint, through a run and back."""
    model, optimizer, scheduler = made()
    train(model, optimizer, scheduler, 1, 0)
    beside = {
        "iter_num": 1,
        "model_args": {"n_layer": 2},
        "best_val_loss": torch.tensor(2.5),
        "config": {"a": None},
    }
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **beside}, tmp_path / "a.pt"
    )
    assert holdfast("convert", tmp_path / "a.pt", tmp_path / "run", "--to", "holdfast").code == 0
    assert holdfast("convert", tmp_path / "run", tmp_path / "b.pt", "--to", "torch").code == 0
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert {key: second[key] for key in beside} == beside
    assert first["optimizer"]["param_groups"] == second["optimizer"]["param_groups"]
    for number, state in first["optimizer"]["state"].items():
        assert all(torch.equal(second["optimizer"]["state"][number][slot], state[slot]) for slot in state)


def test_lists_of_optimizer_state_come_back(tmp_path, holdfast):
    state = {0: {"Q": [torch.ones(2), torch.zeros(3)], "step": 4}}
    groups = [{"lr": 0.1, "params": [0]}]
    torch.save(
        {"model": {"w": torch.ones(2, 3)}, "optimizer": {"state": state, "param_groups": groups}},
        tmp_path / "a.pt",
    )
    assert holdfast("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch").code == 0
    [found] = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["state"].values()
    assert found["step"] == 4 and [each.tolist() for each in found["Q"]] == [[1, 1], [0, 0, 0]]


def test_state_of_no_group_is_refused(tmp_path, holdfast):
    save = {"w": torch.ones(2), "w/exp_avg": torch.ones(2)}
    from safetensors.torch import save_file

    keys = json.dumps({"w": ["w", "param"], "w/exp_avg": ["w", "exp_avg"]})
    save_file(save, tmp_path / "a.safetensors", metadata={"holdfast.keys": keys})
    result = holdfast("convert", tmp_path / "a.safetensors", tmp_path / "b.pt", "--to", "torch")
    assert result.code == 2 and "in which group of its optimizer w is" in result.err
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.slow
def test_single_safetensors_file_is_loaded(run, tmp_path, holdfast):
    assert holdfast("convert", run[0], tmp_path / "a.safetensors", "--to", "safetensors").code == 0
    found, model = load_file(tmp_path / "a.safetensors"), run[1][0]
    assert all(torch.equal(found[name], value) for name, value in model.named_parameters())


@pytest.mark.slow
def test_dcp_folder_is_loaded_by_torch(run, tmp_path, holdfast):
    assert holdfast("convert", run[0], tmp_path / "dcp", "--to", "dcp").code == 0
    model, fresh = run[1][0], made()[0]
    nn.init.zeros_(fresh.embed.weight)
    dcp.load({"model": fresh.state_dict()}, checkpoint_id=tmp_path / "dcp")
    pairs = zip(model.state_dict().values(), fresh.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("make", [tiny_folders.llama_tied, tiny_folders.mixtral, tiny_folders.gpt2])
def test_folder_loads_without_missing_keys(tmp_path, holdfast, make):
    model = make()
    run = of_transformers(model, tmp_path / "run")
    model.config.save_pretrained(tmp_path / "config")
    result = holdfast("convert", run, tmp_path / "out", "--to", "huggingface", "--model", tmp_path / "config")
    assert result.code == 0, result.err
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told.values())
    pairs = zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("way", ["without", "of another", "of other sizes"])
def test_folder_that_would_load_randomly_is_refused(tmp_path, holdfast, way):
    model, arguments = tiny_folders.llama(), []
    run = of_transformers(model, tmp_path / "run")
    if way != "without":
        other = tiny_folders.gpt2() if way == "of another" else tiny_folders.llama(intermediate_size=32)
        other.config.save_pretrained(tmp_path / "config")
        arguments = ["--model", tmp_path / "config"]
    result = holdfast("convert", run, tmp_path / "out", "--to", "huggingface", *arguments)
    said = {
        "without": "config.json",
        "of another": "is not a GPT2LMHeadModel",
        "of other sizes": "is [16, 24] in",
    }
    assert result.code == 2 and said[way] in result.err
    assert not (tmp_path / "out").exists()


def test_model_without_its_head_is_refused(tmp_path, holdfast):
    """Whose folder would load as a language model with a random head."""
    model = transformers.LlamaModel(transformers.LlamaConfig(**tiny_folders.SIZES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with library.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
    tiny_folders.llama().config.save_pretrained(tmp_path / "config")
    result = holdfast(
        "convert", tmp_path / "run", tmp_path / "out", "--to", "huggingface", "--model", tmp_path / "config"
    )
    assert result.code == 2 and "lacks lm_head.weight (1 of 30 tensors)" in result.err


def test_model_of_another_class_is_what_it_was(tmp_path, holdfast):
    config = transformers.LlamaConfig(**tiny_folders.SIZES | {"pad_token_id": 0}, num_labels=3)
    model = transformers.LlamaForSequenceClassification(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with library.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
    model.save_pretrained(tmp_path / "folder")
    result = holdfast(
        "convert", tmp_path / "run", tmp_path / "out", "--to", "huggingface", "--model", tmp_path / "folder"
    )
    assert result.code == 0, result.err
    of_kind = transformers.AutoModelForSequenceClassification
    assert not any(of_kind.from_pretrained(tmp_path / "out", output_loading_info=True)[1].values())


def test_folder_of_transformers_keeps_its_configuration(tmp_path, holdfast):
    folder = tiny_folders.write_folder(tmp_path / "folder")
    assert holdfast("convert", folder, tmp_path / "out", "--to", "huggingface").code == 0
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert loaded.dtype == torch.bfloat16 and not any(told.values())


def with_adapter(tmp_path, **options):
    """A folder, its model with an adapter whose configuration was saved, and a run of that."""
    peft = pytest.importorskip("peft")
    folder = tiny_folders.write_folder(tmp_path / "folder", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], **options)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    return folder, model, of_transformers(model, tmp_path / "run")


def test_adapter_is_loaded_by_peft(tmp_path, holdfast):
    folder, model, run = with_adapter(tmp_path, use_dora=True, modules_to_save=["lm_head"])
    peft = pytest.importorskip("peft")
    result = holdfast(
        "convert", run, tmp_path / "out", "--to", "huggingface", "--model", tmp_path / "adapter"
    )
    assert result.code == 0, result.err
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded, tokens = peft.PeftModel.from_pretrained(base, tmp_path / "out"), torch.arange(20)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)
    assert (
        load_file(tmp_path / "out/adapter_model.safetensors").keys()
        == load_file(tmp_path / "adapter/adapter_model.safetensors").keys()
    )


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_run_of_a_script_is_merged_as_peft_merges_it(tmp_path, holdfast, options):
    _, model, run = with_adapter(tmp_path, modules_to_save=["lm_head"], **options)
    more = ["--to", "huggingface", "--merge", "--model", tmp_path / "adapter"]
    result = holdfast("convert", run, tmp_path / "out", *more)
    assert result.code == 0, result.err
    merged, tokens = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        torch.arange(20)[None],
    )
    expected = model.merge_and_unload().eval()
    assert torch.equal(merged.eval()(tokens).logits, expected(tokens).logits)


@pytest.mark.parametrize("of_weights", [False, True], ids=["run", "copy of weights"])
def test_adapter_alone_is_written_of_a_run_and_of_its_weights(tmp_path, holdfast, of_weights):
    """A copy of weights has what trains, which is the adapter."""
    peft = pytest.importorskip("peft")
    folder = tiny_folders.write_folder(tmp_path / "folder", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    run = of_transformers(model, tmp_path / "run", keep=library.Keep(weights=1))
    [copy] = (run / "weights").iterdir()
    source = copy if of_weights else run
    assert holdfast("convert", source, tmp_path / "out", "--to", "peft").code == 2
    result = holdfast("convert", source, tmp_path / "out", "--to", "peft", "--model", tmp_path / "adapter")
    assert result.code == 0, result.err
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) < copy.stat().st_size + 10_000
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded, tokens = peft.PeftModel.from_pretrained(base, tmp_path / "out"), torch.arange(20)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_adapter_brings_the_embeddings_that_were_resized(tmp_path, holdfast):
    """As PEFT saves them: the base that it is loaded on has not their new rows."""
    peft = pytest.importorskip("peft")
    folder = tiny_folders.write_folder(tmp_path / "folder", dtype=torch.float32)

    def base():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(330)
        return model

    model = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match="has been resized"):
        model.save_pretrained(tmp_path / "adapter")
    run = of_transformers(model, tmp_path / "run")
    result = holdfast("convert", run, tmp_path / "out", "--to", "peft", "--model", tmp_path / "adapter")
    assert result.code == 0, result.err
    loaded, tokens = peft.PeftModel.from_pretrained(base(), tmp_path / "out"), torch.arange(320, 330)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_adapter_lacks_the_layers_that_were_excluded(tmp_path, holdfast):
    _, _, run = with_adapter(tmp_path, exclude_modules=["v_proj"])
    result = holdfast("convert", run, tmp_path / "out", "--to", "peft", "--model", tmp_path / "adapter")
    assert result.code == 0, result.err


def test_packed_weights_without_their_scales_are_not_merged(tmp_path, holdfast):
    """Of a script's own int8 base, whose scales a Checkpointer does not see."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    folder = tiny_folders.write_folder(tmp_path / "folder", dtype=torch.bfloat16)
    packed = transformers.BitsAndBytesConfig(load_in_8bit=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    run = of_transformers(model, tmp_path / "run")
    more = ["--to", "huggingface", "--merge", "--model", tmp_path / "adapter"]
    result = holdfast("convert", run, tmp_path / "out", *more)
    assert result.code == 2 and "is packed (I8), and the run has not its scales" in result.err
    assert not (tmp_path / "out").exists()


def test_adapter_is_not_written_as_a_model(tmp_path, holdfast):
    folder, _, run = with_adapter(tmp_path)
    for model in ([], ["--model", folder]):
        result = holdfast("convert", run, tmp_path / "out", "--to", "huggingface", *model)
        assert result.code == 2 and "adapter_config.json" in result.err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("r", 8, "says r = 8"),
        ("target_modules", ["q_proj", "k_proj"], "differ in target_modules"),
        ("bias", "some", "bias 'some'"),
    ],
)
def test_adapter_of_another_configuration_is_refused(tmp_path, holdfast, option, value, said):
    _, _, run = with_adapter(tmp_path)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {option: value}))
    result = holdfast(
        "convert", run, tmp_path / "out", "--to", "huggingface", "--model", tmp_path / "adapter"
    )
    assert result.code == 2 and said in result.err and not (tmp_path / "out").exists()


def test_rules_with_a_model_are_compared(tmp_path, holdfast):
    run = of_transformers(tiny_folders.llama(), tmp_path / "run")
    tiny_folders.llama().config.save_pretrained(tmp_path / "config")
    results = {}
    for name, to in (("same", "{$1}"), ("other", "x.{$1}")):
        (tmp_path / name).write_text(f"version = 1\n[[rule]]\nmatch = '(.*)'\nrename = '{to}'\n")
        arguments = ["--rules", tmp_path / name, "--model", tmp_path / "config"]
        results[name] = holdfast("convert", run, tmp_path / f"{name}-out", "--to", "huggingface", *arguments)
    assert results["same"].code == 0, results["same"].err
    assert results["other"].code == 2 and "lacks model.embed_tokens.weight" in results["other"].err
