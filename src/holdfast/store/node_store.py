"""The run directory of one node, of a run whose nodes share no directory.

It is a run directory that lacks the payload and the logs of other nodes' ranks: manifests, indexes, shares and timeline
records are those of the whole run and the same on every node. A timeline's record also names the ``streams`` that this
directory hosted in it, which tells whose files it holds. The first rank of the node writes what its ranks share.
Besides, the directory holds the copies for another node (``share_places``). Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast import failpoints
from holdfast.store.commit.housekeeping import refuse_other_data, refuse_two_runs, restore
from holdfast.store.commit.retention import Need, needs
from holdfast.store.disk import write_durably
from holdfast.store.format.manifest import CommitRef, Manifest, Timeline, is_ours, object_path
from holdfast.store.joined_nodes import STREAMS, holdings_of
from holdfast.store.run_store import LocalStore
from holdfast.store.share_places import Holdings, copies_disk, prune_copies, sweep_copies

SMALL_FILES = ("timelines", "index", "commits")
"""The directories of files that every node has, in the order in which missing ones are written."""


class NodeStore(LocalStore):
    """The run directory of one node, open for its ranks. ``leads`` is true for the first of them."""

    def __init__(self, root: Any, *, leads: bool, **options: Any) -> None:
        super().__init__(root, **options)
        self.is_part = True
        self.leads = leads
        self.copies = copies_disk(self.disk.root)
        self.absent: set[CommitRef] = set()
        """Commits whose payload of this rank is not in this directory."""

    @property
    def newest_base(self) -> Manifest | None:
        """The newest commit of the line; None if this directory lacks its payload."""
        newest = super().newest_base
        return None if newest is None or newest.ref in self.absent else newest

    def small_files(self) -> dict[str, float]:
        """Return the files that every node is to have, each with the time at which it was made, if it may be replaced.

        Commits that cannot be read, or lack a file, are left out.
        """
        found: dict[str, float] = {}
        for record in self.timelines()[0].values():
            if self.disk.exists(record.path):
                found[record.path] = 0.0
        for ref in self.commits():
            manifest = self._load_or_none(ref)
            if manifest is not None and all(self.disk.exists(path) for path in manifest.small_paths):
                found[ref.path] = manifest.created
                found |= dict.fromkeys(manifest.small_paths, 0.0)
        return found

    def take_small_files(self, texts: Mapping[str, bytes]) -> None:
        """Write files of other nodes, durably: commits last, so that a listed commit has all its small files."""
        self._check_writer()
        with self._failing():
            for folder in SMALL_FILES:
                for path in sorted(texts):
                    if path.startswith(f"{folder}/") and is_ours(folder, path.rpartition("/")[2]):
                        if self._small is not None:
                            self._small.add(path)
                        write_durably(self.disk, path, texts[path], why=f"node's {folder}")

    def text_for_others(self, path: str) -> bytes:
        """Return the content of a small file for another node, whose record of a timeline names no streams."""
        text = self.disk.read_bytes(path)
        if not path.startswith("timelines/"):
            return text
        return without_streams(Timeline.decode(text, path)).encode()

    def look_again(self, sweeps: bool = True) -> None:
        """Retain the commits that are listed now. Raises ``RunMismatch`` if they are of two runs.

        ``sweeps`` removes the copies for the partner that no commit names, for which all nodes must be there.
        """
        self._keep({ref: self._load_or_none(ref) for ref in self.commits()})
        refuse_two_runs(self, self._retained)
        if sweeps and self.leads and None not in self._retained.values():
            sweep_copies(self.copies, self._named())

    def refuse_other_data(self) -> None:
        """Raise ``RunMismatch`` if the directory holds something else. Called where no node has a commit."""
        refuse_other_data(self)

    def holdings(self) -> Holdings:
        """Return what other nodes may read here."""
        return holdings_of(self.disk, self.timelines()[0].values())

    def adopt(self, timeline: Timeline) -> None:
        """Open ``timeline``, which the first rank of the run has begun, in this directory too."""
        self._check_writer()
        with self._failing():
            write_durably(self.disk, timeline.path, timeline.encode(), why="timeline")
            failpoints.reach("after_timeline_opened")
            self.timeline, self._fork = timeline.id, timeline
            self._timelines, damaged = self.timelines()
            restore(self.disk, self._timelines, damaged)
            self._retire()
            self._prune_timelines()

    def take_published(self, path: str, texts: Mapping[str, bytes]) -> None:
        """Publish here the commit whose manifest is ``path``, as the first rank has published it, durably.

        ``texts`` has the manifest and its small files.
        """
        failpoints.reach("before_node_publish")
        self.take_small_files(texts)
        failpoints.reach("after_node_publish")
        self.follow()
        with self._failing():
            self._retire()
        self.prune_journal()

    def drop(self, ref: CommitRef) -> None:
        """Retire ``ref`` for lack of space, as the first rank has done."""
        if ref in self._retained:
            self._drop([ref])
            self.prune_journal()

    def retire_copies(self, refs: Collection[CommitRef], needed: Collection[Need]) -> None:
        """Remove the commits ``refs`` on request, as ``retire`` does, and the copies for the partner that go with them.

        Commits that this directory does not have are passed over.
        """
        self.retire([ref for ref in refs if self.retains(ref)], needed)
        prune_copies(self.copies, needed, None)

    def prune_journal(self) -> None:
        """Remove the segments, and the copies of segments, of which no retained commit needs a record."""
        super().prune_journal()
        manifests = list(self._retained.values())
        if self.leads and None not in manifests:
            alone = self._for_good() - set(self._newest())
            prune_copies(self.copies, needs(manifests, alone), self.timeline)

    def _drop_files(self, gone: list[Manifest | None]) -> None:
        super()._drop_files(gone)
        if self.leads:
            lost = {object_path(file) for each in gone if each is not None for file in each.files.values()}
            for path in sorted(lost - self._named()):
                self.copies.unlink(path)

    def _named(self) -> set[str]:
        """Return the payload that retained commits name, by content."""
        retained = [manifest for manifest in self._retained.values() if manifest is not None]
        return {object_path(file) for manifest in retained for file in manifest.files.values()}


def even_out(stores: Sequence[NodeStore]) -> None:
    """Write the small files that one of ``stores`` has and another lacks where they are missing, as a resume does.

    A kill may have left a commit on some nodes alone, and to the others its files would seem to be needed by none.
    """
    found = [store.small_files() for store in stores]
    newest: dict[str, tuple[float, NodeStore]] = {}
    for store, files in zip(stores, found, strict=True):
        for path, made in files.items():
            if path not in newest or newest[path][0] < made:
                newest[path] = made, store
    for store, files in zip(stores, found, strict=True):
        missing = {path: at for path, (made, at) in newest.items() if files.get(path, -1.0) < made}
        store.take_small_files({path: at.text_for_others(path) for path, at in missing.items()})
        store.look_again(sweeps=False)


def without_streams(timeline: Timeline) -> Timeline:
    """Return the record for a directory that hosted none of the timeline's streams."""
    return replace(timeline, writer={key: value for key, value in timeline.writer.items() if key != STREAMS})


def is_mine_of(mates: Collection[str], own: str, leads: bool) -> Callable[[str], bool]:
    """Return a function that tells whether the files of a unit are a rank's to remove.

    The first rank of a node also removes those of ranks that the node does not have any more.

    Args:
        mates: The streams of the node's ranks.
        own: The stream of the rank.
        leads: Whether the rank is the first of its node.

    >>> is_mine = is_mine_of(["rank-00002", "rank-00003"], "rank-00002", leads=True)
    >>> is_mine("rank-00002.a"), is_mine("rank-00003.a"), is_mine("rank-00000.a")
    (True, False, True)
    """
    others = tuple(f"{stream}." for stream in mates if stream != own)
    if leads:
        return lambda unit: not unit.startswith(others)
    return lambda unit: unit.startswith(f"{own}.")
