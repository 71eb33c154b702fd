"""The reader of a run directory, beside its writer or without one.

It takes no lock and writes nothing. A directory may be read while its writer works. Commits come and go, so every call
asks the disk, by names alone where that is enough. The invariant: before the writer reuses a commit's files, it has
unlinked its manifest or replaced it by another one of the same step. So a reader that finds changed bytes checks
whether the commit is still listed; if not, it was retired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple, Self, TypeVar

from holdfast.errors import CommitRetired, Damaged, DiskFailed, FileMissing, ManifestCorrupt, NoCommit
from holdfast.io.queue import IOQueue
from holdfast.store import verifying
from holdfast.store.commit.retention import ancestry, copies_in, copy_path, is_begun, lineage, newest_tip
from holdfast.store.disk import AnyDisk, Disk, reference_at
from holdfast.store.format import payload_files
from holdfast.store.format.manifest import (
    CommitRef,
    FileRef,
    Manifest,
    Timeline,
    is_reference,
    timeline_of_name,
    timeline_path,
)
from holdfast.store.format.payload_files import read_atom
from holdfast.store.format.payload_layout import Layout
from holdfast.store.log.segments import timelines_of_segments
from holdfast.store.object_store import place_of, remote_disk
from holdfast.store.verifying import Report

T = TypeVar("T")
ATTEMPTS = 3
"""The number of attempts to read the newest commit beside a writer that may be faster."""


class RunReader:
    """The commits, timelines and tensor entries of the run ``root``.

    A context manager. ``root`` is a directory, or s3://bucket/prefix.
    """

    def __init__(
        self,
        root: str | PurePath,
        *,
        disk: AnyDisk | None = None,
        queue: IOQueue | None = None,
        direct: bool = True,
    ) -> None:
        """Prepare reading. Without ``queue``, each verification makes its own for the time being."""
        self.root = place_of(root)
        self.disk: AnyDisk = disk or remote_disk(self.root) or Disk(str(self.root))
        self.direct = direct
        self._queue = queue
        self._unchanging: _ReadOnce | None = None

    def close(self) -> None:
        """Do nothing, since nothing stays open; for symmetry with ``LocalStore``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commits(self) -> list[CommitRef]:
        """Return every commit of the directory, newest first, by the names alone."""
        if self._unchanging is not None:
            return list(self._unchanging.commits)
        refs = (CommitRef.of_name(name) for name in self.disk.listdir("commits"))
        return sorted((ref for ref in refs if ref is not None), reverse=True)

    def load(self, ref: CommitRef) -> Manifest:
        """Return the manifest of ``ref`` with its shares.

        Raises:
            ManifestCorrupt: The manifest or a share is damaged.
            FileMissing: A share is absent.
            CommitRetired: The commit is gone.
        """
        try:
            manifest = Manifest.decode(self.disk.read_bytes(ref.path), ref.path)
        except FileNotFoundError:
            raise self.retired(ref) from None
        with self.listed(manifest):
            return payload_files.read_shares(self.disk, manifest)

    def line(self, tip: int | None = None) -> list[CommitRef]:
        """Return the commits that led to the newest step of the timeline ``tip``, newest first.

        None means the newest timeline that is begun and has commits.
        """
        return self.line_and_damage()[0] if tip is None else lineage(self.commits(), self.timelines()[0], tip)

    def line_and_damage(self) -> tuple[list[CommitRef], list[Damaged]]:
        """Return the ``line`` and the damage of timeline records with higher numbers, which lead to no commit."""
        records, damaged = self.timelines()
        commits = self.commits()
        odd = {error.path: error for error in damaged}
        line: list[CommitRef] = []
        found: list[Damaged] = []
        for timeline in sorted({*records, *self.timeline_ids()}, reverse=True):
            path = timeline_path(timeline)
            if timeline in records and not is_begun(commits, records[timeline]):
                continue
            line = lineage(commits, records, timeline) if timeline in records else []
            if line:
                break
            found.append(odd.get(path) or _leads_nowhere(path))
        return line, found

    def tip(self) -> int:
        """Return the newest timeline that is begun and whose line has commits; 0 if there is none."""
        records, _ = self.timelines()
        return newest_tip(self.commits(), records)

    def head(self) -> Manifest | None:
        """Return the newest commit of the newest timeline's line; None if the run has none."""

        def newest() -> Manifest | None:
            # without readable timeline records, no commit's line is known
            line = self.line() or self.commits()
            return self.load(line[0]) if line else None

        return again_if_retired(newest)

    def at(self, step: int, timeline: int | None = None) -> Manifest:
        """Return the commit of ``step``: of ``timeline``, or of the current line. Raises ``NoCommit``."""
        line = self.line() or self.commits()  # without readable timeline records, no commit's line is known
        candidates = line if timeline is None else self.commits()
        for ref in candidates:
            if ref.step == step and timeline in (None, ref.timeline):
                return self.load(ref)
        steps = ", ".join(str(step) for step in sorted({ref.step for ref in candidates})) or "none"
        of = "" if timeline is None else f" of timeline {timeline}"
        lead = (
            " Steps that records lead to are in no commit: resume, show, diff and convert take them."
            * bool(self.disk.listdir("journal"))
        )
        raise NoCommit(
            f"{self.root} has no step {step}{of}. It has: {steps}.{lead}{self.describe_others(step)}"
        )

    def describe_others(self, step: int) -> str:
        """Return where else something of ``step`` may be, as text for an error: its weights, abandoned timelines."""
        return self._describe_weights(step) + self._describe_timelines(step)

    def _describe_weights(self, step: int) -> str:
        found = [copy_path(ref) for ref in copies_in(self.disk) if ref.step == step]
        if not found:
            return ""
        return (
            f" Its weights alone are in {self.root / found[-1]}, without the optimizer's state, so it is no step to"
            " resume: convert, show and a fresh directory's source= take that file."
        )

    def _describe_timelines(self, step: int) -> str:
        """Return how to name ``step`` of an abandoned timeline; empty if every timeline has it in the present line."""
        timelines = self.timelines()[0]
        present = {id for id, limit in ancestry(timelines, self.tip()) if limit is None or step <= limit}
        held = timelines.keys() - present
        if not held:
            return ""
        return (
            f" Steps that a later resume abandoned have a timeline in their name: {self.root}@{step}.tTIMELINE, of"
            f" {', '.join(map(str, sorted(held)))}, is a source for a fresh directory if that timeline has the step."
        )

    def timelines(self) -> tuple[dict[int, Timeline], list[Damaged]]:
        """Return the records of all timelines, and the damage of those that cannot be read.

        An unreadable record is replaced by what the manifests or the logs of its timeline say, and by what the
        readable records say of the run. A record that nothing replaces never had a step and is left out.
        """
        return self._read_timelines() if self._unchanging is None else self._unchanging.timelines

    @contextmanager
    def unchanging(self) -> Iterator[None]:
        """List commits and read timelines only once inside the block, in which nobody writes to the run."""
        self._unchanging = _ReadOnce(self.commits(), self._read_timelines())
        try:
            yield
        finally:
            self._unchanging = None

    def _read_timelines(self) -> tuple[dict[int, Timeline], list[Damaged]]:
        records: dict[int, Timeline] = {}
        damaged: dict[str, Damaged] = {}
        for timeline in self.timeline_ids():
            record = Timeline(timeline)
            try:
                record = Timeline.decode(self.disk.read_bytes(record.path), record.path)
            except ManifestCorrupt as error:
                damaged[record.path] = error
            except FileNotFoundError:  # its writer has removed it
                continue
            else:
                records[timeline] = record
        read, unreadable = frozenset(records), frozenset(damaged)
        for ref in self.commits():
            if ref.timeline not in records and (manifest := self._load_or_none(ref)) is not None:
                records[ref.timeline] = record = manifest.timeline_record
                damaged.setdefault(record.path, _missing(record))
        for record in timelines_of_segments(self.disk, records):
            parent = records.get(record.parent) if record.parent is not None else None
            if record.parent is None or (parent is not None and parent.key == record.parent_key):
                records.setdefault(record.id, record)
                damaged.setdefault(record.path, _missing(record))
        return with_run(records, read, unreadable), list(damaged.values())

    def verify(self, manifest: Manifest, *, report: Report | None = None) -> list[Damaged]:
        """Read every byte that ``manifest`` stands for, itself included, and return the damage.

        Raises ``CommitRetired`` if the commit is gone by then.
        """
        damaged = verifying.verify(self, manifest, self._queue, report)
        if damaged and not self.is_listed(manifest):
            raise self.retired(manifest.ref) from damaged[0]
        return damaged

    def newest_whole(self) -> tuple[Manifest, list[Damaged]]:
        """Return the newest commit of the current line that verifies, and the damage of newer ones."""
        return again_if_retired(lambda: verifying.newest_whole(self))

    def atoms(self, manifest: Manifest) -> dict[str, dict[str, Any]]:
        """Return the tensor entries of ``manifest`` by key, as its index describes them, with their fragments."""
        with self.listed(manifest):
            return payload_files.index_of(self.disk, manifest)["atoms"]

    def read_atom(self, manifest: Manifest, atom: dict[str, Any]) -> bytearray:
        """Return the verified bytes of one of the ``atoms``, in C order. Raises ``Damaged``."""
        with self.listed(manifest):
            return read_atom(self.disk, manifest, atom)

    def layout(self, ref: FileRef) -> Layout:
        """Return the positions of the tensors in a file, by its own header."""
        return payload_files.unverified_layout(self.disk, ref)

    def way_out(self, path: str) -> str:
        """Return advice about damage in ``path``: the newest step that does not need the file.

        For a reference file: which folder has its bytes.
        """
        if is_reference(path):
            return reference_at(self.disk, path).way_out()
        for ref in self.line():
            manifest = self._load_or_none(ref)
            if manifest is not None and all(file.path != path for file in manifest.files.values()):
                return (
                    f"Step {ref.step} does not use this file: check it with `holdfast verify {self.root}@{ref.step}`. "
                    "Running again resumes from the newest whole step, if there is one."
                )
        return (
            "No step to go on from is without this file: put a copy of it in its place, or begin another run."
        )

    def is_listed(self, manifest: Manifest) -> bool:
        """Return whether the commit is still listed and was not published again.

        Its files are its own as long as it is listed.
        """
        try:
            there = Manifest.decode(self.disk.read_bytes(manifest.path), manifest.path)
        except FileNotFoundError:
            return False
        except ManifestCorrupt:  # no writer damages a manifest
            return True
        return (there.key, there.created) == (manifest.key, manifest.created)

    @contextmanager
    def listed(self, manifest: Manifest) -> Iterator[None]:
        """Raise ``CommitRetired`` for an error in the block if the commit is not listed any more."""
        try:
            yield
        except (Damaged, DiskFailed, FileNotFoundError) as error:
            if self.is_listed(manifest):
                raise
            raise self.retired(manifest.ref) from error

    def retired(self, ref: CommitRef) -> CommitRetired:
        if self.disk.exists(ref.path):
            return CommitRetired(
                f"step {ref.step} of {self.root} was published again by its writer while it was read. Read it again."
            )
        return CommitRetired(
            f"step {ref.step} of {self.root} was retired by its writer while it was read. Take one that is there"
            f" (`holdfast ls {self.root}`), or let the writer keep more: durability.retain."
        )

    def timeline_ids(self) -> list[int]:
        """Return the numbers of all timelines that have a record, by the names alone."""
        ids = (timeline_of_name(name) for name in self.disk.listdir("timelines"))
        return [timeline for timeline in ids if timeline is not None]

    def run_key(self) -> str:
        """Return the key of the run, which its copies share; "" before the run is begun."""
        return run_key_of(self.timelines()[0])

    def _load_or_none(self, ref: CommitRef) -> Manifest | None:
        try:
            return self.load(ref)
        except (Damaged, NoCommit):
            return None


class _ReadOnce(NamedTuple):
    """The commits and the timelines of a run that nobody writes to."""

    commits: list[CommitRef]
    timelines: tuple[dict[int, Timeline], list[Damaged]]


def run_key_of(records: Mapping[int, Timeline]) -> str:
    """Return the key of the run that has these timelines, which is that of its first timeline."""
    newest_first = sorted(records.values(), key=lambda record: -record.id)
    said = [record.run for record in newest_first]
    without_parent = [record.key for record in newest_first if record.parent is None]
    return next(filter(None, said + without_parent), "")


def with_run(
    records: Mapping[int, Timeline], read: Collection[int], unreadable: Collection[str]
) -> dict[int, Timeline]:
    """Return the records, with ``run`` and ``begun`` filled in where manifests or segments had to stand in for one.

    A stand-in gets the run of a record that continues it or that it continues, by their keys. Without such a link it
    gets the run of the records that were read, but only if its own file is there: a manifest without any record may
    have come from another run.

    Args:
        records: By number, the records that were read and the stand-ins.
        read: Numbers of the records that were read.
        unreadable: Paths of the record files that are there and cannot be read.
    """
    own = {timeline: records[timeline] for timeline in read}
    run, begun = run_key_of(own), min((record.begun for record in own.values() if record.begun), default=0.0)
    linked = {(record.id, record.key): record.run for record in own.values() if record.run}
    oldest_first = [records[timeline] for timeline in sorted(records)]
    for record in reversed(oldest_first):
        if record.parent is not None and (said := linked.get((record.id, record.key))):
            linked.setdefault((record.parent, record.parent_key or ""), said)
    for record in oldest_first:
        if record.parent is not None and (said := linked.get((record.parent, record.parent_key or ""))):
            linked.setdefault((record.id, record.key), said)

    def filled(record: Timeline) -> Timeline:
        said = linked.get((record.id, record.key), run if record.path in unreadable else "")
        return replace(record, run=said, begun=begun if said == run else 0.0) if said else record

    return {timeline: record if timeline in read else filled(record) for timeline, record in records.items()}


def _missing(record: Timeline) -> FileMissing:
    return FileMissing(
        f"{record.path} is missing; the manifests or records of its timeline say the same, the next writer restores it",
        path=record.path,
    )


def _leads_nowhere(path: str) -> ManifestCorrupt:
    return ManifestCorrupt(
        f"{path} continues no commit that is there: it was copied from another run, or the commits that it continues"
        f" were removed. It is passed over.",
        path=path,
    )


def again_if_retired(read: Callable[[], T]) -> T:
    """Return the result of ``read``, which takes the newest commit, and repeat it if that is retired."""
    for _ in range(ATTEMPTS - 1):
        with suppress(CommitRetired):
            return read()
    return read()
