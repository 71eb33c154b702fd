"""Of several that push to one place in a bucket, one at a time publishes or removes; no listed commit lacks payload."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from checkpoint.loops import make
from holdfast.checkpointer import Checkpointer
from holdfast.errors import DiskFailed
from holdfast.store import bucket_lock, pushing
from holdfast.store.bucket_lock import BucketLock
from holdfast.store.commit.retention import Keep
from holdfast.store.format.manifest import ALONE
from holdfast.store.object_store import ObjectDisk
from holdfast.store.pushing import Pusher
from holdfast.store.reader import RunReader
from test_checkpointer import ADAMW, go_on


@pytest.fixture
def locks(bucket):
    return [BucketLock(ObjectDisk(bucket)) for _ in range(2)]


@pytest.fixture
def runs(tmp_path):
    """A run of five steps with a base of step 4 alone, and an earlier copy of it, with a base of step 2 alone."""
    loop = make(ADAMW)
    root, earlier = tmp_path / "run", tmp_path / "earlier"
    keep = Keep(1)
    with Checkpointer(root, model=loop.model, optimizer=loop.optimizers, keep=keep, base_every=100) as ckpt:
        ckpt.resume()
        go_on(loop, ckpt, 2)
        ckpt.save()
        shutil.copytree(root, earlier, ignore=shutil.ignore_patterns("lock"))
        go_on(loop, ckpt, 4)
        ckpt.save()
        go_on(loop, ckpt, 5)
    return root, earlier


def lacking(url):
    """The payload files that listed commits of the bucket name and that are not there."""
    reader, sizes = RunReader(url), ObjectDisk(url).sizes("data")
    files = [file for ref in reader.commits() for file in reader.load(ref).files.values()]
    return [file.path for file in files if sizes.get(file.path) != file.bytes]


def put_lock(bucket, **owner):
    ObjectDisk(bucket).put(f"{bucket_lock.FOLDER}/other", json.dumps({"host": "there", **owner}).encode())


def test_one_of_two_has_the_lock(locks):
    first, second = locks
    assert first.acquire(0) and not second.acquire(0)
    assert second.holder.startswith(f"process {os.getpid()} on ")
    first.release()
    assert second.acquire(0) and not first.acquire(0)


def test_lock_of_an_ended_process_counts_no_more(locks, bucket):
    disk = ObjectDisk(bucket)
    with locks[1].acquired(0):
        [held] = disk.facts(bucket_lock.FOLDER)
        owner_here = json.loads(disk.read_bytes(held))
    child = subprocess.Popen(["true"])
    put_lock(bucket, **{**owner_here, "pid": child.pid})
    assert not locks[0].acquire(0)
    child.wait()
    assert locks[0].acquire(0)
    assert len(disk.listdir(bucket_lock.FOLDER)) == 1


def test_lock_from_elsewhere_counts_until_it_is_old(locks, bucket, monkeypatch):
    """By the clock of the bucket."""
    put_lock(bucket, pid=1, boot="another start")
    assert not locks[0].acquire(0) and locks[0].holder.startswith("process 1 on there (s3://")
    monkeypatch.setattr(bucket_lock, "LEFT_SECONDS", -1)
    assert locks[0].acquire(0)


@pytest.fixture
def no_removal(bucket, monkeypatch):
    """Credentials that may not remove objects."""

    def refused(*_):
        raise DiskFailed("403")

    monkeypatch.setattr(ObjectDisk, "unlink", refused)


def test_locks_are_released_without_permission_to_remove(locks, no_removal):
    for lock in [*locks, *locks]:
        with lock.acquired(0) as is_acquired:
            assert is_acquired


def test_runs_are_pushed_without_permission_to_remove(runs, bucket, no_removal, monkeypatch):
    """Also beside a lock that was left behind."""
    put_lock(bucket, pid=1)
    monkeypatch.setattr(bucket_lock, "LEFT_SECONDS", -1)
    root, earlier = runs
    assert [Pusher(each, bucket).push().durable_step for each in (earlier, root)] == [2, 5]


def test_removal_that_is_not_permitted_is_tried_once_for_each_commit(runs, bucket, no_removal):
    root, earlier = runs
    Pusher(earlier, bucket).push()
    pusher, disk = Pusher(root, bucket, keep=Keep(1)), ObjectDisk(bucket)
    with pytest.raises(DiskFailed, match="403"):
        pusher.push()
    left = disk.facts(bucket_lock.FOLDER)
    assert pusher.push().durable_step == 5 and disk.facts(bucket_lock.FOLDER) == left


def test_commit_that_another_publishes_meanwhile_is_not_waited_for(runs, bucket, monkeypatch):
    acquire, others = BucketLock.acquire, []

    def after_another(self, *arguments):
        if not others:
            others.append(Pusher(runs[0], bucket))
            others[0].push()
            put_lock(bucket, pid=1)
        return acquire(self, *arguments)

    monkeypatch.setattr(BucketLock, "acquire", after_another)
    monkeypatch.setattr(bucket_lock, "random", None)  # needed for a wait
    assert Pusher(runs[0], bucket).push().durable_step == others[0].durable_step == 5


def test_commit_that_another_node_published_is_not_published_again(runs, bucket, monkeypatch):
    """It counts as copied, so that what is not kept is removed after it."""
    push_timelines, begun, others = Pusher._push_timelines, [], []

    def after_another(self):
        begun.append(self)
        if len(begun) == 1:
            others.extend(Pusher(runs[0], bucket).push().commits)
            monkeypatch.setattr(BucketLock, "acquire", None)
        push_timelines(self)

    monkeypatch.setattr(Pusher, "_push_timelines", after_another)
    done = Pusher(runs[0], bucket, streams=[ALONE]).push()
    assert done.commits == others != [] and done.durable_step == 5


def test_commit_that_another_completed_counts_again(runs, bucket, monkeypatch):
    root, earlier = runs
    Pusher(earlier, bucket).push()
    disk = ObjectDisk(bucket)
    for path in disk.sizes("data"):
        disk.unlink(path)
    pusher = Pusher(root, bucket)
    with monkeypatch.context() as patch:
        patch.setattr(Pusher, "_push_commit", lambda *_: None)
        assert pusher.push().durable_step is None
    again = Pusher(earlier, bucket).push().durable_step
    monkeypatch.setattr(Pusher, "_push_commit", lambda *_: None)
    assert pusher.push().durable_step == again is not None


def test_nothing_is_written_under_a_lock_that_others_may_have(locks, monkeypatch):
    assert locks[0].acquire(0)
    locks[0].check()
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", -1)
    with pytest.raises(DiskFailed, match="answered too slowly"):
        locks[0].check()


def test_nothing_is_removed_while_another_publishes(runs, bucket, monkeypatch):
    """Another that keeps less runs after this one has seen that all payload is there, and before the manifest is."""
    root, earlier = runs
    Pusher(root, bucket, keep=Keep(1)).push()
    put_new, turns = ObjectDisk.put_new, []

    def other_first(self, path, data):
        if path.startswith("commits/") and not turns:
            turns.append(path)
            assert Pusher(root, bucket, keep=Keep(1)).push().removed == []
        return put_new(self, path, data)

    monkeypatch.setattr(ObjectDisk, "put_new", other_first)
    Pusher(earlier, bucket).push()
    assert turns and turns[0] in [ref.path for ref in RunReader(bucket).commits()] and lacking(bucket) == []
    keeper = Pusher(root, bucket, keep=Keep(1))
    assert turns[0] in [ref.path for ref in keeper.push().removed] and lacking(bucket) == []


def test_commit_waits_while_another_removes(runs, bucket, locks, monkeypatch):
    monkeypatch.setattr(pushing, "WAIT_SECONDS", 0)
    assert locks[0].acquire(0)
    pusher = Pusher(runs[0], bucket)
    with pytest.raises(DiskFailed, match=r"publish or remove .*/lock/.* counts until"):
        pusher.push()
    assert RunReader(bucket).commits() == [] and pusher.durable_step is None
    locks[0].release()
    assert pusher.push().durable_step == 5


def test_record_of_a_timeline_that_only_log_records_tell_of_is_put(runs, bucket):
    """As the process that had begun to copy them left it."""
    root, _ = runs
    Pusher(root, bucket).push()
    [record] = RunReader(root).timelines()[0].values()
    ObjectDisk(bucket).unlink(record.path)
    assert Pusher(root, bucket).push().durable_step == 5
    assert RunReader(bucket).timelines() == ({record.id: record}, [])


def test_records_are_copied_after_that_of_their_timeline(runs, bucket, monkeypatch):
    """Which may be begun while a push is under way."""
    root, _ = runs
    with monkeypatch.context() as patch:
        patch.setattr(RunReader, "timelines", lambda self: ({}, []))
        assert Pusher(root, bucket).push().records == 0
    assert ObjectDisk(bucket).listdir("journal") == []
    assert Pusher(root, bucket).push().records > 0


def test_index_that_is_half_there_is_put_again(runs, bucket):
    """As some gateways leave it after a broken connection."""
    root, _ = runs
    path = RunReader(root).head().small_paths[0]
    ObjectDisk(bucket).put(path, (root / path).read_bytes()[:-9])
    pusher = Pusher(root, bucket)
    with pytest.raises(DiskFailed, match="is not whole"):
        pusher.push()
    assert RunReader(bucket).commits() == []
    assert pusher.push().durable_step == 5 and RunReader(bucket).verify(RunReader(bucket).head()) == []


@pytest.mark.parametrize("anew", [True, False])
def test_payload_that_somebody_removed_is_copied_again(runs, bucket, anew):
    """By the next process, or by the same one once it has a new commit."""
    root, earlier = runs
    pusher = Pusher(earlier, bucket, keep=Keep(2))
    assert pusher.push().durable_step == 2
    newest = RunReader(earlier).head()
    disk = ObjectDisk(bucket)
    for file in RunReader(bucket).load(newest.ref).files.values():
        disk.unlink(file.path)
    if anew:
        pusher = Pusher(earlier, bucket, keep=Keep(2))
    else:
        shutil.copytree(root, earlier, ignore=shutil.ignore_patterns("lock"), dirs_exist_ok=True)
        assert pusher.push().durable_step == 5 and lacking(bucket)
    done = pusher.push()
    assert done.durable_step == (2 if anew else 5) and done.damaged == [] and lacking(bucket) == []


def test_payload_that_nobody_has_any_more_is_reported_and_counts_for_nothing(runs, bucket):
    root, earlier = runs
    Pusher(earlier, bucket).push()
    disk = ObjectDisk(bucket)
    for ref in RunReader(bucket).commits():
        for file in RunReader(bucket).load(ref).files.values():
            disk.unlink(file.path)
    pusher = Pusher(root, bucket, keep=Keep(3))
    done = pusher.push()
    assert done.durable_step == 5 and {error.path for error in done.damaged} == {
        ref.path for ref in RunReader(earlier).commits()
    } - {ref.path for ref in RunReader(root).commits()}
    assert pusher.push().damaged == []
