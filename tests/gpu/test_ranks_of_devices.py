"""Ranks whose tensors are on a device: killed and continued, converted, two on one device.

Run with ``-m gpu``; where there is no CUDA device each case runs on the CPU.
"""

from __future__ import annotations

import json

import pytest
import torch

from dist.training import whole_tensors, wrapped
from gpu.processes import TESTS, ended, largest_differences, started
from holdfast.checkpointer import Checkpointer
from holdfast.formats.restore import read_tensors
from holdfast.opening import source_of
from holdfast.state.layout.regions import Region

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(240),  # some start a process after the other, each of which makes a context
]


def rank(folder, kind, root, steps, *kill_at, number=0, world_size=1):
    """A process that trains as a rank."""
    place = {"RANK": str(number), "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    rendezvous = str(folder / f"rendezvous-{kind}-{root.name}-{steps}-{len(kill_at)}-{root.exists()}")
    words = (TESTS / "gpu" / "ranks.py", kind, root, steps, *kill_at)
    return started(*words, RENDEZVOUS=rendezvous, **place)


def said_by(process, code=0):
    return [json.loads(line) for line in ended(process, code).splitlines() if line.startswith("{")]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path, kind):
    """A world of one rank: on a device its group is NCCL's. Then one process of a CPU reads what it wrote."""
    whole = said_by(rank(tmp_path, kind, tmp_path / "whole", 10))
    assert len(whole) == 10
    said = said_by(rank(tmp_path, kind, tmp_path / "cut", 10, 6), -9)
    assert said == whole[:6]
    assert said_by(rank(tmp_path, kind, tmp_path / "cut", 10)) == whole[6:]
    expected = torch.load(f"{tmp_path}/cut.whole")
    model = wrapped("plain", 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with Checkpointer(tmp_path / "cut", model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.resume(step=10) == 10
    found = {name: tensor.detach() for name, tensor in whole_tensors(model, optimizer).items()}
    assert largest_differences(found, expected) == {}


@pytest.mark.parametrize("place", ["made", "made.pt"])
def test_a_sharded_state_is_converted(tmp_path, holdfast, place):
    """To a folder of torch.distributed.checkpoint, and to one file."""
    assert len(said_by(rank(tmp_path, "fsdp", tmp_path / "run", 6))) == 6
    to = "torch" if place.endswith(".pt") else "dcp"
    said = holdfast("convert", tmp_path / "run", tmp_path / place, "--to", to)
    assert said.code == 0, said
    expected, source = torch.load(f"{tmp_path}/run.whole"), source_of(str(tmp_path / place))
    wanted = {key: tensor for key, tensor in expected.items() if key in source.atoms}
    assert len(wanted) >= 7, (sorted(source.atoms), sorted(expected))
    regions = [(source.atoms[key], Region.whole(tensor.shape)) for key, tensor in wanted.items()]
    found = dict(zip(wanted, read_tensors(source, regions), strict=True))
    assert largest_differences(found, wanted) == {}


def test_two_ranks_share_the_device(tmp_path):
    """A group of gloo, which adds up what is on a device by way of the host. One rank may see the other die."""

    def world(root, *words, code=0):
        begun = root.exists()
        processes = []
        for number in range(2):
            place = {"RANK": str(number), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
            place["RENDEZVOUS"] = str(tmp_path / f"rendezvous-{root.name}-{begun}")
            processes.append(started(TESTS / "gpu" / "ranks.py", "ddp", root, *words, **place))
        return [said_by(process, code) for process in processes]

    whole = world(tmp_path / "whole", 8)
    assert world(tmp_path / "cut", 8, 5, code=(-9, 1)) == [said[:5] for said in whole]
    assert world(tmp_path / "cut", 8) == [said[5:] for said in whole]
