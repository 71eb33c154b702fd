"""The copying of a run to an object store, so that everything listed there can be recovered at any time.

The order is that of the disk: log records and payload, then indexes, and the manifest last, by a conditional put. No
object is written again with other content, except the manifest of a step that the run's writer published again. Payload
files of a directory are, so in the bucket they are named by their checksums, and the manifest there uses these names.
Log records are grouped into objects anew, whatever segments they come from. Every block is verified on its way; objects
that are there are not sent again. Of several processes that push to one place, one at a time publishes or removes
(``bucket_lock``). Sizes are bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import xxhash

from ..errors import CommitRetired, Damaged, DiskFailed, FileMissing, RunMismatch
from .bucket_lock import BucketLock
from .commit.generations import corrupt
from .commit.retention import (
    Keep,
    ancestry,
    certified_in,
    dropped,
    kept_on_lines,
    lineage,
    needs,
    newest_tip,
    unneeded_segments,
    unneeded_timelines,
)
from .copying import PushResult, RecordsCopy
from .format.manifest import CommitRef, FileRef, Manifest, RankShare, Timeline, object_path
from .format.payload_files import INSPECT, check_size, read_verified
from .format.payload_layout import block_spans
from .log.chain import chain_of
from .log.segments import segments, streams
from .object_store import ObjectDisk, Url
from .reader import RunReader, run_key_of

WAIT_SECONDS = 30.0
"""The longest time that a commit waits for another process that publishes or removes."""
_OBJECT = re.compile(r"data/.+\.[0-9a-f]{32}\.safetensors")
Report = Callable[[int, int], None]
"""A callback with the total bytes of payload and the bytes that were just finished."""


class Pusher:
    """Copies the run in ``root`` to ``url`` at each ``push``. Used by one thread."""

    def __init__(
        self, root: Path, url: Url, *, keep: Keep | None = None, streams: Collection[str] | None = None
    ) -> None:
        """Prepare the copy. Raises as ``ObjectDisk`` does.

        Args:
            keep: Which commits, with which log records, stay in the bucket; None keeps all.
            streams: The ranks whose shares the directory holds, where nodes have a directory each. A commit is then
                copied when all nodes have copied theirs.
        """
        self._local, self._disk = RunReader(root), ObjectDisk(url)
        self._remote = RunReader(url, disk=self._disk)
        self._keep, self._streams, self._lock = keep, streams, BucketLock(self._disk)
        self._published: dict[CommitRef, Manifest] = {}
        self._timelines: dict[int, Timeline] = {}
        """The timelines of the bucket, also those of which only manifests or log records tell."""
        self._missing_timeline_records: set[str] = set()
        """The records of ``_timelines`` that the bucket lacks."""
        self._records = RecordsCopy(self._local.disk, self._disk)
        self._begun = self._tidy = False
        self._unreadable = False
        """True if a manifest in the bucket is unreadable. Nothing is removed then, since it may need anything."""
        self._incomplete: dict[CommitRef, Manifest] = {}
        """Listed commits of the bucket that lack payload, since somebody removed it. They count for nothing."""
        self._done = PushResult()
        self._seen: set[CommitRef] = set()
        """Commits that the directory had at some time, present or not."""
        self._loaded: dict[CommitRef, tuple[tuple[int, int, int], Manifest]] = {}
        """Manifests of the directory, with the inode, time and size of the file that each was read from."""
        self._damaged: set[CommitRef] = set()
        """Damaged commits of the directory, which are not tried again."""
        self._report: Callable[[int], None] = lambda nbytes: None
        self._counted: set[str] = set()
        """Payload files that this push has reported, since several commits may name one."""
        self.durable_step: int | None = None
        """The newest step that can be recovered from the bucket alone, as far as this process knows."""

    def check(self) -> None:
        """Read the timelines of both sides. Raises ``RunMismatch`` if the bucket holds another run."""
        here = self._local.timelines()[0]
        self._timelines, damaged = self._remote.timelines()
        there = self._timelines
        self._missing_timeline_records = {error.path for error in damaged if isinstance(error, FileMissing)}
        if there and not here:
            raise RunMismatch(
                f"{self._disk.root} holds a run, and {self._local.root} has none yet that it could be the copy of. To"
                f' go on from it: resume(source="{self._disk.root}"), with another place for the copy of that.'
            )
        for timeline in sorted(here.keys() & there.keys()):
            self._refuse_another(here[timeline], there[timeline])
        keys = {run_key_of(here), run_key_of(there)} - {""}
        if len(keys) > 1:  # needed where the two sides share no timeline number any more
            raise RunMismatch(
                f"{self._disk.root} holds another run than {self._local.root}. Push to another place."
            )

    def push(self, report: Report | None = None) -> PushResult:
        """Copy what the bucket lacks.

        On return, the bucket holds what the directory held at the call, except commits that are ``damaged`` or were
        ``retired``. An interrupted copy need not be repeated.

        Raises:
            RunMismatch: The bucket holds another run; nothing has been written.
            DiskFailed: The bucket does not answer.
        """
        self._done = PushResult()
        self._begin()
        self._count_completed()
        missing = self._missing()
        self.durable_step = self._reach()
        total = sum({f.path: f.bytes for manifest in missing for f in manifest.files.values()}.values())
        self._counted = set()
        self._report = (lambda nbytes: None) if report is None else partial(report, total)
        self._push_timelines()
        self._push_records()
        if self._streams is not None:  # what other nodes have copied
            self._records.look()
            self._learn()
            self.durable_step = self._reach()
            self._done.commits += [each.ref for each in missing if not self._lacks(each)]
            missing = [manifest for manifest in missing if self._lacks(manifest)]
        for manifest in missing:
            try:
                self._push_commit(manifest)
            except CommitRetired:
                self._done.retired.append(manifest.ref)
            except Damaged as error:  # or its files went when it was retired
                if self._local.is_listed(manifest):
                    self._give_up(manifest.ref, error)
                else:
                    self._done.retired.append(manifest.ref)
        if (
            self._keep is not None
            and not self._unreadable
            and (self._done.commits or not (self._tidy or self._lock.is_removal_refused))
        ):
            self._tidy = False
            # another process may have it: the next push tries again
            with self._lock.acquired(0.0) as is_acquired:
                if is_acquired:
                    self._remove_unkept()
            self._tidy = is_acquired
        self._report_incomplete()
        self._done.durable_step = self.durable_step
        line = lineage(self._published, self._timelines, newest_tip(self._published, self._timelines))
        self._records.forget(min((self._published[ref].oldest_step for ref in line[:2]), default=-1))
        return self._done

    def _missing(self) -> list[Manifest]:
        """Return the commits of the directory that are to be copied, newest first."""
        found = {}
        for ref in _newest_first(self._local):
            if ref in self._damaged:
                continue
            with suppress(CommitRetired):
                try:
                    found[ref] = self._load(ref)
                except Damaged as error:
                    if ref not in self._published:
                        self._give_up(ref, error)
        self._loaded = {ref: loaded for ref, loaded in self._loaded.items() if ref in found}
        unwanted = self._unwanted({**found, **self._published}, self._local.timelines()[0])[0]
        return [each for ref, each in found.items() if self._lacks(each) and ref not in unwanted]

    def _load(self, ref: CommitRef) -> Manifest:
        """Return the directory's manifest of ``ref``, read again only where the file is another one.

        Raises as ``RunReader.load`` does.
        """
        try:
            status = os.stat(self._local.disk.root / ref.path)
        except FileNotFoundError:
            raise self._local.retired(ref) from None
        file = status.st_ino, status.st_mtime_ns, status.st_size
        if ref not in self._loaded or self._loaded[ref][0] != file:
            self._loaded[ref] = file, self._local.load(ref)
        return self._loaded[ref][1]

    def _replaced(self) -> set[CommitRef]:
        """Return the commits of the bucket that the writer has published again, with another state perhaps."""
        found = set()
        for ref in self._published.keys() & set(self._local.commits()):
            with suppress(CommitRetired, Damaged):
                if self._lacks(self._load(ref)):
                    found.add(ref)
        return found

    def _lacks(self, manifest: Manifest) -> bool:
        """Return whether the bucket has no commit of this step, or one that the writer has replaced since."""
        there = self._published.get(manifest.ref)
        return there is None or there.created < manifest.created

    def _begin(self) -> None:
        """Read the state of the bucket, once.

        It is known from then on, except for what others copy, which a put reveals.
        """
        if self._begun:
            return
        self.check()
        self._learn()
        self._set_aside_incomplete(self._disk.sizes("data"))
        self._records.look()
        self._begun = True

    def _give_up(self, ref: CommitRef, error: Damaged) -> None:
        self._damaged.add(ref)
        self._done.damaged.append(error)

    def _push_timelines(self) -> None:
        for timeline, record in sorted(self._local.timelines()[0].items()):
            if timeline in self._timelines and record.path not in self._missing_timeline_records:
                continue
            if not self._disk.put_new(record.path, record.encode()):
                there = Timeline.decode(self._disk.read_bytes(record.path), record.path)
                self._refuse_another(record, there)
            self._timelines[timeline] = record
            self._missing_timeline_records.discard(record.path)
            self.durable_step = self._reach()

    def _refuse_another(self, here: Timeline, there: Timeline) -> None:
        if here.key != there.key:
            raise RunMismatch(
                f"{self._disk.root} holds another run than {self._local.root}, or a copy of it that went on by itself:"
                f" they mean different timelines by {here.id}. Push to another place."
            )

    def _push_commit(self, manifest: Manifest) -> None:
        with self._local.listed(manifest):
            sizes = self._disk.sizes("data")
            for ref in self._own_files(manifest):
                self._push_file(ref, sizes)
                self._push_records()
            copy = self._push_indexes(manifest)
        if self._streams is not None and not self._is_there(copy):
            return
        for stream in copy.streams:  # a snapshot may need log records to reach one step
            journal = self._records.journal(stream, self._timelines, copy.timeline)
            chain_of(copy, stream, journal, copy.step)
        key = manifest.key
        with self._lock.acquired(
            WAIT_SECONDS, lambda: self._by_another(copy, key) is not None
        ) as is_acquired:
            there = self._publish(copy, key) if is_acquired else self._by_another(copy, key)
        if there is None:
            raise DiskFailed(
                f"others publish or remove in {self._disk.root} for longer than {WAIT_SECONDS:.0f} s, now"
                f" {self._lock.holder}. Nothing was published: push again. If that process has ended, the object may be"
                " removed."
            )
        self._published[copy.ref] = there
        self._incomplete.pop(copy.ref, None)
        self._done.commits.append(copy.ref)
        self.durable_step = self._reach()

    def _publish(self, copy: Manifest, key: str) -> Manifest:
        """Put the manifest ``copy``, unless another process has, and return the one that the bucket has.

        ``key`` is that of the timeline. Called under the lock. Raises ``DiskFailed`` if a file is absent.
        """
        there = {**self._disk.sizes("data"), **self._disk.sizes("index")}
        needed = {file.path: file.bytes for file in copy.files.values()}
        small = {ref["path"]: ref["bytes"] for ref in copy.index_refs}
        small |= {share.path: share.bytes for share in copy.shares.values()}
        wrong = [path for path, nbytes in {**needed, **small}.items() if there.get(path) != nbytes]
        for path in small.keys() & there.keys() & {*wrong}:
            self._remove(path)  # the next push puts it again, which it does where there is none
        if wrong:
            raise DiskFailed(
                f"{self._disk.root / wrong[0]} is not whole, or was removed by another that pushes, before the commit"
                " that needs it was there. That was not published: push again."
            )
        self._lock.check()
        if not self._disk.put_new(copy.path, copy.encode()):
            other = self._remote.load(copy.ref)  # an earlier one of the step, or another process was faster
            if other.key != key:
                raise RunMismatch(f"{self._disk.root / copy.path} is of another run than {self._local.root}")
            if other.created >= copy.created:
                return other
            self._disk.put(copy.path, copy.encode())
        return copy

    def _by_another(self, copy: Manifest, key: str) -> Manifest | None:
        """Return the manifest of this commit, or of a later one of its step, that another process has published.

        Returns None also where the commit has lacked payload: it is published anew, after a check of all files.
        """
        if copy.ref in self._incomplete:
            return None
        try:
            self._disk.size(copy.path)
            there = self._remote.load(copy.ref)
        except (FileNotFoundError, CommitRetired):
            return None
        return there if there.key == key and there.created >= copy.created else None

    def _own_files(self, manifest: Manifest) -> list[FileRef]:
        """Return the payload files that the directory has."""
        if self._streams is None:
            return [*manifest.files.values()]
        streams = [stream for stream in manifest.streams if stream in self._streams]
        return [ref for stream in streams for ref in manifest.files_of(stream).values()]

    def _is_there(self, copy: Manifest) -> bool:
        """Return whether all nodes have copied their shares of ``copy``, with the log records that it needs."""
        self._records.look()
        sizes = self._disk.sizes("data")
        with suppress(Damaged):
            for stream in copy.streams:
                chain_of(
                    copy, stream, self._records.journal(stream, self._timelines, copy.timeline), copy.step
                )
            return _is_whole(copy, sizes)
        return False

    def _push_records(self) -> None:
        before = self._done.records
        self._records.push(self._done, self._timelines)
        if self._done.records > before:
            self.durable_step = self._reach()

    def _push_file(self, ref: FileRef, sizes: dict[str, int]) -> None:
        path = object_path(ref)
        counted = ref.path in self._counted
        self._counted.add(ref.path)
        if sizes.get(path) == ref.bytes:
            return None if counted else self._report(ref.bytes)
        check_size(self._local.disk, ref)
        self._disk.put(path, self._blocks(ref))
        sizes[path] = ref.bytes
        self._done.bytes += ref.bytes

    def _blocks(self, ref: FileRef) -> Iterator[bytes]:
        """Yield the verified blocks of a payload file.

        Raises ``Damaged``; then the part that was sent is discarded.
        """
        with closing(self._local.disk.open(ref.path, write=False, direct=False)) as file:
            for (start, stop), expected in zip(block_spans(ref.bytes), ref.checksums, strict=True):
                data = bytearray(stop - start)
                file.read(memoryview(data), start)
                got = xxhash.xxh3_64_hexdigest(data)
                if got != expected:
                    raise corrupt(ref.path, start, len(data), (), expected, got, INSPECT)
                yield bytes(data)
                self._report(len(data))

    def _push_indexes(self, manifest: Manifest) -> Manifest:
        """Copy the indexes, and return the manifest with the names of the bucket."""
        for ref in manifest.index_refs:
            self._push_small(ref["path"], read_verified(self._local.disk, ref, "an index"))
        files = {unit: replace(ref, path=object_path(ref)) for unit, ref in manifest.files.items()}
        copy = replace(manifest, files=files)
        if not manifest.shares:
            return copy
        return copy.with_shares(
            {stream: self._push_share(share) for stream, share in manifest.shares.items()}
        )

    def _push_share(self, share: RankShare) -> RankShare:
        files = {unit: replace(ref, path=object_path(ref)) for unit, ref in share.files.items()}
        copy = replace(share, files=files)
        text = json.dumps(copy.to_json()).encode()
        digest = xxhash.xxh3_128_hexdigest(text)
        self._push_small(f"index/{digest}.json", text)
        return replace(copy, path=f"index/{digest}.json", bytes=len(text), xxh3_128=digest)

    def _push_small(self, path: str, text: bytes) -> None:
        if self._disk.put_new(path, text):
            self._done.bytes += len(text)

    def _reach(self) -> int | None:
        """Return the newest step that can be recovered from the bucket."""
        tip = newest_tip(self._published, self._timelines)
        line = lineage(self._published, self._timelines, tip)
        replaced = self._replaced() & set(
            line
        )  # records after these follow another state than the bucket has
        for ref in line:
            base = self._published[ref]
            ends = [each.step for each in replaced if each.step >= ref.step]
            ends += [step for step in [self._before_other_ranks(ref, tip)] if step is not None]
            until = min(ends, default=None)
            with suppress(Damaged):
                return min(
                    chain_of(
                        base, stream, self._records.journal(stream, self._timelines, tip), until
                    ).last.step
                    for stream in base.streams
                )
        return None

    def _before_other_ranks(self, base: CommitRef, tip: int) -> int | None:
        """Return the last step that log records can reach from ``base``, or None if unlimited.

        A resume by other ranks begins with a snapshot of its own. While the bucket lacks that one, the records after
        it follow nothing. A snapshot that left the directory was either seen there, or the records name its step.
        """
        self._seen |= set(self._local.commits())
        later = [self._timelines[each] for each, _ in ancestry(self._timelines, tip) if each > base.timeline]
        forks = [CommitRef(each.id, each.fork_step) for each in later if each.fork_step is not None]
        lacking = [
            ref.step
            for ref in forks
            if ref not in self._published
            and (ref in self._seen or base.step < ref.step == self._records.base_of(ref.timeline))
        ]
        return min(lacking, default=None)

    def _learn(self) -> None:
        """Load the commits of the bucket that are not known yet."""
        for ref in set(self._remote.commits()) - self._incomplete.keys():
            with suppress(CommitRetired):
                try:
                    self._published[ref] = self._published.get(ref) or self._remote.load(ref)
                except Damaged as error:
                    self._unreadable = True
                    self._done.damaged.append(error)

    def _unwanted(
        self, commits: dict[CommitRef, Manifest], timelines: dict[int, Timeline]
    ) -> tuple[list[CommitRef], set[CommitRef]]:
        """Return the ``commits`` that are not kept, and those kept without their later log records."""
        if self._keep is None:
            return [], set()
        tip, last = newest_tip(commits, timelines), self._keep.last
        line = lineage(commits, timelines, tip)
        for_good = kept_on_lines(commits, timelines, tip, self._keep)
        for_good |= certified_in([commits[ref] for ref in line])
        gone = dropped(commits, timelines, tip, retain=last, room=last, for_good=for_good)
        return gone, for_good - set(line[:last])

    def _remove_unkept(self) -> None:
        """Remove the manifests of commits that are not kept, then the files that no other commit needs.

        Files of the directory's commits stay, because another process may be about to push those commits. Called under
        the lock.
        """
        self._incomplete.clear()
        self._learn()  # others may have copied commits that the directory no longer has
        if self._unreadable:
            return
        sizes = self._disk.sizes("data")
        self._set_aside_incomplete(sizes)
        gone, alone = self._unwanted(self._published, self._timelines)
        all_listed = {**self._published, **self._incomplete}
        gone += [ref for ref in self._unwanted(all_listed, self._timelines)[0] if ref in self._incomplete]
        for ref in gone:
            self._remove(ref.path)
            self._published.pop(ref, None)
            self._incomplete.pop(ref, None)
        named = {path for ref in gone for path in all_listed[ref].small_paths}
        self._done.removed += gone
        kept = [*self._published.values(), *self._incomplete.values()]
        for path in sorted(named - {path for manifest in kept for path in manifest.small_paths}):
            self._remove(path)
        needed = {file.path for manifest in kept for file in manifest.files.values()}
        here = [self._local._load_or_none(ref) for ref in self._local.commits()]
        needed |= {object_path(file) for each in here if each is not None for file in each.files.values()}
        for path in sorted(sizes.keys() - needed):
            if _OBJECT.fullmatch(path):
                self._remove(path)
        if gone:
            for path in list(unneeded_segments(self._disk, needs(kept, alone), None)):
                self._remove(path)
            self._retire_timelines()

    def _remove(self, path: str) -> None:
        self._lock.check()
        self._disk.unlink(path)

    def _set_aside_incomplete(self, sizes: dict[str, int]) -> None:
        """Let listed commits count for nothing whose payload is not among ``sizes``, so that they are copied again."""
        for ref, manifest in list(self._published.items()):
            if not _is_whole(manifest, sizes) and self._remote.is_listed(manifest):
                self._incomplete[ref] = self._published.pop(ref)
                self.durable_step = self._reach()

    def _count_completed(self) -> None:
        """Let commits count again whose payload another process has copied since."""
        if not self._incomplete:
            return
        sizes = self._disk.sizes("data")
        for ref, manifest in list(self._incomplete.items()):
            if _is_whole(manifest, sizes) and self._remote.is_listed(manifest):
                self._published[ref] = self._incomplete.pop(ref)

    def _report_incomplete(self) -> None:
        """Report, once, the commits that lack payload and that the directory does not have, so that they stay so."""
        for ref in sorted(self._incomplete.keys() - self._damaged - {*self._local.commits()}):
            self._give_up(
                ref,
                FileMissing(
                    f"{self._disk.root / ref.path}: payload of step {ref.step} is not there any more, or not whole, and"
                    " the directory does not have that step. It cannot be recovered from there.",
                    path=ref.path,
                ),
            )

    def _retire_timelines(self) -> None:
        """Remove timeline records that the directory lacks and that lead to nothing in the bucket."""
        used = {ref.timeline for ref in self._published} | self._local.timelines()[0].keys()
        used |= {ref.timeline for stream in streams(self._disk) for ref in segments(self._disk, stream)}
        for timeline in unneeded_timelines(self._timelines, used, max(self._timelines, default=0)):
            self._remove(self._timelines.pop(timeline).path)


def _is_whole(manifest: Manifest, sizes: dict[str, int]) -> bool:
    """Return whether all payload of the commit is among the objects with these ``sizes``."""
    return all(sizes.get(file.path) == file.bytes for file in manifest.files.values())


def _newest_first(reader: RunReader) -> list[CommitRef]:
    """Return the commits of the current line, then the others."""
    line = reader.line()
    return line + [ref for ref in reader.commits() if ref not in line]
