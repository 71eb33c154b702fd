"""The verification of every byte that a commit stands for.

The manifest, its timeline's record, its index and every block of every file are read again. The blocks are read with
direct I/O, so that the disk answers and not the page cache. Nothing is changed. Sizes are bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from holdfast.errors import Damaged, DiskFailed, ManifestCorrupt, NoCommit
from holdfast.io.buffers import Buffer, BufferPool
from holdfast.io.queue import IOQueue, Request
from holdfast.store.commit.generations import corrupt, name_atoms
from holdfast.store.disk import OpenFile
from holdfast.store.format.manifest import FileRef, Manifest, is_reference, timeline_path
from holdfast.store.format.payload_files import check_size, index_of, unverified_layout
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK, block_spans

if TYPE_CHECKING:
    from holdfast.store.reader import RunReader


WINDOW = 8
"""The number of blocks in flight."""
Report = Callable[[int], None]
"""A callback with the bytes that were read so far."""


def verify(
    store: RunReader, manifest: Manifest, queue: IOQueue | None, report: Report | None
) -> list[Damaged]:
    """Return the damage in the order manifest, timeline, index, files by offset."""
    damaged = [*_check_manifest(store, manifest), *_check_timeline(store, manifest)]
    atoms: dict[str, dict[str, str]] = {}
    try:
        for name, atom in index_of(store.disk, manifest)["atoms"].items():
            for fragment in atom["fragments"]:
                atoms.setdefault(fragment["unit"], {})[fragment["key"]] = name
    except Damaged as error:
        damaged.append(error)
    used = queue or IOQueue()
    try:
        damaged += _Scan(store, manifest, used, atoms, report).run()
    finally:
        if used is not queue:
            used.close()
    return damaged


NONE_WHOLE = (
    "Nothing was changed, and running again finds no more: put files of a copy of the run in the place of the damaged"
    " ones, or begin in another directory."
)


def newest_whole(store: RunReader) -> tuple[Manifest, list[Damaged]]:
    """Return the newest commit of the current line whose state verifies, and the damage of newer ones.

    Raises ``NoCommit`` for an empty run, ``Damaged`` if no commit is whole.
    """
    line, damaged = store.line_and_damage()
    line = line or store.commits()  # without readable timeline records, no commit's line is known
    for ref in line:
        try:
            manifest = store.load(ref)
        except Damaged as error:
            damaged.append(error)
            continue
        found = store.verify(manifest)
        damaged += found
        # the manifest repeats the timeline's record
        if all(error.path == timeline_path(ref.timeline) for error in found):
            return manifest, damaged
    if not line:
        raise NoCommit(f"{store.root} has no commit yet")
    if is_reference(damaged[0].path):  # the folder is to be put back, and no commit is without it
        raise damaged[0]
    raise Damaged(
        f"{store.root}: none of its {len(line)} commits is whole; the newest problem: {damaged[0]} {NONE_WHOLE}",
        path=damaged[0].path,
    )


def _check_manifest(store: RunReader, manifest: Manifest) -> list[Damaged]:
    """Return the damage if the manifest's file no longer says what ``manifest`` says."""
    try:
        if store.load(manifest.ref) != manifest:
            return [
                ManifestCorrupt(f"{manifest.path} is another one than was read before", path=manifest.path)
            ]
    except Damaged as error:
        return [error]
    return []


def _check_timeline(store: RunReader, manifest: Manifest) -> list[Damaged]:
    """Return the damage of the timeline's record.

    The record must be readable and agree with ``manifest``, and its parent must belong to this run.
    """
    records, damaged = store.timelines()
    path, said = timeline_path(manifest.timeline), manifest.timeline_record
    found = [error for error in damaged if error.path == path]
    for timeline, key in ((said.id, said.key), (said.parent, said.parent_key)):
        other = None if timeline is None else records.get(timeline)
        if other is not None and other.key != key:
            text = f"{other.path} and {manifest.path} are of two runs: they mean different timelines by {timeline}"
            found.append(ManifestCorrupt(text, path=path))
            return found
    record = records.get(said.id)
    if record is not None and (record.parent, record.fork_step) != (said.parent, said.fork_step):
        found.append(ManifestCorrupt(f"{path} and {manifest.path} differ in the fork", path=path))
    return found


@dataclass(frozen=True)
class _Flight:
    """A block that is being read; its digest is the result of ``future``."""

    unit: str
    ref: FileRef
    block: int
    start: int
    nbytes: int
    buffer: Buffer
    future: Future[str]


class _Scan:
    """One pass over all payload blocks of a commit, a few in flight."""

    def __init__(
        self,
        store: RunReader,
        manifest: Manifest,
        queue: IOQueue,
        atoms: dict[str, dict[str, str]],
        report: Report | None,
    ) -> None:
        self.store, self.manifest, self.queue = store, manifest, queue
        self.atoms, self.report = atoms, report
        self.damaged: list[Damaged] = []
        self.done_bytes = 0
        self.flights: deque[_Flight] = deque()
        self.pool = BufferPool()

    def run(self) -> list[Damaged]:
        files: list[OpenFile] = []
        try:
            for unit, ref in self.manifest.files.items():
                file = self._open(ref)
                if file is not None:
                    files.append(file)
                    self._scan_file(unit, ref, file)
            while self.flights:
                self._land()
        finally:
            for flight in self.flights:
                if not flight.future.cancel():
                    flight.future.exception()
            for file in files:
                file.close()
            self.pool.close()
        return self.damaged

    def _open(self, ref: FileRef) -> OpenFile | None:
        try:
            check_size(self.store.disk, ref)
            if len(ref.checksums) != -(-ref.bytes // CHECKSUM_BLOCK):
                raise ManifestCorrupt(
                    f"{self.manifest.path}: {ref.path} lacks checksums", path=self.manifest.path
                )
            return self.store.disk.open(ref.path, write=False, direct=self.store.direct)
        except Damaged as error:
            self.damaged.append(error)
        except (DiskFailed, FileNotFoundError) as error:
            self.damaged.append(Damaged(f"{ref.path} cannot be opened: {error}", path=ref.path))
        return None

    def _scan_file(self, unit: str, ref: FileRef, file: OpenFile) -> None:
        for block, (start, stop) in enumerate(block_spans(ref.bytes)):
            if len(self.flights) >= WINDOW:
                self._land()
            buffer = self.pool.take(stop - start, "verify")
            view = buffer.view[: stop - start]
            future = self.queue.submit(
                [Request(file, view, start, False)],
                kind="verify",
                phase="verify",
                priority=0,
                finish=partial(xxhash.xxh3_64_hexdigest, view),
            )
            self.flights.append(_Flight(unit, ref, block, start, stop - start, buffer, future))

    def _land(self) -> None:
        flight = self.flights.popleft()
        error = flight.future.exception()
        if error is not None and not isinstance(error, DiskFailed | FileNotFoundError):
            raise error
        if error is not None or flight.future.result() != flight.ref.checksums[flight.block]:
            self.damaged.append(self._judge(flight, error))
        self.pool.give(flight.buffer)
        self.done_bytes += flight.nbytes
        if self.report is not None:
            self.report(self.done_bytes)

    def _judge(self, flight: _Flight, error: DiskFailed | FileNotFoundError | None) -> Damaged:
        """Return the error for the damaged block of ``flight``. An object may go while it is read."""
        path, start, nbytes = flight.ref.path, flight.start, flight.nbytes
        atoms = self._atoms_between(flight.unit, flight.ref, start, start + nbytes)
        way_out = self.store.way_out(path)
        if error is None:
            expected, got = flight.ref.checksums[flight.block], flight.future.result()
            return corrupt(path, start, nbytes, atoms, expected, got, way_out)
        where = f"at {path} offset {start}, {nbytes} bytes"
        text = f"{name_atoms(atoms)} cannot be read {where} ({error}). {way_out}"
        return Damaged(text, path=path, offset=start, nbytes=nbytes, atoms=tuple(atoms))

    def _atoms_between(self, unit: str, ref: FileRef, start: int, stop: int) -> list[str]:
        """Return the tensor entries in a damaged block, by the file's own header.

        If the header is unreadable too, returns all entries of the unit.
        """
        known = self.atoms.get(unit, {})
        try:
            keys = unverified_layout(self.store.disk, ref).keys_between(start, stop)
        except (Damaged, DiskFailed, FileNotFoundError):
            keys = []
        return [known[key] for key in keys if key in known] or list(known.values())
