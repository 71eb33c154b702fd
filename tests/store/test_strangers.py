"""Files of others, and a run that lost a part: nothing is begun over them, and nothing of theirs is touched."""

from __future__ import annotations

import shutil

import pytest

from holdfast.errors import RunMismatch
from holdfast.store.run_store import LocalStore
from tiny_run import TinyRun, check_content


def snapshot(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "lock"}


def a_run(root, openings=1, steps=3):
    for _ in range(openings):
        with TinyRun(root) as run:
            for _ in range(steps):
                run.take_step()
    return run


def empty(directory):
    for path in directory.iterdir():
        path.unlink()


@pytest.mark.parametrize("openings", [1, 2])
@pytest.mark.parametrize("harm", [shutil.rmtree, empty])
def test_a_run_that_lost_its_commits_is_not_begun_anew(tmp_path, harm, openings):
    a_run(tmp_path, openings)
    harm(tmp_path / "commits")
    before = snapshot(tmp_path)
    with pytest.raises(RunMismatch, match=r"has no commit.*put commits/ and timelines/ back"):
        LocalStore.open(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_run_that_kept_only_its_timelines_is_not_begun_anew(tmp_path):
    a_run(tmp_path, 2)
    for name in ("commits", "data", "index"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(RunMismatch, match=r"timelines/t0002\.json continues step 3"):
        LocalStore.open(tmp_path)


def test_data_of_nobody_known_is_not_written_over(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "block_0.1.safetensors").write_bytes(b"mine")
    before = snapshot(tmp_path)
    with pytest.raises(RunMismatch, match=r"data/block_0\.1\.safetensors is in it"):
        LocalStore.open(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_fresh_start_that_was_cut_short_is_begun_anew(tmp_path):
    for _ in range(2):
        with TinyRun(tmp_path):
            pass
    with TinyRun(tmp_path) as run:
        check_content(run.store, run.take_step())


def test_a_record_of_another_run_does_not_hide_the_commits(tmp_path):
    a_run(tmp_path / "run", 2)
    a_run(tmp_path / "other", 9, 1)
    record = "timelines/t0009.json"  # continues a step of timeline 8, which this run does not have
    shutil.copy(tmp_path / "other" / record, tmp_path / "run" / record)
    with TinyRun(tmp_path / "run") as run:
        assert (run.resumed.timeline, run.step, run.timeline) == (2, 6, 10)
        run.take_step()
        assert [tuple(ref) for ref in run.store.line()] == [(10, 7), (2, 6)]


@pytest.mark.parametrize("part", ["commits/step-000000000006.t0002.json", "timelines/t0001.json"])
@pytest.mark.parametrize("copy", [False, True])
def test_parts_of_another_run_among_its_own_are_refused(tmp_path, part, copy):
    """The other is a run of the same model, or began as a copy of this one."""
    run, other = tmp_path / "run", tmp_path / "other"
    a_run(run, 1, 1)
    if copy:
        shutil.copytree(run, other)
        part = part.replace("t0001", "t0002")
    else:
        a_run(other, 1, 1)
    for root, steps in ((run, 3), (other, 5)):
        a_run(root, 1, steps)
    shutil.copy(other / part, run / part)
    before = snapshot(run)
    with LocalStore.read(run) as reader:
        assert "are of two runs" in str(reader.verify(reader.head())[0])
    with pytest.raises(RunMismatch, match=r"holds parts of two runs: .* by the number [12]\."):
        LocalStore.open(run)
    assert snapshot(run) == before


def test_commits_of_another_run_whose_timelines_have_other_numbers_are_refused(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    a_run(run, 1)
    a_run(other, 1, 0)  # killed before its first commit
    a_run(other, 2, 1)
    for part in ("commits/step-000000000002.t0003.json", "timelines/t0002.json", "timelines/t0003.json"):
        shutil.copy(other / part, run / part)
    before = snapshot(run)
    with pytest.raises(
        RunMismatch, match=r"two runs: .*t0003\.json and .*t0001\.json have no beginning in common"
    ):
        LocalStore.open(run)
    assert snapshot(run) == before


@pytest.mark.parametrize("content", [None, b"", b"x"])
def test_an_odd_record_with_the_highest_number_is_reported(tmp_path, content):
    a_run(tmp_path / "run", 2)
    record = tmp_path / "run" / "timelines" / "t10000.json"  # sorts before t0002 as text
    if content is None:
        a_run(tmp_path / "other", 1, 1)
        shutil.copy(tmp_path / "other" / "timelines" / "t0001.json", record)
    else:
        record.write_bytes(content)
    with LocalStore.read(tmp_path / "run") as reader:
        manifest, damaged = reader.newest_whole()
    assert manifest.step == 6
    assert [error.path for error in damaged] == ["timelines/t10000.json"]


def test_a_whole_odd_record_is_reported(tmp_path):
    a_run(tmp_path / "run", 2)
    a_run(tmp_path / "other", 4, 1)
    shutil.copy(tmp_path / "other/timelines/t0004.json", tmp_path / "run/timelines/t0004.json")
    with LocalStore.read(tmp_path / "run") as reader:
        manifest, damaged = reader.newest_whole()
    assert manifest.step == 6
    assert ["continues no commit that is there" in str(error) for error in damaged] == [True]


def test_scratch_of_others_stays_and_ours_goes(tmp_path):
    a_run(tmp_path)
    ours = [tmp_path / "scratch" / f"{name}.bin" for name in ("params", "gradients", "inputs-0", "inputs-12")]
    others = [tmp_path / "scratch" / name for name in ("pytorch_model.bin", "inputs-x.bin", "params.bin.old")]
    for path in [*ours, *others]:
        path.write_bytes(b"x")
    a_run(tmp_path)
    assert [path for path in [*ours, *others] if path.exists()] == others


def test_a_file_that_looks_like_a_generation_stays_if_no_commit_can_have_named_it(tmp_path):
    a_run(tmp_path)
    others = [tmp_path / "data" / f"block_0.{number}.safetensors" for number in ("9", "01", "3")]
    for path in others:
        path.write_bytes(b"mine")
    with TinyRun(tmp_path, retain=1, copies=2) as run:
        for _ in range(5):
            run.take_step()
        assert sorted(path.name for path in (tmp_path / "data").glob("block_0.*")) == [
            f"block_0.{number}.safetensors" for number in ("0", "01", "1", "3", "9")
        ]
    assert all(path.read_bytes() == b"mine" for path in others)
