"""The worlds themselves."""

from __future__ import annotations

from dist.world import World


def test_each_group_has_one_worker():
    with World("gloo_workers") as world:
        said = world.run(2)
    assert [(each["groups"], each["workers"]) for each in said] == [(2, 2), (2, 2)], said
