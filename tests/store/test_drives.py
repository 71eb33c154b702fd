"""Files of a run on further drives: what a power cut or a kill leaves of it, and what a link may lead to."""

from __future__ import annotations

import errno
import json
import random
from contextlib import nullcontext
from threading import Barrier, Thread

import pytest

from holdfast.errors import DiskFailed, HoldfastError, RunLocked, RunMismatch
from holdfast.io.queue import IOQueue
from holdfast.store import drive_links
from holdfast.store.commit.retention import SMALL
from holdfast.store.disk import Disk, alone_in
from holdfast.store.drive_links import OWNER, Drive, data_paths, directories_for, folders, record_of
from holdfast.store.format.manifest import HOME
from holdfast.store.run_store import LocalStore
from killed import Killed
from support.simdisk import SimDisk
from tiny_run import TinyRun, check_content

TENSORS = {
    "block_0": [("a/param", "F32", (3, 5)), ("a/exp_avg", "F32", (3, 5))],
    "block_1": [("b/param", "BF16", (701,))],
}


class DrivenRun(TinyRun):
    """Has all its files on the last of its drives."""

    def __init__(self, root, used, **options):
        self.used = used
        super().__init__(root, frozen={}, tensors=TENSORS, threads=1, **options)

    def _begin(self, copies, fork):
        found = directories_for(self.store.disk, self.used)
        rows = [Drive(folder, directory, 1, 1.0) for folder, directory in found.items()]
        home = Drive(HOME, str(self.store.disk.root), 1, 0.0)
        unit, begin = self.store.unit, self.store.begin
        folder = rows[-1].folder if rows else HOME
        self.store.unit = lambda name, layout, copies: unit(name, layout, copies, folder)

        def begin_with_drives(point):
            timeline = begin(point)
            self.store.take_drives([home, *rows] if rows else [])
            return timeline

        self.store.begin = begin_with_drives
        super()._begin(copies, fork)


def process(disk, used, steps):
    with DrivenRun("/sim", used, disk=disk) as run:
        disk.ack((run.timeline, run.step))
        for _ in range(steps):
            run.take_step()
            disk.ack((run.timeline, run.step))


def record(tmp_path, *lists):
    disk = SimDisk()
    for used in lists:
        process(disk, [tmp_path / name for name in used], 3)
    return disk


def check(image, queue):
    """What was acknowledged is there, and every commit that is listed is whole."""
    if not image.disk.exists("commits"):
        assert image.acked is None
        return
    reader = LocalStore.read("/sim", disk=image.disk, queue=queue)
    for ref in reader.commits():
        manifest = reader.load(ref)
        assert reader.verify(manifest) == []
        check_content(reader, manifest)
    if image.acked is not None and image.acked[1]:
        assert reader.newest_whole()[0].step >= image.acked[1]


@pytest.fixture
def queue():
    queue = IOQueue(1)
    yield queue
    queue.close()


@pytest.mark.slow
def test_every_image_of_a_run_on_a_drive_recovers(tmp_path, queue):
    """Of one that begins there, leaves it and goes back."""
    disk, count = record(tmp_path, "a", "", "a"), 0
    for image in disk.images(random.Random(0), samples=3):
        check(image, queue)
        count += 1
    assert count > 100


@pytest.mark.parametrize("why", ["drives", "unit directory", "unit data"])
def test_no_sync_of_a_run_on_a_drive_can_be_left_out(tmp_path, queue, why):
    disk = record(tmp_path, "a")
    with pytest.raises((AssertionError, HoldfastError, FileNotFoundError)):
        for image in disk.images(random.Random(0), samples=3, without=why):
            check(image, queue)


def test_opening_a_run_makes_the_names_on_its_drives_durable(tmp_path):
    """Nobody may have synced them: it may be a copy."""
    disk = record(tmp_path, "a")
    disk.log.clear()
    LocalStore.open("/sim", disk=disk).close()
    assert ("data/drive_1", "reopen data directory") in {(op.place, op.why) for op in disk.log}


STOPS = ["write_durably", "makedirs", "link", "sync_dir", "unlink"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("stop", STOPS)
def test_killed_while_drives_are_taken_or_left(tmp_path, monkeypatch, stop):
    """At each call of its kind in turn, before and after it."""
    lists = [["a"], ["b", "a"], ["b"], [], ["a", "b"]]
    for late in False, True:
        root = tmp_path / f"run{late}"
        for names in lists:
            used = [tmp_path / f"{name}{late}" for name in names]
            for arrival in range(1, 30):
                with monkeypatch.context() as patch:
                    reached = stop_at(patch, stop, arrival, late)
                    try:
                        with DrivenRun(root, used) as run:
                            run.take_step()
                    except Killed:
                        continue
                    assert len(reached) < arrival
                break
            with DrivenRun(root, used) as run:
                for _ in range(2):
                    manifest = run.take_step()
                check_content(run.store, manifest)
                assert run.store.verify(manifest) == []
                assert {path.rpartition("/")[0] for path in data_paths(run.store.disk)} == {
                    run.units["block_0"].folder
                }


def stop_at(patch, name, arrival, late):
    """End ``take`` at its ``arrival``-th call of ``name``."""
    reached, taking = [], []
    take, place = drive_links.take, drive_links if name == "write_durably" else Disk
    function = getattr(place, name)

    def stopping(*args, **options):
        if taking:
            reached.append(name)
        ends = taking and len(reached) == arrival
        if ends and not late:
            raise Killed
        function(*args, **options)
        if ends:
            raise Killed

    def taken(*args):
        taking.append(True)
        try:
            return take(*args)
        finally:
            taking.clear()

    patch.setattr(place, name, stopping)
    patch.setattr(drive_links, "take", taken)
    return reached


def test_a_link_to_a_directory_that_is_no_drive_of_the_run_is_not_written_through(tmp_path):
    """A run that somebody else has made may have any links."""
    root, mine = tmp_path / "run", tmp_path / "mine"
    with DrivenRun(root, [tmp_path / "drive"]) as run:
        run.take_step()
    (tmp_path / "drive").rename(mine)
    (mine / OWNER).unlink()
    (mine / "letter.1.safetensors").write_bytes(b"dear")
    (root / "data" / "drive_1").unlink()
    (root / "data" / "drive_1").symlink_to(mine)
    before = {path: path.read_bytes() for path in mine.iterdir()}
    with pytest.raises(RunMismatch, match="does not say whose it is"):
        LocalStore.open(root)
    for path in (root / "commits").iterdir():
        path.unlink()
    for path in (root / "timelines").iterdir():
        path.unlink()
    with pytest.raises(RunMismatch, match="which no fresh start made"):
        LocalStore.open(root)
    assert before == {path: path.read_bytes() for path in mine.iterdir()}


def test_a_drive_that_no_commit_needs_may_be_lost(tmp_path):
    root = tmp_path / "run"
    with DrivenRun(root, [tmp_path / "drive"]) as run:
        run.take_step()
    with DrivenRun(root, []) as run:
        run.take_step()
        run.take_step()
    assert folders(Disk(root)) == ["data", "data/drive_1"]
    for path in (tmp_path / "drive").iterdir():
        path.unlink()
    (tmp_path / "drive").rmdir()
    with DrivenRun(root, []) as run:
        check_content(run.store, run.take_step())
    assert folders(Disk(root)) == ["data"] and record_of(Disk(root)) == ()


def wanting(root, used):
    """A run's directory, and what it would take."""
    disk = Disk(root)
    disk.makedirs(HOME)
    found = directories_for(disk, used)
    rows = [Drive(folder, directory, 1, 1.0) for folder, directory in found.items()]
    return disk, [Drive(HOME, str(root), 1, 0.0), *rows]


def test_of_two_runs_that_want_the_same_drives_in_the_same_instant_one_has_them(tmp_path):
    def take(root, used):
        ready = wanting(root, used)
        together.wait()
        try:
            drive_links.take(*ready, [])
        except (RunMismatch, RunLocked) as error:
            refused.append((root, str(error)))

    for turn in range(20):
        used, together, refused = [tmp_path / f"{turn}-{k}" for k in range(2)], Barrier(2), []
        roots = [tmp_path / f"run-{turn}-{k}" for k in range(2)]
        threads = [Thread(target=take, args=(root, used[:: 1 - 2 * k])) for k, root in enumerate(roots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ((lost, text),) = refused
        (won,) = set(roots) - {lost}
        assert "another run" in text
        assert [drive_links._owner(str(drive))["run"] for drive in used] == [str(won)] * 2
        assert folders(Disk(lost)) == ["data"] and len(folders(Disk(won))) == 3


def test_a_run_that_comes_second_for_one_of_its_drives_lets_go_of_the_others(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    late, early = wanting(tmp_path / "late", [one, two]), wanting(tmp_path / "early", [two])
    with alone_in(Disk(two)), pytest.raises(RunLocked, match="two is being made a drive of another run"):
        drive_links.take(*late, [])
    assert not list(one.iterdir()) and folders(late[0]) == ["data"]
    drive_links.take(*early, [])
    with pytest.raises(RunMismatch, match="is a drive of another run"):
        drive_links.take(*late, [])
    drive_links.take(*wanting(tmp_path / "third", [one]), [])


def test_what_ranks_show_each_other_and_a_kill_leaves_does_not_keep_a_run_out(tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    (drive / "holdfast-1x_a2b3c").touch()
    drive_links.take(*wanting(tmp_path / "run", [drive]), [])
    assert [path.name for path in drive.iterdir()] == [OWNER]
    other = tmp_path / "other"
    other.mkdir()
    (other / "holdfast-notes").write_text("mine")
    with pytest.raises(RunMismatch, match="1 files in it, such as holdfast-notes"):
        wanting(tmp_path / "run", [other])


@pytest.mark.parametrize("kind", ["listdir", "unlink", "sync_dir"])
def test_a_drive_that_fails_and_is_left_out_is_let_go_of_with_a_warning(tmp_path, monkeypatch, kind):
    """By the run that goes on elsewhere, or by the next."""
    root, drive = tmp_path / "run", tmp_path / "drive"
    with DrivenRun(root, [drive]) as run:
        run.take_step()
    call = getattr(Disk, kind)

    def failing(disk, path, **options):
        inside = (disk.root / path).parent if kind == "unlink" else disk.root / path
        if inside.resolve() == drive:
            raise DiskFailed(f"cannot do this at {path}") from OSError(errno.EIO, "Input/output error")
        return call(disk, path, **options)

    said = rf"the drive {drive} fails \(Input/output error\)\. No commit"
    with DrivenRun(root, []) as run, monkeypatch.context() as patch:
        patch.setattr(Disk, kind, failing)
        with pytest.warns(UserWarning, match=said) if kind == "unlink" else nullcontext():
            for _ in range(4):
                check_content(run.store, run.take_step())
    assert any(drive.glob("*.safetensors")) == (kind == "unlink")
    monkeypatch.setattr(Disk, kind, failing)
    with pytest.warns(UserWarning, match=said):
        DrivenRun(root, []).close()
    assert folders(Disk(root)) == ["data"]
    with DrivenRun(root, []) as run:
        check_content(run.store, run.take_step())


def test_a_drive_that_fails_and_has_files_of_commits_is_an_error(tmp_path, monkeypatch):
    with DrivenRun(tmp_path / "run", [tmp_path / "drive"]) as run:
        run.take_step()
    sync = Disk.sync_dir

    def failing(disk, path, **options):
        if path == "data/drive_1":
            raise DiskFailed(f"cannot sync {path}")
        return sync(disk, path, **options)

    monkeypatch.setattr(Disk, "sync_dir", failing)
    with pytest.raises(DiskFailed, match="cannot sync data/drive_1"):
        DrivenRun(tmp_path / "run", [])


def test_what_is_on_a_drive_counts_as_the_runs(tmp_path):
    root, sizes = tmp_path / "run", []
    with DrivenRun(root, [tmp_path / "drive"]) as run:
        run.take_step()
        for folder in (tmp_path / "drive", *(root / name for name in SMALL)):
            sizes += [path.stat().st_size for path in folder.iterdir() if path.name != OWNER]
        assert run.store.measure() == sum(sizes)
    assert len(list((tmp_path / "drive").glob("*.safetensors"))) == 6


def test_a_drive_is_left_without_files_of_the_run_and_with_those_of_others(tmp_path):
    """Whoever was to remove them may have been killed."""
    root, drive = tmp_path / "run", tmp_path / "drive"
    with DrivenRun(root, [drive]) as run:
        run.take_step()
    with DrivenRun(root, []) as run:
        run.take_step()
        run.take_step()
    (drive / "block_0.1.safetensors").write_bytes(b"left")
    (drive / "notes.txt").write_bytes(b"mine")
    DrivenRun(root, []).close()
    assert [path.name for path in drive.iterdir()] == ["notes.txt"]
    assert folders(Disk(root)) == ["data"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", json.dumps({"drives": [{}]}).encode()])
def test_a_record_of_drives_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "drives.json").write_bytes(content)
    assert record_of(Disk(tmp_path)) == ()
