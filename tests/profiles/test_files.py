"""Profiles: those that come with the library are sound, others are read or refused with the key that is wrong."""

from dataclasses import replace

import pytest

from holdfast.errors import ConfigError
from holdfast.profiles import MachineProfile, ModelProfile, known, load_machine, load_model, to_toml

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt-46m": 46_349_312,
    "gpt-319m": 319_350_784,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
}
"""As the models themselves count."""

MACHINE = """
description = "mine"
[device]
memory = "8GiB"
flops = 1e12
upload = "10GB/s"
download = 10000000000
[host]
memory = "16GiB"
update = 1e9
[ssd]
read = "2GB/s"
write = "1.5GB/s"
capacity = "100GB"
"""


@pytest.mark.parametrize("name", known(MachineProfile))
def test_every_machine_reads_and_writes_back_the_same(name, tmp_path):
    machine = load_machine(name)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(machine, {"ssd.read": "so I was told"}))
    assert load_machine(str(path)) == machine
    assert "# so I was told" in path.read_text()
    assert machine.ssd_read_bytes_per_second >= 10**9


@pytest.mark.parametrize("name", known(ModelProfile))
def test_every_model_reads_and_has_its_parameters(name):
    model = load_model(name)
    assert model.parameters == PARAMETERS.get(name, model.parameters)
    assert model.tokens <= 16384


def test_the_golden_model_has_twelve_squares_of_its_width():
    model = load_model("gpt-65b")
    assert model.block_parameters == pytest.approx(12 * 8192**2, rel=1e-4)
    assert model.input_elements == 4 * 2048 * 8192
    tokens = 4 * 2048
    assert model.forward_flop == pytest.approx(2 * model.block_parameters * tokens + 4 * 4 * 2048**2 * 8192)
    assert model.head_flop == 6 * 50257 * 8192 * tokens


def test_the_workspace_of_the_head_is_flat_in_tokens():
    """Chunks of 256 tokens, the softmax of 64: logits, and the fp32 sum of the head's gradients."""
    model = replace(load_model("llama-3-8b"), vocabulary=131072, width=64, heads=1, kv_heads=1)
    heads = []
    for tokens in (512, 65536):
        sized = replace(model, sequence=tokens)
        heads.append(
            sized.workspace_bytes(2, False) - 34 * sized.tokens * 64
        )  # without the last block's activations
        heads.append(sized.workspace_bytes(4, False) - 68 * sized.tokens * 64)
    halves, whole = (2 * 256 + 16 * 64) * 131072, (4 * 256 + 16 * 64) * 131072
    assert heads == [halves + 4 * 131072 * 64, whole + 4 * 131072 * 64] * 2


def test_a_streamed_head_has_its_gradient_in_tiles():
    """Of 8,192 words: in fp32 and in 16 bits, with the logits of a chunk; or all logits of a chunk."""
    model = replace(load_model("llama-3-8b"), vocabulary=131072, sequence=1024, micro_batch=1)
    for width, expected in ((4096, 6 * 8192 * 4096 + 16 * 256 * 8192), (512, (2 * 256 + 16 * 64) * 131072)):
        sized = replace(model, width=width, heads=1, kv_heads=1)
        assert sized.workspace_bytes(2, True) == max(expected, 34 * 1024 * width)
        assert sized.streamed_head_flop == 8 * 131072 * width * 1024
        whole = {4096: 4 * 8192 * 4096 + 16 * 256 * 8192, 512: (4 * 256 + 16 * 64) * 131072}[width]
        assert sized.workspace_bytes(4, True) == max(whole, (4 * 256 + 16 * 64) * 131072, 68 * 1024 * width)
    few = replace(model, sequence=256)
    assert few.workspace_bytes(2, True) == 16 * 256 * 131072 and few.streamed_head_flop == few.head_flop


def test_a_file_of_ones_own_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MACHINE)
    machine = load_machine(str(path))
    assert machine.host_memory_bytes == 16 * 2**30
    assert (machine.upload_bytes_per_second, machine.download_bytes_per_second) == (10**10, 10**10)
    assert (machine.ssd_count, machine.ssd_mixed_bytes_per_second) == (1, None)
    assert machine.with_more(host_bytes=5, ssds=2) == replace(
        machine, host_memory_bytes=16 * 2**30 + 5, ssd_count=3
    )


@pytest.mark.parametrize(
    "before, after, text",
    [
        ('read = "2GB/s"', 'read = "fast"', "ssd.read = 'fast' is not bytes per second, like \"12GB/s\""),
        ('read = "2GB/s"', "read = 0", "ssd.read = 0 is not bytes per second"),
        ('read = "2GB/s"', "", "ssd.read must be given; docs/plan.md describes every key"),
        ("flops = 1e12", "flops = -1", "device.flops = -1 is not a number above 0"),
        (
            "flops = 1e12",
            'flops = 1e12\nprecision = "fp16"',
            'device.precision = \'fp16\' is not "bf16" or "fp32"',
        ),
        ("flops = 1e12", "flop = 1e12", "unknown key device.flop; did you mean device.flops?"),
        ('upload = "10GB/s"', "", "device.upload must be given, unless device.shares_host = true"),
        ('capacity = "100GB"', 'capacity = "100GB"\ncount = 0', "ssd.count = 0: there must be one"),
        ('description = "mine"', "description = 7", 'description = 7 is not text in quotes, like "this"'),
        ("[device]", "[device", "is not TOML: "),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(tmp_path, before, after, text):
    path = tmp_path / "mine.toml"
    assert before in MACHINE
    path.write_text(MACHINE.replace(before, after))
    with pytest.raises(ConfigError) as refused:
        load_machine(str(path))
    assert str(refused.value).startswith(f"machine {path}")
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "line, text",
    [
        ("blocks = 0", "blocks = 0: must be at least 1"),
        ("heads = 3", "width = 8 does not divide into heads = 3; give head_size"),
        ("gated = 1", "gated = 1 is not true or false"),
        ("blocks = true", "blocks = True is not a whole number"),
    ],
)
def test_a_wrong_model_is_refused_with_the_key(tmp_path, line, text):
    lines = {"description": '"m"', "blocks": "2", "width": "8", "heads": "2", "vocabulary": "16"}
    lines[line.split(" = ")[0]] = line.split(" = ")[1]
    path = tmp_path / "m.toml"
    path.write_text("\n".join(f"{name} = {value}" for name, value in lines.items()))
    with pytest.raises(ConfigError, match=f"model {path}: {text}"):
        load_model(str(path))


def test_unknown_names_say_what_there_is(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no machine 'a100'; did you mean a100-80g\? There are: a100-80g, "
    ):
        load_machine("a100")
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        load_model(str(tmp_path / "absent.toml"))


def test_sizes_are_written_for_a_person():
    lines = to_toml(load_machine("rtx-4090")).splitlines()
    shown = {line.split("#")[0].strip() for line in lines}
    assert {'read = "6500MB/s"', 'capacity = "1800GB"', 'rated = "1200TB"', "flops = 1.1e+14"} <= shown
