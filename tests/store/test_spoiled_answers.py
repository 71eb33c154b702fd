"""Answers of a bucket that break off are asked for again, or named; a listing never ends before its end."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import buckets
from holdfast.errors import DiskFailed
from holdfast.store.object_store import ObjectDisk

NAMES = [f"c{number}" for number in range(4)]
TEXT = bytes(range(250))


@pytest.fixture(scope="module")
def server():
    yield from buckets.served()


class Proxy(ThreadingHTTPServer):
    """Hands on what is asked of the bucket, and spoils the first ``times`` answers to reading."""

    def __init__(self, endpoint):
        super().__init__(("127.0.0.1", 0), Spoiling)
        self.endpoint, self.spoil, self.times = endpoint, None, 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Spoiling(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
        asked = urllib.request.Request(self.server.endpoint + self.path, method=self.command, headers=headers)
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
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    do_GET = do_HEAD = handle_any

    def log_message(self, *args):
        pass


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
