"""The publication of commits on every node: manifests by agreement of the ranks, not by a directory that all see.

The board is a key-value store that the first rank serves.

1. Each rank puts the small files of its share on the board, once the share is durable here and at the partner.
2. The first rank writes those of all ranks into its directory and publishes the manifest there. This is the commit.
3. It puts the manifest on the board. The first rank of each other node writes the same files into its own directory.
4. Only then it retires older commits there, and the node's other ranks read what there is.

The invariant: no two nodes are more than one commit apart, because a rank begins its next share only after its node has
the last commit. So two retained commits suffice for one that all nodes have. Called by ``node_run``.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from ...distributed import Ranks
from ...errors import RankFailed
from ...quantities import MiB
from ...store.format.manifest import Manifest, RankShare
from ...store.node_store import NodeStore
from .local_disks import NodeLayout

PIECE_BYTES = 4 * MiB
"""The most bytes of one value on the board."""
POLL_SECONDS = 0.01


class Publication:
    """The board of one rank, with what it has put there and what it has taken."""

    def __init__(self, ranks: Ranks, layout: NodeLayout, store: NodeStore, deadline_seconds: float) -> None:
        """Open the board. Collective: every rank must call this."""
        self._ranks, self._store, self._deadline = ranks, store, deadline_seconds
        self._place = layout.place_of(ranks.rank)
        done = {f"done/{place}": "0" for place in range(len(layout.ranks))}
        self._board: Any = ranks.board({"newest": "0 ", **done}, deadline_seconds)
        self._posted: deque[list[str]] = deque()
        self._number = self._followed = 0
        self._lock = threading.Lock()

    def post(self, share: RankShare) -> None:
        """Put the small files of this rank's share on the board, and remove those of the share before the last."""
        paths = [share.path, share.index["path"]]
        self._post((path, self._store.disk.read_bytes(path)) for path in paths)

    def publish(self, refs: dict[str, dict[str, Any]]) -> Manifest:
        """Publish the shares ``refs``, by stream, in the first rank's directory. Called on the first rank."""
        with self._lock:
            self._store.take_small_files(self._small_files(refs.values()))
            manifest = self._store.publish_shares(refs)
            self._store.prune_journal()
            self._number += 1
            self._post([(f"{self._number}", self._store.disk.read_bytes(manifest.path))])
            self._followed = self._number
            self._board.set(f"done/{self._place}", f"{self._number}")
            self._board.set("newest", f"{self._number} {manifest.path}")
        return manifest

    def follow(self) -> None:
        """Have this node's directory hold what the first rank has published. Called on the other ranks."""
        with self._lock:
            number, _, path = self._board.get("newest").decode().partition(" ")
            if int(number) > self._followed and self._store.leads:
                text = self._taken(number)
                refs = json.loads(text)["shares"].values()
                self._store.take_published(path, {path: text, **self._small_files(refs)})
                self._board.set(f"done/{self._place}", number)
            elif int(number) > self._followed:
                self._wait(f"done/{self._place}", int(number))
            self._followed = int(number)
            if not self._store.leads:
                self._store.follow()

    def _wait(self, key: str, number: int) -> None:
        """Return when the value of ``key`` is at least ``number``."""
        end = time.monotonic() + self._deadline
        while int(self._board.get(key)) < number:
            if time.monotonic() > end:
                raise RankFailed(
                    f"rank {self._ranks.rank} waited {self._deadline:.0f} s for the first rank of its node to write a"
                    " commit into the node's directory. See what that rank does, and start all ranks again to resume."
                )
            time.sleep(POLL_SECONDS)

    def _small_files(self, refs: Iterable[dict[str, Any]]) -> dict[str, bytes]:
        """Return the files of the shares ``refs`` and their indexes, as far as the directory lacks them."""
        texts: dict[str, bytes] = {}
        for ref in refs:
            share = self._text(ref["path"], texts)
            self._text(json.loads(share)["index"]["path"], texts)
        return texts

    def _text(self, path: str, texts: dict[str, bytes]) -> bytes:
        """Return the file ``path`` of the directory, or else from the board, and then also put it into ``texts``."""
        try:
            return self._store.disk.read_bytes(path)
        except FileNotFoundError:
            texts[path] = self._taken(path)
            return texts[path]

    def _post(self, texts: Iterable[tuple[str, bytes]]) -> None:
        """Put ``texts`` on the board, each in pieces, and remove those of the call before the last."""
        keys = []
        for name, text in texts:
            pieces = [text[start : start + PIECE_BYTES] for start in range(0, len(text), PIECE_BYTES)]
            for number, piece in enumerate(pieces):
                keys.append(f"{name}#{number}")
                self._board.set(keys[-1], piece)
            keys.append(name)
            self._board.set(name, f"{len(pieces)}")
        self._posted.append(keys)
        if len(self._posted) > 3:
            for key in self._posted.popleft():
                self._board.delete_key(key)

    def _taken(self, name: str) -> bytes:
        """Return a text from the board, once it is there."""
        count = int(self._board.get(name))
        return b"".join(self._board.get(f"{name}#{number}") for number in range(count))
