"""FSDP1 with original parameters: a rank holds stretches of them, and its steps are recovered as any others."""

from __future__ import annotations

import shutil
from math import prod

import pytest

from combined import some_of
from dist.world import ended, flip
from holdfast.errors import RuleError
from holdfast.opening import source_of
from holdfast.state.atoms import DTYPE_BYTES
from holdfast.state.boxes import Box
from holdfast.store.chain import verify_records
from holdfast.store.files import Disk
from holdfast.store.reader import RunReader
from holdfast.store.reading import regions
from holdfast.store.segments import read_segment, segments
from holdfast.universal.convert.huggingface import write_single
from holdfast.universal.ruled import infer

KINDS = [
    ("fsdp1", 2, 0), ("fsdp1 layers", 2, 0), ("fsdp1 layers grad", 2, 0), ("fsdp1 layers none", 2, 0),
    ("fsdp1 layers bf16", 2, 9), ("fsdp1 layers hybrid", 4, 0), ("fsdp1 layers hybrid2", 4, 0),
]  # fmt: skip
NO_SHARD = "The `NO_SHARD` sharding strategy is deprecated"


@pytest.mark.parametrize("kind, ranks, mlp", some_of(3, KINDS))
def test_ranks_resume_and_end_as_if_they_had_not_stopped(world, tmp_path, kind, ranks, mlp):
    """No step is lost to a record, as one that seems to be changed otherwise than by the optimizer would be."""
    whole = ended(world.run(ranks, kind=kind, root=tmp_path / "whole", steps=9, mlp=mlp))
    ended(world.run(ranks, kind=kind, root=tmp_path / "cut", steps=5, base_every=3, mlp=mlp))
    rest = ended(world.run(ranks, kind=kind, root=tmp_path / "cut", steps=9, base_every=3, mlp=mlp))
    for one, other in zip(whole, rest, strict=True):
        assert other["resumed"] == 5
        assert other["losses"] == one["losses"][5:]
        assert other["digests"] == {step: d for step, d in one["digests"].items() if int(step) >= 5}
        assert one["lost"] == other["lost"] == 0
        assert not [text for text in other.get("warnings", []) if not text.startswith(NO_SHARD)]


@pytest.mark.parametrize("kind", ["fsdp1 layers", "fsdp1 layers grad"])
def test_a_run_that_accumulates_goes_on_as_if_it_had_not_been_closed(world, tmp_path, kind):
    """Under ``no_sync`` gradients are whole until the last of them."""
    common = {"kind": kind, "accumulate": 3}
    whole = ended(world.run(2, root=tmp_path / "whole", steps=9, **common))
    ended(world.run(2, root=tmp_path / "cut", steps=5, base_every=3, **common))
    rest = ended(world.run(2, root=tmp_path / "cut", steps=9, **common))
    for one, other in zip(whole, rest, strict=True):
        assert (other["resumed"], other["lost"]) == (5, 0)
        assert other["losses"] == one["losses"][5:]
        assert other["digests"].items() <= one["digests"].items()


def test_bases_are_made_beside_training_of_parts_of_several_steps(world, tmp_path):
    """In units of a few elements; others are one unit."""
    common = {"kind": "fsdp1 layers", "unit_bytes": 60}
    whole = ended(world.run(2, root=tmp_path / "whole", steps=40, **common))
    ended(world.run(2, root=tmp_path / "run", steps=36, base_every=3, pause=0.05, **common))
    with RunReader(tmp_path / "run") as reader:
        manifest = reader.head()
        assert manifest.step > 10
        assert reader.verify(manifest) == []
        assert len({file.step for file in manifest.files.values()}) > 2
        assert verify_records(reader, manifest) == (36, [])
    rest = ended(world.run(2, root=tmp_path / "run", steps=40, **common))
    assert rest[0]["resumed"] == 36
    assert rest[0]["digests"].items() <= whole[0]["digests"].items()
    third = ended(world.run(3, root=tmp_path / "run", steps=40, **common))
    assert third[0]["digests"]["40"] == whole[0]["digests"]["40"]


def test_a_base_has_each_tensor_whole_in_boxes_that_any_reader_knows(world, tmp_path):
    """What a rank stored is the boxes that its elements are, whatever files they are in."""
    ended(world.run(2, kind="fsdp1", root=tmp_path, steps=5, save_at=5))
    with RunReader(tmp_path) as reader:
        manifest = reader.head()
        atoms = reader.atoms(manifest)
        for key, atom in atoms.items():
            assert (
                len(reader.read_atom(manifest, atom)) == prod(atom["shape"]) * DTYPE_BYTES[atom["dtype"]]
            ), key
        assert tuple(atoms["first.weight/exp_avg"]["shape"]) == (13, 7)
        assert regions(manifest, atoms)["first.weight/exp_avg"] == [
            (0, Box((0, 0), (12, 7))), (0, Box((12, 0), (13, 5))), (1, Box((12, 5), (13, 7))),
        ]  # fmt: skip
        flat = [fragment["flat"] for fragment in atoms["first.weight/exp_avg"]["fragments"]]
        assert (min(flat)[0], max(flat)[1]) == (0, 91)
        with pytest.raises(RuleError, match="stretches of the flattened scale/param"):
            infer(reader, manifest)


def test_a_file_of_such_a_run_is_begun_from_by_ranks_of_it(world, tmp_path):
    before = ended(world.run(2, kind="fsdp1 layers", root=tmp_path / "run", steps=5))
    source = write_single(source_of(str(tmp_path / "run")), tmp_path / "state.safetensors")
    order = {"kind": "fsdp1", "steps": 5, "resume": {"source": str(source)}}
    after = ended(world.run(3, root=tmp_path / "other", **order))
    assert after[0]["digests"] == {"5": before[0]["digests"]["5"]}


def test_a_damaged_record_of_one_rank_ends_the_chain_of_all(world, tmp_path):
    before = ended(world.run(2, kind="fsdp1 layers", root=tmp_path, steps=9, base_every=100))
    ref = segments(Disk(tmp_path), "rank-00001")[-1]
    records, _ = read_segment(Disk(tmp_path), ref)
    flip(tmp_path / ref.path, records[-1].offset + records[-1].header_bytes + 8200)
    for ranks in (3, 2):
        shutil.copytree(tmp_path, copy := tmp_path.with_name(f"{tmp_path.name}-{ranks}"))
        after = ended(world.run(ranks, kind="fsdp1 layers", root=copy, steps=8))
        assert after[0]["resumed"] == 8
        assert after[0]["digests"] == {"8": before[0]["digests"]["8"]}


def test_a_parameter_that_is_trained_later_is_followed_by_a_base_of_all_ranks(world, tmp_path):
    """One rank alone has a gradient of it."""
    common = {"kind": "fsdp1", "unfreeze_at": 4, "deadline_seconds": 20}
    whole = ended(world.run(2, root=tmp_path / "whole", steps=9, **common))
    assert whole[0]["lost"] == 0
    with RunReader(tmp_path / "whole") as reader:
        assert 4 in [ref.step for ref in reader.commits()]
    ended(world.run(2, root=tmp_path / "run", steps=6, **common))
    rest = ended(world.run(2, root=tmp_path / "run", steps=9, unfreeze_at=7, kind="fsdp1"))
    assert rest[0]["resumed"] == 6
    assert rest[0]["digests"]["6"] == whole[0]["digests"]["6"]
