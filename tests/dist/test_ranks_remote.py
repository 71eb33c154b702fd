"""Several ranks keep up a copy of their run in a bucket: of all ranks, also when some die or are told to stop."""

from __future__ import annotations

import shutil

import pytest

from dist.world import ended
from holdfast.errors import DiskFailed
from holdfast.events import read_events
from holdfast.store.format.manifest import CommitRef
from holdfast.store.log.chain import verify_records
from holdfast.store.pushing import Pusher
from holdfast.store.reader import RunReader


def reached(place):
    """The step to which a run leads, all of which is whole; -1 if it has no commit yet."""
    reader = RunReader(place)
    for ref in reader.commits():
        assert reader.verify(reader.load(ref)) == []
    if (head := reader.head()) is None:
        return -1
    step, damaged = verify_records(reader, head)
    assert damaged == []
    return step


def goes_on(world, tmp_path, bucket, step, ranks=3, kind="fsdp"):
    """What other ranks find in the bucket alone."""
    [said, *_] = ended(world.run(ranks, kind=kind, root=tmp_path / "from the bucket", steps=step,
                                 resume={"source": str(bucket)}))  # fmt: skip
    assert said["resumed"] == step
    return said["digests"][str(step)]


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("kind, replica", [("ddp", False), ("fsdp", True)])
def test_the_copy_is_of_all_ranks_and_any_number_goes_on_from_it(world, tmp_path, bucket, kind, replica):
    said = ended(
        world.run(
            2, kind=kind, root=tmp_path / "run", steps=7, base_every=3, remote=str(bucket), replica=replica
        )
    )
    assert [each["copied"] for each in said] == [7, -1]
    assert reached(bucket) == 7
    shares = RunReader(bucket).head().shares
    assert list(shares) == ["rank-00000", "rank-00001"]
    assert goes_on(world, tmp_path, bucket, 7) == said[0]["digests"]["7"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("killed, replica", [(0, True), (1, False), ("all", False), ("all", True)])
def test_what_was_copied_when_ranks_died_is_a_run_and_the_next_ranks_copy_the_rest(
    world, tmp_path, bucket, killed, replica
):
    order = {"kind": "ddp", "root": tmp_path / "run", "remote": str(bucket), "replica": replica}
    cut = world.run(
        2, steps=12, base_every=3, kill=[killed, 8], copied_at=4 if not replica else None, **order
    )
    assert not any(said.get("finished") for said in cut)
    assert reached(bucket) >= cut[0]["copied"] >= (-1 if replica else 4)
    rest = ended(world.run(2, steps=12, **order))
    assert rest[0]["resumed"] >= max(said["durable"] for said in cut)
    assert rest[0]["copied"] == reached(bucket) == 12
    assert goes_on(world, tmp_path, bucket, 12, ranks=1) == rest[0]["digests"]["12"]


@pytest.mark.parametrize("told, replica", [(0, True), (1, False)])
def test_a_sigterm_to_one_rank_ends_all_with_the_copy_complete(world, tmp_path, bucket, told, replica):
    order = {"signal_at": [told, 4], "base_every": 100, "copies_every": 60}  # so only the last copy is made
    said = world.run(
        2, kind="ddp", root=tmp_path / "run", steps=50, remote=str(bucket), replica=replica, **order
    )
    assert all("SystemExit: 143" in each["error"] for each in said), said
    step = reached(tmp_path / "run")
    assert 4 <= step < 50 and reached(bucket) == step
    assert goes_on(world, tmp_path, bucket, step) == said[0]["digests"][str(step)]


def test_what_is_wrong_with_the_bucket_is_an_error_on_all_ranks_before_anything_is_written(
    world, tmp_path, bucket
):
    ended(world.run(2, kind="ddp", root=tmp_path / "one", steps=2, remote=str(bucket)))
    for place, text in ((str(bucket), "holds a run"), ("runs/copy", "give s3://BUCKET/PREFIX"),
                        ("s3://none/run", "none")):  # fmt: skip
        said = world.run(2, kind="ddp", root=tmp_path / "other", steps=2, remote=place)
        assert all(text in each["error"] for each in said), said
        assert not (tmp_path / "other" / "commits").exists()


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("number", [1, 3, 5, 6])
def test_a_rank_killed_while_it_copies_leaves_a_run_in_the_bucket_and_is_caught_up_with(
    world, tmp_path, bucket, number
):
    """Also in the last copy, after a SIGTERM to the other one."""
    order = {"kind": "ddp", "root": tmp_path / "run", "remote": str(bucket), "base_every": 3}
    cut = world.run(2, steps=6, signal_at=[1, 5], killed_copying=number, **order)
    assert cut[0]["code"] == -9, cut
    if RunReader(bucket).commits():
        assert reached(bucket) >= cut[0].get("copied", -1)
    rest = ended(world.run(2, steps=8, **order))
    assert rest[0]["resumed"] >= max(said.get("durable", 0) for said in cut)
    assert reached(bucket) == 8
    assert goes_on(world, tmp_path, bucket, 8) == rest[0]["digests"]["8"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_copy_that_some_ranks_do_not_know_of_is_refused(world, tmp_path, bucket, rank):
    said = world.run(
        2, kind="ddp", root=tmp_path / "run", steps=2, options_of={rank: {"remote": str(bucket)}}
    )
    assert all(f"rank {rank} '{bucket}'" in each["error"] for each in said), said
    assert not (tmp_path / "run" / "commits").exists()


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("saved, anew", [(False, True), (True, False), (False, False)])
def test_records_of_other_ranks_do_not_count_where_the_base_before_them_went_uncopied(
    world, tmp_path, bucket, monkeypatch, saved, anew
):
    """``saved``: there is a base of the same step by the ranks before. ``anew``: who copies at last has not seen what
    went."""
    run = tmp_path / "run"
    world.run(1, kind="ddp", root=run, base_every=1000, steps=8, save_at=8 if saved else None)
    pusher = Pusher(run, bucket)
    fork = pusher.push().durable_step
    assert (CommitRef(1, fork) in RunReader(bucket).commits()) is saved
    monkeypatch.setattr(Pusher, "_push_commit", failing)
    for steps in (fork + 2, 30):
        ended(world.run(2, kind="ddp", root=run, base_every=1000, steps=steps, save_every=4))
        with pytest.raises(DiskFailed):  # when records have been copied
            pusher.push()
        assert pusher.durable_step == fork
        pusher = Pusher(run, bucket) if anew else pusher
    assert CommitRef(2, fork) not in RunReader(run).commits()
    with pytest.raises(DiskFailed):
        pusher.push()
    assert pusher.durable_step == fork
    monkeypatch.undo()
    assert pusher.push().durable_step == 30


def failing(*_):
    raise DiskFailed("the network is gone")


def test_a_lost_pair_comes_from_the_bucket(world, tmp_path, bucket):
    order = {
        "kind": "fsdp",
        "root": tmp_path / "run",
        "nodes": [0, 1, 2],
        "steps": 12,
        "remote": str(bucket),
        "copies_every": 0.2,
    }
    said = world.run(3, base_every=4, kill=["all", 9], wait_each_step=True, copied_at=8, **order)
    assert said[0]["copied"] >= 8
    for lost in (1, 2):
        shutil.rmtree(tmp_path / f"run-{lost}")
    rest = ended(world.run(3, **order))
    assert {each["resumed"] for each in rest} == {8}
    assert rest[0]["digests"]["8"] == said[0]["digests"]["8"]
    [found] = [e for e in read_events(tmp_path / "run-0" / "events.jsonl") if e["event"] == "shares"]
    tiers = {"rank-00000": "own disk", "rank-00001": "bucket", "rank-00002": "partner"}
    assert found["tiers"] == tiers
    reader = RunReader(bucket)
    assert all(reader.verify(reader.load(ref)) == [] for ref in reader.commits())
    assert verify_records(reader, reader.head()) == (12, [])
