"""Nodes with a directory each, whose run is copied to a bucket too: it has what a lost pair of nodes had."""

from __future__ import annotations

import shutil

import pytest

from buckets import emptied, served
from dist.world import World, ended
from holdfast.events import read_events
from holdfast.store.log.chain import verify_records
from holdfast.store.reader import RunReader

FOUR = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def s3():
    yield from served()


@pytest.fixture(scope="module")
def world(s3):
    with pytest.MonkeyPatch.context() as environment:
        emptied(s3, environment)
        with World() as world:
            yield world


@pytest.fixture
def bucket(s3, monkeypatch):
    return emptied(s3, monkeypatch)


def test_a_lost_pair_comes_from_the_bucket(world, tmp_path, bucket):
    order = {"kind": "fsdp", "root": tmp_path / "run", "nodes": FOUR, "steps": 12, "remote": str(bucket)}
    said = world.run(4, base_every=4, kill=["all", 9], wait_each_step=True, copied_at=8, **order)
    assert said[0]["copied"] >= 8
    for lost in (1, 2):
        shutil.rmtree(tmp_path / f"run-{lost}")
    rest = ended(world.run(4, **order))
    assert {each["resumed"] for each in rest} == {8}
    assert rest[0]["digests"]["8"] == said[0]["digests"]["8"]
    [found] = [e for e in read_events(tmp_path / "run-0" / "events.jsonl") if e["event"] == "shares"]
    assert found["tiers"]["rank-00001"] == "bucket" and found["tiers"]["rank-00003"] == "own disk"
    reader = RunReader(bucket)
    assert all(reader.verify(reader.load(ref)) == [] for ref in reader.commits())
    assert verify_records(reader, reader.head()) == (12, [])
