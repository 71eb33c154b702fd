"""``plan --model --machine``: what it chooses, what it says about it, and what it refuses."""

import ast
import inspect
import json
import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import holdfast as library
from holdfast.cli.plan import placing
from holdfast.profiles import load_machine, load_model, to_toml
from holdfast.schedule.planner.plan_search import Case, best_at, search
from holdfast.schedule.planner.training_setting import Method
from support.tiny_keys import words

GPT = ["--model", "gpt-65b", "--machine", "a100-80g"]


@pytest.fixture(scope="module", autouse=True)
def cached_simulations():
    """Keep each simulation for the commands that follow, such as a plan's text after its document."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fit", "play"):
            patch.setattr(placing, name, cache(getattr(placing, name)))
        yield


@pytest.fixture(scope="module")
def planned():
    return {}


@pytest.fixture
def plan(holdfast, planned):
    """The JSON document of ``plan`` with the options given, of which each is made once."""

    def call(*options):
        if options not in planned:
            result = holdfast("plan", *options, "--json")
            assert (result.code, result.err) == (0, "")
            planned[options] = result.out
        return json.loads(planned[options])

    return call


@pytest.mark.slow
def test_the_document_is_the_plan(plan):
    found = plan(*GPT, "--micro-batches", "3")
    case = Case(
        machine=load_machine("a100-80g"),
        model=load_model("gpt-65b"),
        method=Method(clipping="speculate", is_split=True),
    )
    best = search(case, 3).best
    chosen = found["chosen"]
    assert chosen["tokens_per_second"] == pytest.approx(best.tokens_per_second)
    assert chosen["step_seconds"] == pytest.approx(best.step_seconds)
    assert chosen["on_host"]["params"] == pytest.approx(best.fractions["params"])
    assert chosen["busiest_lane"] == best.busiest
    assert found["parameters"] == case.model.parameters
    assert found["ssd_life"]["steps"] == pytest.approx(
        found["ssd_life"]["rated_bytes"] / chosen["written_bytes_per_step"]
    )
    engine = found["in_whole_blocks"]
    assert engine["delayed_fraction"] * case.model.blocks % 1 == 0
    assert engine["tokens_per_second"] <= chosen["tokens_per_second"] * 1.001
    assert {change["change"] for change in found["what_if"]} == {
        "64 GiB more host memory",
        "one more SSD",
        "clipping: none",
        "clipping: defer",
    }


@pytest.mark.slow
def test_every_option_counts(plan):
    base = ("--model", "llama-7b", "--machine", "rtx-4090", "--micro-batches", "2", "--clipping", "none")
    usual = plan(*base)["chosen"]
    assert plan(*base, "--host", "40GB")["chosen"]["tokens_per_second"] < usual["tokens_per_second"]
    assert plan(*base, "--ssds", "3")["chosen"]["tokens_per_second"] > usual["tokens_per_second"]
    assert plan(*base, "--delayed", "0.05")["chosen"]["delayed_fraction"] == 0.05
    assert plan(*base[:-1], "defer")["chosen"]["delayed_fraction"] == 1
    assert (
        plan(*base, "--commit-every", "9")["chosen"]["written_bytes_per_step"]
        < usual["written_bytes_per_step"]
    )
    short = plan(*base, "--sequence", "512", "--micro-batch-size", "1")["chosen"]
    assert (short["micro_batch_size"], short["sequence"]) == (1, 512)
    assert plan(*base, "--retain", "3")["chosen"]["ssd_bytes"] > usual["ssd_bytes"]
    many = (
        *base[:4],
        "--micro-batches",
        "8",
        "--micro-batch-size",
        "8",
        *base[6:],
    )  # too much to stay on the device
    plain, snake = (plan(*many, "--order", order)["chosen"]["busy_seconds"] for order in ("plain", "snake"))
    assert snake["copies"] < plain["copies"]
    lasting = plan(*base, "--commit-every", "20", "--ssd-steps", "20000")
    assert lasting["ssd_life"]["steps"] >= 20000 * 0.999


@pytest.mark.slow
def test_files_are_taken_for_names(plan, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(load_machine("a100-80g")))
    model = tmp_path / "model.toml"
    model.write_text(
        'description = "mine"\nblocks = 80\nwidth = 8192\nheads = 64\nvocabulary = 50257\nmicro_batch = 4\n'
    )
    mine = plan("--model", model, "--machine", path, "--micro-batches", "3")["chosen"]
    assert mine == plan(*GPT, "--micro-batches", "3")["chosen"]


@pytest.mark.slow
def test_a_person_reads_the_choice_what_binds_what_helps_and_what_the_engine_runs(holdfast, plan):
    found = plan(*GPT, "--micro-batches", "3")
    result = holdfast("plan", *GPT, "--micro-batches", "3")
    assert (result.code, result.err) == (0, "")
    lines, text = result.out.splitlines(), " ".join(result.out.split())
    chosen = found["chosen"]
    assert lines[0].startswith("GPT of 65 billion parameters, 80 blocks, on one NVIDIA A100 80 GB")
    assert (
        f"3 micro-batches of 4 x 2,048 tokens, {chosen['delayed_fraction']:.0%} of each update delayed"
        in text
    )
    assert (
        f"{chosen['tokens_per_second']:,.0f} tokens/s. The busiest lane is {chosen['busiest_lane']}" in text
    )
    shares = {
        line.split()[0]: line.split()[-1]
        for line in lines
        if line.startswith(("parameters", "optimizer state"))
    }
    assert shares["parameters"] == f"{chosen['on_host']['params']:.0%}"
    assert f"one more SSD: {round(found['what_if'][1]['gain'], 3) + 0.0:+.1%}" in text
    assert f"they last {found['ssd_life']['steps']:,.0f} steps" in text
    assert "In whole blocks, as the engine places and delays them, the simulator has" in text


def test_plan_prints_the_speed_of_light(holdfast, plan):
    options = ["--model", "gpt-319m", "--machine", "cpu-2-core", "--micro-batches", "4", "--delayed", "0"]
    found = plan(*options)
    chosen, simulated = found["chosen"], found["in_whole_blocks"]["simulated"]
    assert chosen["speed_of_light"] == max(chosen["busy_seconds"].values()) / chosen["step_seconds"]
    assert 0 < simulated["speed_of_light"] <= 1
    said = f"speed of light    {simulated['speed_of_light']:.0%}, simulated: "
    assert said in holdfast("plan", *options).out


@pytest.mark.parametrize(
    "clipping, every, more",
    [
        ("none", 3, {"train.clip_norm": 0}),
        ("defer", 1, {"train.clip_norm": 1.0, "train.clipping": "defer"}),
        ("auto", 1, {"train.clip_norm": 1.0, "offload.order": "snake"}),
        (
            "per_block",
            3,
            {"train.clip_norm": 1.0, "train.clipping": "per_block", "offload.delayed_fraction": 0.5},
        ),
    ],
)
def test_the_settings_for_the_engine_are_toml_that_a_run_takes(holdfast, clipping, every, more):
    options = ["--micro-batches", "4", "--commit-every", str(every), "--clipping", clipping]
    options += ["--order", more.get("offload.order", "plain")]
    if clipping != "defer":
        options += ["--delayed", str(more.get("offload.delayed_fraction", 0))]
    more = more | ({"durability.every": every} if every != 1 else {})
    result = holdfast("plan", "--model", "gpt-319m", "--machine", "cpu-2-core", *options)
    settings = tomllib.loads(result.out[result.out.index("  [train]") :])
    keys_of = {f"{s}.{k}": v for s, keys in settings.items() for k, v in keys.items()}
    assert set(keys_of) == {
        *more,
        "train.micro_batches",
        "offload.params_on_host",
        "offload.optimizer_on_host",
        "offload.activations_on_host",
    }
    assert {key: keys_of[key] for key in more} == more
    assert holdfast("train", *words(keys_of), "--print-config").code == 0


def test_the_settings_for_fp32_copies_name_the_dtype(holdfast, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(replace(load_machine("cpu-2-core"), precision="fp32")))
    result = holdfast("plan", "--model", "gpt-46m", "--machine", path, "--micro-batches", "1")
    settings = tomllib.loads(result.out[result.out.index("  [train]") :])
    assert settings["train"]["dtype"] == "fp32"


ADAPTERS = ["--model", "gpt-319m", "--machine", "cpu-2-core", "--micro-batches", "4", "--lora", "8"]


def test_all_parameters_are_trained_without_lora(plan):
    found = plan("--model", "gpt-319m", "--machine", "cpu-2-core", "--micro-batches", "4", "--delayed", "0")
    assert found["adapters"] is None
    assert not any(name.startswith("base_") for name in found["chosen"])


def test_the_document_has_adapters_and_base(plan):
    options = ["--model", "llama-3-8b", "--machine", "rtx-4090", "--sequence", "2048", "--micro-batches", "2"]
    found = plan(*options, "--delayed", "0", "--lora", "8", "--base", "nf4", "--host", "6GB")
    profile, adapters, chosen = load_model("llama-3-8b"), found["adapters"], found["chosen"]
    width, keys, hidden = 4096, 1024, 14336
    weights = 2 * width**2 + 2 * width * keys + 3 * width * hidden
    scales = weights // 64
    base = 32 * (weights // 2 + scales + 4 * scales // 256 + 2 * 2 * width)
    assert adapters == {
        "rank": 8,
        "linear_layers_per_block": 7,
        "parameters": 32 * 8 * (2 * (width + width) + 2 * (width + keys) + 3 * (width + hidden)),
        "base": "nf4",
        "base_bits_per_weight": pytest.approx(4.127, abs=1e-3),
        "base_bytes": base,
    }
    moved = base * (31 + 32) / 32
    assert chosen["base_moved_bytes_per_step"] == pytest.approx(moved)
    assert chosen["base_read_bytes_per_step"] == pytest.approx(moved * (1 - chosen["on_host"]["params"]))
    assert 0 < chosen["on_host"]["params"] < 1
    for kind in ("moved", "read"):
        each = chosen[f"base_{kind}_bytes_per_step"] / (32 * profile.block_parameters)
        assert chosen[f"base_{kind}_bytes_per_parameter"] == pytest.approx(each)
    assert found["parameters"] == profile.parameters
    assert found["model"] == f"{profile.description}, with adapters of rank 8 on a base in nf4"


def test_a_base_is_in_bf16_unless_it_is_said(plan):
    found = plan(*ADAPTERS, "--delayed", "0")
    assert (found["adapters"]["base"], found["adapters"]["base_bits_per_weight"]) == ("bf16", 16)


def test_a_person_reads_what_is_trained_on_which_base(holdfast, plan):
    options = [*ADAPTERS, "--base", "int8", "--delayed", "0"]
    found, text = plan(*options), " ".join(holdfast("plan", *options).out.split())
    adapters, chosen = found["adapters"], found["chosen"]
    assert (
        f"adapters of rank 8 on all 4 linear layers of each block: {adapters['parameters']:,} parameters;"
        in text
    )
    assert f"base these layers in int8, {adapters['base_bits_per_weight']:.4g} bits a weight;" in text
    moved, read = (chosen[f"base_{kind}_bytes_per_parameter"] for kind in ("moved", "read"))
    assert f"brings {moved:.2f} bytes a parameter of them to the device, {read:.2f} from the SSDs" in text


@pytest.mark.parametrize(
    "machine, options, expected",
    [
        (
            "cpu-2-core",
            ["--clipping", "none", "--commit-every", "3"],
            {"precision": "bf16", "durability": library.Durability(commit_every=3)},
        ),
        (
            "cpu-2-core",
            ["--order", "snake"],
            {"precision": "bf16", "order": "snake", "clipping": 1.0},
        ),
        (
            "rtx-4090",
            ["--clipping", "per_block", "--delayed", "0.5"],
            {"device": "cuda", "clipping": library.Clipping(1.0, "per_block")},
        ),
    ],
)
def test_the_settings_for_adapters_are_a_call_that_offload_takes(holdfast, machine, options, expected):
    """``holdfast train`` makes no adapters, so there are no keys of it."""
    delayed = [] if "--delayed" in options else ["--delayed", "0"]
    result = holdfast("plan", *ADAPTERS[:3], machine, *ADAPTERS[4:], *options, *delayed)
    assert "[train]" not in result.out
    taken: dict = {}
    scope = SimpleNamespace(
        offload=lambda *args, **kwargs: taken.update(
            inspect.signature(library.offload).bind(*args, **kwargs).arguments
        ),
        Placement=library.Placement,
        Clipping=library.Clipping,
        Durability=library.Durability,
    )
    call = ast.parse(inspect.cleandoc(result.out[result.out.index("holdfast.offload(") :]))
    exec(compile(call, "call", "exec"), {"holdfast": scope, "model": 0, "optimizer": 0, "run": ""})
    placement = taken.pop("placement")
    assert all(
        0 <= getattr(placement, f"{kind}_on_host") <= 1 for kind in ("params", "optimizer", "activations")
    )
    assert placement.delayed_fraction == (0.5 if "0.5" in options else None)
    assert {k: v for k, v in taken.items() if k not in ("model", "optimizer", "run")} == {
        "micro_batches": 4
    } | expected


@pytest.mark.parametrize("base", ["fp8", "int8"])
def test_other_bases_are_planned_with_settings(holdfast, base):
    result = holdfast("plan", *ADAPTERS, "--base", base, "--delayed", "0")
    assert f"these layers in {base}, 8" in result.out and "holdfast.offload(" in result.out


@pytest.mark.slow
def test_micro_batches_are_tried_until_they_bring_nothing(holdfast, plan):
    found = plan("--model", "llama-7b", "--machine", "a100-80g")
    counts = [tried["micro_batches"] for tried in found["tried"]]
    assert counts == list(range(1, len(counts) + 1))
    assert "is the least within 1 % of the best" in " ".join(
        holdfast("plan", "--model", "llama-7b", "--machine", "a100-80g").out.split()
    )


@pytest.mark.slow
def test_where_the_engine_needs_more_than_there_is_it_says_so(plan, holdfast):
    """An evaluation takes eight micro-batches together."""
    tight = ("--model", "gpt-319m", "--machine", "cpu-2-core", "--micro-batches", "1", "--host", "0.98GB")
    tight += ("--clipping", "none")
    found = plan(*tight)
    assert "of host memory with everything on the SSD" in found["in_whole_blocks"]["error"]
    said = " ".join(holdfast("plan", *tight).out.split())
    assert "it does not fit: the engine's buffers" in said
    assert f"speed of light {found['chosen']['speed_of_light']:.0%}, by the formulas: " in said


@pytest.mark.parametrize(
    "options, text",
    [
        (["--model", "gpt-65b"], "--machine is missing: a plan needs --model and --machine"),
        (["--machine", "a100-80g"], "--model is missing"),
        (
            ["--model", "gpt-66b", "--machine", "a100-80g"],
            "there is no model 'gpt-66b'; did you mean gpt-65b?",
        ),
        ([*GPT, "--host", "much"], "--host: 'much' is not a number of bytes"),
        ([*GPT, "--host", "256"], "--host 256 is 256 bytes; write 256GB if that is meant"),
        ([*GPT, "--host", "10GB"], "of host memory are needed, and there are 9.3 GiB"),
        ([*GPT, "--clipping", "some"], "clipping is none or defer or speculate or per_block, not 'some'"),
        (
            [*GPT, "--clipping", "speculate", "--commit-every", "2"],
            "--commit-every 2 with --clipping speculate: a wrong guess is undone from the commit",
        ),
        (
            [*GPT, "--base", "nf4"],
            "--base nf4 is the format of frozen layers, and without --lora all layers are trained",
        ),
        ([*GPT, "--lora", "8", "--base", "nf5"], "--base is bf16 or fp8 or int8 or nf4, not 'nf5'"),
        ([*GPT, "--lora", "0"], "--lora"),
        ([*GPT, "--order", "zigzag"], "order is plain or snake, not 'zigzag'"),
        ([*GPT, "--clipping", "defer", "--delayed", "0.5"], "--delayed says what --clipping defer decides"),
        ([*GPT, "--cadence"], "--cadence is not for a plan of a --model"),
        ([*GPT, "--step", "1s"], "--step is not for a plan of a --model"),
        ([*GPT, "--ssd-steps", "1000000"], "written per step are needed"),
        (
            ["--model", "gpt-175b", "--machine", "rtx-4090", "--host", "200GB", "--sequence", "8192"],
            "of the device's memory, and it has 20.5 GiB",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_2(holdfast, options, text):
    result = holdfast("plan", *options)
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert text in result.err


def test_best_at_is_what_the_golden_machine_gives_without_options(plan):
    """Durable at every step, which costs a little of the golden 334 tokens/s."""
    case = Case(
        machine=load_machine("a100-80g"),
        model=load_model("gpt-65b"),
        method=Method(clipping="speculate", is_split=True),
    )
    rate = best_at(case, 8).tokens_per_second
    assert 250 < rate < 334


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-65b", "adapters", "docs/plan.md"])
def test_plans_are_printed_as_samples_show(name, holdfast):
    """The first line of a sample is its options. "..." stands for lines that a sample leaves out."""
    if name == "docs/plan.md":
        text = (Path(__file__).parents[2] / name).read_text()
        [sample] = re.findall(r"```\n\$ holdfast plan (.*?)```", text, re.DOTALL)
    else:
        sample = (Path(__file__).parent / "planned" / f"{name}.txt").read_text()
    command, _, shown = sample.partition("\n")
    said = holdfast("plan", *command.split()).out.rstrip() + "\n"
    if name == "gpt-65b":
        assert said == shown
    for part in shown.split("...\n"):
        _, found, said = said.partition(part)
        assert found, part


@pytest.mark.slow
def test_what_fits_with_everything_on_the_ssd_is_not_said_not_to(holdfast):
    result = holdfast(
        "plan", "--model", "llama-3-8b", "--machine", "rtx-4090", "--micro-batch-size", 1, "--sequence", 2048
    )
    assert result.code == 0, result.err
    assert "does not fit" not in result.out and "micro_batches = 64" in result.out
