"""Ranks whose records leave out rows of zeros, and what replay makes of them on any number of ranks."""

from __future__ import annotations

import pytest

from dist.world import World, ended
from holdfast.store.log.chain import read_journal
from holdfast.store.run_store import LocalStore

STEPS = 4


@pytest.fixture(scope="module")
def world():
    with World("touching") as world:
        yield world


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("others, other", [(3, "fsdp"), (1, "plain"), (2, "fsdp")])
def test_two_ranks_that_are_killed_come_back_from_what_they_touched(world, tmp_path, others, other):
    """Each record takes, beside its JSON, what was touched of its rank's shards and at most 5 % more."""
    before = world.run(2, root=tmp_path, kind="fsdp", steps=STEPS, killed=True)
    assert [said["code"] for said in before] == [-9, -9], before
    with LocalStore.read(tmp_path) as reader:
        for rank, said in enumerate(before):
            records = read_journal(reader, f"rank-{rank:05d}").records
            assert [*records] == [*range(1, STEPS + 1)]
            for step, record in records.items():
                assert [update["codec"]["kind"] for update in record.about["updates"]] == ["rows"]
                assert record.payload_bytes <= 1.05 * said["touched"][str(step)] < 0.3 * said["dense"]
    after = ended(world.run(others, root=tmp_path, kind=other, steps=STEPS))
    assert after[0]["resumed"] == STEPS
    assert after[0]["digests"][str(STEPS)] == before[0]["digests"][str(STEPS)]


def test_ranks_that_hold_nothing_of_a_parameter_are_killed_and_come_back(world, tmp_path):
    """Two of four have no row of a stack of two experts, and one of them alone stores that."""
    before = world.run(4, root=tmp_path, kind="fsdp", steps=STEPS, experts=2, killed=True)
    after = ended(world.run(4, root=tmp_path, kind="fsdp", steps=STEPS, experts=2))
    assert {said["resumed"] for said in after} == {STEPS}
    assert after[0]["digests"][str(STEPS)] == before[0]["digests"][str(STEPS)]


def test_experts_without_a_token_on_any_rank_of_ddp_take_nothing(world, tmp_path):
    """Parameters are stored by one rank each, so the records of both together take what was touched."""
    before = world.run(2, root=tmp_path, kind="ddp", steps=STEPS, killed=True)
    with LocalStore.read(tmp_path) as reader:
        records = [read_journal(reader, f"rank-{rank:05d}").records for rank in range(2)]
    for step in range(1, STEPS + 1):
        taken = sum(each[step].payload_bytes for each in records)
        assert taken <= 1.05 * before[0]["touched"][str(step)] + 2 * 4096, (taken, before)
    after = ended(world.run(2, root=tmp_path, kind="ddp", steps=STEPS))
    assert after[0]["digests"][str(STEPS)] == before[0]["digests"][str(STEPS)]
