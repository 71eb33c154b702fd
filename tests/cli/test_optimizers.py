"""``holdfast train`` with another optimizer than AdamW: what it keeps of which parameter, and at which rate."""

import pytest
from rich.console import Console

from holdfast.cli.optimizers import make_optimizer
from holdfast.cli.recipe import recipe_of
from holdfast.config import from_values
from holdfast.events import read_events
from training import stored

TINY = {
    "model.blocks": 2, "model.width": 16, "model.heads": 2, "model.kv_heads": 1, "model.context": 16,
    "train.micro_batches": 2, "train.micro_batch_size": 2, "train.warmup_steps": 0, "train.steps": 2,
    "train.dtype": "fp32", "train.rank": 4,
}  # fmt: skip

DENSE = {"exp_avg": (16, 16), "exp_avg_sq": (16, 16), "step": ()}
BYTES = {"exp_avg": (16, 16), "exp_avg_scale": (1,), "rms": (16, 16), "rms_scale": (1,), "step": ()}
SLOTS = {
    "adamw": DENSE,
    "adamw-bf16": DENSE,
    "adamw-8bit": BYTES,
    "adafactor": {"row_var": (16, 1), "col_var": (1, 16), "step": ()},
    "muon": {"momentum_buffer": (16, 16), "step": ()},
    "apollo": {"exp_avg": (4, 16), "exp_avg_sq": (4, 16), "step": (), "seed": (), "norm": ()},
    "apollo-mini": {"exp_avg": (1, 16), "exp_avg_sq": (1, 16), "step": (), "seed": (), "norm": ()},
    "grass": {"exp_avg": (4, 16), "exp_avg_sq": (4, 16), "rows": (4,), "step": ()},
    "mezo": {"step": (), "seed": ()},
}
"""By optimizer: what is kept of a matrix of 16 x 16 in a block."""

OF_MATRICES = ("muon", "apollo", "apollo-mini", "grass")

RATES = {"adafactor": 1e-2, "apollo": 1e-3, "apollo-mini": 1e-3, "grass": 1e-3, "mezo": 1e-6}


@pytest.fixture(autouse=True)
def short_sample(monkeypatch):
    monkeypatch.setattr("holdfast.cli.train.SAMPLE_TOKENS", 1)
    monkeypatch.setattr("holdfast.cli.train.VALIDATION_SAMPLES", 2)


@pytest.fixture
def train(tmp_path, holdfast):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)

    def call(**sets):
        keys = TINY | {"run.dir": tmp_path / "run", "data.text": tmp_path / "text"}
        keys |= {f"train.{name}": value for name, value in sets.items()}
        words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        return holdfast("train", *words)

    return call


def shapes_of(run, parameter):
    """Of what is kept of ``parameter`` besides its value."""
    kept = {
        key.rpartition("/")[2]: value for key, value in stored(run).items() if key.startswith(f"{parameter}/")
    }
    return {slot: tuple(value.shape) for slot, value in kept.items() if slot != "param"}


def rates_of(run):
    return [event["learning_rate"] for event in read_events(run / "events.jsonl") if event["event"] == "step"]


@pytest.mark.parametrize("name", SLOTS)
def test_each_optimizer_trains_and_goes_on(train, tmp_path, name):
    result, run = train(optimizer=name), tmp_path / "run"
    assert result.code == 0, result.err
    rate = RATES.get(name, 3e-4)
    assert f"update   {name}, learning rate {rate:g} at its highest" in result.out
    assert shapes_of(run, "blocks.1.attention.out.weight") == SLOTS[name]
    for parameter, shape in (("embed.weight", (256, 16)), ("head.weight", (256, 16)), ("norm.weight", (16,))):
        if name in OF_MATRICES:
            assert shapes_of(run, parameter) == {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
    on = train(optimizer=name, steps=4)
    assert on.code == 0 and on.err == "" and "Continuing after step 2" in on.out, on.err
    assert {values[0] for values in rates_of(run)[:1]} == {rate}
    assert len(rates_of(run)) == 4


@pytest.mark.parametrize("name", SLOTS)
def test_matrices_decay_and_norms_and_embeddings_do_not(tmp_path, name):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    config = from_values(TINY | {"data.text": str(tmp_path / "text"), "train.optimizer": name})
    recipe = recipe_of(config, Console())
    groups = make_optimizer(recipe, config).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for parameter_name, parameter in recipe.model.named_parameters():
        decays_not = "norm" in parameter_name or parameter_name == "embed.weight"
        assert decays.pop(id(parameter)) == (0.0 if decays_not else 0.1), parameter_name
    assert not decays


def test_mezo_is_placed_by_what_fits_and_writes_what_it_reads(train, tmp_path):
    """Nothing is measured for it, and the state stays in host memory where there is room."""
    assert train(optimizer="mezo").code == 0
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert not [event for event in events if event["event"] == "plan"]
    assert {event["read_bytes"] for event in events if event["event"] == "step"} == {0}


def test_the_optimizer_and_the_rank_of_a_run_stay(train):
    assert train(optimizer="apollo").code == 0
    for wish in ({"optimizer": "grass"}, {"optimizer": "apollo", "rank": 8}):
        result = train(**wish)
        assert result.code == 2 and "is another run: its train." in result.err


def test_a_norm_is_not_of_mezo(train, tmp_path):
    result = train(optimizer="mezo", clip_norm=0.5)
    assert result.code == 2
    assert result.err == "error: train.clip_norm = 0.5: mezo has no gradient to clip; leave it out\n"
    assert not (tmp_path / "run").exists()
