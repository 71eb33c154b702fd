"""A rank that does not come, or gives what cannot be: the others hear of it at once, by its number."""

from __future__ import annotations

import pytest


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("more", [{}, {"save_at": 8}, {"save_at": 6}])
def test_a_rank_that_was_killed_is_named_to_who_waits_for_it(world, tmp_path, more):
    """In ``close`` and in ``save``; no collective of the training tells of it."""
    cut = world.run(3, kind="plain", root=tmp_path, steps=8, kill=[1, 5], deadline_seconds=40, **more)
    assert cut[1]["code"] == -9
    for other in (cut[0], cut[2]):
        assert "RankFailed: rank 1 has ended without a word" in other["error"], other
    rest = world.run(3, kind="plain", root=tmp_path, steps=8)
    assert {said["resumed"] for said in rest} <= {0, 1, 2, 3, 4} and all(said["finished"] for said in rest)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("stuck, killed", [(1, 2), (0, 1)])
def test_a_rank_that_is_stuck_after_another_died_ends_by_sigterm_with_all_it_had(
    world, tmp_path, stuck, killed
):
    """A launcher that starts the ranks again waits for its end, which no handler in Python could bring about."""
    cut = world.run(
        3, kind="plain", root=tmp_path, steps=16, stuck_at=[stuck, 6], kill=[killed, 14], pause=0.05,
        slow=[stuck, 3, 99], width=2500, unit_bytes=10**6, deadline_seconds=40,
    )  # fmt: skip
    assert (cut[stuck]["code"], cut[killed]["code"]) == (143, -9)
    rest = world.run(3, kind="plain", root=tmp_path, steps=8, width=2500, unit_bytes=10**6)
    assert {said["resumed"] for said in rest} == {6}, "the steps that waited for the disk are not lost"
    assert all(said["finished"] for said in rest)


def test_the_first_rank_that_was_killed_is_named(world, tmp_path):
    cut = world.run(2, kind="plain", root=tmp_path, steps=8, kill=[0, 8], deadline_seconds=40)
    assert cut[0]["code"] == -9
    assert "RankFailed: rank 0, which the others ask how far all are, does not answer" in cut[1]["error"]


def test_no_group_and_no_thread_is_left_when_all_have_closed(world, tmp_path):
    for said in world.run(2, kind="plain", root=tmp_path, steps=5, save_at=3):
        assert said["after"] == said["before"]


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    "wrong, message",
    [
        ("options_of", "BadInput: base_every = 0 must be whole steps, at least 1"),
        ("resume_of", "BadInput: resume takes step= or before=, not both"),
        ("between", "BadInput: an optimizer has stepped since step 3"),
    ],
)
def test_what_one_rank_is_refused_every_rank_is_told_at_once(world, tmp_path, wrong, message, who):
    given = {
        "options_of": {who: {"base_every": 0}}, "resume_of": {who: {"step": 1, "before": 2}}, "between": who
    }  # fmt: skip
    said = world.run(
        2, kind="plain", root=tmp_path, steps=5, save_at=3, deadline_seconds=40, **{wrong: given[wrong]}
    )
    assert message in said[who].get("refused", said[who]["error"])
    assert f"RankFailed: rank {who} failed" in said[1 - who]["error"] and message in said[1 - who]["error"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_a_rank_that_cannot_write_any_more_is_told_to_the_others_with_the_reason(world, tmp_path, kind, who):
    """Its file system has become read-only. Nothing that was durable is lost."""
    whole = world.run_undisturbed(2, kind=kind, steps=12)
    cut = world.run(2, kind=kind, root=tmp_path / "cut", steps=5000, read_only=[who, 9], deadline_seconds=40)
    assert "DiskFailed" in cut[who]["error"] and "Read-only file system" in cut[who]["error"]
    if kind == "plain":  # else the collective of the training has ended it
        assert f"RankFailed: rank {who} failed: DiskFailed: " in cut[1 - who]["error"]
    rest = world.run(2, kind=kind, root=tmp_path / "cut", steps=12)
    written = 8 if kind == "ddp" else 0  # without collectives the other rank may be steps behind
    for one, other in zip(whole, rest, strict=True):
        assert (
            max(written, *(said["durable"] for said in cut)) <= other["resumed"] <= 12 and other["finished"]
        )
        if kind == "ddp":
            assert other["digests"].items() <= one["digests"].items()
