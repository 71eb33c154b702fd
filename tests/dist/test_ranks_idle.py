"""Several ranks that iterate without a step are told, and refused in the end, as one process is."""

from __future__ import annotations

import pytest

from dist.world import World

TOLD = "in the last 5 iterations none of the optimizers that the Checkpointer was given has stepped"


@pytest.fixture(scope="module")
def world():
    with World("idling") as world:
        yield world


def ran(world, root, **order):
    ranks = world.run(2, root=root, **order)
    for said in ranks:
        assert said.get("finished"), said.get("trace", said)
        yield said.get("warnings", []), said


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_iterations_in_which_nobody_steps_are_told_and_then_refused(world, tmp_path, kind):
    for told, said in ran(world, tmp_path, kind=kind, habit="nothing", iterations=30):
        assert [text for text in told if TOLD in text] == told and len(told) == 1
        assert "in each of the last 20 iterations" in said["refused"] and said["idle"] == 19


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_that_are_accumulated_are_seen_until_it_is_too_long(world, tmp_path, kind):
    for told, said in ran(world, tmp_path / "run", kind=kind, habit="summed", iterations=19):
        assert (told, said["steps"]) == ([], 3)
    for told, said in ran(world, tmp_path / "other", kind=kind, habit="summed", iterations=30):
        assert told == [] and said["idle"] == 19 and "refused" in said


def test_where_accumulation_cannot_be_seen_it_is_told_as_what_it_may_be(world, tmp_path):
    for told, said in ran(world, tmp_path / "few", kind="fsdp", habit="unsynchronised", iterations=4):
        assert (told, said["steps"]) == ([], 3)
    for told, said in ran(world, tmp_path / "run", kind="fsdp", habit="unsynchronised", iterations=19):
        [text] = told
        assert TOLD in text and "Where gradients are accumulated over as many, nothing is wrong." in text
        assert said["steps"] == 3
