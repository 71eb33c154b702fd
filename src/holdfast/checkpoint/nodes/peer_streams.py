"""A TCP connection from each rank to the one that keeps its copies, for the copies.

A message of gloo takes several turns of two threads in each process, and one of them spins while the other holds the
connection's lock. Here a block of records is one call to the system on each side. Requests of other ranks go over
the process group, which also shows which rank has ended; so do those of a rank for which no connection can be made,
as on hosts with IPv6 alone.

1. Each rank listens at the address that gloo would use, if it is one of IPv4, and tells all others the address and a
   secret.
2. Each rank connects to its partner, and sends the partner's secret and its own number.
3. Each rank accepts those who have connected, and tells all others which they are.

Called by ``PeerChannel``. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import NamedTuple

from ...distributed import Ranks

CONNECT_SECONDS = 5.0
"""The longest time that a rank waits for a connection; then its copies go over the process group."""
HELLO_SECONDS = 1.0
"""The longest time that one who has connected is waited for, who may be another program."""
SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{SECRET_BYTES}sI")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def connect(
    ranks: Ranks, partner: int, guests: Collection[int], deadline_seconds: float
) -> tuple[socket.socket | None, dict[int, socket.socket]]:
    """Return the connection to ``partner``, None without one, and those of ``guests`` that have one.

    A send, or a wait for the partner, that makes no progress for ``deadline_seconds`` fails. Collective: every rank
    must call this.
    """
    secret, seconds = secrets.token_bytes(SECRET_BYTES), min(CONNECT_SECONDS, deadline_seconds / 4)
    listener = _listening()
    with ExitStack() as undone, nullcontext() if listener is None else listener:
        places = ranks.everyone(_Place(None if listener is None else listener.getsockname(), secret))
        out = _connected(places[partner], ranks.rank, seconds)
        undone.callback(shut, [] if out is None else [out])
        tried = ranks.everyone(out is not None)
        expected = {guest for guest in guests if tried[guest]}
        found = {} if listener is None else _accepted(listener, secret, expected, seconds)
        undone.callback(shut, [*found.values()])
        accepted = ranks.everyone([*found])[partner]
        if out is not None and ranks.rank not in accepted:
            out.close()
            out = None
        limit = struct.pack("@ll", int(deadline_seconds), int(deadline_seconds % 1 * 1e6))
        for stream in [*found.values(), *([] if out is None else [out])]:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if out is not None:  # a guest's next request may come after hours
            out.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        undone.pop_all()
        return out, found


def send(stream: socket.socket, views: Sequence[memoryview]) -> None:
    """Send all bytes of ``views``. Raises ``OSError``, and ends the stream, of which the other side has a part."""
    left = [view for view in views if len(view)]
    try:
        while left:
            count = stream.sendmsg(left, [], socket.MSG_NOSIGNAL)  # a script may have SIGPIPE end it
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
    except BaseException:  # an interrupt, too: the next bytes would be taken for the rest of these
        shut([stream])
        raise


def receive(stream: socket.socket, view: memoryview) -> None:
    """Fill all of ``view``.

    Raises ``OSError``, and ends the stream; a ``ConnectionError`` if the other side has ended.
    """
    done = 0
    try:
        while done < len(view):
            count = stream.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the connection was closed")
            done += count
    except BaseException:
        shut([stream])
        raise


def shut(streams: Collection[socket.socket]) -> None:
    """End ``streams``, and what other threads wait for in them."""
    for stream in streams:
        with suppress(OSError):  # the other side has ended before
            stream.shutdown(socket.SHUT_RDWR)
        stream.close()


class _Place(NamedTuple):
    """The address at which a rank listens, None without one, and what those who connect have to know."""

    address: tuple[str, int] | None
    secret: bytes


def _listening() -> socket.socket | None:
    """Return a socket that listens at the address that gloo uses; None if there is no such address."""
    with suppress(OSError, UnicodeError):  # the latter for a host's name that no name service can have
        return socket.create_server((_own_address(), 0), backlog=64)
    return None


def _own_address() -> str:
    """Return the address of the interface that the environment names for gloo, or that of the host's name."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(found[20:24])


def _connected(place: _Place, rank: int, seconds: float) -> socket.socket | None:
    """Return a connection to the rank that listens at ``place``; None if it cannot be made."""
    if place.address is None:
        return None
    with suppress(OSError):
        stream = socket.create_connection(place.address, seconds)
        try:
            stream.sendall(_HELLO.pack(place.secret, rank))
            stream.settimeout(None)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            stream.close()
            raise
        return stream
    return None


def _accepted(
    listener: socket.socket, secret: bytes, expected: Collection[int], seconds: float
) -> dict[int, socket.socket]:
    """Return the connections of the ranks ``expected`` that know ``secret``, as far as they come."""
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + seconds
    with suppress(OSError):
        while {*expected} - {*found} and (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            stream, _ = listener.accept()
            rank = _greeted(stream, secret, min(left, HELLO_SECONDS))
            if rank is not None and rank in expected and rank not in found:
                found[rank] = stream
            else:
                stream.close()  # of another program
    return found


def _greeted(stream: socket.socket, secret: bytes, seconds: float) -> int | None:
    """Return the number of the rank that has connected; None if it does not know ``secret``."""
    hello, end = b"", time.monotonic() + seconds
    with suppress(OSError):
        while len(hello) < _HELLO.size:
            stream.settimeout(max(end - time.monotonic(), 0.001))
            part = stream.recv(_HELLO.size - len(hello))
            if not part or time.monotonic() > end:
                return None
            hello += part
        stream.settimeout(None)
        known, rank = _HELLO.unpack(hello)
        return rank if secrets.compare_digest(known, secret) else None
    return None
