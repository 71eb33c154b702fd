"""Replicas of ranks of ``DistributedDataParallel``: what torch averages is copied bucket by bucket in backward."""

from __future__ import annotations

import os

import pytest

from combined import one_in
from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World("buckets") as world:
        yield world


def run(world, tmp_path, ranks, how, slow=False):
    """What each rank said, of a training that is bit for bit as without a replica, and copied rightly."""
    (tmp_path / "memory").mkdir()
    said = world.run(ranks, how=how, slow=slow, root=str(tmp_path / "run"), memory=str(tmp_path / "memory"))
    assert not any("error" in rank or rank["code"] for rank in said), said
    for rank in said:
        assert rank["same"] and rank["finite"] and not rank["wrong"]
    assert os.listdir(tmp_path / "memory") == []
    return said


def each_step(said, key):
    """Sums over ranks, each of which stores some of the 10 parameters."""
    return [sum(of_ranks) for of_ranks in zip(*(rank[key] for rank in said), strict=True)]


@pytest.mark.parametrize("how, ranks", one_in(2, ["plain", "closed", "zeroed"], [2, 3]))
def test_every_gradient_is_copied_in_backward_and_not_again(world, tmp_path, ranks, how):
    said = run(world, tmp_path, ranks, how)
    assert each_step(said, "early") == [10] * 5
    assert each_step(said, "copied_again") == [0] * 5
    assert max(said[0]["buckets"]) >= 2


@pytest.mark.parametrize(
    "how, early, again",
    [
        ("views", [10] * 5, [0] * 5),
        ("no_sync", [10] * 5, [0] * 5),
        ("two exchanges", [10] * 5, [0] * 5),
        ("scaled", [10] * 5, [10] * 5),
        ("edited", [10] * 5, [1] * 5),
        ("some unused", [10, 8, 10, 8, 10], [0] * 5),
        ("some unused, kept", [10, 8, 10, 8, 10], [0, 2, 0, 2, 0]),
    ],
)
def test_what_is_no_average_any_more_is_copied_again(world, tmp_path, how, early, again):
    said = run(world, tmp_path, 2, how)
    assert (each_step(said, "early"), each_step(said, "copied_again")) == (early, again)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "how, slow",
    one_in(2, ["plain", "some unused, views", "static", "nested", "nested, views", "strided"], [False, True]),
)
def test_how_torch_comes_to_its_averages_does_not_matter(world, tmp_path, how, slow):
    """Nor how long that takes. A bucket gives gradients that do not lie in rows as if they did."""
    run(world, tmp_path, 2, how, slow)


def test_a_replica_that_dies_is_told_at_the_step(world, tmp_path):
    """And not in backward, where other ranks would wait for the rest of the buckets."""
    (tmp_path / "memory").mkdir()
    said = world.run(2, how="dies", slow=False, root=str(tmp_path / "run"), memory=str(tmp_path / "memory"))
    assert [rank.get("whole") for rank in said] == [True, True], said
    assert said[0]["told"] == "at the step"


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "ranks, how", [(3, "views"), (2, "a hook of the script's"), (2, "a hook of torch's")]
)
def test_a_hook_is_put_only_where_it_changes_nothing(world, tmp_path, ranks, how):
    said = run(world, tmp_path, ranks, how)
    assert said[0]["buckets"] == [] and each_step(said, "early") == [0] * 5


def test_a_hook_that_is_left_averages_to_the_same_bits(world, tmp_path):
    """Of three ranks, where torch's own hook, which divides, does not."""
    run(world, tmp_path, 3, "left by TopK")
