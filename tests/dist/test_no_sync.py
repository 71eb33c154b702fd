"""Gradients that DDP ranks add up by themselves under ``no_sync`` before they exchange them: with and without a codec's
communication hook."""

from __future__ import annotations

import pytest

from dist.world import ended

COMMON = {"kind": "ddp", "accumulate": 3}
CODECS = [None, ("topk", 0.3), ("int8", 16)]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("codec", CODECS)
def test_a_run_that_accumulates_goes_on_as_if_it_had_not_been_closed(world, tmp_path, codec):
    """A step is what ends with an exchange, and mid-accumulation is none."""
    common = {**COMMON, "codec": codec}
    whole = ended(world.run_undisturbed(2, steps=9, **common))
    at_once = ended(world.run(2, root=tmp_path / "once", steps=9, **common | {"accumulate": 1}))
    assert len(whole[0]["losses"]) == 9 and whole[0]["losses"] != at_once[0]["losses"]
    assert whole[0]["digests"] == whole[1]["digests"] and len(whole[0]["digests"]) == 10
    ended(world.run(2, root=tmp_path / "cut", steps=5, base_every=3, **common))
    rest = ended(world.run(2, root=tmp_path / "cut", steps=9, **common))
    for one, other in zip(whole, rest, strict=True):
        assert (other["resumed"], other["exactness"]) == (5, "continuation")
        assert other["losses"] == one["losses"][5:]
        assert other["digests"].items() <= one["digests"].items()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("codec", CODECS[::-1])
def test_every_step_of_a_run_that_accumulates_comes_back(world, tmp_path, codec):
    before = world.run(
        2, root=tmp_path, steps=8, base_every=100, pause=0.05, kill=[1, 8], **COMMON, codec=codec
    )
    digests = before[0]["digests"]
    after = ended(world.run(2, root=tmp_path, steps=8, **COMMON, codec=codec))
    step = after[0]["resumed"]
    assert step >= max(said["durable"] for said in before) and step > 3
    assert after[0]["digests"][str(step)] == digests[str(step)]
