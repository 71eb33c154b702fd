"""Folders of torch.distributed.checkpoint are read in place as torch itself loads them; what is hostile or damaged in
them is refused, naming file and tensor."""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from typer.testing import CliRunner

from dist.saving import digest_of, made, state_of
from dist.world import World
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpointer import Checkpointer
from holdfast.cli.main import app
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, FileMissing
from holdfast.formats import state_dict_progress
from holdfast.formats.dcp import dcp_reader as module
from holdfast.formats.dcp import dcp_writer
from holdfast.formats.dcp.dcp_reader import DcpFolder, is_dcp
from holdfast.formats.dcp.dcp_writer import boxes_of, write_dcp
from holdfast.formats.load import ReadTarget, read_all
from holdfast.formats.memory_source import InMemory
from holdfast.formats.readers.huggingface import write_single
from holdfast.formats.run_directory import write_run
from holdfast.formats.torch_archive import pickles
from holdfast.integrations.dcp import StorageWriter
from holdfast.opening import source_of
from holdfast.state.encoding import decode, encode
from holdfast.state.layout.regions import Region

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:TypedStorage is deprecated",
    "ignore:beginning from .* it has no random numbers",
)

WORLDS = [("ddp", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("fsdp2", 4), ("fsdp2_tp", 4), ("hsdp", 4)]


@pytest.fixture(scope="module")
def world():
    with World("saving") as world:
        yield world


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """The folder that a world of a kind has saved, and what a rank of it said."""
    root, known = tmp_path_factory.mktemp("saved"), {}

    def get(kind, size, flat=False):
        key = f"{kind}-{size}-{flat}"
        if key not in known:
            said = world.run(size, job="save", kind=kind, theirs=root / key, flat=flat)
            assert all(each.get("finished") for each in said), said
            known[key] = root / key, said[0]
        return known[key]

    return get


def read(source, boxes=None):
    """All of a source, or of some of its atoms a box, by key, as bytes."""
    boxes = boxes or {key: Region.whole(stored.atom.shape) for key, stored in source.atoms.items()}
    targets = {}
    for key, box in boxes.items():
        stored = source.atoms[key]
        targets[key] = ReadTarget(stored, box, np.empty(box.shape, f"u{stored.atom.itemsize}"))
    read_all(source, list(targets.values()))
    return {key: target.array.tobytes() for key, target in targets.items()}


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def as_torch_loads(folder, tmp_path):
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    return torch.load(tmp_path / "whole.pt", weights_only=False)


def expected(loaded):
    """By the keys of atoms, of the nested form."""
    found = {
        f"{name}/{'buffer' if 'running' in name or 'num_' in name else 'param'}": bits(value)
        for name, value in loaded["model"].items()
    }
    for name, slots in loaded["optim"]["state"].items():
        found |= {f"{name}/{slot}": bits(value) for slot, value in slots.items()}
    return found


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_every_tensor_of_every_parallelism_is_what_torch_loads(saved, tmp_path, kind, size):
    folder, _ = saved(kind, size)
    source, loaded = DcpFolder(folder), as_torch_loads(folder, tmp_path)
    assert read(source) == expected(loaded)
    assert len(source.atoms) == 10 + 3 + 3 * 9 + 1 - 1
    groups = loaded["optim"]["param_groups"]
    assert decode(source.progress["groups"]) == [
        {key: value for key, value in group.items() if key != "params"} for group in groups
    ]
    assert source.progress["group_parameters"] == [group["params"] for group in groups]
    assert decode(source.progress["scheduler"]) == loaded["scheduler"]
    assert source.progress["step"] == 2
    assert decode(source.progress["extra"]["loader.raw"]) == b"\0x"
    assert torch.equal(decode(source.progress["extra"]["generator"]), loaded["generator"])
    assert source.progress["roots"] == {"model": "model", "optimizer": ["optim"]}


@pytest.mark.slow
def test_hyper_parameters_by_parameter_are_the_same_groups(saved):
    nested, flat = DcpFolder(saved("fsdp2", 2)[0]), DcpFolder(saved("fsdp2", 2, flat=True)[0])
    assert read(nested) == read(flat)
    for name in ("groups", "group_parameters", "scheduler", "step"):
        assert nested.progress[name] == flat.progress[name], name


@pytest.mark.slow
def test_any_region_is_read_and_no_more_archives_are_opened_than_it_lies_in(saved, monkeypatch):
    folder, _ = saved("fsdp2", 4, flat=True)  # with 108 hyper-parameters
    opened = []
    real = module.Archive
    monkeypatch.setattr(module, "Archive", lambda *where: opened.append(where) or real(*where))
    source = DcpFolder(folder)
    of_values = len(opened)
    assert of_values < 40  # as the same hyper-parameters come again
    whole = np.frombuffer(
        read(source, {"first.weight/exp_avg": Region((0, 0), (8, 6))})["first.weight/exp_avg"], "f4"
    )
    assert len(opened) == of_values + 4
    box = Region((1, 2), (5, 5))
    part = read(source, {"first.weight/exp_avg": box})["first.weight/exp_avg"]
    assert part == whole.reshape(8, 6)[box.slices].tobytes()
    assert len(opened) == of_values + 4


@pytest.mark.slow
def test_a_thousand_entries_are_not_compared_with_each_other(tmp_path, monkeypatch):
    dcp.save({f"w.{i}": torch.zeros(1) for i in range(1000)}, checkpoint_id=tmp_path / "x", no_dist=True)
    compared = []
    monkeypatch.setattr(pickles.PickledObject, "__eq__", lambda a, b: compared.append(a) or a is b)
    DcpFolder(tmp_path / "x")
    assert len(compared) < 100


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.a(x))


def trained():
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(state, folder):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return DcpFolder(folder)


FORMS = {
    "nested": lambda m, o: {"app": {"model": m, "optim": o}},
    "bare, as torchtitan has it": lambda m, o: {
        **m, "optimizer": flat_of(o), "train_state": {"step": torch.tensor(7)}, "dataloader": {"dp_rank_0": b"bytes"},
        "lr_scheduler": {"last_epoch": 7},
    },
    "wrapped": lambda m, o: {"model": {f"module._orig_mod.{k}": v for k, v in m.items()}, "optim": o},
    "beside averages": lambda m, o: {"ema": {k: v + 1 for k, v in m.items()}, "model": m, "optim": o},
}  # fmt: skip


def flat_of(optimizer):
    state = {f"state.{n}.{s}": v for n, slots in optimizer["state"].items() for s, v in slots.items()}
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            state |= {f"param_groups.{name}.{k}": v for k, v in group.items() if k != "params"}
    return state


@pytest.mark.parametrize("form", FORMS)
def test_the_model_and_its_optimizer_are_found_in_whatever_they_are(tmp_path, form):
    model, optimizer = trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    reference = save({"model": of_model, "optim": of_optimizer}, tmp_path / "plain")
    source = save(FORMS[form](of_model, of_optimizer), tmp_path / "x")
    found, there = read(source), read(reference)
    assert found == there
    for name in ("groups", "group_parameters"):
        assert source.progress[name] == reference.progress[name]
    if "torchtitan" in form:
        assert source.progress["step"] == 7 and source.progress["scheduler"] == {"last_epoch": 7}
        assert decode(source.progress["extra"]["dataloader.dp_rank_0"]) == b"bytes"
        assert source.progress["roots"] == {"model": "", "optimizer": ["optimizer"]}
    if "averages" in form:
        assert torch.equal(decode(source.progress["extra"]["ema.a.weight"]), of_model["a.weight"] + 1)


def test_a_large_tensor_that_is_nobodys_is_an_atom(tmp_path, monkeypatch):
    monkeypatch.setattr(state_dict_progress, "SMALL_BYTES", 10)
    source = save({"model": {"w": torch.ones(3)}, "other": {"w": torch.arange(9.0)}}, tmp_path / "x")
    assert {key: stored.atom.shape for key, stored in source.atoms.items()} == {
        "w/param": (3,),
        "other.w/extra": (9,),
    }


@pytest.mark.parametrize("key", ["", "model", "weights"])
def test_a_model_alone_is_found_under_any_name(tmp_path, key):
    of_model = trained()[0].state_dict()
    source = save({key: of_model} if key else of_model, tmp_path / "x")
    assert {k.rpartition("/")[0] for k in source.atoms} == set(of_model)


def test_an_optimizer_that_knows_parameters_by_number_has_their_names(tmp_path):
    model, optimizer = trained()
    by_name = save(
        dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), tmp_path / "a"
    )
    by_number = save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "b")
    assert read(by_number) == read(by_name)
    assert by_number.progress["group_parameters"] == by_name.progress["group_parameters"]


def test_numbers_that_may_mean_other_parameters_are_not_guessed(tmp_path):
    model, optimizer = trained()
    of_model = model.state_dict()
    del of_model["norm.bias"]
    source = save({"model": of_model, "optim": optimizer.state_dict()}, tmp_path / "x")
    assert "optim.state.0/exp_avg" in source.atoms and "a.weight/exp_avg" not in source.atoms


def twins(tmp_path):
    """What a training of two layers of one shape saved, the top layer's group first: a run, and a folder of torch."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in ((model[1], 0.2), (model[0], 0.1))]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "run"))
    return source_of(str(tmp_path / "run")), save(state, tmp_path / "folder")


def test_numbers_go_through_the_groups_and_not_through_the_model(tmp_path):
    for source in twins(tmp_path):
        assert {"0.weight/param", "1.weight/param", "optim.state.0/exp_avg"} <= source.atoms.keys()
        assert "0.weight/exp_avg" not in source.atoms
        assert source.progress["group_parameters"] == [["0"], ["1"]]


def test_groups_that_shapes_tell_apart_have_their_names_in_a_run_and_in_a_folder(tmp_path):
    model, _ = trained()
    groups = [[p for p in model.parameters() if (p.dim() >= 2) is matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    named = save(dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), tmp_path / "a")
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "run"))
    for source in (save(state, tmp_path / "b"), source_of(str(tmp_path / "run"))):
        assert read(source) == read(named)
        assert source.progress["group_parameters"] == named.progress["group_parameters"]


@pytest.mark.parametrize("params", [[[1]], 3])
def test_groups_of_no_sense_are_refused_by_the_folder(tmp_path, params):
    groups = {"optim": {"state": {0: {"x": torch.ones(2)}}, "param_groups": [{"params": params}]}}
    with pytest.raises(Damaged, match=r"x does not read as a state dict"):
        save({"w": torch.ones(2), **groups}, tmp_path / "x")


def test_a_second_optimizer_of_the_same_parameters_is_kept_apart(tmp_path):
    model, optimizer = trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "a": of_optimizer, "b": of_optimizer}
    source = save(state, tmp_path / "x")
    assert "a.weight/exp_avg" in source.atoms
    assert torch.equal(
        decode(source.progress["extra"]["b.state.a.weight.exp_avg"]),
        of_optimizer["state"]["a.weight"]["exp_avg"],
    )


def test_tensors_of_any_layout_and_dtype_are_what_they_were(tmp_path):
    tensors = {
        "transposed": torch.arange(24.0).reshape(4, 6).T,
        "last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "bf16": torch.arange(5).bfloat16(), "bool": torch.tensor([True, False]), "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3), "part": torch.arange(30.0)[3:20:2], "double": torch.arange(3.0).double(),
    }  # fmt: skip
    source = save({"model": tensors}, tmp_path / "x")
    assert {key.rpartition("/")[0]: data for key, data in read(source).items()} == {
        k: bits(v) for k, v in tensors.items()
    }
    [piece] = read(source, {"transposed/param": Region((2, 1), (5, 3))}).values()
    assert piece == bits(tensors["transposed"][2:5, 1:3])


def test_values_that_are_no_tensors_are_read_as_data(tmp_path):
    values = {
        "tuple": (1, (2.5, None)), "dict": {"a": OrderedDict(b=[1, 2])}, "bytes": b"\xff\0", "text": "x",
        "numbered": [1, {2: "two"}],
    }  # fmt: skip
    dcp.save(
        {"model": {"w": torch.ones(2)}, "extra": values, "set": {3}},
        checkpoint_id=tmp_path / "x",
        no_dist=True,
    )
    extra = DcpFolder(tmp_path / "x").progress["extra"]
    assert decode(extra["extra.tuple"]) == (1, (2.5, None)) and decode(extra["extra.bytes"]) == b"\xff\0"
    assert (
        extra["extra.dict.a.b"] == [1, 2]
        and extra["extra.text"] == "x"
        and extra["extra.numbered.1.2"] == "two"
    )
    assert extra["set"] == {"__object__": "set", "args": [[3]]}


@pytest.fixture
def folder(tmp_path):
    model, optimizer = trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save(
        {"model": of_model, "optim": of_optimizer, "step": 3}, checkpoint_id=tmp_path / "x", no_dist=True
    )
    return tmp_path / "x"


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 8
    path.write_bytes(data)


def place_of(folder, key):
    """Where the archive of a tensor begins and ends."""
    metadata = FileSystemReader(folder).read_metadata()
    [info] = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    return info.offset, info.offset + info.length


@pytest.mark.parametrize("whole", [True, False])
def test_a_flipped_bit_of_a_tensor_is_found_before_a_byte_of_it_is_used(folder, whole):
    start, stop = place_of(folder, "optim.state.a.weight.exp_avg")
    file = folder / "__0_0.distcp"
    flip(file, file.read_bytes().index(b"archive/data/0", start, stop) + 100)
    source = DcpFolder(folder)
    read(source, {"a.weight/param": Region.whole((4, 3))})
    box = Region.whole((4, 3)) if whole else Region((3, 0), (4, 3))
    with pytest.raises(
        ChunkCorrupt, match=rf"optim\.state\.a\.weight\.exp_avg, in .*__0_0\.distcp from {start} on.*CRC-32"
    ):
        read(source, {"a.weight/exp_avg": box})


def test_a_flipped_bit_of_a_header_is_found(folder):
    start, stop = place_of(folder, "model.a.weight")
    file = folder / "__0_0.distcp"
    flip(file, file.read_bytes().index(b"_rebuild_tensor_v2", start, stop) + 3)
    with pytest.raises(Damaged, match=r"model\.a\.weight, in .*__0_0\.distcp.*CRC-32"):
        read(DcpFolder(folder), {"a.weight/param": Region.whole((4, 3))})


def test_a_flipped_bit_of_a_hyper_parameter_is_found(folder):
    start, stop = place_of(folder, "optim.param_groups.0.lr")
    file = folder / "__0_0.distcp"
    flip(file, file.read_bytes().index(b"\x80\x02G", start, stop) + 5)
    with pytest.raises(Damaged, match=r"optim\.param_groups\.0\.lr, in .*__0_0\.distcp"):
        DcpFolder(folder)


def test_a_file_cut_short_or_gone_is_named_with_what_it_has(saved, tmp_path):
    for number in range(4):
        copy = tmp_path / str(number)
        shutil.copytree(saved("fsdp2", 4)[0], copy)
        path = copy / f"__{number}_0.distcp"
        whole = path.read_bytes()
        path.write_bytes(whole[:-5])
        with pytest.raises(
            Damaged, match=rf"\.metadata says that \S+ is at .* of __{number}_0\.distcp, which has"
        ):
            DcpFolder(copy)
        path.unlink()
        with pytest.raises(FileMissing, match=rf"__{number}_0\.distcp is missing, which has \S+"):
            DcpFolder(copy)


def test_a_save_that_was_not_finished_is_no_checkpoint(folder):
    (folder / ".metadata").unlink()
    assert is_dcp(folder)
    with pytest.raises(FileMissing, match=r"\.metadata is missing: the save was not finished"):
        DcpFolder(folder)


def test_saves_of_each_rank_for_itself_are_refused_with_the_way_out(folder):
    (folder / ".metadata").rename(folder / "__0.metadata")
    with pytest.raises(BadInput, match="use_collectives=False"):
        DcpFolder(folder)


def changed(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def weight(metadata):
    return metadata.state_dict_metadata["model.a.weight"]


def info(metadata, key="model.a.weight"):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def size(metadata, *sizes):
    weight(metadata).size = torch.Size(sizes)


def chunks(metadata, *boxes):
    weight(metadata).chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in boxes]
    entry = info(metadata)
    for index in [index for index in metadata.storage_data if index.fqn == "model.a.weight"]:
        del metadata.storage_data[index]
    for number, (start, _) in enumerate(boxes):
        place = type(entry)(entry.relative_path, entry.offset + number * 400, 400)
        metadata.storage_data[MetadataIndex("model.a.weight", start)] = place


def drop(metadata):
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "model.a.weight")]


HOSTILE = {
    "a tensor larger than its chunks": (lambda m: size(m, 5, 3), "a.weight/param.*12 elements stored, not 15"),
    "a tensor smaller than its chunks": (lambda m: size(m, 3, 3), "a.weight/param"),
    "a tensor larger than any": (lambda m: size(m, 1 << 40, 1 << 40), "a.weight/param"),
    "a tensor of the size of nothing that is a number": (lambda m: size(m, 1 << 32, 1 << 32), "a.weight/param"),
    "chunks that overlap": (lambda m: chunks(m, ((0, 0), (3, 3)), ((1, 0), (1, 3))), "two shards of a.weight"),
    "a chunk outside": (lambda m: chunks(m, ((0, 0), (3, 3)), ((4, 0), (1, 3))), "a.weight/param.*outside"),
    "a chunk of another rank": (lambda m: chunks(m, ((0,), (12,))), "model.a.weight"),
    "a chunk that is nowhere": (drop, r"does not say where model\.a\.weight.*a chunk is missing"),
    "an entry of no chunk": (
        lambda m: m.storage_data.update({MetadataIndex("model.b", (0,)): m.storage_data.pop(next(
            i for i in m.storage_data if i.fqn == "model.a.bias"))}), r"model\.(a\.bias|b)"),
    "an entry of nothing that is there": (
        lambda m: m.storage_data.update({MetadataIndex("model.z", (0,)): type(info(m))("__0_0.distcp", 0, 0)}),
        r"says where model\.z from \[0\] on is, and has no such chunk"),
    "an entry after the end": (lambda m: setattr(info(m), "offset", 10**9), r"a\.weight is at 1000000000 to .*distcp"),
    "an entry before the start": (lambda m: setattr(info(m), "offset", -8), "no sizes"),
    "an entry longer than the file": (lambda m: setattr(info(m), "length", 1 << 50), r"model\.a\.weight is at"),
    "an entry shorter than its tensor": (lambda m: setattr(info(m), "length", 40), r"12 elements of model\.a\.w"),
    "an entry in another's bytes": (
        lambda m: setattr(info(m), "offset", info(m, "model.a.bias").offset), "in the same bytes of __0_0.distcp"),
    "an entry that is in no archive": (lambda m: (
        setattr(info(m), "offset", info(m).offset + 9), setattr(info(m), "length", info(m).length - 9)),
        r"model\.a\.weight, in .*__0_0.distcp.* no archive"),
    "a file elsewhere": (lambda m: setattr(info(m), "relative_path", "../__0_0.distcp"), r"a\.weight is in '\.\./"),
    "a file that is not there": (lambda m: setattr(info(m), "relative_path", "x"), r"x is missing, .* model\.a\.w"),
    "no tables": (lambda m: setattr(m, "storage_data", None), "does not read as one"),
    "another kind of thing": (lambda m: m.state_dict_metadata.update(x=OrderedDict()), "does not read as one"),
    "extensions": (lambda m: setattr(info(m), "transform_descriptors", ["zstd"]), r"a\.weight went through"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_metadata_that_claims_what_is_not_there_is_refused_without_memory_for_it(folder, case):
    change, text = HOSTILE[case]
    changed(folder, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((Damaged, BadInput), match=text):
        read(DcpFolder(folder), {"a.weight/param": Region.whole((4, 3))})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_two_tensors_in_each_others_place_are_found(folder):
    def swap(metadata):
        a, b = info(metadata, "model.a.weight"), info(metadata, "optim.state.a.bias.exp_avg")
        for name in ("offset", "length"):
            one, two = getattr(a, name), getattr(b, name)
            setattr(a, name, two)
            setattr(b, name, one)

    with pytest.raises(
        Damaged, match=r"model\.a\.weight.*a tensor \[4\] of F32, not \[4, 3\].*of another save"
    ):
        read(DcpFolder(changed(folder, swap)), {"a.weight/param": Region.whole((4, 3))})


class Runs:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_metadata_that_would_run_something_is_refused_by_name(folder, tmp_path):
    changed(folder, lambda m: setattr(m, "planner_data", Runs(tmp_path / "ran")))
    with pytest.raises(Damaged, match=r"\.metadata names (posix|nt)\.system.* Nothing was executed"):
        DcpFolder(folder)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_would_run_something_is_refused_by_name(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "odd": Runs(tmp_path / "ran")}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(Damaged, match=r"odd, in .*__0_0\.distcp.*system.* Nothing was executed"):
        DcpFolder(tmp_path / "x")
    assert not (tmp_path / "ran").exists()


# Gone on from


@pytest.mark.parametrize(("kind", "size"), [("fsdp2", 4), ("fsdp2_tp", 4), ("fsdp1", 2)])
def test_a_training_goes_on_from_a_folder_of_any_parallelism(saved, tmp_path, kind, size):
    folder, said = saved(kind, size)
    parts = made("ddp", 1, seed=2, steps=1)
    with Checkpointer(
        tmp_path / "run", model=parts[0], optimizer=parts[1], scheduler=parts[2]
    ) as checkpointer:
        assert checkpointer.resume(source=folder) == 2
        assert digest_of(state_of(parts, flat=False)) == said["digest"]


def scheduled():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])


def test_a_schedule_goes_on_at_its_milestones(tmp_path):
    """Torch makes texts of the numbers that are keys."""
    there, here = scheduled(), scheduled()
    for _ in range(3):
        there[1].step()
        there[2].step()
    of_model, of_optimizer = get_state_dict(*there[:2])
    state = {"model": of_model, "optim": of_optimizer, "scheduler": there[2].state_dict()}
    save(state, tmp_path / "x")
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1], scheduler=here[2]) as checkpointer:
        checkpointer.resume(source=tmp_path / "x")
    for _, optimizer, schedule in (there, here):
        optimizer.step()
        schedule.step()
    assert here[2].state_dict() == there[2].state_dict() and here[2].get_last_lr() == there[2].get_last_lr()
    assert type(here[2].milestones) is Counter


def test_what_is_no_tensor_is_taken_apart_as_torch_does(tmp_path):
    """And so comes back to ``dcp.load`` as from a folder of torch."""
    state = {
        "scheduler": {
            **scheduled()[2].state_dict(),
            "lists": [[1, 2], [3]],
            "dicts": [[{"a": 1}], 2],
            "no": {},
        }
    }
    save(state, tmp_path / "theirs")
    extra = {"scheduler": encode(state["scheduler"])}
    write_dcp(InMemory("x", "test", [], extra), tmp_path / "ours")
    theirs, ours = (
        FileSystemReader(tmp_path / name).read_metadata().planner_data for name in ("theirs", "ours")
    )
    assert list(ours.items()) == list(theirs.items())


@pytest.mark.slow
def test_the_tools_know_folders(saved, tmp_path):
    folder, run = str(saved("fsdp2_tp", 4)[0]), CliRunner()
    shown = run.invoke(app, ["show", folder]).output
    assert "dcp" in shown and "exp_avg_sq" in shown and "in 4 files" in shown
    assert "torch.distributed.checkpoint, files of 4 ranks" in shown, shown
    assert re.search(r"first\.weight +8x6 +4 parts +F32", shown), shown
    assert "it agrees" in run.invoke(app, ["verify", folder]).output
    for to in ("dcp", "holdfast"):
        assert run.invoke(app, ["convert", folder, str(tmp_path / to), "--to", to]).exit_code == 0
        same = run.invoke(app, ["diff", folder, str(tmp_path / to)])
        assert same.exit_code == 0 and "40 tensors" in same.output, same.output


# Written


def loaded_by_torch(folder, state):
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def other():
    torch.manual_seed(5)
    model, optimizer = trained()
    with torch.no_grad():
        for tensor in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
            tensor.add_(1)
    optimizer.param_groups[0]["lr"] = 77
    return model, optimizer


@pytest.mark.parametrize("flat", [False, True])
def test_what_is_written_torch_loads_in_either_form(folder, tmp_path, flat):
    write_dcp(DcpFolder(folder), tmp_path / "out")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    wanted = dict(zip(("model", "optim"), get_state_dict(*trained(), options=options), strict=True))
    state = dict(zip(("model", "optim"), get_state_dict(*other(), options=options), strict=True))
    loaded = loaded_by_torch(tmp_path / "out", {**state, "step": 0})
    assert loaded.pop("step") == 3
    assert repr(loaded) == repr(wanted)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def tied(seed):
    torch.manual_seed(seed)
    model = Tied()
    return model, torch.optim.AdamW(model.parameters())


def run_of_tied(root, save):
    return run_of(root, *tied(0), torch.arange(7), save)


def run_of(root, model, optimizer, inputs, save):
    """What is trained for three steps is a run then."""
    with Checkpointer(root, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(3):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
        if save:
            checkpointer.save()
    return model, optimizer


@pytest.mark.parametrize("way", ["base", "records", "compacted", "holdfast", "safetensors"])
def test_weights_that_a_run_has_tied_are_loaded_under_every_name(tmp_path, way):
    wanted = get_state_dict(*run_of_tied(tmp_path / "run", save=way == "base"))
    if way == "compacted":
        compact(tmp_path / "run", 3)
    source = source_of(str(tmp_path / "run"))
    if way == "holdfast":
        write_run(source, tmp_path / "converted")
        source = source_of(str(tmp_path / "converted"))
    elif way == "safetensors":
        source = source_of(str(write_single(source, tmp_path / "one.safetensors")))
    assert source.aliases == {"head.weight": "embed.weight"} and "aliases" not in source.progress
    write_dcp(source, tmp_path / "out")
    loaded = loaded_by_torch(
        tmp_path / "out", dict(zip(("model", "optim"), get_state_dict(*tied(1)), strict=True))
    )
    assert repr(loaded) == repr(dict(zip(("model", "optim"), wanted, strict=True)))


@pytest.mark.parametrize("way", ["dcp", "safetensors"])
def test_a_run_that_was_moved_twice_is_still_a_run(tmp_path, way):
    """Its hyper-parameters stay by optimizer, as what makes its optimizers again has them."""
    wanted = get_state_dict(*run_of(tmp_path / "run", *trained(), torch.randn(4, 3), save=True))
    source = source_of(str(tmp_path / "run"))
    again = DcpFolder(write_dcp(source, tmp_path / "one"))
    kept = ("groups", "optimizers", "replay", "given")
    assert {name: again.progress[name] for name in kept} == {name: source.progress[name] for name in kept}
    if way == "dcp":
        again = DcpFolder(write_dcp(again, tmp_path / "two"))
    else:
        again = source_of(str(write_single(again, tmp_path / "two.safetensors")))
    write_run(again, tmp_path / "moved")
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "moved", model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.resume() == 3
    assert repr(get_state_dict(model, optimizer)) == repr(wanted)


def test_what_is_written_is_read_as_what_it_was_written_from(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_writer, "CHUNK", 40)
    source = DcpFolder(saved("fsdp2_tp", 4)[0])
    counted = []
    write_dcp(source, tmp_path / "out", report=counted.append)
    again = DcpFolder(tmp_path / "out")
    assert read(again) == read(source) and again.progress == source.progress
    assert again.writer == "holdfast"
    assert sum(counted) == sum(stored.atom.nbytes for stored in source.atoms.values())
    assert len(again.atoms["first.weight/param"].pieces) == 8
    last = max(
        info.offset + info.length
        for info in FileSystemReader(tmp_path / "out").read_metadata().storage_data.values()
    )
    assert (tmp_path / "out" / "__0_0.distcp").stat().st_size == last


@pytest.mark.slow
def test_a_written_folder_loads_at_another_world_size(world, saved, tmp_path):
    folder, said = saved("fsdp2_tp", 4)
    write_dcp(DcpFolder(folder), tmp_path / "out")
    for kind, size in (("fsdp2", 2), ("ddp", 2)):
        for ranks in world.run(size, job="load", kind=kind, theirs=tmp_path / "out"):
            assert ranks.get("theirs") == said["digest"], ranks


def test_a_model_without_a_name_before_it_is_written_as_torchtitan_reads_it(folder, tmp_path):
    write_dcp(DcpFolder(folder), tmp_path / "out", model="", optimizer="optimizer")
    of_model, of_optimizer = get_state_dict(*trained())
    there, state = get_state_dict(*other())
    loaded = loaded_by_torch(tmp_path / "out", {**there, "optimizer": flat_of(state)})
    assert repr(loaded) == repr({**of_model, "optimizer": flat_of(of_optimizer)})


MARK = ".holdfast-conversion"


def test_what_says_that_there_is_a_checkpoint_comes_last_and_all_is_durable(folder, tmp_path, monkeypatch):
    calls = []

    class Recording(dcp_writer.Disk):
        def sync(self, target, *, why):
            calls.append(("sync", target if isinstance(target, str) else target.path.name))
            super().sync(target, why=why)

        def sync_dir(self, path, *, why):
            calls.append(("sync_dir", path))
            super().sync_dir(path, why=why)

        def rename(self, src, dst):
            calls.append(("rename", dst))
            super().rename(src, dst)

    monkeypatch.setattr(dcp_writer, "Disk", Recording)
    write_dcp(DcpFolder(folder), tmp_path / "out")
    mark, payload, metadata = MARK, "__0_0.distcp", ".metadata"
    assert calls == [
        call
        for name in (mark, payload, metadata)
        for call in [("sync", f"{name}.tmp"), ("rename", name), ("sync_dir", "")]
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {payload, metadata}


def test_a_conversion_that_fails_leaves_no_checkpoint(folder, tmp_path):
    start, stop = place_of(folder, "model.a.weight")
    file = folder / "__0_0.distcp"
    flip(file, file.read_bytes().index(b"archive/data/0", start, stop) + 100)
    with pytest.raises(ChunkCorrupt, match=r"model\.a\.weight"):
        write_dcp(DcpFolder(folder), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {MARK, "__0_0.distcp.tmp"}


def test_a_folder_that_has_a_checkpoint_is_not_written_over(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(BadInput, match="has a checkpoint already"):
        write_dcp(DcpFolder(folder), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.campaign(keep=9)
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (7,), (3, 5), (2, 3, 4), (1, 1, 9)])
@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_chunks_cover_a_tensor_in_order_and_are_no_larger_than_asked_for(shape, most):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    boxes = list(boxes_of(shape, most))
    assert all(box.elements <= most for box in boxes)
    found = [number for box in boxes for number in numbers[box.slices].reshape(-1).tolist()]
    assert found == list(range(numbers.size))
