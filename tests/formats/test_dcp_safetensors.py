"""Shards that ranks wrote as safetensors are one state, and a folder that lacks some is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dist.world import World
from formats.test_dcp import bits, read
from holdfast.errors import Damaged, FileMissing
from holdfast.formats.dcp.dcp_reader import DcpFolder
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.readers.safetensors_files import ShardedSafetensors

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind and size of a world what it wrote as shards, and as a folder of torch's own."""
    root, found = tmp_path_factory.mktemp("shards"), {}
    with World("saving") as world:
        for kind, size in (("fsdp2", 4), ("fsdp2_tp", 4), ("ddp", 2)):
            places = {"shards": root / kind / "shards", "theirs": root / kind / "theirs"}
            said = world.run(size, job="save", kind=kind, **places)
            assert all(each.get("finished") for each in said), said
            found[kind] = places
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2_tp", "ddp"])
def test_shards_of_all_ranks_are_the_model(folders, kind):
    source = open_source(folders[kind]["shards"])
    assert isinstance(source, ShardedSafetensors)
    whole = read(DcpFolder(folders[kind]["theirs"]))
    assert read(source) == {key: whole[key] for key in whole if key.endswith(("/param", "/buffer"))}


def test_torch_reads_the_same(folders):
    source = ShardedSafetensors(folders["fsdp2"]["shards"])
    state = {
        stored.atom.name: torch.zeros(stored.atom.shape)
        for stored in source.atoms.values()
        if stored.atom.dtype == "F32"
    }
    dcp.load(
        state, storage_reader=dcp.HuggingFaceStorageReader(str(folders["fsdp2"]["shards"])), no_dist=True
    )
    found = {key.rpartition("/")[0]: data for key, data in read(source).items()}
    assert {name: bits(tensor) for name, tensor in state.items()} == {name: found[name] for name in state}


def test_files_of_a_rank_that_are_gone_are_found_but_of_the_last(folders, tmp_path):
    for number in (1, 2, 3):
        copy = tmp_path / str(number)
        shutil.copytree(folders["fsdp2"]["shards"], copy)
        (copy / f"shard-0000{number}-model-00001-of-00001.safetensors").unlink()
        with pytest.raises(FileMissing, match=f"none of rank {number}"):
            ShardedSafetensors(copy)


def changed(folder, change):
    path = folder / "shard-00002-model-00001-of-00001.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return folder


def move(header, *start):
    info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    info["first.weight"]["saved_offsets"] = list(start)
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)


HOSTILE = {
    "shards that meet": (lambda h: move(h, 0, 0), "first.weight/param"),
    "a gap": (lambda h: move(h, 100, 0), "first.weight/param.*a shard is missing"),
    "another rank": (lambda h: move(h, 2), "does not say where its shards belong"),
    "less than nothing": (lambda h: move(h, -2, 0), "does not say where its shards belong"),
    "numbers that are none": (lambda h: move(h, "a", "b"), "does not say where its shards belong"),
    "more than any": (lambda h: move(h, 1 << 70, 0), "does not say where its shards belong"),
    "halves": (lambda h: move(h, 2.5, 0), "does not say where its shards belong"),
    "nested": (
        lambda h: h["__metadata__"].update(DCP_SHARDING_INFO='{"a":' * 5000),
        "does not say where its shards belong",
    ),
    "nothing said": (
        lambda h: h["__metadata__"].pop("DCP_SHARDING_INFO"),
        "does not say where its shards belong",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_shards_that_claim_what_cannot_be_are_refused(folders, tmp_path, case):
    change, text = HOSTILE[case]
    shutil.copytree(folders["fsdp2"]["shards"], tmp_path / "x")
    with pytest.raises(Damaged, match=text):
        ShardedSafetensors(changed(tmp_path / "x", change))
