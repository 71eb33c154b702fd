"""The configuration file: defaults, overrides, and one clear line for every mistake."""

import tomllib
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import config
from holdfast.config import Config, DataConfig, OffloadConfig, RunConfig, TrainConfig
from holdfast.errors import ConfigError


def load(*sets, path=None):
    return config.load_config(path, sets)


def test_no_file_and_no_sets_is_the_default():
    assert load() == Config()


def test_a_set_beats_the_file_and_the_file_beats_the_default(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\nmicro_batches = 3\n")
    chosen = load("train.steps=9", path=path)
    assert (chosen.train.steps, chosen.train.micro_batches, chosen.train.micro_batch_size) == (9, 3, 4)


@pytest.mark.parametrize("value", ["/data/my text", '"/data/my text"'])
def test_text_on_the_command_line_needs_no_quotes(value):
    assert load(f"data.text={value}").data.text == "/data/my text"


def test_a_whole_number_is_accepted_where_a_fraction_or_a_size_is_wanted():
    chosen = load("offload.params_on_host=1", "offload.host_budget=4096")
    assert chosen.offload.params_on_host == 1.0
    assert chosen.offload.host_budget_bytes == 4096


def test_fractions_may_be_left_to_the_budget():
    assert load("offload.optimizer_on_host=auto").offload.optimizer_on_host == "auto"


def test_sizes_and_rates_are_read_with_their_units():
    chosen = load("offload.host_budget=2GiB", "io.read_limit=500MB")
    assert chosen.offload.host_budget_bytes == 2 * 1024**3
    assert chosen.io.read_limit_bytes_per_second == 500_000_000
    assert chosen.io.write_limit_bytes_per_second is None
    assert chosen.offload.device_budget_bytes is None


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ("train.stepps=1", "unknown configuration key train.stepps; did you mean train.steps?"),
        ("steps=1", "unknown configuration key steps; did you mean train.steps?"),
        ("trian.steps=1", "unknown configuration key trian.steps; did you mean train.steps?"),
        ("data.seed=1", "unknown configuration key data.seed; did you mean run.seed?"),
        ("qqq.zzz=1", "`holdfast train --print-config` prints all keys"),
        ("train.steps", "write it as --set section.key=value"),
        ("train.steps=0", "train.steps = 0: must be at least 1"),
        ("train.steps=1.5", "train.steps = 1.5: must be a whole number"),
        ("train.steps=many", 'train.steps = "many": must be a whole number'),
        ("train.steps=true", "train.steps = true: must be a whole number"),
        ("train.micro_batches=0", 'train.micro_batches = 0: must be at least 1, or "auto"'),
        ("train.micro_batches=many", 'train.micro_batches = "many": must be a whole number, or "auto"'),
        ("train.micro_batches=true", 'train.micro_batches = true: must be a whole number, or "auto"'),
        ("train.learning_rate=nan", "train.learning_rate = nan: must be a number"),
        ("train.learning_rate=inf", "train.learning_rate = inf: must be a number"),
        ("train.learning_rate=0", "train.learning_rate = 0.0: must be above 0"),
        ("train.learning_rate=fast", 'train.learning_rate = "fast": must be a number'),
        ("train.optimizer=adam", 'train.optimizer = "adam": must be "adamw" or "adamw-bf16" or'),
        ("train.rank=0", "train.rank = 0: must be at least 1"),
        ("train.clip_norm=true", "train.clip_norm = true: must be a number"),
        ("model.width=8", "model.width = 8: must be a multiple of 2 * model.heads = 16"),
        ("train.clip_norm=-1", "train.clip_norm = -1.0: must not be negative"),
        ("train.dtype=fp8", 'train.dtype = "fp8": must be "auto" or "bf16" or "fp16"'),
        ("offload.schedule=diagonal", 'must be "vertical" or "horizontal"'),
        ("offload.params_on_host=1.1", "must lie between 0 and 1"),
        ("offload.params_on_host=some", 'offload.params_on_host = "some": must be a number'),
        ("offload.delayed_fraction=1.3", "must lie between 0 and 1"),
        ("offload.host_budget=64 gallons", "is not a number of bytes; write it like 20GiB"),
        ("io.read_limit=0", "must be above 0"),
        ("io.direct=1", "io.direct = 1: must be true or false"),
        ("io.threads=0", "must lie between 1 and 256"),
        ("durability.retain=0", "durability.retain = 0: must be at least 1"),
        ("durability.every=-1", "durability.every = -1: must not be negative"),
        ("model.heads=7", "must be a multiple of 2 * model.heads = 14"),
        ("model.kv_heads=3", "model.kv_heads = 3: must divide model.heads = 8"),
        ("model.dropout=1", "must be at least 0 and below 1"),
        ("data.validation_fraction=0.6", "must lie between 0 and 0.5"),
        ("data.text=", "data.text"),
        ("data.validation=0.1", "a share of data.text is data.validation_fraction"),
        ("data.packing=true", 'must be "off" or "on" or "lengths"'),
        ("train.patience=2", "train.patience = 2: needs train.validate_every"),
        ("train.keep_best=true", "train.keep_best = true: needs train.validate_every"),
        ("run.dir=", "run.dir"),
        ("run.seed=-1", "must lie between 0"),
        ("lora.rank=0", 'lora.rank = 0: must be at least 1, or "none"'),
        ("lora.rank=many", 'lora.rank = "many": must be a whole number, or "none"'),
        ("lora.dropout=0.1", "lora.dropout = 0.1: needs adapters: give lora.rank"),
        ("lora.rank=8", "Name its folder: --model FOLDER"),
        ("quantization.bits=5", 'quantization.bits = 5: must be "none" or 4 or 8'),
        ("quantization.bits=4", "quantised weights cannot be trained"),
    ],
)
def test_a_wrong_value_is_refused_with_the_key_and_the_way_out(wrong, expected):
    with pytest.raises(ConfigError) as caught:
        load(wrong)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "content, expected",
    [
        ("[train\n", "is not TOML: "),
        ("steps = 3\n", "unknown configuration key steps; did you mean train.steps?"),
        ("[train.steps]\nx = 3\n", "train.steps"),
        ("[trian]\nsteps = 3\n", "did you mean train.steps?"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, expected):
    path = tmp_path / "run.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r".") as caught:
        load(path=path)
    assert expected in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        load(path=tmp_path / "nowhere.toml")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(path=tmp_path / "binary")


def test_the_default_prints_every_key_with_its_meaning():
    text = config.to_toml(Config())
    assert config.from_values(dict(config.flattened(tomllib.loads(text)))) == Config()
    for kind in config._SECTIONS.values():
        for key in fields(kind):
            assert key.metadata["doc"]
            assert f"\n{key.name} = " in text
    assert max(map(len, text.splitlines())) <= 110


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
        lambda text: not text.startswith("~")  # a home, which is put in when it is read
    ),
    rate=st.floats(1e-12, 1e6),
    fraction=st.one_of(st.floats(0, 1), st.just("auto")),
    seed=st.integers(0, 2**63 - 1),
)
@example(text='\\ " \x7f \n \U0001f600', rate=1e-5, fraction=0.5, seed=0)
def test_what_is_printed_reads_back_equal(text, rate, fraction, seed):
    chosen = Config(
        run=RunConfig(dir=text, seed=seed),
        data=DataConfig(text=text),
        train=TrainConfig(learning_rate=rate),
        offload=OffloadConfig(params_on_host=fraction, drives=(text, "two")),
    )
    again = config.from_values(dict(config.flattened(tomllib.loads(config.to_toml(chosen)))))
    assert again == chosen


@pytest.mark.parametrize("text", ['["/a","/b c"]', "[/a,/b c]", "/a, /b c"])
def test_a_list_may_be_given_as_a_shell_leaves_it(text):
    assert load(f"offload.drives={text}").offload.drives == ("/a", "/b c")


@pytest.mark.parametrize("value", [1, [1], [""], ["/a", ["/b"]], True, "/a,,/b"])
def test_what_is_no_list_of_texts_is_refused(value):
    with pytest.raises(ConfigError, match=r"offload.drives = .*must be a list of texts"):
        config.from_values({"offload.drives": value})


def test_an_empty_list_is_none():
    assert load("offload.drives=[]").offload.drives == ()


def test_what_differs_is_named_in_the_order_of_declaration():
    assert config.changed_keys(Config(), load("train.steps=100")) == {}
    changed = config.changed_keys(Config(), load("io.threads=2", "model.width=512", "model.blocks=4"))
    assert list(changed.items()) == [
        ("model.blocks", (8, 4)),
        ("model.width", (256, 512)),
        ("io.threads", (4, 2)),
    ]


def test_every_key_that_enters_the_arithmetic_is_marked():
    marked = {
        mark: {key for key in config.to_values(Config()) if config.is_marked(key, mark)}
        for mark in ("fixed", "stated")
    }
    model = {f"model.{name}" for name in ("path", "blocks", "width", "heads", "kv_heads", "context")}
    assert marked["fixed"] == {
        "run.seed",
        "data.validation_fraction",
        *model,
        "train.optimizer",
        "train.rank",
        "train.mlp_tokens",
        *(
            f"lora.{name}"
            for name in (
                "rank",
                "alpha",
                "targets",
                "rank_pattern",
                "dora",
                "rslora",
                "modules_to_save",
                "bias",
            )
        ),
        *(f"quantization.{name}" for name in ("bits", "type", "double")),
    }
    train = {
        "micro_batches",
        "micro_batch_size",
        "learning_rate",
        "warmup_steps",
        "weight_decay",
        "clip_norm",
        "clipping",
    }
    train = {f"train.{name}" for name in (*train, "dtype")}
    alone = {
        "data.packing",
        "model.dropout",
        "lora.dropout",
        "offload.order",
        "offload.expert_slots",
        "offload.device",
        "offload.drives",
    }
    assert marked["stated"] == alone | train


def test_the_printed_configuration_says_what_may_change():
    lines = config.to_toml(Config()).splitlines()
    assert "[fixed]" in lines[0] and "--set" in lines[0]
    [width], [rate], [steps] = (
        [line for line in lines if line.startswith(f"{name} =")]
        for name in ("width", "learning_rate", "steps")
    )
    assert width.endswith("[fixed]")
    assert rate.endswith("[stated]")
    assert not steps.endswith("]")
