"""Messages between two processes: what was sent is read, however long that takes."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
import time

import pytest

from holdfast.checkpoint.replica.channel import Channel, ChannelClosed, Inbox


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    yield sender, receiver
    sender.close()
    for thread in threading.enumerate():
        if thread.name == "holdfast-inbox":
            thread.join()
    receiver.close()


@pytest.mark.parametrize("starved_in", ["recv", "parse"])
def test_what_a_starved_reader_has_not_read_is_known(ends, monkeypatch, starved_in):
    """Whoever ends when nothing comes any more has to know that there is something."""
    sender, receiver = ends
    go, parsed = threading.Event(), Channel._parsed

    def slowly(self):
        if self is receiver and (starved_in == "recv" or self._received):
            go.wait(10)
        return parsed(self)

    monkeypatch.setattr(Channel, "_parsed", slowly)
    inbox = Inbox(receiver)
    for number in range(3):
        sender.send({"number": number}, b"x" * number)
    for _ in range(5):
        assert inbox.has_more and inbox.next(0.02) is None
    go.set()
    for number in range(3):
        message = inbox.next(10)
        assert message.about == {"number": number} and bytes(message.data) == b"x" * number
    end = time.monotonic() + 10
    while inbox.has_more:
        assert time.monotonic() < end
    assert inbox.next(0) is None


def test_what_was_sent_before_the_end_comes_before_it(ends):
    sender, receiver = ends
    sender.send({"number": 1})
    sender.send({"number": 2})
    sender.close()
    inbox = Inbox(receiver)
    assert [inbox.next(10).about["number"] for _ in range(2)] == [1, 2]
    with pytest.raises(ChannelClosed):
        inbox.next(10)


def test_descriptor_number_may_be_large(ends):
    """``select`` refuses 1024 and more, which a trainer with many loader processes and files has."""
    sender, receiver = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2048), hard))
    try:
        number = fcntl.fcntl(receiver._socket, fcntl.F_DUPFD_CLOEXEC, 1100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    far = Channel(socket.socket(fileno=number))
    sender.send({"number": 1})
    assert far.has_unread and far.receive(10).about == {"number": 1}
    far.close()
