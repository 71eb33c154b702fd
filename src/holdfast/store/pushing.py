"""Pushing: a run of a directory copied to a bucket, so that at any time all that the bucket lists can be recovered.

The order is that of the disk: records and payload, indexes, and the manifest last, by a conditional put. No object is
written again with other content. Payload files of a directory are, so in the bucket they are named by their checksums,
and the manifest there names them so. Records are cut into objects anew, of whole records each, whatever segment they
come from. Every block is verified on its way; what is there already is not sent again. Sizes are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import xxhash

from ..errors import CommitRetired, Damaged, FileMissing, RunMismatch
from .chain import chain_of
from .generations import corrupt
from .journal import SegmentRef, StoredRecord, read_segment, segments, streams
from .layout import block_spans
from .manifest import CommitRef, FileRef, Manifest, Share, Timeline
from .objects import ObjectDisk
from .reader import RunReader
from .reading import INSPECT, check_size, read_verified
from .records import Records, blocks_of, groups_of, is_long, read_group
from .retention import dropped, lineage
from .room import needs, unneeded_segments
from .target import Url

_OBJECT = re.compile(r"data/.+\.[0-9a-f]{32}\.safetensors")
Told = Callable[[int], None]
"""Told the bytes that are done with, as they are."""


@dataclass
class Pushed:
    """What was copied. ``durable_step`` is the newest that can be recovered from the bucket alone; ``damaged`` is what
    the directory has and could not be copied."""

    commits: list[CommitRef] = field(default_factory=list)
    retired: list[CommitRef] = field(default_factory=list)
    """By the writer of the directory, while they were copied."""
    removed: list[CommitRef] = field(default_factory=list)
    records: int = 0
    bytes: int = 0
    durable_step: int | None = None
    damaged: list[Damaged] = field(default_factory=list)


class Pusher:
    """Copies the run in ``root`` to ``url``, as often as ``push`` is called. Used by one thread."""

    def __init__(self, root: Path, url: Url, *, keep_last: int | None = None) -> None:
        """``keep_last``: how many of the newest commits stay in the bucket, with the records since the oldest of them;
        None: all. Raises ``NoCommit`` if no run is in ``root``, and as ``ObjectDisk``."""
        self._local, self._disk = RunReader(root), ObjectDisk(url)
        self._remote = RunReader(url, disk=self._disk)
        self._keep_last = keep_last
        self._published: dict[CommitRef, Manifest] = {}
        self._timelines: dict[int, Timeline] = {}
        self._records = Records()
        self._begun = False
        self._done = Pushed()
        self._told: Told = lambda nbytes: None
        self.durable_step: int | None = None
        """The newest step that can be recovered from the bucket alone, as far as is known here."""

    def missing(self) -> list[Manifest]:
        """The commits of the directory that are to be copied, newest first; those that cannot be read are left out."""
        self._begin()
        refs = _newest_first(self._local)[: self._keep_last]
        found = []
        for ref in (ref for ref in refs if ref not in self._published):
            with suppress(CommitRetired):
                try:
                    found.append(self._local.load(ref))
                except Damaged as error:
                    self._done.damaged.append(error)
        return found

    def push(self, told: Told | None = None) -> Pushed:
        """Copy what is not there. When it returns, what the directory had when it was called is in the bucket, but for
        what is ``damaged`` or was ``retired``.

        Raises ``RunMismatch``, with nothing written, if the bucket holds another run; ``DiskFailed`` if it does not
        answer. What was copied then needs not be again.
        """
        self._done, self._told = Pushed(), told or self._told
        missing = self.missing()
        self._push_timelines()
        self._push_records()
        for manifest in missing:
            try:
                self._push_commit(manifest)
            except CommitRetired:
                self._done.retired.append(manifest.ref)
            except Damaged as error:
                self._done.damaged.append(error)
        if self._keep_last is not None:
            self._retire(self._keep_last)
        self.durable_step = self._done.durable_step = self._reach()
        return self._done

    def _begin(self) -> None:
        """See what is there. Raises ``RunMismatch`` if it is of another run."""
        here = self._local.timelines()[0]
        self._timelines = there = self._remote.timelines()[0]
        for timeline in sorted(here.keys() & there.keys()):
            if here[timeline].key != there[timeline].key:
                raise RunMismatch(
                    f"{self._disk.root} holds another run than {self._local.root}, or a copy of it that went on by"
                    f" itself: they mean different timelines by {timeline}. Nothing was written: push to another place."
                )
        listed = self._remote.commits()
        self._published = {ref: self._published[ref] for ref in listed if ref in self._published}
        for ref in listed:
            if ref not in self._published:
                with suppress(CommitRetired):
                    try:
                        self._published[ref] = self._remote.load(ref)
                    except Damaged as error:
                        self._done.damaged.append(error)
        if not self._begun:
            for stream in streams(self._disk):
                for ref in segments(self._disk, stream):
                    self._records.add(stream, read_segment(self._disk, ref)[0])
            self._begun = True

    def _push_timelines(self) -> None:
        for timeline, record in sorted(self._local.timelines()[0].items()):
            if timeline not in self._timelines:
                self._disk.put_new(record.path, record.encode())
                self._timelines[timeline] = record

    def _push_commit(self, manifest: Manifest) -> None:
        with self._local.listed(manifest):
            sizes = self._disk.sizes("data")
            for ref in manifest.files.values():
                self._push_file(ref, sizes)
                self._push_records()
            copy = self._push_indexes(manifest)
        for stream in copy.streams:  # a base may need records to be of one step
            journal = self._records.journal(stream, self._timelines, copy.timeline)
            chain_of(copy, stream, journal, copy.step)
        sizes = self._disk.sizes("data")
        for ref in copy.files.values():
            if sizes.get(ref.path) != ref.bytes:
                raise FileMissing(f"{self._disk.root / ref.path} went while it was copied", path=ref.path)
        if not self._disk.put_new(copy.path, copy.encode()):
            copy = self._remote.load(copy.ref)  # of another that pushes, and was faster
            if copy.key != manifest.key:
                raise RunMismatch(f"{self._disk.root / copy.path} is of another run than {self._local.root}")
        self._published[copy.ref] = copy
        self._done.commits.append(copy.ref)

    def _push_file(self, ref: FileRef, sizes: dict[str, int]) -> None:
        path = object_path(ref)
        if sizes.get(path) == ref.bytes:
            return self._told(ref.bytes)
        check_size(self._local.disk, ref)
        self._disk.put(path, self._blocks(ref))
        sizes[path] = ref.bytes
        self._done.bytes += ref.bytes

    def _blocks(self, ref: FileRef) -> Iterator[bytes]:
        """The verified blocks of a payload file. Raises ``Damaged``, and what was sent of it is forgotten."""
        with closing(self._local.disk.open(ref.path, write=False, direct=False)) as file:
            for (start, stop), expected in zip(block_spans(ref.bytes), ref.checksums, strict=True):
                data = bytearray(stop - start)
                file.read(memoryview(data), start)
                got = xxhash.xxh3_64_hexdigest(data)
                if got != expected:
                    raise corrupt(ref.path, start, len(data), (), expected, got, INSPECT)
                yield bytes(data)
                self._told(len(data))

    def _push_indexes(self, manifest: Manifest) -> Manifest:
        """The manifest of the copy, with what it names beside payload in the bucket."""
        for ref in manifest.index_refs:
            self._push_small(ref["path"], read_verified(self._local.disk, ref, "an index"))
        files = {unit: replace(ref, path=object_path(ref)) for unit, ref in manifest.files.items()}
        copy = replace(manifest, files=files)
        if not manifest.shares:
            return copy
        return copy.with_shares(
            {stream: self._push_share(share) for stream, share in manifest.shares.items()}
        )

    def _push_share(self, share: Share) -> Share:
        files = {unit: replace(ref, path=object_path(ref)) for unit, ref in share.files.items()}
        copy = replace(share, files=files)
        text = json.dumps(copy.to_json()).encode()
        digest = xxhash.xxh3_128_hexdigest(text)
        self._push_small(f"index/{digest}.json", text)
        return replace(copy, path=f"index/{digest}.json", bytes=len(text), xxh3_128=digest)

    def _push_small(self, path: str, text: bytes) -> None:
        if self._disk.put_new(path, text):
            self._done.bytes += len(text)

    def _push_records(self) -> None:
        """The records of all streams that are not there."""
        for stream in streams(self._local.disk):
            refs = segments(self._local.disk, stream)
            for ref, following in pairwise([*refs, None]):
                assert ref is not None
                ended = following is not None and following.timeline == ref.timeline
                known = self._records.last(stream, ref.timeline)
                if not (ended and following is not None and following.first_step - 1 <= known):
                    with suppress(FileNotFoundError):  # its writer needs it no more
                        self._push_segment(ref, ended)

    def _push_segment(self, ref: SegmentRef, ended: bool) -> None:
        """What is odd in one that another has followed is damage. At the end it may be on its way, and comes later, or
        was on its way when its writer was stopped."""
        known = self._records.last(ref.stream, ref.timeline)
        found, odd = read_segment(self._local.disk, ref)
        left = [record for record in found if record.step > known]
        while left:
            group = next(groups_of(left))
            pushed, wrong = self._push_group(ref, group)
            left = left[pushed:] if wrong is None else left[pushed + 1 :] if ended else []
            odd = wrong or odd
        if odd is not None and ended:
            self._done.damaged.append(odd)

    def _push_group(self, ref: SegmentRef, group: list[StoredRecord]) -> tuple[int, Damaged | None]:
        """Copy a group as one object: how many of its records are there then, and what is wrong with the next."""
        place = ref._replace(first_step=group[0].step)
        if is_long(group):
            try:
                self._disk.put(place.path, blocks_of(self._local.disk, group[0]))
            except Damaged as error:
                return 0, error
            count, wrong = 1, None
        else:
            data, count, wrong = read_group(self._local.disk, group)
            if count and not self._disk.put_new(place.path, data):  # another pushes as well
                there = {record.step for record in read_segment(self._disk, place)[0]}
                count, wrong = sum(record.step in there for record in group), None
                if not count:
                    raise Damaged(
                        f"{self._disk.root / place.path} does not hold what it is named", path=place.path
                    )
        self._records.add(ref.stream, group[:count])
        self._done.records += count
        self._done.bytes += sum(record.end - record.offset for record in group[:count])
        return count, wrong

    def _tip(self) -> int:
        """The newest timeline whose line has commits in the bucket."""
        known = sorted(self._timelines, reverse=True)
        return next((t for t in known if lineage(self._published, self._timelines, t)), 0)

    def _reach(self) -> int | None:
        """The newest step to which the bucket leads."""
        tip = self._tip()
        for ref in lineage(self._published, self._timelines, tip):
            base = self._published[ref]
            with suppress(Damaged):
                return min(
                    chain_of(
                        base, stream, self._records.journal(stream, self._timelines, tip), None
                    ).last.step
                    for stream in base.streams
                )
        return None

    def _retire(self, keep_last: int) -> None:
        """Remove the manifests of all but the newest commits, then what no other needs. Not what a commit of the
        directory has, which another may be about to push."""
        gone = dropped(self._published, self._timelines, self._tip(), retain=keep_last, room=keep_last)
        for ref in gone:
            self._disk.unlink(ref.path)
        named = {path for ref in gone for path in self._published.pop(ref).small_paths}
        self._done.removed += gone
        kept = list(self._published.values())
        for path in sorted(named - {path for manifest in kept for path in manifest.small_paths}):
            self._disk.unlink(path)
        needed = {file.path for manifest in kept for file in manifest.files.values()}
        here = [self._local._load_or_none(ref) for ref in self._local.commits()]
        needed |= {object_path(file) for each in here if each is not None for file in each.files.values()}
        for path in sorted(self._disk.sizes("data").keys() - needed):
            if _OBJECT.fullmatch(path):
                self._disk.unlink(path)
        if gone:
            for path in list(unneeded_segments(self._disk, needs(kept, ()), None)):
                self._disk.unlink(path)


def object_path(ref: FileRef) -> str:
    """What the payload file is called in a bucket: by its content, since the directory writes the file again."""
    digest = xxhash.xxh3_128_hexdigest(" ".join((str(ref.bytes), *ref.checksums)).encode())
    return f"{ref.path.removesuffix('.safetensors').rpartition('.')[0]}.{digest}.safetensors"


def _newest_first(reader: RunReader) -> list[CommitRef]:
    """The commits of the line, then others."""
    line = reader.line()
    return line + [ref for ref in reader.commits() if ref not in line]
