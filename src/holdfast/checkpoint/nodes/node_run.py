"""A run whose nodes have a directory each: entering, finding what is where, continuing, publishing.

1. The first rank of each node locks the node's directory. Small files that one node has and another lacks are written
   where they are missing.
2. All ranks exchange what each directory holds, and each computes where every share is.
3. The state is recovered from the newest step of which every share is somewhere; a process reads what it needs.
4. Training continues after the base only where every share is on its own node's disk and at the partner, up to the
   recovered step. Otherwise all make a base at once.

Called by ``LogBackend``.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...distributed import Ranks, stream_of
from ...errors import BadInput, Damaged, DiskFailed, RunLocked, RunMismatch
from ...quantities import shown
from ...store.copying import blocks_of
from ...store.format.manifest import CommitRef, Manifest, Point, RankShare, Timeline, object_path
from ...store.joined_nodes import STREAMS, refuse_two_runs
from ...store.log.chain import chain_of, last_step, read_journal
from ...store.node_store import NodeStore, is_mine_of
from ...store.object_store import ObjectDisk, Url
from ...store.reader import RunReader
from ...store.run_store import LocalStore
from ...store.share_places import (
    OWN,
    PARTNER,
    Holdings,
    Place,
    Places,
    is_own,
    missing_streams,
    newest_complete,
    payload_places,
    segment_places,
    tiers_of,
)
from ..log.recorder import BOUND
from .local_disks import LocalDisks, NodeLayout, node_here
from .peer_channel import PeerChannel
from .peer_disk import PartnerCopy, PeerDisk, PeerServer, asking
from .publication import Publication


class NodePeers:
    """The nodes of a run as one rank knows them, and its channel to the ranks of other nodes."""

    def __init__(
        self, ranks: Ranks, option: LocalDisks, deadline_seconds: float, remote: str | None = None
    ) -> None:
        """Exchange who is where. Collective: every rank must call this.

        ``remote`` is the copy of the run in a bucket. Raises ``BadInput`` where all ranks are on one node, or a node
        would be its own partner.
        """
        if ranks.alone:
            raise BadInput(
                "nodes= is for several nodes, and there is one process: leave it out, or call it after"
                " init_process_group."
            )
        gathered = ranks.all_do(lambda: (node_here(option, os.environ), option.partner_offset))
        self.layout = NodeLayout.of([node for node, _ in gathered], [offset for _, offset in gathered])
        self.place = self.layout.place_of(ranks.rank)
        self.leads = self.layout.leads(ranks.rank)
        self.partner = self.layout.partner_of(ranks.rank)
        self.streams = [stream_of(rank) for rank in self.layout.mates(ranks.rank)]
        with ranks.agreeing():
            self.bucket = None if remote is None else ObjectDisk(Url(remote))
        guests = self.layout.copied_by(ranks.rank)
        self.channel = PeerChannel(ranks, deadline_seconds, self.partner, guests)

    def close(self, orderly: bool) -> None:
        """End the channel: ``orderly`` if all ranks do the same, so that each may wait for the others."""
        if orderly:
            self.channel.say_goodbye(self.partner)
            self.channel.close()


class NodeRun:
    """The run, from ``enter`` on. ``fail`` reports an error of the sending thread to all ranks."""

    def __init__(
        self,
        peers: NodePeers,
        ranks: Ranks,
        store: NodeStore,
        emit: Callable[..., None],
        deadline_seconds: float,
    ) -> None:
        """Enter the directory of each node. Collective: every rank must call this."""
        self._peers, self._ranks, self.store, self._emit = peers, ranks, store, emit
        self._stream, self._bucket = stream_of(ranks.rank), peers.bucket
        self.fail: Callable[[BaseException], None] = lambda error: None
        self.lost: Callable[[int], None] = lambda rank: None
        """Reports to all ranks a rank whose process has ended without a word."""
        self._deadline = deadline_seconds
        self._enter()
        self._server = PeerServer(store.disk, store.copies, store.direct)
        guests = peers.layout.copied_by(ranks.rank)
        peers.channel.serve(self._server.handle, guests, lambda rank: self.lost(rank))
        self.copy = PartnerCopy(peers.channel, peers.partner, store.disk, store.direct)
        self._publication = Publication(ranks, peers.layout, store, deadline_seconds)
        self._holdings: list[Holdings] = []
        self._line: list[Manifest] = []
        self._payload: Places = {}
        self._segments: Places = {}
        self._sending: threading.Thread | None = None
        self._is_given_up = False

    # Start

    def _enter(self) -> None:
        """Lock the directories, and make the small files of all nodes the same."""
        ranks, store = self._ranks, self.store
        holder = f'"pid": {os.getpid()}, "host": {json.dumps(socket.gethostname())}'
        holders = ranks.everyone(holder)

        locked: list[RunLocked] = []

        def lock() -> str:
            try:
                if self._peers.leads:
                    store.enter()
            except RunLocked as error:  # whose lock that is, is in the file once all have tried
                locked.append(error)
            return store.writer() if self._peers.leads else ""

        writers = ranks.all_do(lock)
        first = self._peers.layout.ranks[self._peers.place][0]

        def see() -> None:
            for error in locked:
                raise _refuse_shared(store, holders) or error
            if store.writer() != writers[first]:
                raise RunMismatch(
                    f"{store.root} as rank {ranks.rank} sees it is not the directory that rank {first} of its node has"
                    " entered. Give all ranks of a node one directory on the node's disk."
                )

        ranks.all_do(see)
        self._even_out()
        if not any(ranks.everyone(bool(store.commits()))):
            ranks.all_do(lambda: store.refuse_other_data() if self._peers.leads else None)

    def _even_out(self) -> None:
        """Write the small files that one node has and another lacks where they are missing."""
        ranks, store, leads = self._ranks, self.store, self._peers.leads
        mine = ranks.all_do(lambda: store.small_files() if leads else {})
        self._refuse_two_runs()
        newest: dict[str, float] = {}
        for files in mine:
            for path, made in files.items():
                newest[path] = max(newest.get(path, made), made)
        lacking = {
            path
            for path, made in newest.items()
            for rank, files in enumerate(mine)
            if self._peers.layout.leads(rank) and files.get(path, -1.0) < made
        }
        source = {
            path: next(rank for rank, files in enumerate(mine) if files.get(path) == newest[path])
            for path in lacking
        }
        found = ranks.all_do(
            lambda: {path: store.text_for_others(path) for path in lacking if source[path] == ranks.rank}
        )
        texts = {path: text for each in found for path, text in each.items()}
        own = mine[ranks.rank]

        def take() -> None:
            if leads:
                missing = {path: text for path, text in texts.items() if own.get(path, -1.0) < newest[path]}
                store.take_small_files(missing)
                store.look_again()

        ranks.all_do(take)

    def _refuse_two_runs(self) -> None:
        """Raise ``RunMismatch`` if two nodes mean different timelines by one number."""
        gathered = self._ranks.all_do(
            lambda: (
                {number: record.key for number, record in self.store.timelines()[0].items()}
                if self._peers.leads
                else {}
            )
        )
        keys = {f"the directory of rank {rank}": each for rank, each in enumerate(gathered)}
        refuse_two_runs(keys, "Nothing was changed: give each node the directory that it had.")

    def view(self, target: int | None) -> LocalStore:
        """Return the run as it can be read with all nodes. Collective: every rank must call this.

        Raises ``Damaged`` where a share of the newest commit is nowhere, unless a ``target`` is
        given, for which an older one may do.
        """
        ranks, store = self._ranks, self.store
        gathered = ranks.all_do(lambda: store.holdings() if self._peers.leads else None)
        self._holdings = [each for each in gathered if each is not None]
        refs = store.line() or store.commits()
        self._line = [each for each in map(store._load_or_none, refs) if each is not None]
        self._locate({}, {})
        if self._bucket is not None and any(missing_streams(each, self._payload) for each in self._line):
            self._locate(*ranks.first_does(self._in_bucket))
        ask = asking(self._peers.channel, lambda node: self._peers.layout.server_of(node, ranks.rank))
        disk = PeerDisk(
            store.disk.root, self._peers.place, {**self._payload, **self._segments}, ask, self._bucket,
            any(each.has_log for each in self._holdings),
        )  # fmt: skip
        seen = LocalStore(store.root, keep=store.keep, disk=disk, queue=store.queue, direct=store.direct)
        ranks.all_do(lambda: self._refuse_missing(seen, target))
        return seen

    def _locate(self, objects: dict[str, int], segments: dict[str, int]) -> None:
        """Note where each file is. The arguments are the sizes of the bucket's files, by path."""
        self._segments = segment_places(self._holdings, self._peers.place, segments)
        self._payload = payload_places(self._line, self._holdings, self._peers.place, objects)

    def _in_bucket(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the sizes of the payload and of the log's objects in the bucket, by path."""
        bucket, segments = self._bucket, dict[str, int]()
        assert bucket is not None
        for stream in bucket.listdir("journal"):
            segments |= bucket.sizes(f"journal/{stream}")
        return bucket.sizes("data"), segments

    def _refuse_missing(self, seen: LocalStore, target: int | None) -> None:
        if not self._line or target is not None:
            return
        newest = self._line[0]
        lost = missing_streams(newest, self._payload)
        if not lost:
            return
        left = newest_complete(self._line, self._payload)
        if left is not None and self._bucket is not None:
            return  # recovered from there, and what is lost is told
        text = (
            f"of step {newest.step}, the newest base of {seen.root}, {_whose(lost, len(newest.streams))}: neither on"
            " the node that wrote it nor at its partner."
        )
        if left is None:
            raise Damaged(
                f"{text} No other step is whole. Nothing was changed: start with the directory of one of the two nodes,"
                " or begin from a copy in a bucket (resume(source=...)) in new directories.",
                path=newest.path,
            )
        reach = last_step(seen, left)
        raise Damaged(
            f"{text} The newest complete step is {reach}. Nothing was changed: call resume(step={reach}) to go on from"
            " there, or start with the directory of one of the two nodes.",
            path=newest.path,
        )

    def settle(self, point: Point, seen: LocalStore) -> bool:
        """Note what this directory lacks, tell from where each share came, and return whether records may follow.

        They may where every share is on its own node and at the partner up to ``point``, the recovered step.
        Collective: every rank must call this.
        """
        ranks, store = self._ranks, self.store
        store.damaged |= seen.damaged
        # they can never be resumed, so they take no place among the best
        store.damaged |= {each.ref for each in self._line if missing_streams(each, self._payload)}
        base = next(
            (each for each in self._line if each.step <= point.step and each.ref not in store.damaged), None
        )
        store.absent = {each.ref for each in self._line if not self._is_here(each)}
        if base is not None and not ranks.rank:
            tiers = tiers_of(base, self._payload, self._segments)
            self._emit("shares", step=point.step, base_step=base.step, tiers=tiers)
        copied = ranks.all_do(lambda: self._copied_steps(base, point))
        steps = {stream: step for each in copied for stream, step in each.items()}
        whole = base is not None and self._is_here(base) and self._is_copied(base)
        return all(ranks.everyone(whole and steps.get(self._stream, -1) >= point.step))

    @property
    def source_text(self) -> str:
        """The tiers from which shares of the newest base came, for a person; empty if all were on their own disks."""
        newest = newest_complete(self._line, self._payload)
        tiers = {} if newest is None else tiers_of(newest, self._payload, self._segments)
        others = {stream: tier for stream, tier in tiers.items() if tier != OWN}
        return ", ".join(f"{stream} from the {tier}" for stream, tier in others.items())

    def _is_here(self, base: Manifest) -> bool:
        """Return whether this rank's share of ``base``, with all its records, is in the node's own directory."""
        if self._stream not in base.streams:
            return False
        paths = [ref.path for ref in base.files_of(self._stream).values()]
        records = [path for path in self._segments if path.startswith(f"journal/{self._stream}/")]
        own = [path for path in records if any(place.tier == OWN for place in self._segments[path])]
        place = self._peers.place
        return is_own(paths, self._payload, place) and is_own(own, self._segments, place)

    def _is_copied(self, base: Manifest) -> bool:
        """Return whether the payload of this rank's share of ``base`` is at the partner."""
        there = self._holdings[self._peers.layout.partner_place(self._peers.place)].copies
        return all(there.get(object_path(ref)) == ref.bytes for ref in base.files_of(self._stream).values())

    def _copied_steps(self, base: Manifest | None, point: Point) -> dict[str, int]:
        """Return the steps up to which this rank has whole records of the streams that it keeps copies of."""
        if base is None:
            return {}
        streams = [stream_of(rank) for rank in self._peers.layout.copied_by(self._ranks.rank)]
        return {
            stream: self._copied_step(base, stream, point) for stream in streams if stream in base.streams
        }

    def _copied_step(self, base: Manifest, stream: str, point: Point) -> int:
        node = self._peers.place
        copies = self._holdings[node].copies
        places = {
            path: [Place(node, PARTNER, path, nbytes)]
            for path, nbytes in copies.items()
            if path.startswith(f"journal/{stream}/")
        }
        disk = PeerDisk(self.store.disk.root, node, places, lambda *_: {})
        reader = RunReader(self.store.root, disk=disk)
        with suppress(Damaged, DiskFailed):
            chain = chain_of(base, stream, read_journal(reader, stream), point.step)
            for record in chain.records[-BOUND:]:  # only these may have been on their way
                try:
                    deque(blocks_of(disk, record), maxlen=0)
                except Damaged:
                    return record.step - 1
            return chain.last.step
        return -1

    def begin(self, point: Point | None, about: Mapping[str, Any]) -> None:
        """Open the timeline that continues ``point`` in every directory. Collective: every rank must call this."""
        ranks, store, streams = self._ranks, self.store, self._peers.streams
        store.is_mine = is_mine_of(streams, self._stream, self._peers.leads)

        def opened() -> Timeline:
            store.begin(point, about={**about, STREAMS: streams})
            return store.opened

        timeline = ranks.first_does(opened)
        here = replace(timeline, writer={**timeline.writer, STREAMS: streams})
        ranks.all_do(lambda: store.adopt(here) if self._peers.leads and ranks.rank else None)
        ranks.all_do(lambda: None if self._peers.leads else store.join(here, ranks.rank))

    def watch_exit(self) -> None:
        """Bound the wait for other ranks at the end of the process. Called once the recorder is there, for each one.

        The interpreter does last what was registered first, and the recorder then writes what waits.
        """
        atexit.unregister(self._peers.channel.end_with_process)
        atexit.register(self._peers.channel.end_with_process)

    def wait_for_guests(self) -> None:
        """Wait until the ranks whose copies are kept here send nothing more. Called before this process ends."""
        self._peers.channel.wait_until_quiet()

    def end_timeline(self) -> None:
        """Prepare another ``begin``, after nothing is recorded or published any more.

        The connections stay, so that ``view`` can be called before. Collective: every rank must call this.
        """
        self.give_up_sending()
        self.fail, self.lost = (lambda error: None), (lambda rank: None)
        self._publication = Publication(self._ranks, self._peers.layout, self.store, self._deadline)

    # Snapshots

    def send(self, share: RankShare, report: Callable[[], None]) -> None:
        """Copy ``share`` to the partner in a thread, and call ``report`` once it is durable there."""
        self._is_given_up = False
        self._sending = threading.Thread(
            target=self._send, args=(share, report), name="holdfast-partner", daemon=True
        )
        self._sending.start()

    def _send(self, share: RankShare, report: Callable[[], None]) -> None:
        try:
            self.copy_share(share)
            if not self._is_given_up:
                report()
        except BaseException as error:
            self.fail(error)

    def copy_share(self, share: RankShare) -> None:
        """Have ``share`` durable at the partner on return, and its small files on the board."""
        self.copy.copy_files([*share.files.values()], lambda: self._is_given_up)
        if not self._is_given_up:
            self._publication.post(share)

    def give_up_sending(self) -> None:
        """Stop the copying of a share whose snapshot is given up, before its files are written again."""
        sending, self._sending = self._sending, None
        if sending is not None:
            self._is_given_up = True
            sending.join()
            self._is_given_up = False

    def publish(self, refs: dict[str, dict[str, Any]]) -> Manifest:
        """Publish the shares ``refs`` by stream. Called on the first rank."""
        return self._publication.publish(refs)

    def follow(self) -> None:
        """Take over what the first rank has published. Called on the other ranks."""
        self._publication.follow()

    def drop(self, ref: CommitRef | None) -> None:
        """Retire ``ref`` on every node, as the first rank has done. Collective: every rank must call this."""
        ranks, store = self._ranks, self.store
        ranks.all_do(
            lambda: store.drop(ref) if ref is not None and self._peers.leads and ranks.rank else None
        )
        if not self._peers.leads:
            store.follow()

    def close(self, orderly: bool) -> None:
        """End the exchange with other nodes: ``orderly`` if all ranks do so."""
        atexit.unregister(self._peers.channel.end_with_process)
        if orderly:
            self.give_up_sending()  # nobody publishes any more
        self._peers.close(orderly)
        if orderly:
            self._server.close()


def _refuse_shared(store: NodeStore, holders: list[str]) -> BadInput | None:
    """Return the error for a directory that two nodes have, if a rank of this run holds its lock."""
    writer = store.writer()
    rank = next((rank for rank, holder in enumerate(holders) if holder in writer), None)
    if rank is None:
        return None
    return BadInput(
        f"{store.root} is the directory of rank {rank}'s node as well: nodes= takes a directory on each node's own"
        " disk. Give each node its own, or leave out nodes= for one that all share."
    )


def _whose(streams: list[str], count: int) -> str:
    """Return which shares are missing, as part of a sentence."""
    several = len(streams) > 1
    return f"the share{'s' * several} of {shown(streams)} (of {count} ranks) {'are' if several else 'is'} nowhere"
