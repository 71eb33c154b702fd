"""FSDP1 with original parameters: a rank holds stretches of flattened ones, and its steps are recovered as any others."""

from __future__ import annotations

import pytest

from dist.test_ranks import ended
from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 layers", "fsdp1 layers grad", "fsdp1 none"])
def test_two_ranks_resume_and_end_as_if_they_had_not_stopped(world, tmp_path, kind):
    whole = ended(world.run(2, kind=kind, root=tmp_path / "whole", steps=9))
    ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=5, base_every=3))
    rest = ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=9, base_every=3))
    for one, other in zip(whole, rest, strict=True):
        assert other["resumed"] == 5
        assert other["losses"] == one["losses"][5:]
        assert other["digests"] == {step: d for step, d in one["digests"].items() if int(step) >= 5}
        assert "warnings" not in other, other["warnings"]
