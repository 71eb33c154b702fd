"""Tensor parallelism, by itself and under FSDP2: ranks hold columns, rows, parts of parts, and the same as others."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from combined import one_in
from dist.world import ended
from holdfast.cli.main import app
from holdfast.store.format.payload_files import index_of_stream
from holdfast.store.reader import RunReader

WIDTH = 10
"""Of the layer that is cut in two, and each half in two again: of three rows and of two."""


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "more, place",
    one_in(
        2,
        [{"optimizer": "adamw"}, {"codec": ("int8", 16)}, {"optimizer": "sgd"}],
        [("tp", 2), ("fsdp_tp", 4)],
    ),
    ids=str,
)
def test_a_run_that_stopped_goes_on_as_if_it_had_not(world, tmp_path, place, more):
    kind, ranks = place
    common = {"kind": kind, "mlp": WIDTH, **more}
    whole = ended(world.run_undisturbed(ranks, steps=9, **common))
    ended(world.run(ranks, root=tmp_path / "cut", steps=5, base_every=3, **common))
    rest = ended(world.run(ranks, root=tmp_path / "cut", steps=9, base_every=3, **common))
    for one, other in zip(whole, rest, strict=True):
        assert other["resumed"] == 5
        assert other["losses"] == one["losses"][5:]
        assert other["digests"] == {step: d for step, d in one["digests"].items() if int(step) >= 5}


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind, ranks", [("fsdp_tp", 4), ("tp", 2)])
def test_a_killed_rank_ends_the_others_and_all_go_on_from_one_step(world, tmp_path, kind, ranks):
    common = {"kind": kind, "mlp": WIDTH, "steps": 12, "base_every": 3}
    whole = ended(world.run_undisturbed(ranks, **common))
    cut = world.run(ranks, root=tmp_path / "cut", kill=[1, 9], pause=0.03, **common)
    rest = ended(world.run(ranks, root=tmp_path / "cut", **common))
    assert max(said["durable"] for said in cut) <= rest[0]["resumed"] <= 9
    assert rest[0]["digests"].items() <= whole[0]["digests"].items()


KINDS = [
    ("tp", 2, "plain", 1), ("tp", 2, "ddp", 2), ("tp", 2, "fsdp", 3), ("fsdp_tp", 4, "plain", 1),
    ("fsdp_tp", 4, "fsdp", 2), ("fsdp_tp", 4, "tp", 2), ("fsdp_tp", 4, "ddp", 2), ("ddp", 2, "tp", 2),
    ("fsdp", 3, "fsdp_tp", 4), ("plain", 1, "fsdp_tp", 4),
]  # fmt: skip


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kinds, width", one_in(2, KINDS, [WIDTH, 12]))
def test_a_run_goes_on_under_another_parallelism(world, tmp_path, kinds, width):
    """With records behind the base, replayed in the cut that wrote them."""
    kind, ranks, other, others = kinds
    before = ended(world.run(ranks, kind=kind, root=tmp_path, steps=5, base_every=100, mlp=width))
    after = ended(world.run(others, kind=other, root=tmp_path, steps=8, base_every=3, mlp=width))
    assert after[0]["resumed"] == 5
    assert after[0]["digests"]["5"] == before[0]["digests"]["5"]
    again = ended(world.run(1, kind="plain", root=tmp_path, steps=8, mlp=width))
    assert again[0]["digests"]["8"] == after[0]["digests"]["8"]


def test_a_matrix_of_which_a_rank_holds_several_pieces_is_refused_with_the_way_out(world, tmp_path):
    said = world.run(2, kind="plain", root=tmp_path / "run", steps=2, mlp=12, spoilt="by strides")
    assert all("first.weight is cut into several regions on one rank" in each["error"] for each in said)
    assert all("Redistribute it first" in each["error"] for each in said)
    assert not (tmp_path / "run").exists()


def test_what_several_ranks_hold_one_of_them_stores(world, tmp_path):
    ended(world.run(4, kind="fsdp_tp", root=tmp_path, steps=3, mlp=WIDTH))
    shown = CliRunner().invoke(app, ["show", str(tmp_path)]).output
    assert ", one of 4 ranks" in shown and re.search(r"first\.weight +10x7 +4 parts +F32 param", shown), shown
    with RunReader(tmp_path) as reader:
        manifest = reader.head()
        assert reader.verify(manifest) == []
        stored = sum(
            fragment["global"][1][0] - fragment["global"][0][0]
            for stream in manifest.streams
            for atom in index_of_stream(reader.disk, manifest, stream)["atoms"].values()
            if (atom["name"], atom["slot"]) == ("second.bias", "param")
            for fragment in atom["fragments"]
        )
    assert stored == 3


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind, ranks", [("tp", 2), ("fsdp_tp", 4)])
def test_clipping_here_is_refused_where_torch_has_no_norm_of_all(world, tmp_path, kind, ranks):
    """One parameter is cut over other ranks than the others are, or not at all."""
    for said in world.run(ranks, kind=kind, root=tmp_path / "run", steps=3, mlp=WIDTH, clip_norm=0.5):
        assert "BadInput: clip_norm = 0.5: some parameters are sharded, others are not" in said["error"]
    assert not (tmp_path / "run").exists()
