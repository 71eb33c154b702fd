"""The connection to a helper process ends without taking the descriptor from a thread that still uses it."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from holdfast.checkpoint.replica import channel, replica_process
from holdfast.checkpoint.replica.channel import Channel
from holdfast.checkpoint.replica.replica_process import LAST_WORD, ReplicaProcess


class Ended:
    """A process that has ended already."""

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        raise AssertionError("nothing is to be killed")


@pytest.fixture
def helper(monkeypatch):
    """A helper whose process has sent its last word."""
    theirs: list[socket.socket] = []
    monkeypatch.setattr(replica_process, "start_process", lambda sock: theirs.append(sock.dup()) or Ended())
    helper = ReplicaProcess(lambda about: None, 60.0)
    helper.start()
    yield helper, Channel(theirs[0])
    theirs[0].close()
    replica_process._left.clear()


@pytest.mark.parametrize("end", [ReplicaProcess.end, ReplicaProcess.leave])
def test_descriptor_outlives_its_reader(helper, monkeypatch, end):
    """A thread on its way into ``poll`` would wait for the file that has the number by then."""
    helper, other = helper
    sock, seen = helper._channel._socket, []
    is_readable = channel.is_readable

    def late(waited_for, timeout):
        ready = is_readable(waited_for, timeout)
        if waited_for is sock and ready:  # a message, or the end of the connection
            time.sleep(0.2)
            seen.append(sock.fileno())
        return ready

    monkeypatch.setattr(channel, "is_readable", late)
    other.send({"word": "something"})  # after which the thread gets to the function above
    other.send({"word": LAST_WORD})
    end(helper)
    assert seen and -1 not in seen
    assert sock.fileno() == -1 and not helper.is_alive


def test_descriptor_outlives_its_sender(helper):
    helper, other = helper
    other.send({"word": LAST_WORD})
    ending = threading.Thread(target=helper.end)
    with helper._sending:  # another thread is sending
        ending.start()
        ending.join(0.2)
        assert helper._channel._socket.fileno() >= 0
    ending.join(10)
    assert helper._channel._socket.fileno() == -1
