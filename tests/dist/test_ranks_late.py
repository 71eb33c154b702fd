"""A rank that does not come is told of, not waited for in silence."""

from __future__ import annotations

from dist.world import World


def test_a_checkpointer_that_other_ranks_do_not_make_says_what_it_waits_for(tmp_path):
    with World("late") as world:
        first, second = world.run(2, root=tmp_path / "late", late_seconds=2.0)
        assert first["finished"] and second["finished"]
        [told] = first["warnings"]
        assert (
            "rank 0 has waited 0.5 s for the other ranks to make their Checkpointer. All 2 ranks have to"
            in told
        )
        assert "warnings" not in second


def test_ranks_that_come_in_time_are_told_nothing(tmp_path):
    with World("late") as world:
        for said in world.run(2, root=tmp_path / "run", late_seconds=0.0):
            assert said["finished"] and "warnings" not in said
