"""Several processes of a ``Trainer`` with the callback end, after they were killed, as ones that never were."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

from dist.world import World

KINDS = {
    "plain": {},
    "own generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "accumulation": {"gradient_accumulation_steps": 3},
    "workers": {"dataloader_num_workers": 2},
    "masks": {"data": "masks"},
    "masks and accumulation": {"data": "masks", "gradient_accumulation_steps": 2},
    "drop": {"dataloader_drop_last": True},
    "stream": {"data": "stream", "max_steps": 8},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "steps": {"max_steps": 7, "optim": "adafactor"},
}
"""Two processes: 4 batches of each in an epoch, two epochs."""


@pytest.fixture(scope="module")
def world():
    with World("trained") as world:
        yield world


def ended(ranks):
    for said in ranks:
        assert said.get("finished") and said["processes"] == len(ranks), said.get("trace") or said
    return ranks


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again_they_end_the_same(world, tmp_path, kind):
    whole = ended(world.run(2, **KINDS[kind]))
    micro_steps = KINDS[kind].get("gradient_accumulation_steps", 1)
    for killed, step in enumerate((2, 4) if micro_steps > 1 else (2, 5)):
        cut = world.run(2, root=tmp_path / "run", kill=[killed % 2, step], **KINDS[kind])
        assert cut[killed % 2]["code"] == -9, cut
        assert not any(said.get("finished") for said in cut)
    rest = ended(world.run(2, root=tmp_path / "run", **KINDS[kind]))
    for one, other in zip(whole, rest, strict=True):
        assert 0 < len(other["losses"]) < len(one["losses"])
        assert other["losses"] == one["losses"][len(one["losses"]) - len(other["losses"]) :]
        assert other["digests"] == one["digests"]


@pytest.mark.parametrize("others", [1, 3])
def test_another_number_of_processes_is_refused_by_name(world, tmp_path, others):
    ended(world.run(2, root=tmp_path / "run", max_steps=3))
    said = world.run(others, root=tmp_path / "run")
    assert f"was trained with processes 2, now it is {others}" in said[0]["error"]
    ended(world.run(2, root=tmp_path / "run"))
