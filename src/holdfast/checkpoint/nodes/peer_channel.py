"""Requests between ranks, and the answers, over a CPU process group of torch.distributed.

Each rank has one thread that answers requests of any rank, and one for each guest with a connection of its own
(``peer_streams``), so that training waits for nobody; what they ask for is done one after another. A request is a JSON
header of fixed size, with at most ``BLOCK_BYTES`` behind it in at most ``MOST_PIECES`` pieces; an answer has the same
form, with at most one piece. A rank sends one request at a time, so each thread needs one block of memory for what it
receives. The group has no time limit, because a rank may ask for nothing for hours; whoever waits for an answer has a
deadline.

A rank waits for the last message of each guest, in a thread. If the connection breaks before it, the guest's process
has ended: the system closes its connections at once, however it ended.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from ...distributed import Ranks
from ...errors import DiskFailed, HoldfastError, RankFailed
from ...io.buffers import Buffer
from ...quantities import MiB
from . import peer_streams

BLOCK_BYTES = 4 * MiB
"""The most bytes behind one header."""
HEADER_BYTES = 2048
MOST_PIECES = 64
"""The most messages behind one header."""
FOREVER = timedelta(days=365)
JOIN_SECONDS = 10.0
"""The longest time that a closing rank waits for its guests to say goodbye."""
EXIT_SECONDS = 3.0
"""The longest time that a process which ends without ``close`` waits for other ranks."""
QUIET_SECONDS = 0.1
"""The time without a request after which a process that ends expects no more requests."""
END_SECONDS = 0.5
"""The longest time that a process which ends so waits for a thread to end."""
_REQUEST, _SENT, _REPLY, _ANSWER, _LAST, _NEVER = range(6)
"""Tags of messages. ``_LAST`` is that of a guest's last message; nothing is sent with ``_NEVER``."""

Request = dict[str, Any]
Handler = Callable[[Request, memoryview], "tuple[Request, memoryview | None]"]
"""Answers a request with the bytes sent behind it: a header, and at most ``BLOCK_BYTES``."""


class PeerChannel:
    """The requests and answers of one rank. ``ask`` may be called from several threads."""

    def __init__(self, ranks: Ranks, deadline_seconds: float, partner: int, guests: Collection[int]) -> None:
        """Make the group, and the connections for copies: to ``partner``, and from ``guests``.

        Collective: every rank must call this.
        """
        self._process = os.getpid()
        self._rank, self._deadline = ranks.rank, timedelta(seconds=deadline_seconds)
        self._group: Any = dist.new_group(backend="gloo", timeout=FOREVER)
        self._partner = partner
        self._out, self._in = peer_streams.connect(ranks, partner, guests, deadline_seconds)
        self._asking = threading.Lock()
        self._unanswered: set[int | socket.socket] = set()
        """The connections, and for the group the ranks, of which an answer is awaited."""
        self._thread: threading.Thread | None = None
        self._watchers: list[threading.Thread] = []
        self._servers: list[threading.Thread] = []
        self._is_ending = False
        self._served_at = 0.0
        """The time of the last answer, by the monotonic clock."""
        self._handling = threading.Lock()
        self._busy: set[int] = set()
        """The threads that receive or answer a request."""

    def serve(self, handle: Handler, guests: Collection[int], lost: Callable[[int], None]) -> None:
        """Answer requests by ``handle`` until each rank of ``guests`` has said goodbye.

        ``lost`` is called with the number of a guest whose process ends without a goodbye.
        """
        self._thread = threading.Thread(
            target=self._serve, args=(handle, set(guests)), name="holdfast-peer", daemon=True
        )
        self._watchers = [
            threading.Thread(target=self._watch, args=(guest, lost), name="holdfast-watch", daemon=True)
            for guest in guests
        ]
        self._servers = [
            threading.Thread(
                target=self._serve_stream, args=(handle, stream), name="holdfast-copies", daemon=True
            )
            for stream in self._in.values()
        ]
        for thread in (self._thread, *self._watchers, *self._servers):
            thread.start()
        # registered before the hook of a recorder, which the interpreter therefore calls first
        atexit.register(self._end_watching)

    def ask(
        self, rank: int, request: Request, sent: Sequence[memoryview] = (), into: memoryview | None = None
    ) -> Request:
        """Send ``request`` with the bytes of ``sent``, one after the other, to ``rank``, and return its answer.

        Bytes of the answer go to the beginning of ``into``. Raises ``DiskFailed`` with the error of the other rank,
        ``RankFailed`` if it does not answer.
        """
        with self.asked(rank, request, sent) as answer:
            return answer(into)

    @contextmanager
    def asked(
        self, rank: int, request: Request, sent: Sequence[memoryview] = ()
    ) -> Iterator[Callable[[memoryview | None], Request]]:
        """Send a request, and yield a function that waits for its answer, so that work may be done meanwhile.

        The function must be called, once, inside the block. Other threads cannot ask until the block ends. Where it
        ends without the whole answer, as by an interrupt, ``rank`` is asked no more: the next request would be given
        the answer to this one.
        """
        with self._asking:
            out = self._out if rank == self._partner else None
            way = rank if out is None else out
            header = _encode({**request, "pieces": [len(piece) for piece in sent]})

            def answer(into: memoryview | None) -> Request:
                found = self._answer(rank, out, into)
                self._unanswered.discard(way)
                if "error" in found:
                    raise DiskFailed(f"rank {rank}: {found['error']}")
                return found

            with self._failing(rank):
                if way in self._unanswered:
                    raise ConnectionError("an earlier request has got no answer")
            self._unanswered.add(way)
            try:
                with self._failing(rank):
                    self._request(rank, out, header, sent)
                yield answer
            finally:
                if out is not None and out in self._unanswered:
                    peer_streams.shut([out])  # or the other side waits until somebody takes its answer

    def _request(
        self, rank: int, out: socket.socket | None, header: bytearray, sent: Sequence[memoryview]
    ) -> None:
        if out is not None:
            peer_streams.send(out, [memoryview(header), *sent])
            return
        pieces = [torch.frombuffer(piece, dtype=torch.uint8) for piece in sent]
        works = [self._group.send([torch.frombuffer(header, dtype=torch.uint8)], rank, _REQUEST)]
        works += [self._group.send([piece], rank, _SENT) for piece in pieces]
        for work in works:
            work.wait(self._deadline)

    def say_goodbye(self, rank: int) -> None:
        """Tell ``rank`` that this one asks for nothing any more, and ends in order. Errors do not matter."""
        out, self._out = self._out, None
        peer_streams.shut([] if out is None else [out])
        with suppress(HoldfastError), self._failing(rank):
            self._send(rank, _LAST, torch.zeros(1, dtype=torch.uint8, device="cpu"))
            self.ask(rank, {"do": "goodbye"})

    def close(self) -> None:
        """Wait for the guests to say goodbye, and leave the group if all have.

        Otherwise the thread and the group stay until the process ends.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            self._shut_streams()
            return
        thread.join(JOIN_SECONDS)
        if not thread.is_alive():
            for each in self._watchers:  # a guest's last message came before its goodbye
                each.join(JOIN_SECONDS)
        self._is_ending = True
        if not any(each.is_alive() for each in (thread, *self._watchers)):
            atexit.unregister(self._end_watching)
            self._shut_streams()
            for each in self._servers:
                each.join(JOIN_SECONDS)
            with suppress(ValueError, RuntimeError):  # the script has destroyed all groups
                dist.destroy_process_group(self._group)

    def _shut_streams(self) -> None:
        peer_streams.shut([*self._in.values(), *([] if self._out is None else [self._out])])

    def wait_until_quiet(self) -> None:
        """Return once no request is or was under way for ``QUIET_SECONDS`` from now, or after ``EXIT_SECONDS``."""
        busy_at = time.monotonic()
        end = busy_at + EXIT_SECONDS
        while (now := time.monotonic()) < min(end, busy_at + QUIET_SECONDS):
            time.sleep(QUIET_SECONDS / 10)
            busy_at = now if self._busy else max(busy_at, self._served_at)

    def end_with_process(self) -> None:
        """Bound the wait for other ranks at the end of a process that did not call ``close``.

        They may have ended, or end at the same moment and answer no more. Called when the interpreter ends. Does
        nothing in a fork.
        """
        if self._thread is not None and os.getpid() == self._process:
            timer = threading.Timer(EXIT_SECONDS, self._abort)
            timer.daemon = True
            with suppress(RuntimeError):  # this interpreter starts no more threads
                timer.start()

    def _abort(self) -> None:
        """Fail all that is under way: a wait that runs out of time closes the connections of a gloo group.

        Does nothing in a fork, whose connections are those of its parent.
        """
        if os.getpid() != self._process:
            return
        self._is_ending = True
        self._shut_streams()
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for rank in range(self._group.size()):  # a wait for one that has ended does not run out of time
            if rank != self._rank:
                with suppress(RuntimeError):
                    self._group.recv([nothing], rank, _NEVER).wait(timedelta(milliseconds=1))

    def _end_watching(self) -> None:
        """End the threads that wait in a receive, at the end of a process that did not call ``close``.

        A connection that breaks later would bring them back to an interpreter that has ended, which aborts the process.
        """
        known = (self._thread, *self._watchers, *self._servers)
        threads = [each for each in known if each is not None and each.is_alive()]
        if threads:
            self._abort()
        for each in threads:
            each.join(END_SECONDS)

    def _watch(self, guest: int, lost: Callable[[int], None]) -> None:
        """Receive the last message of ``guest``, or learn that its process has ended without one."""
        last = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            self._group.recv([last], guest, _LAST).wait()
        except RuntimeError:
            if not self._is_ending:
                lost(guest)

    def _answer(self, rank: int, out: socket.socket | None, into: memoryview | None) -> Request:
        header = memoryview(bytearray(HEADER_BYTES))
        with self._failing(rank):
            self._receive(rank, out, _REPLY, header)
            answer = _decode(header)
            if answer["bytes"]:
                assert into is not None
                self._receive(rank, out, _ANSWER, into[: answer["bytes"]])
        return answer

    def _send(self, rank: int, tag: int, data: torch.Tensor) -> None:
        self._group.send([data], rank, tag).wait(self._deadline)

    def _receive(self, rank: int, out: socket.socket | None, tag: int, view: memoryview) -> None:
        if out is not None:
            peer_streams.receive(out, view)
        else:
            self._group.recv([torch.frombuffer(view, dtype=torch.uint8)], rank, tag).wait(self._deadline)

    @contextmanager
    def _failing(self, rank: int) -> Iterator[None]:
        """Turn the error of the process group into one about the other rank."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise RankFailed(
                f"rank {self._rank} exchanges copies with rank {rank}, which has ended or does not answer ({error})."
                " Every step that was durable still is: start all ranks again to resume."
            ) from error

    def _serve(self, handle: Handler, guests: set[int]) -> None:
        header = memoryview(bytearray(HEADER_BYTES))
        request_tensor = torch.frombuffer(header, dtype=torch.uint8)
        memory = Buffer(BLOCK_BYTES, "copy").view  # page-aligned: it is written past the page cache
        block = torch.frombuffer(memory, dtype=torch.uint8)

        def reply(answer: bytearray, data: memoryview | None) -> None:
            self._group.send([torch.frombuffer(answer, dtype=torch.uint8)], source, _REPLY).wait()
            if data is not None:
                self._group.send([torch.frombuffer(data, dtype=torch.uint8)], source, _ANSWER).wait()

        with suppress(RuntimeError):  # the others have ended; whoever asks them next reports that
            while guests:
                work = self._group.recv_anysource([request_tensor], _REQUEST)
                work.wait()
                with self._answering():
                    source, request = work._source_rank(), _decode(header)
                    ends = [*accumulate(request["pieces"], initial=0)]
                    works = [self._group.recv([block[a:b]], source, _SENT) for a, b in pairwise(ends)]
                    for each in works:
                        each.wait()
                    if request["do"] == "goodbye":
                        guests.discard(source)
                        reply(_encode({"bytes": 0}), None)
                    else:
                        self._handle(handle, request, memory[: ends[-1]], reply)

    def _serve_stream(self, handle: Handler, stream: socket.socket) -> None:
        """Answer the requests of one guest until it closes its connection, or ends."""
        try:
            self._answer_all(handle, stream)
        finally:  # after an error the guest does not wait for an answer
            peer_streams.shut([stream])

    def _answer_all(self, handle: Handler, stream: socket.socket) -> None:
        header = memoryview(bytearray(HEADER_BYTES))
        memory = Buffer(BLOCK_BYTES, "copy").view

        def reply(answer: bytearray, data: memoryview | None) -> None:
            peer_streams.send(stream, [memoryview(answer), *([] if data is None else [data])])

        with suppress(OSError):  # the guest has ended, which another thread sees
            while True:
                peer_streams.receive(stream, header)
                with self._answering():
                    request = _decode(header)
                    sent = memory[: sum(request["pieces"])]
                    peer_streams.receive(stream, sent)
                    self._handle(handle, request, sent, reply)

    def _handle(
        self,
        handle: Handler,
        request: Request,
        sent: memoryview,
        reply: Callable[[bytearray, memoryview | None], None],
    ) -> None:
        """Do what ``request`` asks for, and answer it: one request of all threads after another."""
        with self._handling:
            answer, data = _handled(handle, request, sent)
            data = data or None
            reply(_encode({**answer, "bytes": 0 if data is None else len(data)}), data)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Note that a request is under way."""
        self._busy.add(threading.get_ident())
        try:
            yield
        finally:
            self._served_at = time.monotonic()
            self._busy.discard(threading.get_ident())


def _handled(handle: Handler, request: Request, sent: memoryview) -> tuple[Request, memoryview | None]:
    try:
        return handle(request, sent)
    except Exception as error:  # any error: whoever asked reports it
        text = f"{type(error).__name__}: {error}"[: HEADER_BYTES // 2]
        while len(json.dumps(text)) > HEADER_BYTES // 2:  # a character may take 12 bytes
            text = text[:-1]
        return {"error": text}, None


def _encode(table: Request) -> bytearray:
    text = json.dumps(table).encode()
    assert len(text) <= HEADER_BYTES, table
    return bytearray(text.ljust(HEADER_BYTES))


def _decode(header: memoryview) -> Request:
    """Return what ``_encode`` was given. Raises ``ConnectionError`` for other bytes."""
    try:
        return json.loads(bytes(header))
    except ValueError as error:
        raise ConnectionError("what came is no message") from error
