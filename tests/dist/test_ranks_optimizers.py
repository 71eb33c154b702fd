"""Optimizers that need a whole matrix, on several ranks: Muon, and Adafactor, of which torch's takes no distributed
tensors; one like it that does is refused."""

from __future__ import annotations

import re

import pytest

from dist.world import ended
from holdfast.store.reader import RunReader

KINDS = [("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4)]
CASES = [
    ("adafactor", "ddp", 2), ("muon", "ddp", 2), ("factored", "ddp", 2), ("muon", "fsdp", 2), ("muon", "fsdp", 3),
    ("muon", "hsdp", 4),
]  # fmt: skip


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("optimizer, kind, ranks", CASES)
def test_a_run_goes_on_as_if_it_had_not_been_closed_or_killed(world, tmp_path, optimizer, kind, ranks):
    common = {"kind": kind, "optimizer": optimizer, "clip": False, "pause": 0.02}
    whole = ended(world.run_undisturbed(ranks, steps=12, **common))
    cut = {**common, "root": tmp_path / "cut", "base_every": 4}
    ended(world.run(ranks, steps=5, **cut))
    died = world.run(ranks, steps=12, kill=[ranks - 1, 9], wait_at=7, **cut)
    assert died[0]["resumed"] == 5
    rest = ended(world.run(ranks, steps=12, **cut))
    assert 7 <= rest[0]["resumed"] < 9
    for one, other in zip(whole, rest, strict=True):
        assert other["losses"] == one["losses"][other["resumed"] :]
        assert other["digests"].items() <= one["digests"].items()


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("optimizer, kind, ranks", CASES)
def test_a_saved_state_is_taken_by_any_other_parallelism(world, tmp_path, optimizer, kind, ranks):
    common = {"root": tmp_path, "optimizer": optimizer, "clip": False}
    said = ended(world.run(ranks, kind=kind, steps=4, save_at=4, **common))
    kinds = KINDS if optimizer == "muon" else [("ddp", 3)]
    for step, (other, others) in enumerate([*kinds, ("plain", 1)], start=5):
        found = ended(world.run(others, kind=other, steps=step, save_at=step, **common))
        assert found[0]["resumed"] == step - 1
        assert found[0]["digests"][str(step - 1)] == said[0]["digests"][str(step - 1)]
        said = found


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind, ranks", KINDS[1:])
def test_factors_that_are_not_cut_as_their_parameter_is_are_refused(world, tmp_path, kind, ranks):
    """Those of a matrix of which a rank has one row look like that row."""
    said = world.run(ranks, root=tmp_path, kind=kind, optimizer="factored", clip=False, steps=3)
    for rank in said:
        assert re.search(
            "ModelNotSupported: .*/row, of the shape .*, is not cut over the ranks as its", rank["error"]
        ), rank
        assert rank["at"] == 1


def test_factors_that_come_later_are_refused_before_a_base_has_them(world, tmp_path):
    options = {
        "kind": "fsdp",
        "optimizer": "factored later",
        "clip": False,
        "base_every": 2,
        "unit_bytes": 1 << 20,
    }
    said = world.run(2, root=tmp_path, steps=12, pause=0.05, **options)
    for rank in said:
        assert re.search(
            "ModelNotSupported: .*/row, of the shape .*, is not cut over the ranks as its", rank["error"]
        ), rank
        assert 3 <= rank["at"] < 8
    with RunReader(tmp_path) as reader:
        slots = {atom["slot"] for ref in reader.commits() for atom in reader.atoms(reader.load(ref)).values()}
    assert slots == {"param", "buffer"}
