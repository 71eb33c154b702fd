"""Several ranks that train on compressed gradients: DDP by a communication hook, sharded ones each by itself."""

from __future__ import annotations

import pytest

from dist.world import ended
from holdfast.store.disk import Disk
from holdfast.store.log.segments import read_segment, segments
from holdfast.store.reader import RunReader

TOPK, INT8 = ("topk", 0.3), ("int8", 16)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "kind, ranks, codec", [("ddp", 2, INT8), ("fsdp", 3, INT8), ("fsdp", 2, TOPK), ("hsdp", 4, TOPK)]
)
def test_a_closed_run_goes_on_as_if_it_had_not_been(world, tmp_path, kind, ranks, codec):
    """Residuals come back, those of each rank to it."""
    whole = ended(world.run_undisturbed(ranks, kind=kind, steps=9, codec=codec))
    dense = ended(world.run_undisturbed(ranks, kind=kind, steps=9))
    assert whole[0]["losses"] != dense[0]["losses"]
    ended(world.run(ranks, kind=kind, root=tmp_path / "cut", steps=5, codec=codec, base_every=3))
    rest = ended(world.run(ranks, kind=kind, root=tmp_path / "cut", steps=9, codec=codec))
    for one, other in zip(whole, rest, strict=True):
        assert (other["resumed"], other["exactness"]) == (5, "continuation")
        assert other["losses"] == one["losses"][5:]
        assert other["digests"].items() <= one["digests"].items()


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("codec", [TOPK, INT8])
@pytest.mark.parametrize("kind, ranks", [("ddp", 2), ("fsdp", 2), ("fsdp", 3)])
def test_a_run_that_died_comes_back_to_its_newest_step_without_residuals(world, tmp_path, kind, ranks, codec):
    """Of three ranks of FSDP2 two hold nothing of a parameter, and one of them alone stores that."""
    died = world.run(
        ranks, kind=kind, root=tmp_path, steps=12, codec=codec, base_every=3, pause=0.05, kill=[1, 11]
    )
    state = ended(world.run(ranks, kind=kind, root=tmp_path, steps=12, codec=codec))
    assert state[0]["resumed"] >= max(said["durable"] for said in died)
    assert {said["exactness"] for said in state} == {"state"}
    assert state[0]["digests"][str(state[0]["resumed"])] == died[0]["digests"][str(state[0]["resumed"])]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_the_newest_point_that_training_goes_on_from_is_one_that_all_ranks_were_at(world, tmp_path, kind):
    """A base that is made beside training mostly is not: each rank copies its residuals when it can."""
    steps, common = 20, {"kind": kind, "codec": TOPK}
    whole = ended(world.run_undisturbed(2, steps=steps, **common))
    world.run(
        2, root=tmp_path / "run", steps=steps, save_at=4, keep_last=99, base_every=3, pause=0.06,
        kill=[0, steps - 1], **common,
    )  # fmt: skip
    with RunReader(tmp_path / "run") as reader:
        newest = reader.line()[0].step
    rest = world.run(2, root=tmp_path / "run", steps=steps, resume={"exactness": "continuation"}, **common)
    for one, other in zip(whole, ended(rest), strict=True):
        assert other["exactness"] == "continuation" and 4 <= other["resumed"] <= newest
        assert other["losses"] == one["losses"][other["resumed"] :]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kinds", [("ddp", 2, "ddp", 3), ("fsdp", 3, "fsdp", 2), ("fsdp", 2, "plain", 1)])
def test_compressed_records_are_replayed_under_another_parallelism(world, tmp_path, kinds):
    kind, ranks, other, others = kinds
    before = world.run(
        ranks, kind=kind, root=tmp_path, steps=9, codec=TOPK, base_every=3, pause=0.03, kill=[0, 9]
    )
    after = ended(world.run(others, kind=other, root=tmp_path, steps=10, codec=TOPK))
    step = str(after[0]["resumed"])
    assert int(step) > 0 and after[0]["digests"][step] == before[0]["digests"][step]


def test_residuals_of_each_rank_of_a_hook_are_not_those_of_ranks_without_it(world, tmp_path):
    """Those would add unlike residuals to like gradients, and no longer hold the same: residuals begin at zero."""
    ended(world.run(2, kind="ddp", root=tmp_path, steps=5, codec=TOPK))
    after = ended(world.run(2, kind="plain", root=tmp_path, steps=5, codec=TOPK))
    assert {(said["resumed"], said["exactness"]) for said in after} == {(5, "state")}


def test_two_ranks_record_no_more_than_three_halves_of_a_percent(world, tmp_path):
    """Of Adam's whole state, both together, and neither more than it would by itself."""
    width = 30_000
    ended(
        world.run(
            2, kind="ddp", root=tmp_path, steps=3, codec=("topk", 0.01), width=width, unit_bytes=1 << 20
        )
    )
    state_bytes = 12 * (7 * width + 3 * width + 2 * width)
    by_rank = []
    for stream in ("rank-00000", "rank-00001"):
        records = [
            r for ref in segments(Disk(tmp_path), stream) for r in read_segment(Disk(tmp_path), ref)[0]
        ]
        assert len(records) == 3
        by_rank.append(max(record.parts[0][0] for record in records))
    assert sum(by_rank) < 0.015 * state_bytes + 2 * 4096, (by_rank, state_bytes)


def test_a_gradient_made_dense_that_one_rank_has_no_room_for_is_followed_by_a_base_of_all(world, tmp_path):
    """The other rank stores another parameter, and knows nothing of it."""
    options = {
        "kind": "ddp",
        "root": tmp_path,
        "codec": ("topk", 0.01),
        "width": 3000,
        "deadline_seconds": 40,
        "unit_bytes": 1 << 20,
    }
    ranks = ended(world.run(2, steps=6, dense_at=3, save_at=6, **options))
    assert sorted(said["lost"] > 0 for said in ranks) == [False, True]
    again = ended(world.run(2, steps=6, **options))
    assert again[0]["resumed"] == 6 and again[0]["digests"]["6"] == ranks[0]["digests"]["6"]


def test_residuals_for_which_memory_has_no_room_are_in_bases_that_all_ranks_wait_for(world, tmp_path):
    """They are copied at the end of one step, which none of the ranks can do beside training."""
    options = {"kind": "ddp", "root": tmp_path, "codec": INT8, "deadline_seconds": 20}
    whole = ended(world.run(2, steps=9, memory=30_000, base_every=3, **options))
    again = ended(world.run(2, steps=9, resume={"before": 9, "exactness": "continuation"}, **options))
    step = again[0]["resumed"]
    assert 0 < step < 9, "there was no base, or only that at the end"
    for one, other in zip(whole, again, strict=True):
        assert other["losses"] == one["losses"][step:]


def test_topk_refuses_a_hook_of_the_script(world, tmp_path):
    said = world.run(2, root=tmp_path / "run", steps=3, kind="ddp", codec=("topk", 0.3), spoilt="by a hook")
    for each in said:
        assert each["error"].startswith("BadInput: the model has a communication hook already"), each
    assert not (tmp_path / "run").exists()
