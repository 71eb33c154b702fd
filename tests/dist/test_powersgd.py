"""Ranks that exchange gradients by torch's PowerSGD hook: records hold its two matrices, bases what it carries on."""

from __future__ import annotations

import shutil

import pytest

from dist.world import ended
from holdfast.delta.slots import tensors_of
from holdfast.store.files import Disk
from holdfast.store.reader import RunReader
from holdfast.store.segments import read_segment, segments

ONE, TWO = ("powersgd", 1), ("powersgd", 2)


def arrays_of(root, ranks=2):
    """By step, the arrays that the records of all ranks hold: how many elements of each."""
    found = {}
    for rank in range(ranks):
        stream = f"rank-{rank:05d}"
        for ref in segments(Disk(root), stream):
            for record in read_segment(Disk(root), ref)[0]:
                sizes = found.setdefault(record.step, {})
                start = record.offset + record.header_bytes
                data = memoryview(
                    bytearray((root / ref.path).read_bytes()[start : start + record.parts[0][0]])
                )
                for key, array in tensors_of(data).items():
                    sizes[key] = sizes.get(key, 0) + array.numel()
    return found


@pytest.mark.parametrize("ranks, codec", [(2, ONE), (2, TWO), (4, ONE)])
def test_a_closed_run_goes_on_as_if_it_had_not_been(world, tmp_path, ranks, codec):
    """What torch's hook keeps comes back: residuals of each rank to it, and what the next exchange begins with."""
    whole = ended(world.run(ranks, kind="ddp", root=tmp_path / "whole", steps=12, codec=codec))
    dense = ended(world.run(ranks, kind="ddp", root=tmp_path / "dense", steps=12))
    assert whole[0]["losses"] != dense[0]["losses"]
    ended(world.run(ranks, kind="ddp", root=tmp_path / "cut", steps=6, codec=codec, base_every=3))
    rest = ended(world.run(ranks, kind="ddp", root=tmp_path / "cut", steps=12, codec=codec))
    for one, other in zip(whole, rest, strict=True):
        assert (other["resumed"], other["exactness"]) == (6, "continuation")
        assert other["losses"] == one["losses"][6:]
        assert other["digests"].items() <= one["digests"].items()


def test_a_run_that_died_comes_back_to_its_newest_step_and_is_told_of_its_residuals(world, tmp_path):
    died = world.run(
        2, kind="ddp", root=tmp_path, steps=14, codec=ONE, base_every=4, pause=0.05, kill=[1, 13]
    )
    state = ended(world.run(2, kind="ddp", root=tmp_path, steps=14, codec=ONE))
    newest = state[0]["resumed"]
    assert newest >= max(said["durable"] for said in died)
    assert {said["exactness"] for said in state} == {"state"}
    assert state[0]["digests"][str(newest)] == died[0]["digests"][str(newest)]


def test_every_step_can_be_resumed_also_by_one_process_without_the_codec(world, tmp_path):
    before = ended(
        world.run(2, kind="ddp", root=tmp_path / "run", steps=7, codec=TWO, base_every=100, keep_last=9)
    )
    for step in (7, 5, 3, 2, 1):
        assert digests_of(world, tmp_path, step) == {str(step): before[0]["digests"][str(step)]}


def digests_of(world, folder, step):
    """What one process without the codec finds at ``step`` of a copy of ``folder / "run"``."""
    shutil.copytree(folder / "run", folder / "copy")
    found = ended(world.run(1, kind="plain", root=folder / "copy", steps=step, resume={"step": step}))
    shutil.rmtree(folder / "copy")
    return found[0]["digests"]


def test_another_number_of_ranks_goes_on_from_the_same_step_without_residuals(world, tmp_path):
    before = ended(world.run(2, kind="ddp", root=tmp_path, steps=6, codec=ONE))
    after = ended(world.run(3, kind="ddp", root=tmp_path, steps=9, codec=ONE))
    assert {(said["resumed"], said["exactness"]) for said in after} == {(6, "state")}
    assert after[0]["digests"]["6"] == before[0]["digests"]["6"]
    again = ended(world.run(3, kind="ddp", root=tmp_path, steps=10, codec=ONE))
    assert {(said["resumed"], said["exactness"]) for said in again} == {(9, "continuation")}
    assert again[0]["digests"]["9"] == after[0]["digests"]["9"]


def test_the_newest_point_that_training_goes_on_from_is_one_that_all_ranks_were_at(world, tmp_path):
    whole = ended(world.run(2, kind="ddp", root=tmp_path / "whole", steps=20, codec=ONE))
    world.run(
        2, kind="ddp", root=tmp_path / "run", steps=20, codec=ONE, save_at=6, keep_last=99, base_every=100,
        pause=0.02, kill=[0, 19],
    )  # fmt: skip
    rest = world.run(
        2, kind="ddp", root=tmp_path / "run", steps=20, codec=ONE, resume={"exactness": "continuation"}
    )
    for one, other in zip(whole, ended(rest), strict=True):
        assert (other["resumed"], other["exactness"]) == (6, "continuation")
        assert other["losses"] == one["losses"][6:]


def test_before_it_starts_gradients_are_dense_and_every_step_is_continued(world, tmp_path):
    whole = ended(
        world.run(2, kind="ddp", root=tmp_path / "whole", steps=9, codec=ONE, base_every=100, keep_last=9)
    )
    for step in (1, 2):
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
        rest = world.run(2, kind="ddp", root=tmp_path / "cut", steps=9, codec=ONE, resume={"step": step})
        for one, other in zip(whole, ended(rest), strict=True):
            assert (other["resumed"], other["exactness"]) == (step, "continuation")
            assert other["losses"] == one["losses"][step:]
        shutil.rmtree(tmp_path / "cut")
    arrays = arrays_of(tmp_path / "whole")
    assert [step for step in arrays if "left/F32" not in arrays[step]] == [1, 2]


def test_a_record_holds_two_narrow_matrices_although_the_script_clips(world, tmp_path):
    width = 3_000
    ended(world.run(2, kind="ddp", root=tmp_path, steps=5, codec=TWO, width=width, unit_bytes=1 << 20))
    arrays = arrays_of(tmp_path)
    vectors = width + width + 3 + 1  # the norm's weight and bias, the last bias, the scale
    assert arrays[1]["grad/F32"] == 7 * width + 3 * width + vectors
    for step in (3, 4, 5):
        assert arrays[step]["left/F32"] + arrays[step]["right/F32"] == 2 * (width + 7)
        assert arrays[step]["grad/F32"] == vectors + 3 * width  # of rank 2 nothing would be gained there
    with RunReader(tmp_path) as reader:
        assert reader.verify(reader.head()) == []


def test_several_buckets_are_exchanged_and_formed_anew(world, tmp_path):
    """Many at once would use up the threads of gloo; those of a process's first backward pass are others."""
    options = {"kind": "ddp", "codec": ONE, "width": 100_000, "unit_bytes": 1 << 24}
    whole = ended(world.run(2, root=tmp_path / "whole", steps=6, **options))
    ended(world.run(2, root=tmp_path / "cut", steps=4, **options))
    rest = ended(world.run(2, root=tmp_path / "cut", steps=6, **options))
    assert rest[0]["losses"] == whole[0]["losses"][4:]
    assert rest[0]["digests"].items() <= whole[0]["digests"].items()
    arrays = arrays_of(tmp_path / "cut")
    assert arrays[5]["left/F32"] + arrays[5]["right/F32"] == 200_000 + 7 + 3


def test_a_gradient_that_was_changed_since_is_recorded_as_it_is_with_a_warning(world, tmp_path):
    before = ended(
        world.run(
            2, kind="ddp", root=tmp_path / "run", steps=6, codec=ONE, edit_at=5, base_every=100, keep_last=9
        )
    )
    told = [text for said in before for text in said.get("warnings", []) if "PowerSGD" in text]
    assert len(told) == 1 and "gradient of first.weight is not what the PowerSGD hook gave" in told[0]
    arrays = arrays_of(tmp_path / "run")
    assert arrays[5]["grad/F32"] == arrays[6]["grad/F32"] + 7 * 13
    for step in (6, 5, 4):
        assert digests_of(world, tmp_path, step) == {str(step): before[0]["digests"][str(step)]}


@pytest.mark.parametrize(
    "order, message",
    [
        ({"kind": "fsdp"}, "is for gradients on their way between the ranks of DistributedDataParallel"),
        ({"kind": "ddp", "spoilt": "by a scaler"}, "with a GradScaler: torch's PowerSGD hook keeps"),
        ({"kind": "ddp", "spoilt": "by a hook"}, "has a communication hook already"),
        ({"kind": "ddp", "spoilt": "by a scalar"}, "cannot take module.scale, ()"),
    ],
)
def test_what_the_hook_cannot_do_is_refused_with_nothing_written(world, tmp_path, order, message):
    said = world.run(2, root=tmp_path / "run", steps=3, codec=ONE, **order)
    assert all(each["error"].startswith("BadInput") and message in each["error"] for each in said), said
    assert not (tmp_path / "run").exists()
