"""A newer base of several ranks, made in one process without the script: bit for bit what the ranks would have made."""

from __future__ import annotations

import shutil
from contextlib import suppress

import pytest

from combined import one_in
from dist.world import ended, flip
from holdfast import failpoints
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.errors import BadInput, NoCommit
from holdfast.store.disk import Disk
from holdfast.store.format.payload_files import regions
from holdfast.store.log.segments import read_segment, segments
from holdfast.store.reader import RunReader


class Ended(BaseException):
    """In place of the death of the process, which would do no more than this."""


def end():
    raise Ended


def content(root, step):
    """Of a base: what it holds by key, in which regions, and of each rank the progress."""
    with RunReader(root) as reader:
        manifest = reader.at(step)
        assert reader.verify(manifest) == []
        atoms = reader.atoms(manifest)
        held = {key: bytes(reader.read_atom(manifest, atom)) for key, atom in atoms.items()}
        cuts = regions(manifest, atoms)
        progress = {stream: dict(share.progress) for stream, share in manifest.shares.items()}
        for each in progress.values():
            del each["rates"]
            each["random"] = each["random"]["torch"]  # the only generator that the script seeds
        return held, cuts, progress


PLACES = [("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4)]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "place, optimizer",
    [(("ddp", 2), "adamw"), *one_in(4, PLACES, ["sgd", "adamw", "foreach", "fused"])],
)
def test_a_compacted_base_is_that_of_the_ranks_bit_for_bit(world, tmp_path, place, optimizer):
    kind, ranks = place
    options = {"kind": kind, "optimizer": optimizer, "base_every": 100}
    ended(world.run(ranks, root=tmp_path / "live", steps=9, save_at=6, **options))
    whole = ended(world.run(ranks, root=tmp_path / "run", steps=9, **options))
    done = compact(tmp_path / "run", 6)
    assert (done.base.step, done.from_step, done.base.oldest_step) == (6, 0, 6)
    assert content(tmp_path / "run", 6) == content(tmp_path / "live", 6)
    with RunReader(tmp_path / "run") as reader:
        assert [ref.step for ref in reader.commits()] == [6]
    rest = ended(world.run(ranks, root=tmp_path / "run", steps=10, **options))
    assert rest[0]["resumed"] == 9 and rest[0]["digests"]["9"] == whole[0]["digests"]["9"]


def test_a_compacted_run_goes_on_with_another_number_of_ranks(world, tmp_path):
    whole = ended(world.run(3, kind="fsdp", root=tmp_path, steps=9, base_every=100))
    compact(tmp_path, 5)
    for ranks, step in ((2, 7), (1, 6)):
        shutil.copytree(tmp_path, copy := tmp_path.with_name(f"{tmp_path.name}-{ranks}"))
        found = ended(world.run(ranks, kind="fsdp", root=copy, steps=step, resume={"step": step}))
        assert found[0]["digests"] == {str(step): whole[0]["digests"][str(step)]}


def test_of_bases_that_ranks_made_at_several_steps_one_of_one_step_is_made(world, tmp_path):
    ended(world.run(2, kind="fsdp", root=tmp_path, steps=34, base_every=5, pause=0.05))
    before = ended(world.run(2, kind="fsdp", root=tmp_path, steps=40, base_every=1000))
    with RunReader(tmp_path) as reader:
        newest = reader.head()
    assert newest.oldest_step < newest.step < 38
    done = compact(tmp_path, newest.step + 2)
    assert (done.from_step, done.base.oldest_step) == (newest.step, newest.step + 2)
    after = ended(world.run(2, kind="fsdp", root=tmp_path, steps=40))
    assert after[0]["resumed"] == 40 and after[0]["digests"]["40"] == before[0]["digests"]["40"]


def test_a_rank_that_stores_nothing_has_its_part_of_a_compacted_base(world, tmp_path):
    before = ended(world.run(2, kind="ddp", root=tmp_path, steps=9, tiny=True, base_every=100))
    compact(tmp_path, 5)
    after = ended(world.run(2, kind="ddp", root=tmp_path, steps=9, tiny=True))
    assert after[0]["resumed"] == 9 and after[0]["digests"]["9"] == before[0]["digests"]["9"]


@pytest.mark.parametrize(
    "more, message",
    [({"average": True}, "something is done after every update"),
     ({"optimizer": "global"}, "its optimizer .*Global is not one of")],
)  # fmt: skip
def test_what_updates_all_parameters_at_once_is_refused(world, tmp_path, more, message):
    ended(world.run(2, kind="ddp", root=tmp_path, steps=5, base_every=100, **more))
    with pytest.raises(BadInput, match=message):
        compact(tmp_path, 4)


def test_a_damaged_record_of_one_rank_is_no_reason_to_remove_anything(world, tmp_path):
    before = ended(world.run(2, kind="fsdp", root=tmp_path, steps=9, base_every=100))
    ref = segments(Disk(tmp_path), "rank-00001")[-1]
    records, _ = read_segment(Disk(tmp_path), ref)
    flip(tmp_path / ref.path, records[-1].offset + records[-1].header_bytes + 8200)
    with pytest.raises(
        BadInput, match=r"cannot be replayed to step 9 .* fails its checksum.* Nothing was removed"
    ):
        compact(tmp_path, 9)
    after = ended(world.run(2, kind="fsdp", root=tmp_path, steps=8))
    assert after[0]["digests"] == {"8": before[0]["digests"]["8"]}


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """Of two ranks, and what they had by step."""
    root = tmp_path_factory.mktemp("compacted") / "run"
    return root, ended(world.run(2, kind="fsdp", root=root, steps=9, base_every=100))[0]["digests"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("failpoint", [
    "before_data_sync", "after_data_sync:2", "after_manifest_write", "after_manifest_rename", "after_compacted",
    "after_retire_unlink", "before_retired_unlink",
])  # fmt: skip
def test_ended_while_it_compacts_it_has_lost_no_more_than_what_was_to_go(
    world, run, tmp_path, monkeypatch, failpoint
):
    root, digests = run
    shutil.copytree(root, copy := tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(Ended):
        for name, value in {"armed": failpoint, "action": end, "_arrivals": {}}.items():
            patch.setattr(failpoints, name, value)
        compact(copy, 6)
    shutil.copytree(copy, tmp_path / "again")
    with suppress(NoCommit):  # step 6 is a base already
        compact(tmp_path / "again", 6)
    orders = {9: {"root": copy}, 6: {"root": tmp_path / "again", "resume": {"step": 6}}}
    said = world.run_each(2, [{"kind": "fsdp", "steps": step, **order} for step, order in orders.items()])
    assert [ended(found)[0]["digests"] for found in said] == [
        {f"{step}": digests[f"{step}"]} for step in orders
    ]
