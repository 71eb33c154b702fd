"""Several ranks with one run: they resume the same step, under the same parallelism or another one."""

from __future__ import annotations

import pytest

from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


def ended(ranks):
    """All ranks came to the end, with one state."""
    for said in ranks:
        assert said.get("finished"), said.get("trace") or said
    assert all(said["digests"] == ranks[0]["digests"] for said in ranks)
    return ranks


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_resume_and_end_as_if_they_had_not_stopped(world, tmp_path, kind):
    whole = ended(world.run(2, kind=kind, root=tmp_path / "whole", steps=9))
    ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=5, base_every=3))
    rest = ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=9, base_every=3))
    for one, other in zip(whole, rest, strict=True):
        assert other["resumed"] == 5
        assert other["losses"] == one["losses"][5:]
        assert other["digests"] == {step: d for step, d in one["digests"].items() if int(step) >= 5}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("worlds", [(2, 4), (4, 2), (3, 1), (1, 3), (4, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(world, tmp_path, kind, worlds):
    """With records after the base, and from there once more."""
    one, other = worlds
    before = ended(world.run(one, kind=kind, root=tmp_path, steps=5, base_every=3))
    after = ended(world.run(other, kind=kind, root=tmp_path, steps=8, base_every=3))
    assert after[0]["resumed"] == 5
    assert after[0]["digests"]["5"] == before[0]["digests"]["5"]
    again = ended(world.run(other, kind=kind, root=tmp_path, steps=9))
    assert again[0]["digests"]["8"] == after[0]["digests"]["8"]
