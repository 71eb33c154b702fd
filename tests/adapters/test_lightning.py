"""A Lightning script with the callback ends, after it was killed and started again, as one that never was."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from dist.world import World

KINDS = {
    "plain": {},
    "noise": {"noise": True},
    "own generator": {"own_generator": True},
    "workers": {"num_workers": 2},
    "accumulation": {"accumulate_grad_batches": 3},
    "often validated": {"val_check_interval": 2},
    "not validated": {"validate": False, "noise": True},
    "plateau": {"plateau": True},
    "part of the data": {"limit_train_batches": 3, "own_generator": True, "noise": True},
    "steps": {"max_steps": 10, "max_epochs": -1},
    "by hand": {"by_hand": True},
    "stopping": {"stopping": True, "max_epochs": 9},
}
"""In one process 8 batches an epoch, in two 4; three epochs."""


@pytest.fixture(scope="module")
def world():
    with World("lightened") as world:
        yield world


def ended(ranks):
    for said in ranks:
        assert said.get("finished") and said["processes"] == len(ranks), said.get("trace") or said
    return ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again_it_ends_the_same(world, tmp_path, kind, ranks):
    whole = ended(world.run(ranks, output=tmp_path / "whole", **KINDS[kind]))
    steps = whole[0]["steps"]
    for step in (2, steps // 3 + 1, steps):
        cut = world.run(
            ranks, root=tmp_path / "run", output=tmp_path / "cut", kill=[ranks - 1, step], **KINDS[kind]
        )
        assert cut[ranks - 1]["code"] == -9, cut
        assert not any(said.get("finished") for said in cut)
    rest = ended(world.run(ranks, root=tmp_path / "run", output=tmp_path / "cut", **KINDS[kind]))
    for one, other in zip(whole, rest, strict=True):
        assert 0 < len(other["losses"]) < len(one["losses"])
        assert other["losses"] == one["losses"][len(one["losses"]) - len(other["losses"]) :]
        assert other["digests"] == one["digests"]


@pytest.mark.parametrize("others", [1, 3])
def test_another_number_of_processes_is_refused_by_name(world, tmp_path, others):
    ended(world.run(2, root=tmp_path / "run", output=tmp_path, max_steps=3))
    said = world.run(others, root=tmp_path / "run", output=tmp_path)
    assert f"was trained with processes 2, now it is {others}" in said[0]["error"]


@pytest.mark.parametrize(
    "setting, text",
    [
        ({"ckpt_path": "last.ckpt"}, "would be loaded over the run"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs gives up the place"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches 1, now it is 2"),
    ],
)
def test_settings_that_lose_the_place_are_refused(world, tmp_path, setting, text):
    ended(world.run(1, root=tmp_path / "run", output=tmp_path, max_epochs=1))
    [said] = world.run(1, root=tmp_path / "run", output=tmp_path, **setting)
    assert text in said["error"], said
