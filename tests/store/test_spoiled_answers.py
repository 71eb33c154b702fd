"""Answers of a bucket that break off are asked for again, or named; a listing never ends before its end.

A bucket that is busy, hangs, or loses answers to what it did leaves a copy whole, and no mark goes ahead of it.
"""

from __future__ import annotations

import itertools
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import buckets
from holdfast.checkpoint import bucket_copy
from holdfast.errors import DiskFailed
from holdfast.store import object_store
from holdfast.store.commit.retention import Keep
from holdfast.store.log.chain import verify_records
from holdfast.store.object_store import ObjectDisk
from holdfast.store.pushing import Pusher
from holdfast.store.reader import RunReader
from test_checkpointer import go_on, start

NAMES = [f"c{number}" for number in range(4)]
TEXT = bytes(range(250))
HANG_SECONDS = 0.5


@pytest.fixture(scope="module")
def server():
    yield from buckets.served()


class Proxy(ThreadingHTTPServer):
    """Hands on what is asked of the bucket, and spoils the first ``times`` answers to reading.

    ``fault`` says of each request whether it is answered with an error ("busy"), not at all ("hang"), or is done and
    not answered ("lost").
    """

    daemon_threads = True

    def __init__(self, endpoint):
        super().__init__(("127.0.0.1", 0), Spoiling)
        self.endpoint, self.spoil, self.times, self.fault = endpoint, None, 0, lambda: None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Spoiling(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        body, fault = self.body(), self.server.fault()
        if fault == "hang":
            time.sleep(HANG_SECONDS)
            return self.drop()
        if fault == "busy":
            return self.send_error(503)
        left = ("host", "connection", "content-length", "transfer-encoding")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in left}
        headers = {"Content-Type": "application/octet-stream", **headers}
        asked = urllib.request.Request(
            self.server.endpoint + self.path, method=self.command, headers=headers, data=body
        )
        try:
            answer = urllib.request.urlopen(asked)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            status, data = answer.status, answer.read()
            kept = {
                k: v
                for k, v in answer.headers.items()
                if k.lower() in ("content-range", "etag", "last-modified")
            }
            length = answer.headers["Content-Length"] if self.command == "HEAD" else None
        if fault == "lost":
            return self.drop()
        broken = False
        if self.command == "GET" and self.server.times > 0 and status < 300:
            self.server.times -= 1
            whole = len(data)
            status, data, broken = self.server.spoil(status, data)
            length = whole if broken else None
        self.send_response(status)
        for name, value in {**kept, "Content-Length": length or len(data)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        if broken:
            self.wfile.flush()
            self.drop()

    def body(self):
        """What is sent along, None for a request that only reads."""
        if "Transfer-Encoding" not in self.headers:
            length = int(self.headers.get("Content-Length") or 0)
            return self.rfile.read(length) if length or self.command in ("PUT", "POST") else None
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def drop(self):
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def log_message(self, *args):
        pass


@pytest.fixture
def impatient(monkeypatch):
    """A client that waits for answers for tenths of a second, and asks again once."""
    monkeypatch.setattr(object_store, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(object_store, "RETRIES", 1)
    monkeypatch.setattr(object_store, "SOON", 0.0)


@pytest.fixture
def spoiled(server, monkeypatch):
    """A disk with a few objects, and the proxy through which it is read."""
    url = buckets.emptied(server, monkeypatch)
    writer = ObjectDisk(url)
    for name in NAMES:
        writer.put(f"commits/{name}", TEXT)
    proxy = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    yield ObjectDisk(url), proxy
    proxy.shutdown()
    proxy.server_close()


def page_without_end(status, data):
    """Only the first entry; it says that more follow, and not where."""
    first, last = data.index(b"</Contents>"), data.rindex(b"</Contents>")
    return status, re.sub(rb"<IsTruncated>.*?<", b"<IsTruncated>true<", data[:first] + data[last:]), False


LISTINGS = {
    "broken": lambda status, data: (status, data[: len(data) // 2], True),
    "cut": lambda status, data: (status, data[: len(data) // 2], False),
    "page": page_without_end,
    "html": lambda status, data: (200, b"<html><body>Log in first</body></html>", False),
    "error": lambda status, data: (200, b"<Error><Code>InternalError</Code></Error>", False),
    "busy": lambda status, data: (503, b"<Error><Code>SlowDown</Code></Error>", False),
}


@pytest.mark.parametrize("how", LISTINGS)
def test_a_spoiled_listing_is_asked_for_again(spoiled, how):
    disk, proxy = spoiled
    proxy.spoil, proxy.times = LISTINGS[how], 1
    assert disk.listdir("commits") == NAMES
    assert not proxy.times


def test_a_mark_of_a_folder_is_no_entry(spoiled):
    """Some tools leave an empty object that is called like the folder."""
    disk, proxy = spoiled
    mark = urllib.request.Request(f"{proxy.endpoint}/bucket/runs/a/journal/", method="PUT", data=b"")
    urllib.request.urlopen(mark).close()
    assert disk.listdir("journal") == [] and disk.listdir("commits") == NAMES


@pytest.mark.parametrize("how", ["broken", "cut", "page"])
def test_a_listing_that_stays_spoiled_is_named(spoiled, how):
    disk, proxy = spoiled
    proxy.spoil, proxy.times = LISTINGS[how], 1000
    with pytest.raises(DiskFailed, match="cannot list s3://bucket/runs/a/commits"):
        disk.listdir("commits")


@pytest.mark.slow
def test_who_answers_everything_is_no_object_store(spoiled):
    """As a page that asks to log in first: it is no bucket without commits."""
    disk, proxy = spoiled
    proxy.endpoint = "data:text/html,Log%20in%20first?"
    with pytest.raises(DiskFailed, match="cannot list"):
        disk.listdir("commits")


@pytest.mark.parametrize("broken", [True, False])
def test_a_short_range_is_read_again(spoiled, broken):
    disk, proxy = spoiled
    proxy.spoil, proxy.times = lambda status, data: (status, data[:50], broken), 1
    assert disk.read_range("commits/c1", 100, 100) == TEXT[100:200]
    assert disk.read_range("commits/c1", 200, 100) == TEXT[200:]


@pytest.mark.slow
def test_an_object_that_breaks_off_is_read_again(spoiled):
    disk, proxy = spoiled
    proxy.spoil, proxy.times = lambda status, data: (status, data[:50], True), 1
    assert disk.read_bytes("commits/c1") == TEXT


def faults():
    """A fault of each kind in turn, each after more requests without one. The client repeats few requests so often."""
    for gap, fault in zip(itertools.count(12, 12), itertools.cycle(["lost", "busy", "hang"]), strict=False):
        yield from gap * [None]
        yield from (1 if fault == "hang" else 4) * [fault]


def test_faults_leave_a_whole_copy_and_no_mark_ahead_of_it(tmp_path, server, spoiled, impatient):
    disk, proxy = spoiled
    url = disk.root / "run"
    loop, checkpointer = start(tmp_path / "run", base_every=100)
    pusher = Pusher(tmp_path / "run", url, keep=Keep(1))
    proxy.fault, failed, begun = partial(next, faults()), 0, time.monotonic()
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 2)
        checkpointer.save()
        while pusher.durable_step != 2:
            try:
                pusher.push()
            except DiskFailed:
                failed += 1
            assert time.monotonic() - begun < 60
            assert_reaches(server, url, pusher.durable_step)
    assert failed > 1


def assert_reaches(server, url, step):
    """The bucket itself has what leads to ``step`` at least, and no commit that is not whole."""
    with pytest.MonkeyPatch.context() as direct:
        direct.setenv("AWS_ENDPOINT_URL", server)
        reader = RunReader(url)
        for ref in reader.commits():
            assert reader.verify(reader.load(ref)) == []
        assert step is None or verify_records(reader, reader.head())[0] >= step


def test_bucket_that_stops_answering_does_not_keep_a_training_from_its_end(
    tmp_path, server, spoiled, impatient, monkeypatch
):
    monkeypatch.setattr(bucket_copy, "SECONDS", 0.02)
    disk, proxy = spoiled
    url = disk.root / "run"
    loop, checkpointer = start(tmp_path / "run", remote=str(url))
    checkpointer.resume()
    go_on(loop, checkpointer, 2)
    while checkpointer.remote_durable_step < 2:
        time.sleep(0.01)
    proxy.fault = lambda: "hang"
    go_on(loop, checkpointer, 4)
    begun = time.monotonic()
    with pytest.warns(UserWarning, match="ends at step 2 of 4: cannot"):
        checkpointer.close()
    assert time.monotonic() - begun < 20 and checkpointer.remote_durable_step == 2
    assert_reaches(server, url, 2)
    assert verify_records(RunReader(tmp_path / "run"), RunReader(tmp_path / "run").head())[0] == 4
