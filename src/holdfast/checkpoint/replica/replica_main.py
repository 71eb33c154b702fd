"""The entry of a replica's process: ``python -m holdfast.checkpoint.replica.replica_main DESCRIPTOR``.

``replica_process.start_process`` runs it; the descriptor is this end's socket.
"""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import suppress

from holdfast import failpoints

from .channel import Channel, ChannelClosed
from .multi_rank_server import MultiRankReplicaServer
from .replica_process import ReplicaConfig
from .replica_server import ReplicaServer


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # ends when its trainer has ended
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    with suppress(ChannelClosed):
        message = channel.receive()
        assert message is not None
        terms = ReplicaConfig(**message.about["terms"])
        failpoints.armed = terms.failpoint
        kind = ReplicaServer if terms.world_size == 1 else MultiRankReplicaServer
        kind(channel, terms).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
