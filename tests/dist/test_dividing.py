"""Ranks that begin from a state of another library divide what has to be checked, and all are refused what one finds
damaged, none of them touched."""

from __future__ import annotations

import pytest
import torch

from dist.training import Mlp
from dist.world import World
from formats.deepspeed_files import random_state, write
from holdfast.formats.foreign_formats import open_source
from holdfast.store.reader import RunReader
from survive_run import digest

SHAPES = {name: tuple(parameter.shape) for name, parameter in Mlp(12).named_parameters()}


@pytest.fixture(scope="module")
def world():
    with World("dividing") as world:
        yield world


@pytest.fixture(params=[1, 3])
def state(tmp_path, request):
    """A checkpoint of ZeRO of 3 ranks, with 9 partitions that any other cut needs several of."""
    state = random_state([SHAPES])
    write(tmp_path / "source", state, request.param, 3)
    return state


def partitions(path):
    source = open_source(path)
    return sorted(
        f"{part.path.rpartition('/')[2]} {part.offset}"
        for part in source.parts
        if part.nbytes > 4 and part.path
    )


def begun(world, tmp_path, machines):
    said = world.run(len(machines), root=tmp_path / "run", begin=tmp_path / "source", machines=machines)
    assert all(rank.get("finished") for rank in said), [rank.get("trace", rank) for rank in said]
    return said


COPIED = r"""
version = 1
[mesh]
tp = 2
[[files]]
match = '(?P<tp>\d+)\.pt'
[[rule]]
match = '.*'
replicate = "tp"
"""


def test_copies_that_differ_in_what_one_stage_wants_leave_all_as_they_were(world, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    torch.manual_seed(1)
    for rank in range(2):
        model = Mlp(12)
        torch.nn.init.constant_(model.first.weight, 7.0)
        torch.nn.init.constant_(model.first.bias, 7.0)
        torch.save(model.state_dict(), source / f"{rank}.pt")
    (source / "rules.toml").write_text(COPIED)
    said = world.run(2, root=tmp_path / "run", begin=source, machines=[1, 1], stages=True)
    assert all("the copies of second." in rank["error"] for rank in said), said
    assert all(rank["same"] for rank in said)


def looked(ranks):
    return sorted(each for rank in ranks for each in rank["looked"])


def test_the_ranks_of_a_machine_check_each_partition_once_between_them(world, tmp_path, state):
    said = begun(world, tmp_path, [1, 1])
    large = partitions(tmp_path / "source")
    found = [each for each in looked(said) if each in large]
    assert found == large and all(set(rank["looked"]) & set(large) for rank in said)
    assert {rank["state"] for rank in said} == {digest(dict(sorted(state.expected.items())))}


def test_what_another_machine_sees_each_checks_for_itself(world, tmp_path, state):
    said = begun(world, tmp_path, [1, 2])
    large = partitions(tmp_path / "source")
    first, second = ([each for each in looked(ranks) if each in large] for ranks in (said[:1], said[1:]))
    assert sorted({*first, *second}) == large and set(first) & set(second)
    assert len(set(first)) == len(first) and len(set(second)) == len(second)
    assert {rank["state"] for rank in said} == {digest(dict(sorted(state.expected.items())))}


@pytest.mark.parametrize("slot", ["param", "exp_avg_sq"])
def test_what_one_rank_finds_damaged_no_rank_takes(world, tmp_path, state, slot):
    data = state.expected[f"second.weight/{slot}"].reshape(-1)[-4:].numpy().tobytes()
    [path] = [p for p in (tmp_path / "source").rglob("*optim_states.pt") if data in p.read_bytes()]
    content = bytearray(path.read_bytes())
    content[content.index(data)] ^= 1
    path.write_bytes(content)
    said = begun(world, tmp_path, [1, 1])
    assert all(rank["same"] for rank in said)
    assert sorted(rank["error"].partition(":")[0] for rank in said) == ["ChunkCorrupt", "RankFailed"]
    assert all(path.name in rank["error"] and "fails its CRC-32" in rank["error"] for rank in said)
    assert RunReader(tmp_path / "run").commits() == []
