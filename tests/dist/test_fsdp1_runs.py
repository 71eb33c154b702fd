"""FSDP1 with original parameters: a rank holds stretches of them, and its steps are recovered as any others."""

from __future__ import annotations

import shutil

import pytest

from combined import one_in
from dist.test_ranks import ended
from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


KINDS = ["fsdp1", "fsdp1 layers", "fsdp1 layers grad", "fsdp1 layers none"]
NO_SHARD = "The `NO_SHARD` sharding strategy is deprecated"


@pytest.mark.parametrize("kind, mlp", [*((kind, 0) for kind in KINDS), ("fsdp1 layers bf16", 9)])
def test_two_ranks_resume_and_end_as_if_they_had_not_stopped(world, tmp_path, kind, mlp):
    """No step is lost to a record, as one that seems to be changed otherwise than by the optimizer would be."""
    whole = ended(world.run(2, kind=kind, root=tmp_path / "whole", steps=9, mlp=mlp))
    ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=5, base_every=3, mlp=mlp))
    rest = ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=9, base_every=3, mlp=mlp))
    for one, other in zip(whole, rest, strict=True):
        assert other["resumed"] == 5
        assert other["losses"] == one["losses"][5:]
        assert other["digests"] == {step: d for step, d in one["digests"].items() if int(step) >= 5}
        assert one["lost"] == other["lost"] == 0
        assert not [text for text in other.get("warnings", []) if not text.startswith(NO_SHARD)]


RANKS = [(2, 3), (3, 2), (2, 1), (1, 2), (4, 3)]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 layers"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_goes_on_with_another_number_of_ranks(world, tmp_path, kind, ranks):
    """With records after the base, and from there once more."""
    one, other = ranks
    before = ended(world.run(one, kind=kind, root=tmp_path, steps=5, base_every=3))
    after = ended(world.run(other, kind=kind, root=tmp_path, steps=8, base_every=3))
    assert after[0]["resumed"] == 5
    assert after[0]["digests"]["5"] == before[0]["digests"]["5"]
    again = ended(world.run(other, kind=kind, root=tmp_path, steps=9))
    assert again[0]["digests"]["8"] == after[0]["digests"]["8"]


OTHERS = [
    ("fsdp1 layers", 2, "ddp", 2), ("fsdp1", 3, "fsdp", 2), ("fsdp1 layers", 3, "plain", 1),
    ("fsdp1 layers hybrid", 4, "fsdp1", 2), ("fsdp1", 2, "fsdp1 layers hybrid", 4), ("fsdp1 layers", 2, "hsdp", 4),
    ("ddp", 2, "fsdp1 layers", 3), ("fsdp", 3, "fsdp1", 2), ("plain", 1, "fsdp1 layers", 2), ("hsdp", 4, "fsdp1", 3),
]  # fmt: skip


@pytest.mark.parametrize("kinds, optimizer", one_in(2, OTHERS, ["sgd", "adamw", "foreach", "fused"]))
def test_a_run_goes_on_under_another_parallelism(world, tmp_path, kinds, optimizer):
    kind, ranks, other, others = kinds
    before = ended(world.run(ranks, kind=kind, root=tmp_path, steps=5, base_every=3, optimizer=optimizer))
    after = ended(world.run(others, kind=other, root=tmp_path, steps=6, base_every=3, optimizer=optimizer))
    assert after[0]["resumed"] == 5
    assert after[0]["digests"]["5"] == before[0]["digests"]["5"]


@pytest.mark.parametrize("kinds", OTHERS)
def test_a_run_begins_from_that_of_another_parallelism(world, tmp_path, kinds):
    """By resume(source=RUN@STEP): a step that records lead to, and one that a base has."""
    kind, ranks, other, others = kinds
    source = tmp_path / "source"
    before = ended(world.run(ranks, kind=kind, root=source, steps=6, save_at=4, base_every=50))
    for step in (4, 6):
        order = {"kind": other, "steps": step, "resume": {"source": f"{source}@{step}"}}
        after = ended(world.run(others, root=tmp_path / f"from{step}", **order))
        assert after[0]["resumed"] == step
        assert after[0]["digests"] == {str(step): before[0]["digests"][str(step)]}


def test_every_step_can_be_resumed(world, tmp_path):
    before = ended(world.run(2, kind="fsdp1", root=tmp_path / "run", steps=7, base_every=3, keep_last=9))
    for step in range(8):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        found = ended(world.run(2, kind="fsdp1", root=tmp_path / "copy", steps=step, resume={"step": step}))
        assert found[0]["digests"] == {str(step): before[0]["digests"][str(step)]}
        shutil.rmtree(tmp_path / "copy")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_others_and_all_go_on_from_one_step(world, tmp_path, killed):
    kind = "fsdp1 layers"
    whole = ended(world.run(2, kind=kind, root=tmp_path / "whole", steps=12))
    cut = world.run(2, kind=kind, root=tmp_path / "cut", steps=12, base_every=3, kill=[killed, 8])
    assert cut[killed]["code"] == -9
    rest = ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=12))
    assert max(said["durable"] for said in cut) <= rest[0]["resumed"] <= 8
    for one, other in zip(whole, rest, strict=True):
        assert other["losses"] == one["losses"][other["resumed"] :]
        assert other["digests"].items() <= one["digests"].items()
