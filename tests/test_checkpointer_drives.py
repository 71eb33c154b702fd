"""A Checkpointer over several drives: every bit that it has on one, bases and records spread by what the drives take,
and one run for whoever reads it."""

from __future__ import annotations

import os
import shutil
from copy import deepcopy

import pytest
import torch
from torch import nn

from checkpoint.loops import manifests, same
from holdfast import Checkpointer, Keep, LocalDisks
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.cli.convert import ConvertOptions, convert
from holdfast.cli.diff import diff
from holdfast.cli.inspect import show, verify
from holdfast.errors import BadInput, Damaged, RunMismatch
from holdfast.measure import drive_rates
from holdfast.store.commit.pruning import prune
from holdfast.store.disk import Disk
from holdfast.store.drive_links import OWNER, folders, record_of
from holdfast.store.log import journal, striping
from holdfast.store.log.chain import verify_records
from holdfast.store.log.segments import read_segment, segments, stripe_paths
from holdfast.store.pushing import Pusher
from holdfast.store.run_store import LocalStore
from support.drive_rates import Rates

PAGE = 4096


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    rates = Rates()
    monkeypatch.setattr(drive_rates, "rate_of", rates.rate_of)
    monkeypatch.setattr(drive_rates, "device_of", hash)
    monkeypatch.setattr(striping, "STRIPE_BYTES", PAGE)
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 4000)
    monkeypatch.setattr("holdfast.checkpointer.BASE_BYTES_PER_STEP", 20_000)
    monkeypatch.setattr(journal, "GROUPS_PER_SEGMENT", 4)
    return rates


class Loop:
    """A training of many equal layers, some of them frozen."""

    def __init__(self, root, used=(), seed=0, frozen=6, layers=18, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
        for layer in self.model[:frozen]:
            layer.requires_grad_(False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        options = {"base_every": 3, "keep": Keep(2)} | options
        self.checkpointer = Checkpointer(
            root, model=self.model, optimizer=self.optimizer, drives=used, **options
        )

    def __enter__(self):
        self.start = self.checkpointer.resume()
        return self

    def __exit__(self, *error):
        self.checkpointer.__exit__(*error)

    def train(self, count):
        for _ in range(count):
            self.model(torch.randn(3, 16)).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.checkpointer.step()
            self.checkpointer._backend.recorder.drain()

    def state(self):
        return deepcopy([dict(self.model.state_dict()), self.optimizer.state_dict()["state"]])


def train(root, steps, used=(), **options):
    """Take ``steps`` more steps, and return the states by step."""
    with Loop(root, used, **options) as loop:
        states = {loop.start: loop.state()}
        for step in range(loop.start + 1, loop.start + steps + 1):
            loop.train(1)
            states[step] = loop.state()
    return states


def files_of(root, manifest=None):
    """The bytes of the newest base, by the directory in which they really are."""
    found: dict[str, int] = {}
    for ref in (manifest or manifests(root)[0]).files.values():
        place = (root / ref.path).resolve().parent.name
        found[place] = found.get(place, 0) + ref.bytes
    return found


def records_of(root):
    """The bytes of the log, without what is reserved, by the directory in which they really are."""
    LocalStore.open(root).close()
    found: dict[str, int] = {}
    disk = Disk(root)
    for ref in segments(disk, "rank-00000"):
        for path in striping.segment_paths(disk, ref.path):
            place = (root / path).resolve().parent.name
            found[place] = found.get(place, 0) + disk.size(path) - PAGE * (path == ref.path)
    return found


def check_every_step(root, states, **options):
    """Each step that a copy of the run leads to is that of the training."""
    steps = [step for step in states if step >= min(m.step for m in manifests(root))]
    for step in steps[:: max(1, len(steps) // 3)] + steps[-1:]:
        copy = root.with_name(f"{root.name}-{step}")
        shutil.copytree(root, copy)  # follows links, as cp -rL does
        loop = Loop(copy, seed=1, **options)
        try:
            assert loop.checkpointer.resume(step=step) == step
            assert same(loop.state(), states[step])
        finally:
            loop.checkpointer.close(save=False)
        shutil.rmtree(copy)


# The bits, and where they are


@pytest.mark.slow
def test_every_step_of_a_run_over_drives_comes_back(tmp_path, rates):
    root, used = tmp_path / "run", [tmp_path / "one", tmp_path / "two"]
    rates |= {"one": 2e9}
    states = train(root, 11, used)
    assert same(states[11], train(tmp_path / "whole", 11)[11])
    with Loop(root, used, seed=1) as loop:
        assert loop.start == 11 and same(loop.state(), states[11])
        loop.train(2)
        states |= {13: loop.state()}
    assert same(states[13], train(tmp_path / "whole", 2)[13])
    check_every_step(root, states)


@pytest.mark.parametrize("name, rate", [("one", 1e9), ("fast", 3e9)])
def test_bases_and_records_are_spread_by_what_drives_take(tmp_path, rates, name, rate):
    root = tmp_path / "run"
    rates |= {"fast": 3e9}
    train(root, 12, [tmp_path / name], frozen=0, layers=40, base_every=1000)
    share = rate / (rate + 1e9)
    for manifest in manifests(root):
        base = files_of(root, manifest)
        assert base[name] / sum(base.values()) == pytest.approx(share, rel=0.1)
    log = records_of(root)
    assert log[name] / sum(log.values()) == pytest.approx(share, rel=0.1)
    assert {path.name for path in root.iterdir()} >= {
        "commits",
        "index",
        "timelines",
        "drives.json",
        "events.jsonl",
    }
    there = {path.name.rpartition(".")[2] for path in (tmp_path / name).iterdir()}
    assert there == {"safetensors", "log", "json"} and (tmp_path / name / OWNER).exists()


def test_a_list_of_drives_is_measured_once_and_files_stay_where_they_are(tmp_path, rates):
    root, used = tmp_path / "run", [tmp_path / "one", tmp_path / "two"]
    train(root, 4, used)
    before, asked = files_of(root), rates.asked
    rates |= {"one": 1e12}
    train(root, 4, used[::-1])
    assert (files_of(root), rates.asked, asked) == (before, 3, 3)
    assert [drive.share for drive in record_of(Disk(root))] == pytest.approx([1 / 3] * 3)


@pytest.mark.slow
def test_frozen_files_are_named_again_where_they_are(tmp_path, rates):
    """Also by a run that takes another drive, and not by one that leaves theirs."""
    root, one, two = tmp_path / "run", tmp_path / "one", tmp_path / "two"
    train(root, 4, [one])
    frozen = {name: ref.path for name, ref in manifests(root)[0].files.items() if "frozen-" in name}
    assert {path.rpartition("/")[0] for path in frozen.values()} == {"data", "data/drive_1"}
    states = train(root, 8, [two, one])
    assert {name: ref.path for name, ref in manifests(root)[0].files.items() if "frozen-" in name} == frozen
    states |= train(root, 8, [two])
    assert not {"one"} & files_of(root).keys()
    check_every_step(root, states)


@pytest.mark.slow
def test_a_run_goes_on_with_any_other_list_of_drives_and_leaves_former_ones_empty(tmp_path, rates):
    root, one, two = tmp_path / "run", tmp_path / "one", tmp_path / "two"
    states = train(root, 3)
    for used in [one], [one], [two, one], [two], [], []:
        states |= train(root, 7, used)
        assert files_of(root).keys() == {"data", *(path.name for path in used)}
        assert verify_records(reader := LocalStore.read(root), reader.head())[1] == []
    with Loop(root, seed=1) as loop:
        assert same(loop.state(), states[loop.start])
    assert not list(one.iterdir()) and not list(two.iterdir())
    assert not (root / "drives.json").exists() and folders(Disk(root)) == ["data"]


def test_a_drive_stays_the_runs_while_its_records_are_needed(tmp_path, monkeypatch, rates):
    """It has no file of a base, and is not in the list any more."""
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 1 << 20)
    root, drive = tmp_path / "run", tmp_path / "one"
    states = train(root, 8, [drive], base_every=1000, frozen=0)
    assert not any(drive.glob("*.safetensors")) and any(drive.glob("*.log"))
    for _ in range(2):
        with Loop(root, seed=1, base_every=1000, frozen=0) as loop:
            assert loop.start == 8 and same(loop.state(), states[8])


@pytest.mark.slow
def test_what_is_on_drives_counts_for_the_cap(tmp_path, rates):
    root, used, cap = tmp_path / "run", [tmp_path / "one", tmp_path / "two"], 3_000_000
    with Loop(root, used, storage=cap) as loop:
        for _ in range(60):
            loop.train(1)
            there = [path for folder in (root, *used) for path in folder.rglob("*") if path.is_file()]
            sizes = [path.stat().st_size for path in there if path.name not in (OWNER, "lock", "drives.json")]
            assert sum(sizes) <= cap
        state = loop.state()
    with Loop(root, used, seed=1) as loop:
        assert loop.start == 60 and same(loop.state(), state)


def test_a_rollback_within_the_process_reads_what_drives_have(tmp_path, rates):
    with Loop(tmp_path / "run", [tmp_path / "one"]) as loop:
        loop.train(5)
        state = loop.state()
        loop.train(4)
        assert loop.checkpointer.rollback(5) == 5 and same(loop.state(), state)
        loop.train(2)
        state = loop.state()
    with Loop(tmp_path / "run", [tmp_path / "one"], seed=1) as loop:
        assert loop.start == 7 and same(loop.state(), state)


def test_steps_without_records_lie_over_drives_too(tmp_path, rates):
    states = train(tmp_path / "run", 7, [tmp_path / "one"], base_every=None, every=2)
    assert files_of(tmp_path / "run").keys() == {"data", "one"}
    with Loop(tmp_path / "run", [tmp_path / "one"], seed=1, base_every=None, every=2) as loop:
        assert loop.start == 7 and same(loop.state(), states[7])


# One run for who reads it


@pytest.mark.slow
def test_whoever_verifies_compares_converts_or_begins_from_the_run_need_not_know(tmp_path, rates, capsys):
    root, used = tmp_path / "run", [tmp_path / "one"]
    states = train(root, 8, used, base_every=1000)
    assert verify(str(root), as_json=False)
    show(str(root), as_json=False)
    convert(f"{root}@8", tmp_path / "other", ConvertOptions(to="holdfast"), as_json=False)
    assert diff(f"{root}@8", str(tmp_path / "other"), as_json=False)
    loop = Loop(tmp_path / "fresh", seed=1)
    with loop.checkpointer:
        assert loop.checkpointer.resume(source=f"{root}@6") == 6 and same(loop.state(), states[6])


@pytest.mark.slow
def test_the_run_is_compacted_and_pruned_where_it_is(tmp_path, rates):
    root, used = tmp_path / "run", [tmp_path / "one"]
    states = train(root, 8, used, base_every=1000)
    states |= train(root, 8, used, base_every=1000)
    compact(root, 11)
    assert files_of(root, next(m for m in manifests(root) if m.step == 11)).keys() == {"data", "one"}
    check_every_step(root, {step: state for step, state in states.items() if step >= 11})
    before = len(stripe_paths(Disk(root)))
    prune(root, Keep(last=1))
    disk = Disk(root)
    assert 0 < len(stripe_paths(disk)) <= before
    on_drive = {path.name for path in (tmp_path / "one").glob("*.log")}
    assert on_drive == {os.path.basename(path) for path in stripe_paths(disk)}
    assert verify(str(root), as_json=False)


@pytest.mark.slow
def test_the_copy_in_a_bucket_knows_of_no_drives(tmp_path, rates, bucket):
    from holdfast.store.object_store import place_of

    states = train(tmp_path / "run", 8, [tmp_path / "one"], base_every=1000)
    Pusher(tmp_path / "run", place_of(str(bucket))).push()
    loop = Loop(tmp_path / "fresh", seed=1)
    with loop.checkpointer:
        assert loop.checkpointer.resume(source=str(bucket)) == 8 and same(loop.state(), states[8])


def test_damage_on_a_drive_is_found_and_mended_from_a_copy(tmp_path, rates, capsys):
    root, drive = tmp_path / "run", tmp_path / "one"
    train(root, 8, [drive])
    shutil.copytree(root, tmp_path / "copy")
    path = next(ref.path for ref in manifests(root)[0].files.values() if "drive_1" in ref.path)
    with open(root / path, "r+b") as file:
        file.seek(PAGE + 5)
        file.write(b"\xff\x00\xff")
    assert not verify(str(root), as_json=False) and path in capsys.readouterr().out
    assert verify(str(root), as_json=False, repair_from=str(tmp_path / "copy"))
    assert verify(str(root), as_json=False)


# A drive that is not there, or another one


def content(*places):
    return {
        path: path.read_bytes() if path.is_file() else b""
        for place in places
        for path in sorted(place.rglob("*"))
        if path.name not in ("events.jsonl", "lock")
    }


@pytest.mark.parametrize("has_base", [True, False])
def test_a_drive_that_is_not_there_is_named_with_nothing_written(tmp_path, monkeypatch, rates, has_base):
    """Also one that has records alone."""
    root, drive = tmp_path / "run", tmp_path / "mnt" / "one"
    if not has_base:
        monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 1 << 20)
    states = train(root, 8, [drive], base_every=1000, frozen=0)
    assert any(drive.glob("*.safetensors")) == has_base and any(drive.glob("*.log"))
    (tmp_path / "mnt").rename(tmp_path / "away")
    before = content(root)
    for used in [drive], []:
        with pytest.raises(RunMismatch, match=rf"on the drive {drive}, which is not there. Mount its disk"):
            train(root, 1, used, frozen=0)
        assert content(root) == before and not (tmp_path / "mnt").exists()
    reader = LocalStore.read(root)
    assert f"its drive {drive} is not there" in str(verify_records(reader, reader.head())[1])
    (tmp_path / "away").rename(tmp_path / "mnt")
    with Loop(root, [drive], seed=1, frozen=0) as loop:
        assert loop.start == 8 and same(loop.state(), states[8])


def test_drives_that_were_exchanged_are_refused_with_nothing_written(tmp_path, rates):
    root, one, two = tmp_path / "run", tmp_path / "one", tmp_path / "two"

    def swap():
        one.rename(tmp_path / "aside")
        two.rename(one)
        (tmp_path / "aside").rename(two)

    states = train(root, 8, [one, two])
    swap()
    before = content(root, one, two)
    for used in [one, two], []:
        with pytest.raises(RunMismatch, match=r"mount the.* disks .*as they were, or turn the links"):
            train(root, 1, used)
        assert content(root, one, two) == before
    swap()
    with Loop(root, [one, two], seed=1) as loop:
        assert loop.start == 8 and same(loop.state(), states[8])


def test_a_file_of_the_log_that_a_drive_lost_ends_the_run_there_with_a_warning(tmp_path, rates):
    root, drive = tmp_path / "run", tmp_path / "one"
    states = train(root, 8, [drive], base_every=1000)
    first, *_ = segments(Disk(root), "rank-00000")
    last = read_segment(Disk(root), first)[0][-1].step
    later = sorted(drive.glob("*.log"))[-1]
    later.unlink()
    loop = Loop(root, [drive], seed=1)
    with pytest.warns(UserWarning, match=f"{later.name} is missing"):
        step = loop.checkpointer.resume()
    try:
        assert last <= step < 8 and same(loop.state(), states[step])
    finally:
        loop.checkpointer.close()


@pytest.mark.parametrize("used", [["one"], []])
def test_a_log_that_is_put_back_has_its_records_on_drives(tmp_path, rates, used):
    root, used = tmp_path / "run", [tmp_path / name for name in used]
    states = train(root, 8, [tmp_path / "one"], base_every=1000)
    (root / "journal").rename(tmp_path / "away")
    with pytest.raises(Damaged, match="put it back"):
        train(root, 1, used)
    (tmp_path / "away").rename(root / "journal")
    with Loop(root, used, seed=1, base_every=1000) as loop:
        assert loop.start == 8 and same(loop.state(), states[8])


def test_a_segment_that_is_put_back_has_its_records_on_drives(tmp_path, rates):
    root, drive = tmp_path / "run", tmp_path / "one"
    states = train(root, 8, [drive], base_every=1000)
    first = segments(Disk(root), "rank-00000")[0].path
    (root / first).rename(tmp_path / "away")
    with pytest.warns(UserWarning, match="a segment was removed"):
        train(root, 1, [drive], base_every=1000)
    (tmp_path / "away").rename(root / first)
    loop = Loop(tmp_path / "fresh", seed=1)
    with loop.checkpointer:
        assert loop.checkpointer.resume(source=f"{root}@8.t1") == 8 and same(loop.state(), states[8])


def test_a_run_without_commits_is_not_taken_for_a_fresh_one_by_its_drives(tmp_path, rates):
    root, drive = tmp_path / "run", tmp_path / "one"
    train(root, 4, [drive], base_every=1000)
    for folder in "commits", "journal":
        (root / folder).rename(tmp_path / folder)
    for path in [*(root / "data").glob("*.safetensors"), *drive.glob("*.safetensors")]:
        path.unlink()
    before = content(root, drive)
    with pytest.raises(RunMismatch, match=r"has records of .*, which is missing too"):
        train(root, 1, [drive])
    assert content(root, drive) == before


# What is refused


@pytest.mark.parametrize(
    "options, text",
    [
        ({"used": "one"}, "is one directory; give a list"),
        ({"used": [3]}, "is not a list of directories"),
        ({"used": {"one": 1}}, "is not a list of directories"),
        ({"used": ["one"], "replica": True, "base_every": 3}, "drives= with replica= is not offered"),
        ({"used": ["one"], "nodes": LocalDisks()}, "drives= with nodes= is not offered"),
        ({"used": ["run/data/one"]}, "lie one in the other"),
        ({"used": ["one", "one/two"]}, "lie one in the other"),
    ],
)
def test_what_could_not_be_kept_is_refused_with_nothing_written(tmp_path, monkeypatch, rates, options, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=text):
        Loop("run", **options)
    assert not list(tmp_path.iterdir())


def test_a_drive_of_another_run_and_one_with_other_files_are_refused(tmp_path, rates):
    train(tmp_path / "run", 1, [tmp_path / "one"])
    with pytest.raises(RunMismatch, match="is a drive of another run"):
        Loop(tmp_path / "other", [tmp_path / "one"])
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "notes").write_text("mine")
    with pytest.raises(RunMismatch, match="1 files in it, such as notes"):
        Loop(tmp_path / "other", [tmp_path / "two"])
    assert not (tmp_path / "other").exists()


def test_two_drives_on_one_file_system_are_a_warning(tmp_path, monkeypatch, rates):
    monkeypatch.setattr(drive_rates, "device_of", lambda directory: 1)
    with (
        pytest.warns(UserWarning, match="are on one file system"),
        Loop(tmp_path / "run", [tmp_path / "one"]),
    ):
        pass


def test_a_damaged_page_of_stripes_is_told(tmp_path, rates):
    root = tmp_path / "run"
    train(root, 4, [tmp_path / "one"], base_every=1000)
    ref = segments(Disk(root), "rank-00000")[0]
    with open(root / ref.path, "r+b") as file:
        file.seek(300)
        file.write(b"~~")
    found, odd = read_segment(Disk(root), ref)
    assert found == [] and isinstance(odd, Damaged)
