"""A run in a bucket: copied whole or not at all, read from there as from a directory, under every fault."""

from __future__ import annotations

import shutil
import socket
from itertools import count

import pytest

from checkpoint.loops import cut_small, make, same
from dist.world import World
from holdfast.checkpointer import Checkpointer
from holdfast.errors import (
    BadInput,
    ChunkCorrupt,
    CommitRetired,
    Damaged,
    DiskFailed,
    FileMissing,
    NoCommit,
    RunMismatch,
)
from holdfast.opening import source_of
from holdfast.store import bucket_lock, copying, object_store
from holdfast.store.commit.retention import Keep
from holdfast.store.format.manifest import ALONE, object_path
from holdfast.store.log.chain import last_step, verify_records
from holdfast.store.log.segments import read_segment, segments
from holdfast.store.object_store import NamedCommit, ObjectDisk, Url
from holdfast.store.pushing import Pusher
from holdfast.store.reader import RunReader
from test_checkpointer import ADAMW, go_on, reference, start
from tiny_run import TinyRun, check_content


@pytest.fixture
def run(tmp_path):
    """Of 7 steps: a base of step 0, the others in records."""
    loop, checkpointer = start(tmp_path / "run", "batchnorm")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 7)
    return tmp_path / "run"


def test_log_object_that_another_push_removes_while_it_is_read_counts_as_gone(run, bucket, monkeypatch):
    Pusher(run, bucket).push()
    [ref, *_] = segments(ObjectDisk(bucket), ALONE)
    read, calls = ObjectDisk.read_range, count()

    def removed(self, path, *rest):
        if next(calls) > 1:
            raise FileNotFoundError(path)
        return read(self, path, *rest)

    monkeypatch.setattr(object_store, "AHEAD", 1)
    monkeypatch.setattr(ObjectDisk, "read_range", removed)
    assert read_segment(ObjectDisk(bucket), ref) == ([], None)


def test_commit_that_another_push_removes_while_it_is_verified_is_retired(run, bucket, monkeypatch):
    Pusher(run, bucket).push()
    reader = RunReader(bucket)
    manifest = reader.head()

    def removed(self, path, *_):
        self.unlink(manifest.path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(ObjectDisk, "read_range", removed)
    with pytest.raises(CommitRetired):
        reader.verify(manifest)


def test_base_that_another_push_removes_while_training_begins_from_it_is_retired(
    run, bucket, monkeypatch, tmp_path
):
    """After its manifest was looked at."""
    Pusher(run, bucket).push()
    path, read = RunReader(bucket).head().path, ObjectDisk.read_range
    monkeypatch.setattr("holdfast.sources.require_intact_snapshot", lambda *_: None)

    def removed(self, name, *rest):
        if not name.startswith("data/"):
            return read(self, name, *rest)
        self.unlink(path)
        raise FileNotFoundError(name)

    monkeypatch.setattr(ObjectDisk, "read_range", removed)
    _, checkpointer = start(tmp_path / "other", "batchnorm")
    with checkpointer, pytest.raises(CommitRetired):
        checkpointer.resume(source=str(bucket))


def assert_whole(url):
    """Every commit of the bucket verifies; the step that the newest leads to, None if there is none."""
    reader = RunReader(url)
    for ref in reader.commits():
        assert reader.verify(reader.load(ref)) == []
    head = reader.head()
    if head is None:
        return None
    step, odd = verify_records(reader, head)
    assert odd == []
    return step


@pytest.mark.slow
def test_a_pushed_run_is_whole_and_leads_as_far_as_the_directory_does(run, bucket):
    done = Pusher(run, bucket).push()
    assert done.durable_step == 7 == assert_whole(bucket) and done.damaged == []
    here, there = RunReader(run), RunReader(bucket)
    assert there.commits() == here.commits() == done.commits
    assert source_of(f"{bucket}@7").atoms.keys() == source_of(f"{run}@7").atoms.keys()


def test_what_is_there_is_not_sent_again(run, bucket, monkeypatch):
    Pusher(run, bucket).push()
    monkeypatch.setattr(ObjectDisk, "put", None)
    done = Pusher(run, bucket).push()
    assert (done.commits, done.records, done.bytes, done.durable_step) == ([], 0, 0, 7)


def test_records_that_are_there_are_read_once(run, bucket, monkeypatch):
    Pusher(run, bucket).push()
    pusher, begun = Pusher(run, bucket), []
    monkeypatch.setattr(
        copying,
        "read_segment",
        lambda disk, ref, start=0: begun.append(start) or read_segment(disk, ref, start),
    )
    pusher.push()
    del begun[:]
    pusher.push()
    assert begun and all(begun)


def test_payload_of_a_copy_that_was_interrupted_is_not_sent_again(run, bucket, monkeypatch):
    [ref] = Pusher(run, bucket).push().commits
    ObjectDisk(bucket).unlink(ref.path)
    put, sent = ObjectDisk.put, []
    monkeypatch.setattr(
        ObjectDisk, "put", lambda self, path, data: sent.append(path) or put(self, path, data)
    )
    assert Pusher(run, bucket).push().commits == [ref] and assert_whole(bucket) == 7
    assert not [path for path in sent if path.startswith("data/")]


@pytest.mark.slow
def test_training_goes_on_from_the_bucket_as_if_it_were_that_run(run, bucket, tmp_path):
    Pusher(run, bucket).push()
    shutil.rmtree(run)
    states, _ = reference(12, "batchnorm")
    loop = make(ADAMW, "batchnorm", seed=5)
    checkpointer = Checkpointer(tmp_path / "new", model=loop.model, optimizer=loop.optimizers, **loop.things)
    with checkpointer:
        assert checkpointer.resume(source=str(bucket)) == 7
        assert same(loop.state(), states[7])
        go_on(loop, checkpointer, 12)
    assert same(loop.state(), states[12])


class Killed(BaseException):
    """The process ends here."""


def killing(monkeypatch, number):
    """The next push ends right after its ``number``-th change of the bucket, and so right before the one after that."""
    count = 0

    def wrap(name):
        true = getattr(ObjectDisk, name)

        def call(self, *arguments):
            nonlocal count
            result = true(self, *arguments)
            count += 1
            if count == number:
                raise Killed
            return result

        monkeypatch.setattr(ObjectDisk, name, call)

    for name in ("put", "put_new", "unlink"):
        wrap(name)


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """Twenty steps; bases of several steps about every five; a group of records in each segment."""
    cut_small(monkeypatch, 1)
    loop = make(ADAMW)
    root = tmp_path / "long"
    with Checkpointer(root, model=loop.model, optimizer=loop.optimizers, base_every=5) as checkpointer:
        checkpointer.resume()
        for i in range(20):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()
            if i == 9:
                shutil.copytree(root, tmp_path / "earlier", ignore=shutil.ignore_patterns("lock"))
    return root


@pytest.mark.slow
def test_a_push_killed_at_any_point_leaves_a_whole_bucket_that_never_goes_back(
    long_run, tmp_path, bucket, monkeypatch
):
    earlier = Pusher(tmp_path / "earlier", bucket).push().durable_step
    assert earlier == assert_whole(bucket) == 10
    monkeypatch.setattr(
        bucket_lock, "LEFT_SECONDS", -1
    )  # the process of the lock is this one, and has not ended
    number, reached = 0, earlier
    while True:
        number += 1
        with monkeypatch.context() as patch:
            killing(patch, number)
            try:
                done = Pusher(long_run, bucket, keep=Keep(1)).push()
            except Killed:
                step = assert_whole(bucket)
                assert step is not None and step >= reached
                reached = step
            else:
                break
    assert number >= 5 and reached == 20 == done.durable_step == assert_whole(bucket)
    assert [ref.step for ref in RunReader(bucket).commits()] == [RunReader(long_run).head().step]


@pytest.mark.slow
def test_two_that_push_the_same_run_do_not_harm_each_other(long_run, bucket, monkeypatch):
    monkeypatch.setattr(copying, "GROUP_BYTES", 3 * 8192)
    first, second = Pusher(long_run, bucket), Pusher(long_run, bucket)
    put_new, turns = ObjectDisk.put_new, []

    def other_first(self, path, data):
        if self is first._disk and len(turns) < 3 and path.startswith(("journal", "commits")):
            turns.append(path)
            with monkeypatch.context() as patch:
                patch.setattr(ObjectDisk, "put_new", put_new)
                second.push()
        return put_new(self, path, data)

    monkeypatch.setattr(ObjectDisk, "put_new", other_first)
    done = first.push()
    assert turns and done.damaged == [] and done.durable_step == 20 == assert_whole(bucket)


def test_a_manifest_is_published_by_one_of_two(bucket):
    disk = ObjectDisk(bucket)
    assert disk.put_new("commits/a", b"1") and not disk.put_new("commits/a", b"2")
    assert disk.read_bytes("commits/a") == b"1"


@pytest.mark.slow
def test_a_place_that_holds_another_run_is_refused_and_stays_as_it_was(run, long_run, bucket):
    Pusher(run, bucket).push()
    before = listing(ObjectDisk(bucket))
    with pytest.raises(
        RunMismatch, match=r"s3://bucket/runs/a holds another run than .* Push to another place"
    ):
        Pusher(long_run, bucket).push()
    assert listing(ObjectDisk(bucket)) == before


def listing(disk, path=""):
    found = dict(disk.sizes(path))
    below = {f"{path}/{name}".lstrip("/") for name in disk.listdir(path)} - found.keys()
    for name in sorted(below):
        found |= listing(disk, name)
    return found


@pytest.mark.slow
def test_only_the_newest_bases_stay_where_that_is_asked_for(long_run, tmp_path, bucket):
    Pusher(tmp_path / "earlier", bucket).push()
    before = RunReader(bucket).commits()
    done = Pusher(long_run, bucket, keep=Keep(1)).push()
    [newest] = RunReader(bucket).commits()
    assert set(done.removed) == {*before, *done.commits} - {newest} and done.durable_step == 20
    manifest = RunReader(bucket).load(newest)
    left = listing(ObjectDisk(bucket))
    assert {path for path in left if path.startswith("data/")} == {
        f.path for f in manifest.files.values()
    } | {
        object_path(file)
        for ref in RunReader(long_run).commits()
        for file in RunReader(long_run).load(ref).files.values()
        if object_path(file) in left
    }
    assert {path for path in left if path.startswith("index/")} == set(manifest.small_paths)
    assert assert_whole(bucket) == 20


@pytest.mark.slow
def test_what_another_copied_meanwhile_goes_whole_or_not_at_all(long_run, tmp_path, bucket, monkeypatch):
    """Of commits that the directory does not have any more, and that were not there when this one began to copy."""
    acquired, others = bucket_lock.BucketLock.acquired, []

    def after_another(self, wait_seconds, *is_needless):
        if not wait_seconds:  # what is not kept goes next
            others.append(Pusher(tmp_path / "earlier", bucket).push())
        return acquired(self, wait_seconds, *is_needless)

    monkeypatch.setattr(bucket_lock.BucketLock, "acquired", after_another)
    Pusher(long_run, bucket, keep=Keep(1)).push()
    [other] = others
    assert other.commits and assert_whole(bucket) == 20
    assert len(RunReader(bucket).commits()) == 1


@pytest.mark.slow
def test_a_manifest_goes_before_its_files(long_run, tmp_path, bucket, monkeypatch):
    Pusher(tmp_path / "earlier", bucket).push()
    gone, unlink = [], ObjectDisk.unlink
    monkeypatch.setattr(ObjectDisk, "unlink", lambda self, path: gone.append(path) or unlink(self, path))
    Pusher(long_run, bucket, keep=Keep(1)).push()
    kinds = [path.split("/")[0] for path in gone]
    assert {"commits", "data", "journal"} <= set(kinds)
    assert max(i for i, kind in enumerate(kinds) if kind == "commits") < kinds.index("data")


@pytest.mark.slow
def test_nothing_is_removed_beside_a_manifest_that_cannot_be_read(long_run, tmp_path, bucket):
    Pusher(tmp_path / "earlier", bucket).push()
    disk = ObjectDisk(bucket)
    ref = RunReader(bucket).commits()[-1]
    disk.put(ref.path, disk.read_bytes(ref.path)[:-3])
    before = listing(disk).keys()
    done = Pusher(long_run, bucket, keep=Keep(1)).push()
    assert done.damaged[0].path == ref.path and done.durable_step == 20
    assert before <= listing(disk).keys() and done.removed == []


def payload(url):
    reader = RunReader(url)
    return next(iter(reader.load(reader.line()[0]).files.values()))


@pytest.mark.slow
def test_a_flipped_bit_in_the_bucket_is_named(run, bucket):
    Pusher(run, bucket).push()
    ref, disk = payload(bucket), ObjectDisk(bucket)
    data = bytearray(disk.read_bytes(ref.path))
    data[-1] ^= 1
    disk.put(ref.path, bytes(data))
    reader = RunReader(bucket)
    [error] = reader.verify(reader.head())
    assert isinstance(error, ChunkCorrupt) and error.path == ref.path
    with pytest.raises(Damaged, match=ref.path):
        source_of(f"{bucket}@7")


@pytest.mark.parametrize("change", ["removed", "cut short"])
def test_an_object_that_is_missing_or_short_is_named(run, bucket, change):
    Pusher(run, bucket).push()
    ref, disk = payload(bucket), ObjectDisk(bucket)
    data = disk.read_bytes(ref.path)
    disk.unlink(ref.path)
    if change == "cut short":
        disk.put(ref.path, data[:-1])
    reader = RunReader(bucket)
    [error] = reader.verify(reader.head())
    assert isinstance(error, FileMissing) and error.path == ref.path


def test_damage_in_the_directory_is_not_copied(run, bucket):
    ref = payload(run)
    data = bytearray((run / ref.path).read_bytes())
    data[-1] ^= 1
    (run / ref.path).write_bytes(data)
    done = Pusher(run, bucket).push()
    assert [error.path for error in done.damaged] == [ref.path] and done.durable_step is None
    assert RunReader(bucket).commits() == [] and object_path(ref) not in ObjectDisk(bucket).sizes("data")


@pytest.mark.slow
def test_a_damaged_record_is_not_copied_and_those_after_it_are(long_run, bucket):
    disk = RunReader(long_run).disk
    refs = segments(disk, ALONE)[:3]
    found = [read_segment(disk, ref)[0] for ref in refs]
    merged = bytearray()
    for ref, rows in zip(refs, found, strict=True):
        merged += (long_run / ref.path).read_bytes()[: rows[-1].end]
        (long_run / ref.path).unlink()
    first, *others = [record for rows in found for record in rows]
    merged[first.end - first.payload_bytes] ^= 1
    (long_run / refs[0].path).write_bytes(merged)
    done = Pusher(long_run, bucket).push()
    assert refs[0].path in [error.path for error in done.damaged]
    assert done.durable_step == 20 and last_step(RunReader(bucket), RunReader(bucket).head()) == 20
    there = ObjectDisk(bucket)
    copied = {record.step for ref in segments(there, ALONE) for record in read_segment(there, ref)[0]}
    assert first.step not in copied and others and {record.step for record in others} <= copied


@pytest.mark.slow
def test_records_that_are_being_written_are_copied_when_they_are_whole(run, bucket):
    ref = max(segments(RunReader(run).disk, ALONE))
    fourth = read_segment(RunReader(run).disk, ref)[0][3]
    whole = (run / ref.path).read_bytes()
    torn = bytearray(whole)
    torn[fourth.end - fourth.payload_bytes] ^= 1
    (run / ref.path).write_bytes(torn)
    pusher = Pusher(run, bucket)
    done = pusher.push()
    assert done.durable_step == 3 == assert_whole(bucket) and done.damaged == []
    (run / ref.path).write_bytes(whole)
    assert pusher.push().durable_step == 7 == assert_whole(bucket)


@pytest.mark.slow
def test_a_record_too_long_for_memory_is_sent_in_parts(run, bucket, monkeypatch):
    sent, put = [], ObjectDisk.put
    monkeypatch.setattr(copying, "GROUP_BYTES", 1)
    monkeypatch.setattr(
        ObjectDisk, "put", lambda self, path, data: sent.append(path) or put(self, path, data)
    )
    assert Pusher(run, bucket).push().durable_step == 7 == assert_whole(bucket)
    assert len([path for path in sent if path.startswith("journal/")]) == 7


def test_another_that_copied_fewer_of_the_same_records_is_believed(run, bucket, monkeypatch):
    first = read_segment(RunReader(run).disk, max(segments(RunReader(run).disk, ALONE)))[0][0]
    put_new, others = ObjectDisk.put_new, []

    def after_another(self, path, data):
        if path.startswith("journal/") and not others:
            others.append(put_new(self, path, data[: first.end - first.offset]))
        return put_new(self, path, data)

    monkeypatch.setattr(ObjectDisk, "put_new", after_another)
    assert Pusher(run, bucket).push().durable_step == 7 == assert_whole(bucket)
    assert others == [True] and len(ObjectDisk(bucket).listdir(f"journal/{ALONE}")) == 2


@pytest.mark.parametrize("nbytes", [20, object_store.AHEAD + 20])
def test_a_read_past_the_end_fails(bucket, nbytes):
    disk = ObjectDisk(bucket)
    disk.put("data/short", bytes(nbytes - 10))
    with pytest.raises(DiskFailed, match=f"it ends at {nbytes - 10}, {nbytes} bytes from 0 are wanted"):
        disk.open("data/short").read(memoryview(bytearray(nbytes)), 0)


@pytest.mark.slow
def test_a_run_resumed_at_an_earlier_step_takes_its_copy_with_it(run, bucket):
    Pusher(run, bucket).push()
    loop, checkpointer = start(run, "batchnorm")
    with checkpointer:
        checkpointer.resume(step=4)
        go_on(loop, checkpointer, 6)
    done = Pusher(run, bucket).push()
    assert done.durable_step == 6 == assert_whole(bucket)
    assert RunReader(bucket).tip() == 2


@pytest.mark.slow
def test_a_run_whose_files_are_written_again_stays_as_it_was_copied(tmp_path, bucket):
    root = tmp_path / "tiny"
    with TinyRun(root) as tiny:
        copies = []
        for _ in range(4):
            tiny.take_step()
            Pusher(root, bucket).push()
            copies.append(RunReader(bucket).head())
        assert not RunReader(root).is_listed(copies[0])
    for step, copy in enumerate(copies, 1):
        assert copy.step == step
        check_content(RunReader(bucket), copy)
    assert assert_whole(bucket) == 4


@pytest.mark.slow
def test_a_commit_that_is_retired_while_it_is_copied_gives_way_to_newer_ones(tmp_path, bucket, monkeypatch):
    root, put = tmp_path / "tiny", ObjectDisk.put
    with TinyRun(root) as tiny:
        tiny.take_step()

        def meanwhile(self, path, data):
            monkeypatch.setattr(ObjectDisk, "put", put)
            for _ in range(4):
                tiny.take_step()
            put(self, path, data)

        monkeypatch.setattr(ObjectDisk, "put", meanwhile)
        pusher = Pusher(root, bucket)
        done = pusher.push()
        assert [ref.step for ref in done.retired] == [1] and done.commits == done.damaged == []
        assert pusher.push().durable_step == 5 == assert_whole(bucket)


def test_a_commit_that_is_published_again_while_it_is_copied_is_copied_by_the_next_push(
    tmp_path, bucket, monkeypatch
):
    root, put = tmp_path / "tiny", ObjectDisk.put
    with TinyRun(root) as tiny:
        first = tiny.take_step()

        def meanwhile(self, path, data):
            monkeypatch.setattr(ObjectDisk, "put", put)
            files = dict(tiny.fixed)
            for name, unit in tiny.units.items():
                generation = unit.acquire()
                files[name] = generation, tiny.write(unit, generation, tiny.timeline, 1)
                (root / first.files[name].path).write_bytes(bytes(first.files[name].bytes))
            tiny.store.publish(1, files, tiny.index, {}, again=True)
            put(self, path, data)

        monkeypatch.setattr(ObjectDisk, "put", meanwhile)
        pusher = Pusher(root, bucket)
        done = pusher.push()
        assert [ref.step for ref in done.retired] == [1] and done.commits == done.damaged == []
        assert pusher.push().durable_step == 1 == assert_whole(bucket)


def test_a_commit_whose_records_go_with_it_while_it_is_copied_is_no_damage(long_run, bucket, monkeypatch):
    """Its parts are of several steps, so it is nothing without them; its payload is still there."""
    reader = RunReader(long_run)
    ref = reader.line()[0]
    manifest = reader.load(ref)
    assert manifest.oldest_step < manifest.step
    for other in reader.commits():
        if other != ref:
            (long_run / other.path).unlink()
    begin = Pusher._push_timelines

    def meanwhile(self):
        (long_run / ref.path).unlink()
        shutil.rmtree(long_run / "journal")
        begin(self)

    monkeypatch.setattr(Pusher, "_push_timelines", meanwhile)
    done = Pusher(long_run, bucket).push()
    assert (done.retired, done.damaged, done.commits) == ([ref], [], [])


def test_a_commit_that_lacks_records_and_is_still_there_is_damaged(long_run, bucket):
    shutil.rmtree(long_run / "journal")
    done = Pusher(long_run, bucket).push()
    assert done.retired == [] and done.damaged


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.mark.slow
def test_what_several_ranks_wrote_is_copied_and_others_go_on_from_there(tmp_path, bucket, world):
    [said, _] = world.run(2, kind="fsdp", root=tmp_path / "ranks", steps=5)
    assert said["finished"], said.get("trace")
    assert Pusher(tmp_path / "ranks", bucket).push().durable_step == 5 == assert_whole(bucket)
    assert len(RunReader(bucket).head().shares) == 2
    resume = {"source": str(bucket)}
    for rank in world.run(3, kind="fsdp", root=tmp_path / "new", steps=6, resume=resume):
        assert rank.get("finished"), rank.get("trace")
        assert rank["resumed"] == 5 and rank["digests"]["5"] == said["digests"]["5"]


@pytest.mark.slow
def test_the_mark_waits_for_the_base_that_other_ranks_begin_with(tmp_path, bucket, monkeypatch, world):
    """Their records are of other parts of the state: before that base is there nothing leads to them."""
    run = tmp_path / "ranks"
    for ranks, steps in ((2, 3), (3, 6)):
        for said in world.run(ranks, kind="ddp", root=run, steps=steps, base_every=100):
            assert said.get("finished"), said.get("trace")
        pusher = Pusher(run, bucket)
        if ranks == 3:
            monkeypatch.setattr(pusher, "_push_file", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pusher.push()
            assert pusher.durable_step == 3
            pusher = Pusher(run, bucket)
        assert pusher.push().durable_step == steps


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_one_error(bucket, monkeypatch, run):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setattr(object_store, "RETRIES", 2)
        with pytest.raises(
            DiskFailed, match=r"cannot list s3://bucket/runs/a/\w+: .*after 2 retries"
        ) as caught:
            Pusher(run, bucket).push()
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_without_an_endpoint_it_is_amazons(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    store = object_store._connected(Url("s3://bucket/runs/a"))
    assert store.prefix == "runs/a" and "endpoint" not in store.config


def test_an_endpoint_without_its_scheme_is_refused(monkeypatch, run):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(BadInput, match="'localhost:9000': it begins with http:// or https://"):
        Pusher(run, Url("s3://bucket/run")).push()


def test_a_bucket_that_is_not_there_is_named(bucket, run):
    with pytest.raises(BadInput, match="there is no bucket 'other'"):
        Pusher(run, Url("s3://other/run")).push()


def test_a_place_with_no_run_in_it_is_named(bucket):
    with pytest.raises(NoCommit, match="s3://bucket/runs/b is not a run"):
        source_of("s3://bucket/runs/b@3")


def test_an_address_survives_what_path_does_to_it():
    for text in ("s3://bucket/runs/a@7", "s3:/bucket/runs/a@7"):
        assert NamedCommit.parse(text) == NamedCommit(Url("s3://bucket/runs/a"), 7)
    assert str(NamedCommit.parse("s3://bucket/runs/a").run) == "s3://bucket/runs/a"
