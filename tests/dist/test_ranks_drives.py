"""Several ranks over several drives: the steps of a run on one disk, each rank with files on every drive."""

from __future__ import annotations

import pytest

from dist.world import ended
from holdfast.store.disk import Disk
from holdfast.store.drive_links import folders
from holdfast.store.log.chain import verify_records
from holdfast.store.reader import RunReader

BASES = {"base_every": 3, "unit_bytes": 400}


def places(root, drives):
    """The streams that have payload, and those that have records, by drive."""
    files = {
        drive.name: [path.name for path in drive.iterdir() if path.name.startswith("rank-")]
        for drive in drives
    }
    files["data"] = [path.name for path in (root / "data").iterdir() if path.name.startswith("rank-")]
    return {
        drive: {(name.split(".")[0], name.rpartition(".")[2]) for name in names}
        for drive, names in files.items()
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_over_drives_have_every_step_and_go_on_as_any_other_number(world, tmp_path, kind):
    root, used = tmp_path / "run", [tmp_path / "one", tmp_path / "two"]
    whole = ended(world.run_undisturbed(2, kind=kind, steps=9))
    ended(world.run(2, kind=kind, root=root, steps=5, drives=used, **BASES))
    there = places(root, used)
    assert {stream for stream, suffix in there["one"] if suffix == "log"} == {"rank-00000", "rank-00001"}
    assert {stream for each in there.values() for stream, suffix in each if suffix == "safetensors"} == {
        "rank-00000", "rank-00001",
    }  # fmt: skip
    assert all("safetensors" in {suffix for _, suffix in each} for each in there.values())
    rest = ended(world.run(2, kind=kind, root=root, steps=9, drives=used, **BASES))
    for one, other in zip(whole, rest, strict=True):
        assert other["resumed"] == 5
        assert other["digests"] == {step: d for step, d in one["digests"].items() if int(step) >= 5}
    reader = RunReader(root)
    assert reader.verify(reader.head()) == [] and verify_records(reader, reader.head())[1] == []
    alone = ended(world.run(1, kind=kind, root=root, steps=10, drives=used[:1], **BASES))
    assert alone[0]["resumed"] == 9 and alone[0]["digests"]["9"] == rest[0]["digests"]["9"]


def test_ranks_leave_drives_empty(world, tmp_path):
    root, drive = tmp_path / "run", tmp_path / "one"
    before = ended(world.run(2, kind="ddp", root=root, steps=4, drives=[drive], **BASES))
    for steps in (12, 13):
        after = ended(world.run(2, kind="ddp", root=root, steps=steps, save_every=6, **BASES))
        assert after[0]["resumed"] == {12: 4, 13: 12}[steps]
        assert steps == 13 or after[0]["digests"]["4"] == before[0]["digests"]["4"]
    assert not list(drive.iterdir()) and folders(Disk(root)) == ["data"]


def test_other_drives_on_one_rank_are_refused_with_nothing_written(world, tmp_path):
    said = world.run(
        2, kind="ddp", root=tmp_path / "run", steps=2, drives=[tmp_path / "one"],
        options_of={"1": {"drives": [str(tmp_path / "two")]}},
    )  # fmt: skip
    for each in said:
        assert "drives= is not the same on all ranks" in each["error"]
    assert not [path for path in tmp_path.iterdir() if path.name in ("run", "one", "two")]
