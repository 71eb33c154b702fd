"""Live engines of the real DeepSpeed begin from what other stages, worlds and libraries wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.launching import deepspeed

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

LIVE = Path(__file__).with_name("live_run.py")

SAVED = {
    "z1-2": (2, {"stage": 1}),
    "z3-3": (3, {"stage": 3, "zero": {"sub_group_size": 100}}),
    "z2-4": (4, {"stage": 2}),
    "z1-2-bf16": (2, {"stage": 1, "dtype": "bf16"}),
    "z2-2-dealt": (2, {"stage": 2, "zero": {"round_robin_gradients": True}}),
}
"""By name the ranks and the job of a checkpoint."""

BEGUN = [
    ("z1-2", 2, {"stage": 1}),
    ("z1-2", 3, {"stage": 1}),
    ("z1-2", 3, {"stage": 3}),
    ("z1-2", 3, {"stage": 3, "zero": {"sub_group_size": 100, "stage3_param_persistence_threshold": 10**6}}),
    ("z1-2", 2, {"stage": 3}),
    ("z3-3", 2, {"stage": 1}),
    ("z3-3", 3, {"stage": 3, "zero": {"sub_group_size": 60}}),
    ("z2-4", 2, {"stage": 3}),
    ("z2-4", 3, {"stage": 2, "zero": {"parameter_alignment": True}}),
    ("z2-4", 3, {"stage": 1, "zero": {"round_robin_gradients": True, "parameter_alignment": True}}),
    ("z2-2-dealt", 2, {"stage": 2, "zero": {"round_robin_gradients": True}}),
    ("z2-2-dealt", 3, {"stage": 3}),
    ("z1-2-bf16", 3, {"stage": 3, "dtype": "bf16"}),
    ("z1-2-bf16", 2, {"stage": 2, "dtype": "bf16"}),
    ("z1-2-bf16", 3, {"stage": 1, "dtype": "bf16", "accumulate": "fp32"}),
]


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
def begun(saved, tmp_path_factory):
    """What each live engine told, by name."""
    found = {}
    for world in (2, 3):
        jobs = [
            {**job, "name": name, "source": str(saved[source][0])}
            for name, (source, ranks, job) in zip(NAMES, BEGUN, strict=True)
            if ranks == world
        ]
        found |= deepspeed(tmp_path_factory.mktemp(f"begun-{world}"), world, jobs, LIVE)
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
    assert (after["global_steps"], after["counters"]) == (3, (3, 36, 0, 3))
    assert after["groups"] == before["groups"] and after["scheduler"] == before["scheduler"]
    assert after["steps"] and set(after["steps"]) == {3.0}
    for key, tensor in before["module"].items():
        assert torch.equal(after["working"][key], tensor), key
    exact = world == SAVED[source][0] and job["stage"] == SAVED[source][1]["stage"]
    close = {"rel": 2e-3} if "bf16" in source else {"rel": 1e-6}
    assert after["losses"] == (before["losses"] if exact else pytest.approx(before["losses"], **close))
    assert after["rates"] == before["rates"]
