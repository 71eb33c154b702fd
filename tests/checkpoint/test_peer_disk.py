"""The log of another node is read by few requests, and as it is there."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from holdfast.checkpoint.collective_snapshots import StorageShare
from holdfast.checkpoint.nodes import peer_channel, peer_disk, peer_streams
from holdfast.checkpoint.nodes.peer_disk import PeerDisk, PeerServer, packed, unpacked
from holdfast.distributed import Ranks
from holdfast.errors import DiskFailed, RankFailed
from holdfast.io.queue import IOQueue
from holdfast.store.disk import Disk
from holdfast.store.format.manifest import CommitRef
from holdfast.store.log.segments import read_segment, segments
from holdfast.store.share_places import OWN, Place
from support.journal_records import PAGE, record, written

COUNT = 20


@pytest.fixture
def log(tmp_path):
    """A log on another node, and how this one reads it, with what it asks for."""
    queue = IOQueue(2)
    disk = written(tmp_path / "there", queue, [[record(n, (32 * PAGE,))] for n in range(11, 11 + COUNT)])
    queue.close()
    [ref] = segments(disk, "s")
    server, asked = PeerServer(disk, Disk(tmp_path / "copies")), []

    def ask(node, request, view):
        asked.append(request["do"])
        _, data = server.handle(request, memoryview(b""))
        view[: len(data)] = data
        return {"bytes": len(data)}

    place = Place(1, OWN, ref.path, disk.size(ref.path))
    return disk, ref, PeerDisk(tmp_path / "here", 0, {ref.path: [place]}, ask), asked


def test_headers_of_another_nodes_log_come_in_one_answer(log):
    disk, ref, seen, asked = log
    found, damage = read_segment(seen, ref)
    assert (found, damage) == read_segment(disk, ref) and len(found) == COUNT
    assert asked == ["headers"]


def test_a_torn_log_of_another_node_ends_where_it_ends_there(log):
    disk, ref, seen, _ = log
    fifth = read_segment(disk, ref)[0][4]
    with open(disk.root / ref.path, "r+b") as file:
        file.seek(fifth.offset + 40)
        file.write(b"?")
    found, damage = read_segment(seen, ref)
    assert len(found) == 4 and damage is not None and damage.offset == fifth.offset


def test_headers_that_one_answer_cannot_hold_are_asked_for_again():
    data = memoryview(bytes(range(256)) * 16)
    memory = memoryview(bytearray(1024))

    def read(view, offset):
        view[:] = data[offset : offset + len(view)]

    spans = [(0, 300), (900, 300), (2000, 300), (3000, 300)]
    found = unpacked(bytes(packed(read, spans, memory)))
    assert [(offset, bytes(piece)) for offset, piece in found] == [
        (offset, bytes(data[offset : offset + 300])) for offset in (0, 900, 2000)
    ]
    assert unpacked(bytes(packed(read, [(0, 2000)], memory))) == []


@pytest.mark.parametrize("is_commit", [True, False])
def test_nodes_retire_what_the_first_rank_has_retired(is_commit):
    """A copy of weights has the name of a commit, which stays."""
    ref, dropped = CommitRef(1, 4), []
    store = SimpleNamespace(drop_oldest=lambda: ref, retains=lambda each: not is_commit)
    room = StorageShare(
        Ranks(), store, None, None, lambda: 0, lambda: None, SimpleNamespace(drop=dropped.append)
    )
    assert room._drop_one()
    assert dropped == [ref if is_commit else None]


def test_views_are_sent_in_as_few_requests_as_can_carry_them(monkeypatch):
    """All bytes, in their order; none with more bytes or pieces than one request may have."""
    monkeypatch.setattr(peer_disk, "BLOCK_BYTES", 10)
    monkeypatch.setattr(peer_disk, "MOST_PIECES", 3)
    data = bytes(range(60))
    views, start = [], 0
    for size in (3, 0, 25, 1, 1, 1, 1, 9, 10, 1):
        views.append(memoryview(data)[start : start + size])
        start += size
    blocks = list(peer_disk.in_blocks(views))
    assert b"".join(b"".join(block) for block in blocks) == data[:start]
    assert [[len(piece) for piece in block] for block in blocks] == [
        [3, 7],
        [10],
        [8, 1, 1],
        [1, 1, 8],
        [1, 9],
        [1, 1],
    ]
    assert list(peer_disk.in_blocks([])) == []


def test_copies_arrive_in_whole_pages_of_memory_and_in_their_order():
    """So that they can be written past the page cache."""
    sizes, seen, sent = [PAGE, 3 * PAGE, PAGE], [], iter([b"a", b"b", b"c"])
    requests = [peer_channel._encode({"do": "write", "pieces": sizes})]
    work = SimpleNamespace(wait=lambda: None, _source_rank=lambda: 1)

    def asked(headers, tag):
        if not requests:
            raise RuntimeError
        headers[0].copy_(torch.frombuffer(requests.pop(), dtype=torch.uint8))
        return work

    def received(pieces, source, tag):
        pieces[0].fill_(ord(next(sent)))
        return work

    def handle(request, data):
        seen.append((ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE, bytes(data)))
        return {}, None

    channel = peer_channel.PeerChannel.__new__(peer_channel.PeerChannel)
    channel._busy, channel._handling = set(), threading.Lock()
    channel._group = SimpleNamespace(recv_anysource=asked, recv=received, send=lambda *_: work)
    channel._serve(handle, {1})
    assert seen == [(0, b"a" * PAGE + b"b" * 3 * PAGE + b"c" * PAGE)]


def test_a_process_that_ends_waits_for_the_request_that_is_under_way():
    """However long the last one was ago."""
    came, requests = (
        threading.Event(),
        [peer_channel._encode({"do": "write", "pieces": []})],
    )
    work = SimpleNamespace(wait=lambda: None, _source_rank=lambda: 1)

    def received(headers, tag):
        if not requests:
            raise RuntimeError
        headers[0].copy_(torch.frombuffer(requests.pop(), dtype=torch.uint8))
        return work

    def handle(request, sent):
        came.set()
        time.sleep(0.3)
        return {}, None

    channel = peer_channel.PeerChannel.__new__(peer_channel.PeerChannel)
    channel._served_at, channel._busy, channel._handling = 0.0, set(), threading.Lock()
    channel._group = SimpleNamespace(recv_anysource=received, send=lambda *_: work)
    thread = threading.Thread(target=channel._serve, args=(handle, {1}))
    thread.start()
    assert came.wait(10)
    channel.wait_until_quiet()
    assert channel._served_at, "answered"
    thread.join()
    began = time.monotonic()
    channel.wait_until_quiet()
    assert time.monotonic() - began >= peer_channel.QUIET_SECONDS, "one may be on its way"


@pytest.fixture
def by_stream():
    """A channel to a partner without a process group, its requests as the partner sees them, and its connection."""
    out, incoming = socket.socketpair()
    seen, there, here = [], *(peer_channel.PeerChannel.__new__(peer_channel.PeerChannel) for _ in range(2))
    there._busy, there._handling = set(), threading.Lock()
    here._process, here._thread, here._in = os.getpid(), threading.current_thread(), {}
    here._rank, here._partner, here._out, here._asking, here._unanswered = 0, 1, out, threading.Lock(), set()

    def handle(request, sent):
        seen.append((request["do"], bytes(sent)))
        if request["do"] == "fail":
            raise OSError("disk on fire")
        if request["do"] == "die":
            return {"what": "x" * peer_channel.HEADER_BYTES}, None
        return {"has": True}, memoryview(b"answer") if request["do"] == "read" else None

    thread = threading.Thread(target=there._serve_stream, args=(handle, incoming))
    thread.start()
    yield here, seen, incoming
    peer_streams.shut([out, incoming])
    thread.join(10)
    assert not thread.is_alive() and not there._busy


def test_partner_is_asked_and_answers_over_the_connection_alone(by_stream):
    channel, seen, _ = by_stream
    assert channel.ask(1, {"do": "write"}, [memoryview(b"a" * PAGE), memoryview(b"b")])["has"]
    into = memoryview(bytearray(8))
    assert channel.ask(1, {"do": "read"}, (), into)["bytes"] == 6 and into[:6] == b"answer"
    assert seen == [("write", b"a" * PAGE + b"b"), ("read", b"")]


def test_error_of_the_partner_ends_no_connection(by_stream):
    channel, _, _ = by_stream
    with pytest.raises(DiskFailed, match="rank 1: OSError: disk on fire"):
        channel.ask(1, {"do": "fail"})
    assert channel.ask(1, {"do": "has"})["has"]


@pytest.mark.parametrize("letter", ["a", "é", "\N{FIRE}", "\0"])
def test_long_error_is_told_as_far_as_an_answer_holds_it(letter):
    def handle(*_):
        raise OSError(letter * 5000)

    answer, _ = peer_channel._handled(handle, {}, memoryview(b""))
    assert letter * 50 in answer["error"]
    peer_channel._encode({**answer, "bytes": 0})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_partner_whose_thread_dies_is_a_failed_rank_at_once(by_stream):
    channel, _, _ = by_stream
    channel._out.settimeout(10)
    with pytest.raises(RankFailed, match="closed"):
        channel.ask(1, {"do": "die"})


def test_partner_that_has_ended_is_a_failed_rank(by_stream):
    channel, _, incoming = by_stream
    incoming.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        with pytest.raises(RankFailed, match="rank 1"):
            channel.ask(1, {"do": "write"}, [memoryview(b"a")])


def _interrupt(*_):
    raise KeyboardInterrupt


def _after_sending(channel, monkeypatch):
    real = peer_streams.send
    monkeypatch.setattr(
        peer_streams,
        "send",
        lambda stream, views: (real(stream, views), stream is channel._out and _interrupt()),
    )


def _between_header_and_bytes(channel, monkeypatch):
    real = channel._receive
    monkeypatch.setattr(
        channel,
        "_receive",
        lambda rank, out, tag, view: (_interrupt if tag == peer_channel._ANSWER else real)(
            rank, out, tag, view
        ),
    )


@pytest.mark.parametrize(
    "interrupted",
    [
        _after_sending,
        lambda channel, monkeypatch: monkeypatch.setattr(channel, "_answer", _interrupt),
        _between_header_and_bytes,
    ],
    ids=["after sending", "before the answer", "between header and bytes"],
)
def test_answer_that_an_interrupt_has_cut_off_is_not_taken_for_the_next_one(
    by_stream, monkeypatch, interrupted
):
    channel, seen, _ = by_stream
    with monkeypatch.context() as patched:
        interrupted(channel, patched)
        with pytest.raises(KeyboardInterrupt):
            channel.ask(1, {"do": "read"}, (), memoryview(bytearray(8)))
    assert channel._out.fileno() == -1, "the partner does not wait until its answer is taken"
    for _ in range(2):
        with pytest.raises(RankFailed, match="an earlier request has got no answer"):
            channel.ask(1, {"do": "has"}, (), memoryview(bytearray(8)))
    assert ("has", b"") not in seen


def test_answer_over_the_group_that_an_interrupt_has_cut_off_is_not_taken_for_the_next_one(by_stream):
    channel, _, _ = by_stream
    answers, work = [b'{"bytes": 0, "of": 1}'], SimpleNamespace(wait=lambda *_: None)

    def received(headers, rank, tag):
        headers[0].copy_(torch.frombuffer(bytearray(answers.pop(0).ljust(2048)), dtype=torch.uint8))
        return work

    channel._group, channel._deadline = SimpleNamespace(send=lambda *_: work, recv=received), None
    assert channel.ask(2, {"do": "has"})["of"] == 1
    answers += [b'{"bytes": 0, "of": 2}', b'{"bytes": 0, "of": 3}']
    with pytest.raises(KeyboardInterrupt), channel.asked(2, {"do": "has"}):
        raise KeyboardInterrupt
    with pytest.raises(RankFailed, match="an earlier request has got no answer"):
        channel.ask(2, {"do": "has"})
    assert channel.ask(3, {"do": "has"})["of"] == 2, "other ranks are asked as before"
    assert channel.ask(1, {"do": "has"})["has"], "and the partner by its connection"


def test_bytes_that_are_no_message_are_a_failed_rank(by_stream):
    channel, _, incoming = by_stream
    channel._request = lambda *_: incoming.sendall(b"?" * peer_channel.HEADER_BYTES)
    with pytest.raises(RankFailed, match="no message"):
        channel.ask(1, {"do": "has"})


def test_channel_that_never_served_leaves_no_connection_open(by_stream):
    channel, _, _ = by_stream
    channel._thread = None
    channel.close()
    assert channel._out.fileno() == -1


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("end", ["end_with_process", "_abort"])
def test_fork_that_ends_leaves_the_connections_of_its_parent(by_stream, monkeypatch, end):
    channel, _, _ = by_stream
    shut = SimpleNamespace(start=channel._shut_streams)
    monkeypatch.setattr(threading, "Timer", lambda *_: shut)
    child = os.fork()
    if not child:
        try:
            getattr(channel, end)()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert channel.ask(1, {"do": "has"})["has"]
