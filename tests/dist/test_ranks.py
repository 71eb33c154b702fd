"""Several ranks with one run: they resume the same step, under the same parallelism or another one."""

from __future__ import annotations

import shutil
from itertools import product

import pytest

from combined import one_in
from dist.world import ended, flip
from holdfast.state.layout.regions import Region
from holdfast.store.disk import Disk
from holdfast.store.format.payload_files import regions
from holdfast.store.log.chain import verify_records
from holdfast.store.log.segments import read_segment, segments
from holdfast.store.reader import RunReader
from holdfast.store.run_store import LocalStore


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_resume_and_end_as_if_they_had_not_stopped(world, tmp_path, kind):
    whole = ended(world.run_undisturbed(2, kind=kind, steps=9))
    ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=5, base_every=3))
    rest = ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=9, base_every=3))
    for one, other in zip(whole, rest, strict=True):
        assert other["resumed"] == 5
        assert other["losses"] == one["losses"][5:]
        assert other["digests"] == {step: d for step, d in one["digests"].items() if int(step) >= 5}


KINDS = [
    ("ddp", 3, "ddp", 1), ("hsdp", 4, "fsdp", 2), ("ddp", 2, "fsdp", 3), ("fsdp", 2, "hsdp", 4), ("fsdp", 3, "ddp", 2),
    ("ddp", 2, "ddp", 4), ("fsdp", 2, "fsdp", 3), ("hsdp", 4, "plain", 1), ("plain", 1, "fsdp", 4),
]  # fmt: skip
OPTIMIZERS = ["sgd", "adamw", "foreach", "fused"]


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("kinds, optimizer", one_in(4, KINDS, OPTIMIZERS))
def test_a_run_goes_on_with_other_ranks_under_another_parallelism(world, tmp_path, kinds, optimizer):
    """With records after the base, and from there once more."""
    kind, ranks, other, others = kinds
    common = {"root": tmp_path, "optimizer": optimizer}
    before = ended(world.run(ranks, kind=kind, steps=5, base_every=3, **common))
    after = ended(world.run(others, kind=other, steps=8, base_every=3, **common))
    assert after[0]["resumed"] == 5
    assert after[0]["digests"]["5"] == before[0]["digests"]["5"]
    again = ended(world.run(others, kind=other, steps=9, **common))
    assert again[0]["digests"]["8"] == after[0]["digests"]["8"]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kinds", KINDS[2:])
def test_a_run_begins_from_that_of_another_parallelism(world, tmp_path, kinds):
    """By resume(source=RUN@STEP): a step that records lead to, and one that a base has."""
    kind, ranks, other, others = kinds
    source = tmp_path / "source"
    before = ended(world.run(ranks, kind=kind, root=source, steps=6, save_at=4, base_every=50))
    orders = [
        {"kind": other, "root": tmp_path / f"{step}", "steps": step, "resume": {"source": f"{source}@{step}"}}
        for step in (4, 6)
    ]
    for step, after in zip((4, 6), map(ended, world.run_each(others, orders)), strict=True):
        assert after[0]["resumed"] == step
        assert after[0]["digests"] == {str(step): before[0]["digests"][str(step)]}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_step_can_be_resumed(world, tmp_path, kind):
    before = ended(world.run(2, kind=kind, root=tmp_path / "run", steps=7, base_every=3, keep_last=9))
    for step in range(8):
        shutil.copytree(tmp_path / "run", tmp_path / f"{step}")
    orders = [
        {"kind": kind, "root": tmp_path / f"{step}", "steps": step, "resume": {"step": step}}
        for step in range(8)
    ]
    for step, found in enumerate(world.run_each(2, orders)):
        assert ended(found)[0]["digests"] == {str(step): before[0]["digests"][str(step)]}


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind, killed", list(product(["ddp", "fsdp"], [0, 1])))
def test_a_killed_rank_ends_the_others_and_all_go_on_from_one_step(world, tmp_path, kind, killed):
    whole = ended(world.run_undisturbed(2, kind=kind, steps=12))
    cut = world.run(2, kind=kind, root=tmp_path / "cut", steps=12, base_every=3, kill=[killed, 8])
    assert cut[killed]["code"] == -9
    assert not cut[1 - killed].get("finished")
    rest = ended(world.run(2, kind=kind, root=tmp_path / "cut", steps=12))
    assert max(said["durable"] for said in cut) <= rest[0]["resumed"] <= 8
    assert rest[0]["resumed"] == rest[1]["resumed"]
    for one, other in zip(whole, rest, strict=True):
        assert other["losses"] == one["losses"][other["resumed"] :]
        assert other["digests"].items() <= one["digests"].items()


@pytest.mark.parametrize("who", [0, 1])
def test_a_mistake_of_one_rank_is_told_to_the_others_by_its_number(world, tmp_path, who):
    """Also where it is the first one, with which the board goes."""
    cut = world.run(2, kind="plain", root=tmp_path, steps=5000, raises=[who, 3])
    assert cut[who]["error"] == "ValueError: a mistake of the script"
    assert f"RankFailed: rank {who} failed: ValueError: a mistake of the script" in cut[1 - who]["error"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind, who", one_in(2, ["ddp", "fsdp", "plain"], [0, 1]))
def test_all_ranks_stop_at_one_step_on_a_sigterm_to_any(world, tmp_path, kind, who):
    cut = world.run(2, kind=kind, root=tmp_path, steps=5000, signal_at=[who, 5])
    assert [said["error"] for said in cut] == ["SystemExit: 143"] * 2
    rest = ended(world.run(2, kind=kind, root=tmp_path, steps=cut[0]["at"]))
    assert cut[0]["at"] == cut[1]["at"] == rest[0]["resumed"]


def test_save_makes_a_base_of_one_step_on_all_ranks(world, tmp_path):
    ended(said := world.run(2, kind="fsdp", root=tmp_path, steps=5, save_at=4))
    assert [each["saved"] for each in said] == [4, 4]
    with RunReader(tmp_path) as reader:
        manifest = reader.head()
        assert (manifest.step, manifest.oldest_step, list(manifest.shares)) == (
            4,
            4,
            ["rank-00000", "rank-00001"],
        )
        assert reader.verify(manifest) == []
        shapes = {key: tuple(atom["shape"]) for key, atom in reader.atoms(manifest).items()}
        assert shapes["first.weight/exp_avg"] == (13, 7)
        atoms = reader.atoms(manifest)
        first = atoms["first.weight/param"]
        assert regions(manifest, atoms)["first.weight/param"] == [
            (0, Region((0, 0), (7, 7))), (1, Region((7, 0), (13, 7))),
        ]  # fmt: skip
        assert len(reader.read_atom(manifest, first)) == 13 * 7 * 4


def test_bases_are_made_beside_training_by_all_ranks_each_at_its_pace(world, tmp_path):
    whole = ended(world.run_undisturbed(2, kind="fsdp", steps=40))
    ended(world.run(2, kind="fsdp", root=tmp_path / "run", steps=36, base_every=3, pause=0.05))
    with RunReader(tmp_path / "run") as reader:
        manifest = reader.head()
        assert manifest.step > 10
        assert reader.verify(manifest) == []
        assert len({file.step for file in manifest.files.values()}) > 2
        assert verify_records(reader, manifest) == (36, [])
    rest = ended(world.run(2, kind="fsdp", root=tmp_path / "run", steps=40))
    assert rest[0]["resumed"] == 36
    assert rest[0]["digests"].items() <= whole[0]["digests"].items()


def test_a_damaged_record_of_one_rank_ends_the_chain_of_all(world, tmp_path):
    before = ended(world.run(2, kind="fsdp", root=tmp_path, steps=9, base_every=100))
    segment = max((tmp_path / "journal" / "rank-00001").iterdir())
    records, _ = read_segment(Disk(tmp_path), segments(Disk(tmp_path), "rank-00001")[-1])
    flip(segment, records[-1].offset + records[-1].header_bytes + 8200)
    after = world.run(2, kind="fsdp", root=tmp_path, steps=9)
    assert [said["resumed"] for said in ended(after)] == [records[-1].step - 1] * 2
    assert after[0]["digests"].items() <= before[0]["digests"].items()


@pytest.mark.parametrize("what", ["share", "unit"])
def test_a_base_that_lacks_the_part_of_one_rank_gives_way_to_the_one_before(world, tmp_path, what):
    before = ended(world.run(2, kind="fsdp", root=tmp_path, steps=9, save_at=5))
    with RunReader(tmp_path) as reader:
        share = reader.head().shares["rank-00001"]
    own = next(file for unit, file in share.files.items() if "frozen-" not in unit)  # which both bases name
    path = tmp_path / (share.path if what == "share" else own.path)
    flip(path, path.stat().st_size // 2)
    after = ended(world.run(2, kind="fsdp", root=tmp_path, steps=9))
    assert after[0]["resumed"] == 9
    assert after[0]["digests"]["9"] == before[0]["digests"]["9"]


@pytest.mark.parametrize("fresh", [True, False])
def test_ranks_that_see_another_directory_are_refused_before_training(world, tmp_path, fresh):
    if not fresh:
        ended(world.run(2, kind="ddp", root=tmp_path / "run", steps=2))
    said = world.run(2, kind="ddp", root=tmp_path / "run", steps=5, elsewhere=1)
    assert "RunMismatch" in said[1]["error"] and "one directory" in said[1]["error"]
    assert "rank 1 failed" in said[0]["error"]
    assert all("at" not in each for each in said)


def test_no_rank_removes_files_that_another_writes(world, tmp_path):
    """Every file of a unit stays while its rank trains. Those of frozen parameters have one."""
    ended(
        world.run(2, kind="ddp", root=tmp_path, steps=60, base_every=4, keep_last=1, pause=0.02, unit_bytes=1)
    )
    with RunReader(tmp_path) as reader:
        units = [u for u in reader.head().files if u.startswith("rank-00001")]
        assert reader.verify(reader.head()) == []
    names = [path.name for path in (tmp_path / "data").iterdir()]
    for unit in units:
        assert sum(name.startswith(f"{unit}.") for name in names) == (1 if "frozen-" in unit else 2), names
    ended(world.run(1, kind="ddp", root=tmp_path, steps=62, keep_last=1, save_at=61))
    assert not [path.name for path in (tmp_path / "data").iterdir() if path.name.startswith("rank-")]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind, damaged", one_in(2, ["ddp", "fsdp"], [0, 1]))
def test_a_damaged_record_of_one_rank_ends_the_chain_under_another_number_of_ranks_too(
    world, tmp_path, kind, damaged
):
    """The other rank's records lead further, and none of them may be taken."""
    before = ended(world.run(2, kind=kind, root=tmp_path, steps=9, base_every=100))
    stream = f"rank-{damaged:05d}"
    ref = segments(Disk(tmp_path), stream)[-1]
    records, _ = read_segment(Disk(tmp_path), ref)
    flip(tmp_path / ref.path, records[-1].offset + records[-1].header_bytes + 8200)
    step = records[-1].step - 1
    after = ended(world.run(1, kind=kind, root=tmp_path, steps=step))
    assert after[0]["resumed"] == step == 8
    assert after[0]["digests"] == {"8": before[0]["digests"]["8"]}


def test_a_parameter_that_is_trained_later_is_followed_by_a_base_of_all_ranks(world, tmp_path):
    """One of them stores it; all have to take part in the base."""
    before = ended(world.run(2, kind="ddp", root=tmp_path, steps=8, unfreeze_at=4, deadline_seconds=20))
    with RunReader(tmp_path) as reader:
        assert [ref.step for ref in reader.commits()] == [4, 0]
    after = ended(world.run(2, kind="ddp", root=tmp_path, steps=8))
    assert after[0]["digests"] == {"8": before[0]["digests"]["8"]}


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("base_every", [1, 2])
def test_save_at_a_step_of_which_a_base_has_just_been_made_beside_training(world, tmp_path, base_every):
    """All parts of that one may be of the very step, or of earlier ones; the saved one takes its place."""
    common = {
        "kind": "fsdp",
        "root": tmp_path,
        "base_every": base_every,
        "pause": 0.25,
        "unit_bytes": 1 << 20,
    }
    ended(world.run(2, steps=9, save_every=3, keep_last=9, **common))
    with RunReader(tmp_path) as reader:
        for step in (3, 6, 9):
            manifest = reader.at(step)
            assert manifest.oldest_step == step
            assert reader.verify(manifest) == []
    with LocalStore.open(tmp_path, retain=9) as store:  # which removes the parts of bases that gave way
        named = {path for ref in store.commits() for path in store.load(ref).small_paths}
        assert {f"index/{path.name}" for path in (tmp_path / "index").iterdir()} == named
