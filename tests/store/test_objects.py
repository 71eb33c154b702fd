"""A run in a bucket: copied whole or not at all, read from there as from a directory, under every fault."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import urllib.request

import pytest

from delta.loops import cut_small, make, same
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, DiskFailed, FileMissing, NoCommit, RunMismatch
from holdfast.sources import source_of
from holdfast.store import objects, records
from holdfast.store.chain import last_step, verify_records
from holdfast.store.objects import ObjectDisk
from holdfast.store.pushing import Pusher, object_path
from holdfast.store.reader import RunReader
from holdfast.store.target import Target, Url
from test_checkpointer import ADAMW, go_on, reference, start

pytest.importorskip("obstore", reason="the extra s3 is not installed")
server = pytest.importorskip("moto.server", reason="the dev tools are not installed")


@pytest.fixture(scope="module")
def endpoint():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(endpoint, monkeypatch):
    """The address of an empty bucket."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).close()
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    return Url("s3://bucket/runs/a")


@pytest.fixture
def run(tmp_path):
    """Of 7 steps: a base of step 0, the others in records."""
    loop, checkpointer = start(tmp_path / "run", "batchnorm")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 7)
    return tmp_path / "run"


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
