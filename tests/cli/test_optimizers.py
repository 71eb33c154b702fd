"""``holdfast train`` with another optimizer than AdamW: what it keeps of which parameter, and at which rate."""

import pytest
import torch

from holdfast.cli.train.engine_build import make_optimizer
from holdfast.cli.train.recipe import recipe_of
from holdfast.config import from_values
from holdfast.events import read_events
from support.tiny_keys import TINY, words
from training import stored

KEYS = TINY | {"train.warmup_steps": 0, "train.steps": 2, "train.rank": 4}

F32, BF16, U8, I64 = torch.float32, torch.bfloat16, torch.uint8, torch.int64
STEP = {"step": (F32, ())}


def moments(dtype, *shape):
    return {"exp_avg": (dtype, shape), "exp_avg_sq": (dtype, shape), **STEP}


BYTES = {
    "exp_avg": (U8, (16, 16)),
    "exp_avg_scale": (F32, (1,)),
    "rms": (U8, (16, 16)),
    "rms_scale": (F32, (1,)),
}
DRAWN = {"seed": (I64, ()), "norm": (F32, ())}
SLOTS = {
    "adamw": moments(F32, 16, 16),
    "adamw-bf16": moments(BF16, 16, 16),
    "adamw-8bit": BYTES | STEP,
    "adamw-8bit-24": BYTES | STEP,
    "adafactor": {"row_var": (F32, (16, 1)), "col_var": (F32, (1, 16)), **STEP},
    "muon": {"momentum_buffer": (F32, (16, 16)), **STEP},
    "apollo": moments(F32, 4, 16) | DRAWN,
    "apollo-mini": moments(F32, 1, 16) | DRAWN,
    "grass": moments(F32, 4, 16) | {"rows": (I64, (4,))},
    "mezo": {"seed": (I64, ()), **STEP},
}
"""By optimizer: what is kept of a matrix of 16 x 16 in a block."""

OF_MATRICES = ("muon", "apollo", "apollo-mini", "grass")

RATES = {"adafactor": 1e-2, "apollo": 1e-3, "apollo-mini": 1e-3, "grass": 1e-3, "mezo": 1e-6}


@pytest.fixture
def train(tmp_path, holdfast):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)

    def call(**sets):
        keys = KEYS | {"run.dir": tmp_path / "run", "data.text": tmp_path / "text"}
        return holdfast("train", *words(keys | {f"train.{name}": value for name, value in sets.items()}))

    return call


def slots_of(run, parameter):
    """What is kept of ``parameter`` besides its value: types and shapes."""
    kept = {
        key.rpartition("/")[2]: value for key, value in stored(run).items() if key.startswith(f"{parameter}/")
    }
    return {slot: (value.dtype, tuple(value.shape)) for slot, value in kept.items() if slot != "param"}


def rates_of(run):
    return [event["learning_rate"] for event in read_events(run / "events.jsonl") if event["event"] == "step"]


@pytest.mark.slow
@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("name", SLOTS)
def test_each_optimizer_trains_and_goes_on(train, tmp_path, name):
    result, run = train(optimizer=name), tmp_path / "run"
    assert result.code == 0, result.err
    rate = RATES.get(name, 3e-4)
    assert f"update   {name}, learning rate {rate:g} at its highest" in result.out
    assert slots_of(run, "blocks.1.attention.out.weight") == SLOTS[name]
    for parameter, shape in (("embed.weight", (256, 16)), ("head.weight", (256, 16)), ("norm.weight", (16,))):
        if name in OF_MATRICES:
            assert slots_of(run, parameter) == moments(F32, *shape)
    on = train(optimizer=name, steps=4)
    assert on.code == 0 and on.err == "" and "Continuing after step 2" in on.out, on.err
    assert {values[0] for values in rates_of(run)[:1]} == {rate}
    assert len(rates_of(run)) == 4


@pytest.mark.parametrize("name", SLOTS)
def test_matrices_decay_and_norms_and_embeddings_do_not(tmp_path, name):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    config = from_values(KEYS | {"data.text": str(tmp_path / "text"), "train.optimizer": name})
    recipe = recipe_of(config, print)
    groups = make_optimizer(recipe, config).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for parameter_name, parameter in recipe.model.named_parameters():
        decays_not = "norm" in parameter_name or parameter_name == "embed.weight"
        assert decays.pop(id(parameter)) == (0.0 if decays_not else 0.1), parameter_name
    assert not decays


@pytest.mark.parametrize("name", [*OF_MATRICES, "adamw", "adamw-bf16", "adamw-8bit", "adamw-8bit-24"])
def test_whatever_is_adamws_has_one_adamw(tmp_path, name):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    config = from_values(KEYS | {"data.text": str(tmp_path / "text"), "train.optimizer": name})
    recipe = recipe_of(config, print)
    optimizer = make_optimizer(recipe, config)
    [of_head] = [g for g in optimizer.param_groups for p in g["params"] if p is recipe.model.head.weight]
    assert (of_head["betas"], of_head["eps"], of_head["lr"]) == ((0.9, 0.95), 1e-8, config.train.highest_rate)


def test_muon_takes_the_learning_rates_of_adamw(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    config = from_values(KEYS | {"data.text": str(tmp_path / "text"), "train.optimizer": "muon"})
    optimizer = make_optimizer(recipe_of(config, print), config)
    assert [group.get("adjust_lr_fn") for group in optimizer.param_groups] == ["match_rms_adamw", None, None]


@pytest.mark.slow
def test_mezo_is_placed_by_what_fits(train, tmp_path):
    """Nothing is measured for it, and the state stays in host memory where there is room."""
    result = train(optimizer="mezo")
    assert result.code == 0
    assert "100% of optimizer state, 100% of block inputs in host memory, by what fits" in " ".join(
        result.out.split()
    )
    [told] = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "engine"]
    assert told["on_host"]["optimizer"] == 1.0
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert not [event for event in events if event["event"] == "plan"]
    assert {event["read_bytes"] for event in events if event["event"] == "step"} == {0}


@pytest.mark.slow
def test_the_optimizer_and_the_rank_of_a_run_stay(train):
    assert train(optimizer="apollo").code == 0
    for wish in ({"optimizer": "grass"}, {"optimizer": "apollo", "rank": 8}):
        result = train(**wish)
        assert result.code == 2 and "is another run: its train." in result.err


@pytest.mark.parametrize("key, value", [("clip_norm", "0.5"), ("clipping", '"per_block"')])
def test_a_norm_is_not_of_mezo(train, tmp_path, key, value):
    result = train(**{"optimizer": "mezo", key: value.strip('"')})
    assert result.code == 2
    assert result.err == f"error: train.{key} = {value}: mezo has no gradient to clip; leave it out\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_was_given_the_usual_rate_goes_on_and_keeps_it_when_another_gets_usual(
    train, tmp_path, monkeypatch
):
    assert train(learning_rate=3e-4).code == 0
    assert train(steps=4).code == 0
    monkeypatch.setattr("holdfast.config.USUAL_RATE", 1e-4)
    result = train(steps=6)
    assert result.code == 2 and "train.learning_rate 0.0003 -> 0.0001" in result.err
