"""``holdfast train`` with ``[lora]``: the adapters of PEFT, resumed, exported alone and merged, as PEFT has them."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import holdfast as library
from holdfast.cli.train.engine_build import make_optimizer
from holdfast.cli.train.recipe import recipe_of
from holdfast.config import load_config
from holdfast.data.loader import step_loader
from holdfast.offload.model.peft_adapters import lora_layers
from support.adapter_runs import TINY, logits, losses, train_adapters
from support.tiny_keys import words
from training import differing, stored

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import tiny_folders  # noqa: E402  (needs transformers)
from tiny_folders import TEXT, write_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing", "ignore:.*fan_in_fan_out")

LORA = (
    "lora.rank=4", "lora.targets=[q_proj,v_proj,up_proj]", "lora.rank_pattern=[1.mlp.up_proj=2,v_proj=6]",
    "lora.dropout=0.2",
)  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 12)
    return path


@pytest.fixture
def train(holdfast, text):
    return partial(train_adapters, holdfast, text)


def base_of(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def with_adapter(folder, adapter, dtype=torch.float32, **options):
    return peft.PeftModel.from_pretrained(base_of(folder, dtype), adapter, **options)


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def run(tmp_path_factory, made, train, llama):
    """A run of three steps, in two sittings. Tests of this module share it, and leave it as it is."""
    if not made:
        made["run"] = tmp_path_factory.mktemp("shared") / "run"
        for steps in (1, 3):
            result = train(made["run"], llama, steps, *LORA)
            assert result.code == 0, result.err
    return made["run"]


@pytest.mark.slow
def test_adapters_resume_and_are_written_as_peft_loads_them(tmp_path, run, train, holdfast, llama):
    result = train(tmp_path / "whole", llama, 3, *LORA)
    said = "LoRA of rank 4 (2 on 1.mlp.up_proj, 6 on v_proj) on q_proj, v_proj, up_proj; all else is frozen"
    assert said in " ".join(result.out.split())
    assert f"convert {tmp_path / 'whole'} OUT --to peft" in result.out
    assert losses(run) == losses(tmp_path / "whole")
    found = stored(run)
    assert differing(found, stored(tmp_path / "whole")) == []

    assert holdfast("convert", run, tmp_path / "adapter", "--to", "peft").code == 0
    told = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(llama) and told["r"] == 4 and told["lora_alpha"] == 8
    assert told["lora_dropout"] == 0.2 and sorted(told["target_modules"]) == ["q_proj", "up_proj", "v_proj"]
    assert told["rank_pattern"] == {"1.mlp.up_proj": 2, "v_proj": 6} and told["alpha_pattern"] == {
        "1.mlp.up_proj": 4,
        "v_proj": 12,
    }
    loaded = with_adapter(llama, tmp_path / "adapter")
    ranks = {name: (layer.r["default"], layer.scaling["default"]) for name, layer in lora_layers(loaded)}
    assert ranks == {
        name: (2 if name.endswith("1.mlp.up_proj") else 6 if name.endswith("v_proj") else 4, 2.0)
        for name in ranks
    }
    values = {f"{name}/param": value for name, value in loaded.named_parameters() if "lora_" in name}
    assert len(values) == 3 * 3 * 2 and differing(found, values) == []
    assert all(value.abs().max() > 0 for value in values.values())

    result = holdfast(
        "convert", run, tmp_path / "merged", "--to", "huggingface", "--merge", "--dtype", "fp32"
    )
    assert result.code == 0, result.err
    expected = loaded.merge_and_unload()
    merged = base_of(tmp_path / "merged")
    assert torch.equal(logits(merged), logits(expected)) and not torch.equal(
        logits(merged), logits(base_of(llama))
    )
    assert not (tmp_path / "merged/adapter_config.json").exists()
    assert (tmp_path / "merged/tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()


def test_merged_in_the_dtype_of_the_folder(tmp_path, run, holdfast, llama):
    """As PEFT merges on a base in bf16: the sum is rounded once."""
    assert holdfast("convert", run, tmp_path / "adapter", "--to", "peft").code == 0
    assert holdfast("convert", run, tmp_path / "merged", "--to", "huggingface", "--merge").code == 0
    expected = with_adapter(llama, tmp_path / "adapter", torch.bfloat16).merge_and_unload().state_dict()
    found = load_file(tmp_path / "merged/model.safetensors")
    assert differing(found, expected) == [] and found.keys() == expected.keys()
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "bfloat16"


def test_a_run_of_adapters_is_not_written_as_a_model(tmp_path, run, holdfast):
    for more, said in (
        (["--to", "huggingface"], "--to peft writes them alone, and --to huggingface --merge"),
        (["--to", "torch", "--merge"], "--merge writes the folder of a model"),
    ):
        result = holdfast("convert", run, tmp_path / "out.pt", *more)
        assert result.code == 2 and said in result.err and not (tmp_path / "out.pt").exists()


@pytest.mark.slow
def test_merging_asks_for_adapters(tmp_path, train, holdfast, llama):
    assert train(tmp_path / "run", llama, 1).code == 0
    result = holdfast("convert", tmp_path / "run", tmp_path / "out", "--to", "huggingface", "--merge")
    assert result.code == 2 and "does not say which adapters it trained" in result.err


WHOLE = {"llama": "lm_head", "gpt2": "ln_f"}
"""A module that is trained whole."""


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "whole"])
@pytest.mark.parametrize("make", ["llama", "gpt2"])
def test_losses_are_those_of_peft_in_a_plain_loop(tmp_path, train, holdfast, text, make, kind):
    """With the adapters' values of step 0, the samples of the run, and its keys for random numbers."""
    folder = write_folder(tmp_path / "folder", tiny_folders.EVERY[make])
    run, sets = tmp_path / "run", ["lora.rank=4", "lora.dropout=0.2", "train.clip_norm=0"]
    if kind == "whole":
        sets += [f"lora.modules_to_save=[{WHOLE[make]}]", "lora.bias=all"]
    elif kind != "lora":
        sets.append(f"lora.{kind}=true")
    more = {"modules_to_save": [WHOLE[make]], "bias": "all"} if kind == "whole" else {}
    assert train(run, folder, 3, *sets, "durability.retain=9").code == 0
    assert holdfast("convert", f"{run}@0", tmp_path / "begins", "--to", "peft").code == 0
    told = json.loads((tmp_path / "begins/adapter_config.json").read_text())
    asked = {
        "lora_dropout": 0.2,
        "use_rslora": kind == "rslora",
        "use_dora": kind == "dora",
        "lora_alpha": 8,
        "r": 4,
    } | more
    assert {key: told[key] for key in asked} == asked
    model = with_adapter(folder, tmp_path / "begins", is_trainable=True).train()
    fresh = peft.get_peft_model(
        base_of(folder),
        peft.LoraConfig(
            r=4, target_modules="all-linear", use_dora=kind == "dora", task_type="CAUSAL_LM", **more
        ),
    )
    begun = dict(model.named_parameters())
    for name, value in fresh.named_parameters():
        assert begun[name].shape == value.shape and begun[name].requires_grad == value.requires_grad
        if "magnitude" in name or "lora_B" in name or "modules_to_save" in name:
            assert torch.equal(begun[name], value), name

    config = load_config(run / "config.toml")
    recipe = recipe_of(config, lambda _: None)
    loader = step_loader(recipe.corpus, 2, 2, seed=config.run.seed, stack=recipe.stack)
    recipe.model = model
    optimizer, found = make_optimizer(recipe, config), losses(run)
    model.config.use_cache = False
    with library.keyed_rng(model, config.run.seed) as keys:
        for step, scale in enumerate(_rates(config)):
            for group in optimizer.param_groups:
                group["lr"] = config.train.highest_rate * scale
            micro_batches = next(loader)
            tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
            total = 0.0
            for m, batch in enumerate(micro_batches):
                keys.at(step, m)
                count = int((batch["labels"][:, 1:] != -100).sum())
                loss = model(**batch).loss * count / tokens
                loss.backward()
                total += float(loss.detach())
            assert total == pytest.approx(found[step + 1], rel=1e-5), step
            optimizer.step()
            optimizer.zero_grad()
    ends = stored(run)
    for name, value in model.named_parameters():
        if value.requires_grad:
            assert torch.allclose(ends[f"{name}/param"], value, atol=1e-5), name


def _rates(config):
    from holdfast.cli.train.engine_build import learning_rate_factor

    return [learning_rate_factor(step, config.train.warmup_steps, config.train.steps) for step in range(3)]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["lora.rank=0"], 'lora.rank = 0: must be at least 1, or "none"'),
        (["lora.rank=4", "lora.targets=[q_pro]"], 'is called "q_pro"; did you mean "q_proj"? Its linear layers are'),
        (["lora.rank=4", "lora.targets=[q_proj,wrong]"], 'is called "wrong". Its linear layers are q_proj, k_proj'),
        (["lora.rank=4", "lora.targets=[input_layernorm]"], "PEFT makes no such adapters"),
        (["lora.alpha=8"], "lora.alpha = 8.0: needs adapters: give lora.rank"),
        (["lora.rank=4", "lora.modules_to_save=[lm_hea]"], 'modules_to_save: no layer of the model in'),
        (
            ["lora.rank=4", "lora.targets=[v_proj]", "lora.modules_to_save=[q_proj]", "quantization.bits=4"],
            "packed values are not",
        ),
        (["lora.rank=4", "lora.targets=[v_proj]", "lora.rank_pattern=[q_proj=2]"], "no adapted layer of the model"),
        (["lora.rank=4", "lora.rank_pattern=[q_proj]"], 'write each as "end of a name=rank"'),
        (["lora.rank=4", "lora.bias=some"], 'lora.bias = "some": must be "none" or "all" or "lora_only"'),
        (["lora.rank=4", "train.optimizer=apollo"], 'train.optimizer = "apollo" projects'),
        (["quantization.bits=4"], "quantised weights cannot be trained. Train adapters on them"),
        (["lora.rank=4", "quantization.bits=4", "lora.dora=true"], "which bitsandbytes has packed or will pack"),
        (["lora.rank=4", "quantization.bits=8", "quantization.type=fp4"], "is for quantization.bits = 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_and_nothing_is_written(tmp_path, train, llama, sets, said):
    result = train(tmp_path / "run", llama, 1, *sets)
    assert result.code == 2 and said in result.err and result.err.count("error:") == 1
    assert not (tmp_path / "run").exists()


def test_adapters_want_a_folder(tmp_path, holdfast):
    result = holdfast("train", "--set", f"run.dir={tmp_path / 'run'}", "--set", "lora.rank=4")
    assert (
        result.code == 2
        and "Name its folder: --model FOLDER" in result.err
        and not (tmp_path / "run").exists()
    )


@pytest.mark.parametrize("alone", [True, False])
def test_adapters_on_adapters_are_refused(tmp_path, train, llama, alone):
    folder = tmp_path / "folder"
    shutil.copytree(llama, folder)
    (folder / "adapter_config.json").write_text("{}")
    if alone:
        (folder / "config.json").unlink()
    result = train(tmp_path / "run", folder, 1, *LORA)
    assert result.code == 2 and "adapters on adapters are not trained. Merge them first" in result.err
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_its_adapters(run, train, llama):
    result = train(run, llama, 4, "lora.rank=8", *LORA[1:])
    assert result.code == 2 and "its lora.rank is 4, and 8 was asked for" in result.err


@pytest.mark.slow
def test_a_killed_run_of_adapters_ends_the_same_without_its_folder(
    tmp_path, train, holdfast_process, llama, text
):
    folder, whole, run = tmp_path / "folder", tmp_path / "whole", tmp_path / "run"
    shutil.copytree(llama, folder)
    assert train(whole, folder, 5, *LORA, "lora.dora=true").code == 0
    keys = TINY | {"run.dir": run, "data.text": text, "train.steps": 5, "io.write_limit": "100KB"}
    keys |= dict(each.split("=", 1) for each in (*LORA, "lora.dora=true"))
    process = holdfast_process("train", "--model", folder, *words(keys))
    while not (run / "events.jsonl").exists() or len(losses(run)) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert len(losses(run)) < 5
    shutil.rmtree(folder)
    result = train(run, folder, 5, *LORA, "lora.dora=true")
    assert result.code == 0 and "Continuing after step" in result.out, result.err
    assert differing(stored(run), stored(whole)) == [] and losses(run) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["mixtral", "llama_tied", "gpt2"])
def test_other_families_merge_as_peft_does(tmp_path, train, holdfast, make):
    """Fused experts, tied weights, and transposed ones."""
    folder, run = write_folder(tmp_path / "folder", tiny_folders.EVERY[make]), tmp_path / "run"
    if make == "mixtral":
        result = train(run, folder, 2, "lora.rank=4")
        assert result.code == 2 and "PEFT would adapt the fused weights of" in result.err and not run.exists()
    targets = [] if make == "gpt2" else ["lora.targets=[q_proj,o_proj]"]
    result = train(run, folder, 2, "lora.rank=4", "lora.rslora=true", *targets)
    assert result.code == 0, result.err
    assert holdfast("convert", run, tmp_path / "adapter", "--to", "peft").code == 0
    result = holdfast(
        "convert", run, tmp_path / "merged", "--to", "huggingface", "--merge", "--dtype", "fp32"
    )
    assert result.code == 0, result.err
    expected = with_adapter(folder, tmp_path / "adapter").merge_and_unload()
    found, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()) and differing(found.state_dict(), expected.state_dict()) == []
    assert torch.equal(logits(found), logits(expected))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's own
@pytest.mark.parametrize(
    ("target", "sets"),
    [
        ("lm_head", ["lora.targets=[q_proj,lm_head]"]),
        ("embed_tokens", ["lora.targets=[q_proj,embed_tokens]"]),
        ("lm_head", ["lora.targets=[q_proj]", "lora.modules_to_save=[lm_head]"]),
    ],
)
def test_an_adapter_of_a_tied_weight_is_not_merged(tmp_path, train, holdfast, target, sets):
    """Head and embedding would both change, or the head's adapter be lost."""
    folder, run = write_folder(tmp_path / "folder", tiny_folders.llama_tied), tmp_path / "run"
    assert train(run, folder, 1, "lora.rank=4", *sets).code == 0
    result = holdfast("convert", run, tmp_path / "merged", "--to", "huggingface", "--merge")
    assert result.code == 2 and f"{target} in {run}@1 is also that of" in result.err, result.err
    assert "--to peft" in result.err and not (tmp_path / "merged").exists()
    assert holdfast("convert", run, tmp_path / "adapter", "--to", "peft").code == 0


@pytest.mark.slow
def test_modules_and_biases_that_were_trained_are_written_as_peft_loads_them(tmp_path, train, holdfast):
    folder, run = write_folder(tmp_path / "folder", tiny_folders.gpt_neox), tmp_path / "run"
    sets = ["lora.rank=4", "lora.modules_to_save=[lm_head,mlp]"]
    result = train(run, folder, 2, *sets, "lora.bias=lora_only")
    assert result.code == 0, result.err
    assert "on all-linear; the biases of these layers; lm_head, mlp whole; all else is frozen" in " ".join(
        result.out.split()
    )
    assert holdfast("convert", run, tmp_path / "adapter", "--to", "peft").code == 0
    loaded, found = with_adapter(folder, tmp_path / "adapter", is_trainable=True), stored(run)
    values = {f"{name}/param": p.detach() for name, p in loaded.named_parameters() if p.requires_grad}
    assert len(values) == 3 * (2 * 3 + 4) + 1 and differing(found, values) == []
    loaded.save_pretrained(tmp_path / "saved")
    names = [load_file(tmp_path / each / "adapter_model.safetensors").keys() for each in ("adapter", "saved")]
    assert names[0] == names[1]

    for dtype, more in ((torch.float32, ["--dtype", "fp32"]), (torch.bfloat16, [])):
        out = tmp_path / str(dtype)
        assert holdfast("convert", run, out, "--to", "huggingface", "--merge", *more).code == 0
        expected = with_adapter(folder, tmp_path / "adapter", dtype).merge_and_unload().state_dict()
        merged = base_of(out, dtype).state_dict()
        assert differing(merged, expected) == [] and merged.keys() == expected.keys()
        assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {dtype}
        if dtype == torch.float32:
            plain = base_of(folder).state_dict()
            ends = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
            layers = [f"gpt_neox.layers.{n}.{end}" for n in range(3) for end in ends]
            changed = {
                "lm_head.weight",
                *(f"{each}.{end}" for each in layers for end in ("weight", "bias")),
            }
            assert {name for name in plain if not torch.equal(plain[name], merged[name])} == changed

    path = run / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bias": "all"}))
    result = holdfast("convert", run, tmp_path / "other", "--to", "peft")
    assert result.code == 2 and "differ in bias" in result.err and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_experts_of_a_mixture_are_read_where_tokens_go(tmp_path, train, holdfast):
    """By transformers' loop over experts, which rounds otherwise than the product of all."""
    folder, sets = write_folder(tmp_path / "folder", tiny_folders.mixtral), LORA[:1] + LORA[2:]
    runs = {"whole": (), "routed": ("offload.expert_slots=2",)}
    for run, more in runs.items():
        plain = ("lora.targets=[q_proj,v_proj]", "lora.rank_pattern=[]")
        result = train(tmp_path / run, folder, 2, *sets, *plain, *more)
        assert result.code == 0, result.err
    found, expected = ([*losses(tmp_path / run).values()] for run in ("routed", "whole"))
    assert found == pytest.approx(expected, rel=1e-5)
    assert any(".experts-" in path.name for path in (tmp_path / "routed/data").iterdir())
    assert holdfast("convert", tmp_path / "routed", tmp_path / "adapter", "--to", "peft").code == 0
