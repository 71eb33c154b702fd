"""Real checkpoints of Megatron's core, stepped and saved on gloo without a GPU, are read as its ranks report them.

They step with made up gradients, as the forward needs a GPU; models, optimizers and the saving are Megatron's own.
Which forms its distributed optimizer has depends on its version.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from dist.world import World
from holdfast.errors import Damaged
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.load import read_flat
from holdfast.sources import From
from holdfast.state.encoding import decode
from peers.launching import parameters_asked

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


def older_than(*release):
    """Whether Megatron's core is; where there is none, nothing here is run."""
    try:
        return tuple(map(int, version("megatron-core").split(".")[:2])) < release
    except PackageNotFoundError:
        return False


OLD = older_than(0, 14)
GATHERED = "dp_zero_gather_scatter"
BUCKETS, WHOLE = (GATHERED, "fully_sharded_model_space") if OLD else ("dp_reshardable", "fully_reshardable")
FORMS = dict.fromkeys(
    ["plain", GATHERED, BUCKETS, WHOLE]
)  # buckets are not saved before 0.14: an assertion fails
WORLDS = {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 4: [(2, 2), (2, 1)]}
EVERY = {
    f"{form}, {world} ranks, TP {tp}, PP {pp}": (world, {"optimizer": form, "tp": tp, "pp": pp})
    for world, meshes in WORLDS.items()
    for tp, pp in meshes
    for form in FORMS
}
EVERY |= {
    "fp32": (1, {"optimizer": "fp32", "tp": 1, "pp": 1}),
    "stacked": (4, {"optimizer": "plain", "tp": 2, "pp": 2, "stacked": True}),
    "stacked, distributed": (4, {"optimizer": WHOLE, "tp": 2, "pp": 1, "stacked": True}),
    "halves": (4, {"optimizer": WHOLE, "tp": 2, "pp": 2, "singleton": True}),
    "biases": (2, {"optimizer": BUCKETS, "tp": 2, "pp": 1, "biases": True}),
    "tied": (4, {"optimizer": BUCKETS, "tp": 2, "pp": 2, "tied": True}),
    "tied, gathered": (2, {"optimizer": GATHERED, "tp": 1, "pp": 2, "tied": True}),
    "experts": (2, {"optimizer": "plain", "tp": 1, "pp": 1, "experts": 4, "ep": 2}),
    "experts, distributed": (4, {"optimizer": WHOLE, "tp": 1, "pp": 1, "experts": 4, "ep": 2, "stacked": True}),
}  # fmt: skip
if not OLD:
    EVERY["several buckets"] = (2, {"optimizer": BUCKETS, "tp": 1, "pp": 1, "bucket": 1000})


FLIPPED = f"{WHOLE}, 1 ranks, TP 1, PP 1"


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """By name: the folder of a checkpoint, and what each rank said that it holds."""
    found = {}
    wanted = {each.get("name", FLIPPED) for each in parameters_asked(request, "saved")}
    for world in WORLDS:
        root = tmp_path_factory.mktemp(f"megatron-{world}")
        jobs = [
            {"name": name, "folder": str(root / str(n)), "report": str(root / f"{n}.report"), **job}
            for n, (name, (ranks, job)) in enumerate(EVERY.items())
            if ranks == world and name in wanted
        ]
        said = World("peers.megatron_run", patience_seconds=500).run(world, jobs=jobs)
        missing = [job["name"] for job in jobs if not Path(f"{job['report']}.{world - 1}").exists()]
        assert not missing, f"{missing} were not done: {said}"[-4000:]
        for job in jobs:
            reports = [torch.load(f"{job['report']}.{rank}", weights_only=False) for rank in range(world)]
            found[job["name"]] = Path(job["folder"]), reports
    return found


def whole(reports):
    """Every tensor by key, put together of the stretches that the ranks hold: the oracle."""
    parts = {}
    for row in (row for report in reports for row in report["held"]):
        for slot, stretch in row["slots"].items():
            local = parts.setdefault((row["name"], slot, row["dim"]), {}).setdefault(
                row["tp"], torch.full(row["shape"], float("nan"), dtype=stretch.dtype)
            )
            local.view(-1)[row["start"] : row["start"] + len(stretch)] = stretch
    found = {}
    for (name, slot, dim), by_rank in parts.items():
        tensors = [by_rank[rank] for rank in sorted(by_rank)]
        if dim is None:
            assert all(map(tensors[0].equal, tensors))
            tensor = tensors[0]
        elif "linear_fc1" in name and not any("bias" in row["name"] for row in reports[0]["held"]):
            tensor = torch.cat([half for side in zip(*(t.chunk(2) for t in tensors)) for half in side])
        else:
            tensor = torch.cat(tensors, dim)
        assert not tensor.isnan().any(), name
        found[f"{name}/{slot}"] = tensor
    return found


def tensors(source):
    found = {}
    for key, stored in source.atoms.items():
        kind = {"F32": torch.float32, "BF16": torch.bfloat16}[stored.atom.dtype]
        values = read_flat(source, stored, 0, stored.atom.elements).view("u1")
        found[key] = torch.from_numpy(values).view(kind).reshape(stored.atom.shape)
    return found


@pytest.mark.campaign(keep=14)
@pytest.mark.parametrize("name", EVERY)
def test_what_is_read_is_what_the_ranks_hold(saved, name):
    folder, reports = saved[name]
    source, expected = open_source(folder), whole(reports)
    if EVERY[name][1].get("tied"):
        expected = {key: tensor for key, tensor in expected.items() if not key.startswith("output_layer")}
    found = tensors(source)
    names = {key.rpartition("/")[0] for key in expected}
    assert "optimizer_is_not_known" not in source.progress["extra"]
    assert set(found) == set(expected) | {f"{each}/step" for each in names}
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    assert all(found[f"{each}/step"] == 3 for each in names)
    for part in range(len(source.parts)):
        source.check(part)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", [n for n in EVERY if "1 ranks" in n])
def test_what_else_is_there_is_what_the_ranks_said(saved, name):
    folder, reports = saved[name]
    progress = open_source(folder).progress
    assert progress["step"] == 3 and decode(progress["scheduler"]) == reports[0]["schedule"]
    [taken], groups = decode(progress["groups"]), reports[0]["groups"]
    assert {"lr", "betas", "eps"} <= set(taken)
    assert all(group[key] == value for group in groups for key, value in taken.items())
    assert set(progress["group_parameters"][0]) == {row["name"] for row in reports[0]["held"]}
    assert "torch_rng_state" in decode(progress["extra"]["rng_state/shard_0.0_1.1"])[0]
    assert progress["extra"]["args"]["num_layers"] == 4


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", [f"{form}, 2 ranks, TP 2, PP 1" for form in FORMS])
def test_a_pack_gives_the_names_of_hugging_face(saved, name):
    folder, reports = saved[name]
    source, expected = From(folder, rules="megatron-to-llama").source(), whole(reports)
    found = tensors(source)
    for slot in ("param", "exp_avg", "exp_avg_sq"):
        qkv = expected[f"decoder.layers.2.self_attention.linear_qkv.weight/{slot}"].view(2, 4, 4, 16)
        for head, part in (("q", qkv[:, :2]), ("k", qkv[:, 2]), ("v", qkv[:, 3])):
            assert torch.equal(
                found[f"model.layers.2.self_attn.{head}_proj.weight/{slot}"], part.reshape(-1, 16)
            )
        gate, up = expected[f"decoder.layers.1.mlp.linear_fc1.weight/{slot}"].chunk(2)
        assert torch.equal(found[f"model.layers.1.mlp.gate_proj.weight/{slot}"], gate)
        assert torch.equal(found[f"model.layers.1.mlp.up_proj.weight/{slot}"], up)
    assert found["model.layers.2.self_attn.q_proj.weight/step"] == 3
    assert len(found) == 4 * (4 * 9 + 3)


def test_a_flipped_bit_of_a_real_one_is_found(saved, tmp_path):
    folder, reports = saved[FLIPPED]
    stretch = reports[0]["held"][3]["slots"]["exp_avg"][:8].numpy().tobytes()
    paths = [path for path in folder.glob("*.distcp") if stretch in path.read_bytes()]
    assert paths
    copy = tmp_path / "x"
    copy.mkdir()
    for each in folder.iterdir():
        data = bytearray(each.read_bytes())
        if each in paths:
            data[data.index(stretch)] ^= 1
        (copy / each.name).write_bytes(data)
    source = open_source(copy)
    with pytest.raises(Damaged, match="exp_avg"):
        for part in range(len(source.parts)):
            source.check(part)
