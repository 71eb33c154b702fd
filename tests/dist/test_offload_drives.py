"""Several ranks train out of core over several drives: the bits of a plain loop, one run for who reads it."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from dist.offloading import plain
from dist.test_offload import check, pieces_of
from dist.world import World
from holdfast.store.run_store import LocalStore
from plain_loops import PLACEMENTS

STEPS = 5

pytestmark = pytest.mark.filterwarnings("ignore:the drives .* are on one file system")


@pytest.fixture(scope="module")
def world():
    with World("offloading") as world:
        yield world


@pytest.fixture
def train(world, tmp_path):
    """Ranks that train to a step, over drives of ``tmp_path`` that are given by their names."""

    def train(ranks, steps=STEPS, used=("one", "two"), rates=None, **order):
        options = {"drives": [str(tmp_path / name) for name in used], **order.pop("options", {})}
        return world.run(
            ranks, root=tmp_path / "run", steps=steps, rates=rates or {}, options=options, **order
        )

    return train


def folders_of(root):
    """By unit of the newest commit, where its file is."""
    return {unit: ref.path.rpartition("/")[0] for unit, ref in LocalStore.read(root).head().files.items()}


def by_rank(root):
    """By rank, where its files are."""
    found = {}
    for unit, folder in folders_of(root).items():
        found.setdefault(unit.partition(".")[0], set()).add(folder)
    return found


def what_is_in(root):
    return sorted(
        (str(path), path.lstat().st_ino, path.is_file() and path.read_bytes()) for path in root.rglob("*")
    )


# The bits


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.5, "clipping": "speculate", **PLACEMENTS["ssd"]},
        {"delayed_fraction": 0.5, "commit_every": 3, **PLACEMENTS["mixed"]},
        {"clip_norm": 0.5, **PLACEMENTS["host"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_over_drives_have_every_bit_of_a_plain_loop(train, tmp_path, ranks, options):
    """One drive is faster than the others. Every rank has files on both."""
    root = tmp_path / "run"
    said = train(ranks, micro_batches=2, kind="wide", rates={"one": 2e9}, options=options)
    expected = plain([(STEPS, ranks, 2)], "wide", clip_norm=options.get("clip_norm"), pieces=pieces_of(root))
    check(said, root, *expected)
    assert [there >= {"data/drive_1", "data/drive_2"} for there in by_rank(root).values()] == [True] * ranks


def test_a_run_goes_on_with_any_number_of_ranks_and_any_drives(train, tmp_path):
    """Of one process and back; what ranks that are gone had goes, from the drives too. A list is measured once."""
    phases = [
        (2, 1, 2, ["one"]), (4, 2, 1, ["one"]), (5, 3, 2, ["two", "one"]), (7, 2, 1, []), (9, 2, 1, ["two"]),
        (11, 1, 2, ["two"]), (13, 2, 2, ["two"]), (15, 1, 2, []),
    ]  # fmt: skip
    measured = []
    for steps, ranks, micro_batches, used in phases:
        said = train(ranks, steps, used, micro_batches=micro_batches, options={"retain": 1})
        measured.append(any(key.startswith("measured") for key in said[0]))
        folders = {folder_of(tmp_path / "run", tmp_path / name) for name in used}
        assert set(folders_of(tmp_path / "run").values()) - {"data"} == folders
    check(said, tmp_path / "run", *plain([phase[:3] for phase in phases]))
    assert measured == [True, False, True, False, True, False, False, False]
    places = [tmp_path / "run" / "data", tmp_path / "one", tmp_path / "two"]
    left = [path.name for place in places for path in place.iterdir()]
    assert not [name for name in left if name.startswith("rank-")], "of ranks that are gone"
    assert not list((tmp_path / "one").iterdir()), "of a drive that was left"


def folder_of(root, drive):
    """By which the run names ``drive``."""
    [link] = [path for path in (root / "data").glob("drive_*") if path.resolve() == drive]
    return f"data/{link.name}"


def test_what_a_rank_has_may_be_nothing(train, tmp_path):
    """Of a block that is one matrix, not cut, one rank of three has all."""
    said = train(3, used=["one"], kind="thin")
    check(said, tmp_path / "run", *plain([(STEPS, 3, 1)], "thin"))


# Where files are


def test_a_blocks_parts_lie_on_different_drives_and_so_do_a_ranks(train, tmp_path):
    """Of equal drives; with all that is not state in host memory they have a half each."""
    root = tmp_path / "run"
    train(2, 2, ["one"], kind="wide", options={"params_on_host": 1.0, "optimizer_on_host": 1.0})
    folders = folders_of(root)
    for block in range(4):
        there = [folder for unit, folder in folders.items() if f".blocks.{block}-" in unit]
        assert sorted(there) == ["data", "data/drive_1"], folders
    assert all(len(there) == 2 for there in by_rank(root).values())
    first, second = json.loads((root / "drives.json").read_bytes())["drives"]
    assert first["share"] == pytest.approx(second["share"]) == pytest.approx(0.5)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind, ranks", [("wide", 2), ("thin", 3)])
def test_files_stay_where_they_are_from_one_resume_to_the_next(train, tmp_path, kind, ranks):
    """Ranks that have unlike parts, one of them nothing, take one set of shares; with other rates, too."""
    options = {"activations_on_host": 0.0}
    train(ranks, 2, kind=kind, rates={"one": 2e9}, options=options)
    before = folders_of(tmp_path / "run")
    said = train(ranks, 4, kind=kind, rates={"two": 9e9}, options=options)
    assert folders_of(tmp_path / "run") == before
    assert not [key for each in said for key in each if key.startswith("measured")]


# Ranks that end


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_all_go_on_to_the_same_end(train, tmp_path, rank):
    cut = train(2, micro_batches=2, kill=[rank, 3], options={"clip_norm": 0.5})
    assert cut[rank]["code"] == -9 and cut[1 - rank]["error"].startswith("RankFailed")
    said = train(2, micro_batches=2, options={"clip_norm": 0.5})
    assert {each["resumed"] for each in said} == {cut[1 - rank]["durable"]}
    check(said, tmp_path / "run", *plain([(STEPS, 2, 2)], clip_norm=0.5))


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize(
    "rank, failpoint",
    [(0, "after_timeline_opened:1"), (0, "before_data_sync:1"), (0, "after_manifest_sync:1"),
     (0, "after_retire_unlink:1"), (1, "before_data_sync:1"), (1, "after_data_sync:4"), (1, "after_data_sync:9")],
)  # fmt: skip
def test_a_rank_is_killed_while_files_move(train, tmp_path, rank, failpoint):
    """First a fresh run's start, and then one that leaves a drive and takes another; every commit there is is whole."""
    root, told = tmp_path / "run", 0
    for number, used in enumerate((["one"], ["two"])):
        said = train(2, 2 + 2 * number, used, failpoint=[rank, failpoint], early=True)
        assert said[rank]["code"] == -9 and said[1 - rank]["error"].startswith("RankFailed"), said
        told = max([told, *(each["durable"] for each in said if "durable" in each)])
        reader = LocalStore.read(root)
        assert all(reader.verify(reader.load(ref)) == [] for ref in reader.commits())
    said = train(2, 6, ["one"])
    assert all((each["resumed"] or 0) >= told for each in said)
    check(said, root, *plain([(6, 2, 1)]))


# What is refused, on all ranks and with nothing written


@pytest.mark.parametrize(
    "lists, message",
    [
        ((["one"], ["two"]), "drives is ['{0}/two'] on rank 1 and ['{0}/one'] on rank 0"),
        ((["one"], []), "drives is [] on rank 1 and ['{0}/one'] on rank 0"),
        (([], ["one"]), "drives is ['{0}/one'] on rank 1 and [] on rank 0"),
    ],
    ids=str,
)
def test_unlike_lists_are_refused_by_name(train, tmp_path, lists, message):
    wrong = {
        str(rank): {"drives": [str(tmp_path / name) for name in used]} for rank, used in enumerate(lists)
    }
    for each in train(2, wrong=wrong):
        text = message.format(tmp_path)
        assert each["error"].startswith(f"BadInput: the ranks have unlike arguments: {text}"), each
    assert not list(tmp_path.iterdir())


def test_a_list_in_another_order_is_the_same(train, tmp_path):
    wrong = {"1": {"drives": [str(tmp_path / name) for name in ("two", "one")]}}
    check(train(2, wrong=wrong), tmp_path / "run", *plain([(STEPS, 2, 1)]))


def test_a_drive_that_one_rank_does_not_see_is_refused(train, tmp_path):
    """As of a host that has a disk of its own at that path."""
    said = train(2, blind=[1])
    assert said[1]["error"].startswith(f"RunMismatch: the drive {tmp_path / 'one'} as rank 1 sees it"), said[
        1
    ]
    assert "leave out disks that only one of them has" in said[1]["error"]
    assert said[0]["error"].startswith("RankFailed: rank 1 failed, so no rank goes on. RunMismatch"), said[0]
    assert not list(tmp_path.iterdir())
    train(2, 2)
    before = what_is_in(tmp_path / "run")
    said = train(2, 3, blind=[1])
    assert said[1]["error"].startswith(f"RunMismatch: the drive {tmp_path / 'one'} as rank 1 sees it"), said[
        1
    ]
    assert what_is_in(tmp_path / "run") == before


def test_a_directory_with_other_files_is_refused(train, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "mine.txt").write_text("mine")
    said = train(2)
    assert said[0]["error"].startswith(f"RunMismatch: {tmp_path / 'two'} cannot be made a drive of"), said[0]
    assert said[1]["error"].startswith("RankFailed: rank 0 failed, so no rank goes on. RunMismatch"), said[1]
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_a_drive_that_is_not_there_is_named_on_all_ranks(train, tmp_path):
    train(2, 2)
    shutil.move(tmp_path / "one", tmp_path / "unmounted")
    before = what_is_in(tmp_path)
    for used in ["one", "two"], []:
        for each in train(2, 3, used):
            assert (
                f"has files of its commits on the drive {tmp_path / 'one'}, which is not there"
                in each["error"]
            )
    assert what_is_in(tmp_path) == before
    shutil.move(tmp_path / "unmounted", tmp_path / "one")
    check(train(2), tmp_path / "run", *plain([(STEPS, 2, 1)]))


def test_the_space_that_all_ranks_take_of_a_full_drive_is_counted(train, tmp_path):
    """Where it has nearly everything, that is what lies there in the end."""
    said = train(2, 1, ["one"], rates={"one": 1e15}, full=["one"])
    told = [
        re.search(rf"the drive {tmp_path}/one needs .* more \((\d+) bytes\)", each["error"]) for each in said
    ]
    assert not list(tmp_path.iterdir())
    train(2, 1, ["one"], rates={"one": 1e15})
    there = sum(path.stat().st_size for path in (tmp_path / "one").glob("*.safetensors"))
    assert [int(each[1]) for each in told] == [there, there], said
