"""The transport between a trainer and its replica: messages over a socket, and staging buffers in shared memory.

A message, JSON followed by bytes, is delivered whole or not at all. Messages that a dead process had sent can still be
read; one that its death cut off is dropped. Gradients do not travel in messages: the trainer fills a staging buffer
that both processes map, and the replica uses the content in place. The file of that memory is unlinked once both have
mapped it, so nothing is left when both have ended, in whatever way. Used by the replica's client and server. Sizes are
bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...accelerators import CannotPin, pin, use_device
from ...io.threads import open_file
from ...optim.torch_threads import keep_torch_threads, one_torch_thread
from ...store.disk import Disk
from ...store.format.payload_layout import Layout
from ..capture.staging_buffers import StagingBuffer, StagingPool
from ..log.recorder import FinalizedStep

_LENGTHS = struct.Struct("<QQ")
_PIECE = 1 << 20


class Channel:
    """One end of a connection. One thread sends, one thread receives."""

    def __init__(self, sock: socket.socket, deadline_seconds: float | None = None) -> None:
        """Wrap ``sock``. A part of a ``send`` that takes longer than ``deadline_seconds`` in all raises
        ``TimeoutError``.
        """
        self._socket, self._received, self._idle = sock, bytearray(), False
        sock.settimeout(deadline_seconds)

    def send(self, about: dict[str, Any], data: memoryview | bytes = b"") -> None:
        """Send one message. Raises ``OSError`` if the other end is gone."""
        text = json.dumps(about).encode()
        self._socket.sendall(_LENGTHS.pack(len(text), len(data)) + text)
        if len(data):
            self._socket.sendall(data)

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message; None if none arrives within ``timeout`` seconds. Raises ``ChannelClosed``."""
        while (message := self._parsed()) is None:
            self._idle = True
            if not is_readable(self._socket, timeout):
                return None
            self._idle = False  # set first: data is always either unread or in this thread's hands
            try:
                piece = self._socket.recv(_PIECE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except ConnectionError:
                piece = b""
            if not piece:
                raise ChannelClosed
            self._received += piece
        return message

    @property
    def has_unread(self) -> bool:
        """Return whether there is data to read, or the receiving thread is reading it."""
        return is_readable(self._socket, 0) or not self._idle

    def end(self) -> None:
        """End the connection: a thread that receives gets ``ChannelClosed``. The descriptor stays open."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close the socket. No other thread may use the channel.

        Another thread could be about to enter a system call with the descriptor's number, which the next file or
        socket of this process gets.
        """
        self.end()
        self._socket.close()

    def _parsed(self) -> Message | None:
        if len(self._received) < _LENGTHS.size:
            return None
        text_bytes, data_bytes = _LENGTHS.unpack_from(self._received)
        start = _LENGTHS.size + text_bytes
        if len(self._received) < start + data_bytes:
            return None
        about = json.loads(self._received[_LENGTHS.size : start])
        data = memoryview(self._received[start : start + data_bytes])
        del self._received[: start + data_bytes]
        return Message(about, data)


class Inbox:
    """A queue of received messages, filled by a thread at once, so that the sender never waits for the consumer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="holdfast-inbox", daemon=True).start()

    def next(self, timeout: float) -> Message | None:
        """Return the next message; None if none arrives within ``timeout`` seconds.

        Raises ``ChannelClosed`` on every call after the end.
        """
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            self._messages.put(None)
            raise ChannelClosed
        return message

    @property
    def has_more(self) -> bool:
        """Return whether data has arrived that is not a message yet. Read this before the last call of ``next``."""
        return self._channel.has_unread

    def _read(self) -> None:
        with suppress(ChannelClosed):
            while True:
                self._messages.put(self._channel.receive())
        self._messages.put(None)


class Message(NamedTuple):
    about: dict[str, Any]
    data: memoryview
    """Writable memory that belongs to this message alone."""


class ChannelClosed(Exception):
    """The other end is closed, and everything that it sent has been read."""


def is_readable(sock: socket.socket, timeout: float | None) -> bool:
    """Return whether ``sock`` has something to read, or has ended, within ``timeout`` seconds (None: at any time).

    Unlike ``select``, this takes descriptors of any number.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if timeout is None else math.ceil(timeout * 1000)))


RING = "ring"
ADVICE = " {place} has to be on a tmpfs, as /dev/shm is: memory of files elsewhere is refused."
"""Advice where the shared memory cannot be pinned."""


class SharedPool(StagingPool):
    """A pool of ``count`` staging buffers in the new file ``ring`` of a shared-memory store.

    Every page is faulted in. Pinned where gradients come from ``devices``.
    """

    def __init__(
        self, place: Path, layouts: Sequence[Layout], count: int, devices: Sequence[torch.device] = ()
    ) -> None:
        super().__init__(layouts, 0, devices)
        self.part_bytes = [layout.file_bytes for layout in layouts]
        disk = Disk(place)
        disk.allocate(
            RING, max(1, count * self.slot_bytes)
        )  # otherwise a write without free space would end the process
        self._ring = Ring(place, self.part_bytes, count)
        self.slots = [
            StagingBuffer(layouts, self._ring.parts(number), self._departures, ADVICE.format(place=place))
            for number in range(count)
        ]
        self._free, self.count = list(self.slots), count

    def close(self) -> None:
        super().close()
        self._ring.close()


class Ring:
    """The shared memory of ``count`` staging buffers, each with parts of ``part_bytes``."""

    def __init__(self, place: Path, part_bytes: Sequence[int], count: int) -> None:
        self._part_bytes = list(part_bytes)
        nbytes = max(1, count * sum(part_bytes))
        with open_file(place / RING, write=True, direct=False) as file:
            self._memory = mmap.mmap(file.fd, nbytes)
        self._view = memoryview(self._memory)
        self._unpin: Callable[[], object] | None = None

    def parts(self, slot: int) -> list[memoryview]:
        start, parts = slot * sum(self._part_bytes), []
        for nbytes in self._part_bytes:
            parts.append(self._view[start : start + nbytes])
            start += nbytes
        return parts

    def pin(self, device: torch.device) -> None:
        """Pin the memory, so that copies from it to ``device`` are fast. Where that is refused they are slow."""
        with suppress(CannotPin):
            self._unpin = pin(self._view, device)

    def close(self) -> None:
        """Release the memory; buffers that still refer to it keep it alive."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        with suppress(BufferError):
            self._view.release()
            self._memory.close()


class RecordSender:
    """A sender that calls ``send`` with each complete step, in order, once it has fully arrived from the device.

    Steps that are complete are sent by the training thread, before ``put`` returns. From the first step with copies
    still under way, a thread waits for the copies and sends, so that training does not wait.
    """

    def __init__(self, send: Callable[[FinalizedStep], None], devices: Sequence[torch.device] = ()) -> None:
        """Prepare a sender for steps that come from ``devices``."""
        self._send, self._devices = send, list(devices)
        self._failure: BaseException | None = None
        self._waiting: queue.SimpleQueue[FinalizedStep | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, sealed: FinalizedStep) -> None:
        if self._thread is None and not sealed.is_late:
            return self._send(sealed)
        if self._thread is None:
            keep_torch_threads()
            self._thread = threading.Thread(target=self._work, name="holdfast-post", daemon=True)
            self._thread.start()
        self._waiting.put(sealed)

    def check(self) -> None:
        """Raise the error of the thread, which sends nothing after it."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Return when everything has been sent, or the thread has failed."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        one_torch_thread()
        for device in self._devices[:1]:
            use_device(device)
        while (sealed := self._waiting.get()) is not None:
            try:
                sealed.complete()
                self._send(sealed)
            except BaseException as error:
                self._failure = error
                return
