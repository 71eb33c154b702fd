"""Real checkpoints of DeepSpeed are read as DeepSpeed itself reports them, and what is written, it loads."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import holdfast
from formats.deepspeed_files import State, write
from holdfast.formats.deepspeed.deepspeed_writer import write_deepspeed
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.load import read_flat
from holdfast.formats.torch_archive.archives import Archive
from holdfast.formats.torch_archive.pickles import PickledObject, Tensor
from holdfast.state.encoding import decode
from peers.launching import deepspeed, parameters_asked
from peers.odd_model import Model, groups_of, loss_of, tokens_of
from support.warm_python import environment_of, run_python

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

SAVED = {
    "z1": {"stage": 1},
    "z2": {"stage": 2},
    "z3": {"stage": 3, "zero": {"sub_group_size": 100}},
    "z1-bf16": {"stage": 1, "dtype": "bf16"},
    "z2-bf16": {"stage": 2, "dtype": "bf16"},
    "z3-bf16": {"stage": 3, "dtype": "bf16"},
    "z1-aligned": {"stage": 1, "zero": {"parameter_alignment": True}},
    "z2-dealt": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "z2-dealt-aligned": {"stage": 2, "zero": {"round_robin_gradients": True, "parameter_alignment": True}},
    "z1-sgd": {"stage": 1, "sgd": True},
    "z3-sgd": {"stage": 3, "sgd": True},
}
WORLDS = (2, 3, 4)
EVERY = [(name, world) for name in SAVED for world in WORLDS]
LOADED = [
    (name, world, stage)
    for name, world in [
        ("z1", 4),
        ("z2", 3),
        ("z3", 4),
        ("z1-bf16", 3),
        ("z3-bf16", 2),
        ("z1-sgd", 4),
        ("z3-sgd", 3),
    ]
    for stage in (1, 2, 3)
    if stage < 3 or "sgd" not in name  # which its ZeRO-3 does not load
]


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """By name and world: the folder of a checkpoint, and what DeepSpeed says that it is of."""
    found = {}
    asked = parameters_asked(request, "saved")
    wanted = {(each["name"], each["world"]) for each in asked if "name" in each}
    wanted |= {(name, each["world"]) for each in asked if "name" not in each for name in ("z2-dealt", "z2")}
    for world in WORLDS:
        root = tmp_path_factory.mktemp(f"saved-{world}")
        jobs = [
            {"do": "save", "name": name, "folder": str(root / name), **job}
            for name, job in SAVED.items()
            if (name, world) in wanted
        ]
        for name, told in deepspeed(root, world, jobs).items():
            found[name, world] = root / name, told
    return found


def tensors(source):
    found = {}
    for key, stored in source.atoms.items():
        kind = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}[stored.atom.dtype]
        values = read_flat(source, stored, 0, stored.atom.elements).view("u1")
        found[key] = torch.from_numpy(values).view(kind).reshape(stored.atom.shape)
    return found


def assert_same(found, told):
    for key, tensor in told.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(("name", "world"), [each for each in EVERY if each[0] != "z2-dealt"])
def test_what_is_read_is_what_deepspeed_says_that_it_has(saved, name, world):
    folder, told = saved[name, world]
    source = open_source(folder)
    found = tensors(source)
    assert_same(found, told["tensors"])
    beside = {"seen/buffer", "frozen.weight/param", "frozen.bias/param"}
    steps = set() if "sgd" in name else {key for key in found if key.endswith("/step")}
    assert set(found) == set(told["tensors"]) | beside | steps
    assert all(found[key] == 3 for key in steps) and found["seen/buffer"].tolist() == [3, 3, 3]
    assert source.progress["step"] == told["global_steps"] == 3
    assert [decode(group) for group in source.progress["groups"]] == told["groups"]
    assert source.progress["scheduler"] == told["scheduler"]
    assert source.progress["extra"]["epoch"] == 4 and source.aliases == {"head.weight": "embed.weight"}
    if told["module"]:
        assert_same(
            found, {f"frozen.{part}/param": told["module"][f"frozen.{part}"] for part in ("weight", "bias")}
        )


@pytest.mark.parametrize("world", (2, 4))
def test_parameters_that_were_dealt_in_turn_are_read_where_they_are(saved, world):
    """Of these 0.19.8 says itself what is not so: it looks for them where they would be undealt. The module tells."""
    folder, told = saved["z2-dealt", world]
    found = tensors(open_source(folder))
    keys = [key for key in told["tensors"] if key.endswith("/param")]
    assert_same(found, {key: told["module"][key.removesuffix("/param")] for key in keys})
    _, undealt = saved["z2", world]
    for key, tensor in undealt["tensors"].items():  # sums in another order
        assert torch.allclose(found[key], tensor, rtol=1e-3, atol=1e-6), key
    if world == 4:  # four parameters in a group of theirs: dealing changes nothing
        return assert_same(found, told["tensors"])
    wrong = [key for key in told["tensors"] if not torch.equal(told["tensors"][key], found[key])]
    assert wrong, "DeepSpeed is right about them by now: compare with it as with the others"


@pytest.fixture(scope="module")
def loaded(request, saved, tmp_path_factory):
    """What DeepSpeed says after it loaded what was written of its checkpoints, at another world size."""
    root = tmp_path_factory.mktemp("written")
    jobs = {2: [], 3: []}
    for each in parameters_asked(request, "loaded"):
        name, world, stage = (each[key] for key in ("name", "world", "stage"))
        folder = root / f"{name}-{world}-{stage}"
        write_deepspeed(open_source(saved[name, world][0]), folder, stage)
        kept = {key: value for key, value in SAVED[name].items() if key != "zero"}
        job = {**kept, "do": "load", "name": folder.name, "folder": str(folder), "stage": stage}
        jobs[3 if world == 2 else 2].append(job)
    return {name: told for world, each in jobs.items() for name, told in deepspeed(root, world, each).items()}


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(("name", "world", "stage"), LOADED)
def test_deepspeed_loads_what_was_written_for_any_stage_and_world(saved, loaded, name, world, stage):
    _, before = saved[name, world]
    after = loaded[f"{name}-{world}-{stage}"]
    assert_same(after["tensors"], before["tensors"])
    assert set(after["tensors"]) == set(before["tensors"])
    assert (after["global_steps"], after["skipped_steps"]) == (3, 0)
    assert after["scheduler"] == before["scheduler"]
    if stage < 3:
        assert after["groups"] == before["groups"]
    close = (
        {"rel": 1e-6} if "bf16" not in name else {"rel": 2e-3}
    )  # gradients are summed in the type of the model
    assert after["losses"] == pytest.approx(before["losses"], **close)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["z1", "z2-dealt", "z3", "z1-aligned", "z3-sgd"])
def test_training_goes_on_in_plain_torch_as_deepspeed_went_on(saved, tmp_path, name, world):
    """One process, no DeepSpeed, directly from the checkpoint of several ranks."""
    folder, told = saved[name, world]
    torch.manual_seed(99)
    model = Model()
    groups = groups_of(model)
    optimizer = torch.optim.SGD(groups, momentum=0.9) if "sgd" in name else torch.optim.AdamW(groups)
    losses = []
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        with pytest.warns(UserWarning, match="it has no random numbers"):
            start = checkpointer.resume(source=folder)
        assert start == 3 and model.head.weight is model.embed.weight
        for step, rates in enumerate(told["rates"], start):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            loss = loss_of(model, tokens_of(step))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            losses.append(loss.item())
    assert losses == pytest.approx(told["losses"], rel=1e-6)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(("name", "world"), [("z1", 3), ("z3", 2), ("z3-bf16", 3), ("z1-bf16", 4)])
def test_what_deepspeeds_own_converter_made_is_read_as_its_source(saved, tmp_path, name, world):
    folder, told = saved[name, world]
    inject = [] if name.startswith("z3") else ["--inject_missing_state"]
    options = [
        "--input_folder",
        str(folder / "global_step3"),
        "--output_folder",
        str(tmp_path / "global_step3"),
    ]
    options += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    words = ["-m", "deepspeed.checkpoint.ds_to_universal", *options, *inject]
    done = run_python(*words, env=environment_of(), modules=["peers.deepspeed_run"], timeout=300)
    assert done.returncode == 0, done.stderr
    converted, source = open_source(tmp_path), open_source(folder)
    assert converted.format == "deepspeed universal"
    found = tensors(converted)
    assert_same(found, told["tensors"])
    assert_same(found, tensors(source))
    for key in ("step", "groups", "group_parameters", "scheduler"):
        assert converted.progress[key] == source.progress[key]


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("name", "stage", "options"), [("z1", 1, {}), ("z2-bf16", 2, {}), ("z3", 3, {"sub_group": 100})]
)
def test_the_files_of_the_fast_tests_have_the_fields_of_real_ones(
    saved, tmp_path, name, world, stage, options
):
    folder, _ = saved[name, world]
    source = open_source(folder)
    params = [stored.atom for stored in source.atoms.values() if stored.atom.slot == "param"]
    shapes = {atom.name: atom.shape for atom in params}
    groups = [{n: torch.zeros(shapes[n]) for n in names} for names in source.progress["group_parameters"]]
    slots = {s: {n: torch.zeros(shapes[n]) for g in groups for n in g} for s in ("exp_avg", "exp_avg_sq")}
    frozen = {n: torch.zeros(shapes[n]) for n in ("frozen.weight", "frozen.bias")}
    beside = {"frozen": frozen, "buffers": {"seen": torch.arange(3)}, "shared": dict(source.aliases)}
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    made = write(tmp_path, State(groups, slots, step=3, dtype=dtype, **beside), stage, world, **options)
    real = {path.name: path for path in (folder / "global_step3").glob("*.pt")}
    assert {path.name for path in made.iterdir()} == set(real)
    for path in made.iterdir():
        assert form_of(Archive(path).content) == form_of(Archive(real[path.name]).content), path.name


HYPER_PARAMETERS = {
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}


def form_of(value):
    """What is alike in checkpoints of the same model: fields, classes, shapes, and the places of fragments."""
    if isinstance(value, dict):
        left_out = HYPER_PARAMETERS | {"ds_config"}
        items = [(key, form_of(item)) for key, item in value.items() if key not in left_out]
        return items if isinstance(value, OrderedDict) and "seen" not in value else dict(items)
    if isinstance(value, list | tuple):
        return [form_of(item) for item in value]
    if isinstance(value, Tensor):
        return value.shape, value.storage.dtype
    if isinstance(value, PickledObject):
        return value.name, value.fields if "fragment" in value.name else sorted(value.fields), value.args
    return type(value).__name__
