"""The connections for copies: all bytes in order, between the ranks that they are for, and none after a fault."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from holdfast.checkpoint.nodes import peer_streams

PARTNER = {0: 1, 1: 2, 2: 0}


class Fellows:
    """Ranks that are threads of this process."""

    def __init__(self, rank, values, barrier):
        self.rank, self._values, self._barrier = rank, values, barrier

    def everyone(self, value):
        self._barrier.wait(20)
        self._values[self.rank] = value
        self._barrier.wait(20)
        return [self._values[rank] for rank in sorted(self._values)]


def connected(deadline_seconds=20.0):
    """For each rank its connection to its partner, and those of its guests."""
    values, barrier = {}, threading.Barrier(len(PARTNER))

    def connect(rank):
        guests = [guest for guest, partner in PARTNER.items() if partner == rank]
        return peer_streams.connect(Fellows(rank, values, barrier), PARTNER[rank], guests, deadline_seconds)

    with ThreadPoolExecutor(len(PARTNER)) as threads:
        return list(threads.map(connect, PARTNER))


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(peer_streams, "CONNECT_SECONDS", 1.0)


def shut(found):
    for out, incoming in found:
        peer_streams.shut([*incoming.values(), *([] if out is None else [out])])


def test_each_rank_sends_to_its_partner_alone():
    found = connected()
    for rank, (out, _) in enumerate(found):
        data = bytes([rank]) * 3_000_000
        got = bytearray(3_000_003)
        incoming = found[PARTNER[rank]][1]
        assert [*incoming] == [rank]
        sending = threading.Thread(
            target=peer_streams.send, args=(out, [memoryview(b"abc"), memoryview(b""), memoryview(data)])
        )
        sending.start()
        peer_streams.receive(incoming[rank], memoryview(got))
        sending.join()
        assert got == b"abc" + data
    shut(found)


def test_rank_without_an_address_gets_its_copies_over_the_group(monkeypatch):
    listeners = [None, peer_streams._listening(), peer_streams._listening()]
    monkeypatch.setattr(peer_streams, "_listening", listeners.pop)
    found = connected()
    assert [out is None for out, _ in found].count(True) == 1
    for rank, (out, _) in enumerate(found):
        assert (rank in found[PARTNER[rank]][1]) == (out is not None)
    shut(found)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda out, incoming: peer_streams.send(out, [memoryview(bytes(50_000_000))]),
        lambda out, incoming: peer_streams.send(incoming, [memoryview(bytes(50_000_000))]),
        lambda out, incoming: peer_streams.receive(out, memoryview(bytearray(1))),
    ],
    ids=["request", "answer", "wait for an answer"],
)
def test_no_side_waits_for_one_that_does_nothing(waiting):
    found = connected(deadline_seconds=0.8)
    with pytest.raises(BlockingIOError):
        waiting(found[0][0], found[1][1][0])
    shut(found)


def test_error_while_connecting_leaves_no_connection_open(monkeypatch):
    """As one of a rank that has failed meanwhile."""
    opened, real_connected, real_accepted = [], peer_streams._connected, peer_streams._accepted

    def kept(*arguments):
        opened.append(real_connected(*arguments))
        return opened[-1]

    def accepted(*arguments):
        found = real_accepted(*arguments)
        opened.extend(found.values())
        return found

    def everyone(self, value, real=Fellows.everyone):
        values = real(self, value)
        if isinstance(value, list):
            raise ConnectionError("a rank has failed")
        return values

    monkeypatch.setattr(peer_streams, "_connected", kept)
    monkeypatch.setattr(peer_streams, "_accepted", accepted)
    monkeypatch.setattr(Fellows, "everyone", everyone)
    with pytest.raises(ConnectionError, match="a rank has failed"):
        connected()
    assert len(opened) == 6 and all(stream.fileno() == -1 for stream in opened)


@pytest.mark.parametrize("name", ["a" * 64 + ".example", "a..example"])
def test_host_whose_name_has_no_address_listens_nowhere(monkeypatch, name):
    """An error of one rank would leave the others waiting for it."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert peer_streams._listening() is None


def test_program_that_does_not_know_the_secret_is_turned_away(monkeypatch):
    """Also where it comes first, and says nothing."""
    strangers = []
    real = peer_streams._connected

    def connected_after_a_stranger(place, rank, seconds):
        strangers.append(socket.create_connection(place.address))
        if rank:
            strangers[-1].sendall(peer_streams._HELLO.pack(b"?" * peer_streams.SECRET_BYTES, rank))
        else:
            strangers[-1].shutdown(socket.SHUT_WR)
        return real(place, rank, seconds)

    monkeypatch.setattr(peer_streams, "_connected", connected_after_a_stranger)
    found = connected()
    assert all(out is not None for out, _ in found)
    for stranger in strangers:
        with closing(stranger):
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
    shut(found)


@pytest.mark.parametrize("pause", [0.08, 60.0])
def test_program_that_says_little_takes_no_connection_from_a_rank(monkeypatch, pause):
    """Nor one that says a byte now and then."""
    monkeypatch.setattr(peer_streams, "HELLO_SECONDS", 0.1)
    monkeypatch.setattr(peer_streams, "CONNECT_SECONDS", 1.0)
    real, is_over, threads = peer_streams._connected, threading.Event(), []

    def chat(stranger):
        with stranger, suppress(OSError):
            for _ in range(peer_streams._HELLO.size):
                if is_over.wait(pause):
                    break
                stranger.send(b"?")

    def connected_after_a_stranger(place, rank, seconds):
        for _ in range(3):
            threads.append(threading.Thread(target=chat, args=(socket.create_connection(place.address),)))
            threads[-1].start()
        return real(place, rank, seconds)

    monkeypatch.setattr(peer_streams, "_connected", connected_after_a_stranger)
    found = connected()
    is_over.set()
    for thread in threads:
        thread.join()
    assert all(out is not None for out, _ in found)
    shut(found)


def test_partner_that_has_ended_ends_no_script_by_a_signal():
    """Where SIGPIPE is what it is without Python."""
    script = (
        "import signal, socket; from holdfast.checkpoint.nodes import peer_streams\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "out, incoming = socket.socketpair(); incoming.close()\n"
        "try: peer_streams.send(out, [memoryview(b'a')])\n"
        "except BrokenPipeError: print('told')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout == "told\n", (run.returncode, run.stderr)


def test_stream_ends_with_a_send_that_was_cut_off():
    """What followed would be taken for the rest of it."""
    out, incoming = socket.socketpair()

    class Interrupted:
        def __init__(self):
            self.shutdown, self.close = out.shutdown, out.close

        def sendmsg(self, views, *_):
            out.send(bytes(views[0][:10]))
            raise KeyboardInterrupt

    with closing(incoming):
        with pytest.raises(KeyboardInterrupt):
            peer_streams.send(Interrupted(), [memoryview(bytes(100))])
        with pytest.raises(OSError):
            peer_streams.send(out, [memoryview(bytes(100))])
        with pytest.raises(ConnectionError):
            peer_streams.receive(incoming, memoryview(bytearray(100)))
