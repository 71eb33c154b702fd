"""Live engines of the real DeepSpeed begin from what other stages, worlds and libraries wrote."""

from __future__ import annotations

import json
import shutil
import zipfile

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from combined import CAMPAIGN
from dist.awkward import out_of_core
from dist.awkward_decoder import Form
from holdfast.cli.main import app
from holdfast.formats.foreign_formats import open_source
from holdfast.state.encoding import decode
from peers.launching import deepspeed
from peers.odd_model import Model, groups_of
from peers.test_deepspeed import tensors
from survive_run import digest

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

LIVE = "peers.live_run"

SAVED = {
    "z1-2": (2, {"stage": 1}),
    "z3-3": (3, {"stage": 3, "zero": {"sub_group_size": 100}}),
    "z2-4": (4, {"stage": 2}),
    "z1-2-bf16": (2, {"stage": 1, "dtype": "bf16"}),
    "z1-2-sgd": (2, {"stage": 1, "sgd": True}),
    "z2-2-dealt": (2, {"stage": 2, "zero": {"round_robin_gradients": True}}),
}
"""By name the ranks and the job of a checkpoint."""

BEGUN = [
    ("z1-2", 2, {"stage": 1}),
    ("z1-2", 3, {"stage": 3}),
    ("z1-2", 3, {"stage": 3, "zero": {"sub_group_size": 100, "stage3_param_persistence_threshold": 10**6}}),
    ("z3-3", 2, {"stage": 1}),
    ("z2-4", 1, {"stage": 2}),
    ("z2-4", 3, {"stage": 1, "zero": {"round_robin_gradients": True, "parameter_alignment": True}}),
    ("z2-2-dealt", 2, {"stage": 2, "zero": {"round_robin_gradients": True}}),
    ("z1-2-sgd", 3, {"stage": 3, "sgd": True}),
    ("z1-2-bf16", 3, {"stage": 1, "dtype": "bf16", "accumulate": "fp32"}),
]
AGAIN = [
    ("z1-2-3-3-", 2, {"stage": 2}),
    ("z3-3-2-1-", 3, {"stage": 3, "zero": {"sub_group_size": 100}}),
    ("z2-4-1-2-", 3, {"stage": 1}),
    ("z1-2-sgd-3-3-", 2, {"stage": 1, "sgd": True}),
    ("z2-2-dealt-2-2-round_robin_gradients-", 3, {"stage": 1}),
    ("z1-2-bf16-3-1-fp32", 2, {"stage": 3, "dtype": "bf16"}),
]
if CAMPAIGN:
    BEGUN += [
        ("z1-2", 3, {"stage": 1}),
        ("z1-2", 2, {"stage": 3}),
        ("z3-3", 3, {"stage": 3, "zero": {"sub_group_size": 60}}),
        ("z2-4", 2, {"stage": 3}),
        ("z2-4", 3, {"stage": 2, "zero": {"parameter_alignment": True}}),
        ("z2-2-dealt", 3, {"stage": 3}),
        ("z1-2-bf16", 3, {"stage": 3, "dtype": "bf16"}),
        ("z1-2-bf16", 2, {"stage": 2, "dtype": "bf16"}),
    ]
    AGAIN += [("z2-4-2-3-", 2, {"stage": 3}), ("z1-2-bf16-3-3-", 2, {"stage": 1, "dtype": "bf16"})]
"""From the runs that these live engines saved."""


def name_of(source, world, job):
    return "-".join([source, str(world), str(job["stage"]), *job.get("zero", {}), job.get("accumulate", "")])


NAMES = [name_of(*each) for each in BEGUN]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By name: the folder of a checkpoint, and what DeepSpeed says that it is of."""
    found = {}
    for world in sorted({ranks for ranks, _ in SAVED.values()}):
        root = tmp_path_factory.mktemp(f"saved-{world}")
        jobs = [
            {"do": "save", "name": name, "folder": str(root / name), **job}
            for name, (ranks, job) in SAVED.items()
            if ranks == world
        ]
        for name, told in deepspeed(root, world, jobs).items():
            found[name] = root / name, told
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def begun(saved, runs, tmp_path_factory):
    """What each live engine told, by name."""
    found = {}
    for world in (1, 2, 3):
        jobs = [
            {**job, "name": name, "source": str(saved[source][0]), "run": str(runs / name)}
            for name, (source, ranks, job) in zip(NAMES, BEGUN, strict=True)
            if ranks == world
        ]
        found |= deepspeed(tmp_path_factory.mktemp(f"begun-{world}"), world, jobs, LIVE)
    return found


@pytest.fixture(scope="module")
def again(begun, runs, tmp_path_factory):
    """What the live engines told that began from what live engines saved, and saved to the same run two steps later."""
    found = {}
    for world in (2, 3):
        jobs = [
            {**job, "name": name, "source": str(runs / name), "later": str(runs / name)}
            for name, ranks, job in AGAIN
            if ranks == world
        ]
        found |= deepspeed(tmp_path_factory.mktemp(f"again-{world}"), world, jobs, LIVE)
    return found


def assert_same(found, told):
    assert found.keys() == told.keys()
    for key, tensor in told.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.parametrize(("name", "begin"), list(zip(NAMES, BEGUN, strict=True)), ids=NAMES)
def test_a_live_engine_has_what_another_stage_and_world_wrote(saved, begun, name, begin):
    source, world, job = begin
    _, before = saved[source]
    after = begun[name]
    assert (after["refused"], after["start"]) == (None, 3)
    if "dealt" not in source and "round_robin_gradients" not in job.get("zero", {}):
        assert_same(after["tensors"], before["tensors"])  # as DeepSpeed says: of dealt ones that is not so
    assert after["working_alike"]
    assert set(after["persistent"]) == ({"AVAILABLE"} if "persistence" in name else set())
    assert (after["global_steps"], after["counters"]) == (3, (3, 36, 0, 3))
    assert after["groups"] == before["groups"] and after["scheduler"] == before["scheduler"]
    assert set(after["steps"]) == ({3.0} if "sgd" not in source else set())
    for key, tensor in before["module"].items():
        assert torch.equal(after["working"][key], tensor), key
    exact = world == SAVED[source][0] and job["stage"] == SAVED[source][1]["stage"]
    close = {"rel": 2e-3} if "bf16" in source else {"rel": 1e-6}
    assert after["losses"] == (before["losses"] if exact else pytest.approx(before["losses"], **close))
    assert after["rates"] == before["rates"]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_live_engine_saved_is_a_run(saved, begun, runs, name):
    source = next(source for each, (source, _, _) in zip(NAMES, BEGUN, strict=True) if each == name)
    _, before = saved[source]
    assert begun[name]["saved"] == 3
    done = CliRunner().invoke(app, ["verify", f"{runs / name}@3"])
    assert done.exit_code == 0, done.output
    read = open_run(runs / name)
    found = tensors(read)
    told = begun[name]["tensors"] if "dealt" not in source else {}
    told = told if "round_robin_gradients" not in name else {}
    for key, tensor in told.items():
        assert torch.equal(found[key], tensor), key
    for key, tensor in begun[name]["working"].items():
        if key.startswith(("frozen", "seen")):
            assert torch.equal(found[f"{key}/{'buffer' if key == 'seen' else 'param'}"], tensor), key
    steps = {key for key in found if key.endswith("/step")}
    expected = set(before["tensors"]) | {"seen/buffer", "frozen.weight/param", "frozen.bias/param"} | steps
    assert set(found) == expected and all(found[key] == 3 for key in steps)
    assert bool(steps) == ("sgd" not in name)
    assert [decode(group) for group in read.progress["groups"]] == before["groups"]
    members = open_source(saved[source][0]).progress["group_parameters"]
    assert [set(names) for names in read.progress["group_parameters"]] == [set(names) for names in members]
    assert decode(read.progress["scheduler"]) == before["scheduler"]
    assert read.progress["extra"]["global_samples"] == 36 and read.aliases == {"head.weight": "embed.weight"}


def open_run(path):
    return holdfast.From(f"{path}@3").source()


@pytest.mark.parametrize(("name", "world", "job"), AGAIN, ids=[each[0] for each in AGAIN])
def test_a_live_engine_begins_from_what_another_saved(saved, begun, again, runs, name, world, job):
    first, after = begun[name], again[name]
    assert (after["refused"], after["start"], after["counters"]) == (None, 3, (3, 36, 0, 3))
    if "dealt" not in name:
        assert_same(after["tensors"], first["tensors"])
    assert_same(after["working"], {**first["working"]})
    assert after["working_alike"] and after["groups"] == first["groups"]
    assert after["scheduler"] == first["scheduler"] and after["rates"] == first["rates"]
    assert set(after["steps"]) == ({3.0} if "sgd" not in name else set())
    close = {"rel": 2e-3} if "bf16" in name else {"rel": 1e-6}
    assert after["losses"] == pytest.approx(first["losses"], **close)
    assert after["saved_later"] == 6
    told = CliRunner().invoke(app, ["ls", str(runs / name), "--json"])
    assert told.exit_code == 0 and '"step": 6' in told.output and '"step": 3' in told.output, told.output
    done = CliRunner().invoke(app, ["verify", str(runs / name)])
    assert done.exit_code == 0, done.output


def test_one_process_goes_on_from_what_a_live_engine_saved(begun, runs, tmp_path):
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model))
    name = "z3-3-2-1-"
    with holdfast.Checkpointer(tmp_path / "next", model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.resume(source=f"{runs / name}@3") == 3
        told = begun[name]["tensors"]
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter, told[f"{key}/param"]), key
                assert torch.equal(optimizer.state[parameter]["exp_avg"], told[f"{key}/exp_avg"]), key
        assert model.seen.tolist() == [3, 3, 3]
    with (
        pytest.raises(holdfast.errors.RunMismatch),
        holdfast.Checkpointer(runs / name, model=model, optimizer=optimizer) as checkpointer,
    ):
        checkpointer.resume()


def test_the_engine_out_of_core_goes_on_from_what_a_live_engine_saved(tmp_path):
    form, root = Form(), tmp_path / "run"
    [told] = deepspeed(
        tmp_path, 2, [{"name": "deep", "form": list(form), "stage": 3, "trained": 3, "run": str(root)}], LIVE
    ).values()
    said = {}
    out_of_core(said.update, steps=6, form=form, root=str(tmp_path / "engine"), source=str(root))
    assert (told["saved"], said["resumed"]) == (3, 3)
    for key, tensor in told["tensors"].items():
        assert said["digests"][3][key] == digest({key: tensor}), key
    assert said["losses"] == pytest.approx(told["losses"], rel=1e-6)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def within_tensor(path):
    """Somewhere in the largest tensor of a file of torch, or of safetensors."""
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            tensors = [each for each in archive.infolist() if "/data/" in each.filename]
            stored = archive.read(largest := max(tensors, key=lambda each: each.file_size))
        return content.index(stored, largest.header_offset) + len(stored) // 2
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    offsets = [e["data_offsets"] for key, e in header.items() if not key.startswith("__")]
    start, end = max(offsets, key=lambda each: each[1] - each[0])
    return 8 + size + (start + end) // 2


@pytest.fixture(scope="module")
def damaged(saved, begun, runs, tmp_path_factory):
    """What was told of damaged sources, by name."""
    root = tmp_path_factory.mktemp("damaged")
    shutil.copytree(saved["z3-3"][0], root / "zero")
    file = root / "zero" / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    flip(file, within_tensor(file))
    shutil.copytree(runs / "z1-2-3-3-", root / "run")
    file = next((root / "run" / "data").glob("save-000000000003*rank-00002*"))
    flip(file, within_tensor(file))
    shutil.copytree(saved["z2-4"][0], root / "missing")
    next((root / "missing").rglob("zero_pp_rank_3_*")).unlink()
    jobs = [
        {"name": f"{kind}-{stage}", "source": str(root / kind) + at, "stage": stage, "trained": 1}
        for kind, at in (("zero", ""), ("run", "@3"), ("missing", ""))
        for stage in (1, 3)
    ]
    return deepspeed(root, 2, jobs, LIVE)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("kind", "text"), [("zero", "CRC-32"), ("run", "checksum"), ("missing", "rank")])
def test_damage_is_refused_on_all_ranks_with_no_engine_changed(damaged, kind, text, stage):
    told = damaged[f"{kind}-{stage}"]["refused"]
    assert len(told) == 2 and damaged[f"{kind}-{stage}"]["start"] is None
    for failed, unchanged in told:
        assert unchanged and text in failed, failed
