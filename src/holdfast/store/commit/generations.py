"""The generations of a unit: several files that its state alternates between, so that the newest steps stay whole.

Each step writes a unit to a file that no retained manifest names; then the new manifest names that file. A whole file
is written, header and filler included: nothing in a published file is older than its commit, and each request is one
checksum block. Sizes and offsets are bytes.
"""

from __future__ import annotations

import re
import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise

import xxhash

from holdfast import failpoints
from holdfast.errors import ChunkCorrupt, DiskFailed, ManifestCorrupt, PoolExhausted, RunMismatch
from holdfast.io.buffers import Buffer
from holdfast.io.queue import IOQueue, Request
from holdfast.quantities import shown
from holdfast.store.disk import AnyDisk, OpenFile, write_durably
from holdfast.store.drive_links import folders, unneeded
from holdfast.store.format.manifest import HOME, REFERENCE, SAFETENSORS, is_reference
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK, Layout, block_spans
from holdfast.store.format.reference_files import Reference

PIECES = 4
"""Number of checksum blocks in memory at once while ``write_through`` writes a file."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class Generations:
    """The files of the unit ``name``: ``<folder>/<name>.<k>.safetensors``, with k from 0 to copies-1.

    Made by ``LocalStore``. ``folder`` is ``data`` or that of a drive. Files in other folders, from a time when the
    unit lived there, are read by their paths and removed when no retained manifest names them.
    Safe to use from several threads; different generations may be written at once.

    A unit that never changes may be a ``reference`` to a folder. Its one file is then ``<name>.0.reference``, which is
    never written as others are: ``adopt`` takes the place of ``acquire`` and ``write``.

    Args:
        retained: Returns the files that retained manifests name, with their sizes.
        way_out: Returns advice for a path that is damaged.
        check_writer: Raises if the run may not be written (any more).
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        copies: int,
        *,
        disk: AnyDisk,
        queue: IOQueue,
        retained: Callable[[], Mapping[str, int]],
        way_out: Callable[[str], str],
        check_writer: Callable[[], None] = lambda: None,
        direct: bool = True,
        grows: bool = False,
        folder: str = HOME,
        cuts: Sequence[int] = (),
        reference: Reference | None = None,
    ) -> None:
        """Prepare the files without touching the disk.

        A unit that ``grows`` may have more than ``copies`` files, because commits are kept for good. Bytes between two
        of the offsets ``cuts``, whole pages, can be read by themselves.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"a unit's name is letters, digits, '_', '-' and '.', not {name!r}")
        self.name, self.layout, self.copies = name, layout, copies
        self._disk, self._queue, self._direct = disk, queue, direct
        self._retained, self._way_out, self._check_writer = retained, way_out, check_writer
        self._spans = list(block_spans(layout.file_bytes))
        cuts = sorted(set(cuts))
        self._pieces = [_cut(start, stop, cuts) for start, stop in self._spans]
        """The ranges of each checksum block that can be read by themselves; one for most."""
        self._digests: dict[int, dict[int, str]] = {}
        """Checksum of each of several pieces of a block, by generation and offset: of files written or read whole."""
        self._lock = threading.Lock()
        self._acquired: set[int] = set()
        self._synced: dict[int, tuple[str, ...]] = {}
        self._files: dict[int, OpenFile] = {}
        self.folder = folder
        self._grows = grows
        self._surplus: set[int] = set()
        self._elsewhere: set[str] = set()
        self.reference = reference
        self._suffix = SAFETENSORS if reference is None else REFERENCE

    @property
    def open_files(self) -> int:
        """The number of files that are open once all are."""
        return self.copies if self.reference is None else 2 * len(self.reference.files)

    def path(self, generation: int) -> str:
        return _path(self.folder, self.name, generation, self._suffix)

    def generation_of(self, path: str) -> int:
        """Return the generation at ``path``, as a manifest names it. Raises ``ValueError`` if there is none."""
        start, end = re.escape(f"{self.folder}/{self.name}"), re.escape(self._suffix)
        match = re.fullmatch(rf"{start}\.(\d+){end}", path)
        if not match:
            raise ValueError(f"{path} is no generation of the unit {self.name!r}")
        return int(match[1])

    def is_mine(self, path: str) -> bool:
        """Return whether the file at ``path`` is in the folder of this unit, and a reference if the unit is one."""
        return path.rpartition("/")[0] == self.folder and path.endswith(self._suffix)

    def create(self) -> None:
        """Reserve the space of all generations, with durable names.

        Call it before the first ``acquire``. Whole files that a retained manifest names are left alone and must have
        this layout's size.
        """
        paths = map(self.path, range(self.copies if self.reference is None else 0))
        missing = [path for path in paths if not self._usable(path)]
        for path in missing:
            self._disk.allocate(path, self.layout.file_bytes)
        if missing:  # the names of the others are durable since the run was opened
            self._disk.sync_dir(self.folder, why="unit directory")
        self._elsewhere = {
            _path(folder, self.name, generation, suffix)
            for folder in folders(self._disk)
            for suffix in (SAFETENSORS, REFERENCE)[: 2 if self.copies == 1 else 1]
            if (folder, suffix) != (self.folder, self._suffix)
            for generation in existing_generations(self._disk, folder, self.name, self._retained(), suffix)
        }
        self.trim()

    def keep_reference(self) -> None:
        """Make the reference file say where the bytes are, durably. Nothing happens if the unit is no reference.

        Call it once all bytes are verified: commits may name the file already, and mean these bytes.
        """
        if self.reference is None:
            return
        self._check_writer()
        path, content = self.path(0), self.reference.encode()
        with suppress(FileNotFoundError, ManifestCorrupt):
            if self._disk.read_bytes(path) == content:
                return
        write_durably(self._disk, path, content, why="reference")

    def trim(self) -> None:
        """Remove surplus generations, from a time when more commits were kept, that no commit needs.

        Only files that follow ``copies`` without a gap and have the size of this unit's files are removed: a writer
        makes no others, and another file may be somebody's own copy. A unit that grows removes all files of this
        size, because kept commits leave gaps. Files in other folders go the same way.
        """
        with self._lock:  # one thread of a rank may retire commits while another writes
            retained = self._retained()
            generation = self.copies
            while self._disk.exists(self.path(generation)) and self._usable(self.path(generation)):
                self._surplus.add(generation)
                generation += 1
            if self._grows:
                self._surplus |= self._others()
            free = [k for k in sorted(self._surplus - self._acquired) if self.path(k) not in retained]
            if self._grows and all(self.path(k) in retained for k in range(self.copies)):
                free = free[1:]  # the next write takes the first one
            for generation in free:
                file = self._files.pop(generation, None)
                self._surplus.remove(generation)
                if file is not None:
                    file.close()
                self._disk.unlink(self.path(generation))
            for path in sorted(self._elsewhere - retained.keys()):
                self._elsewhere.remove(path)
                with unneeded(self._disk, path.rpartition("/")[0]):
                    remove_file(self._disk, path, self.layout.file_bytes)

    def _others(self) -> set[int]:
        """Return the generations beyond ``copies`` that are on disk, in any order."""
        found = existing_generations(self._disk, self.folder, self.name)
        return {k for k in found if k >= self.copies and self._usable(self.path(k))}

    def missing_bytes(self) -> int:
        """Return the bytes that ``create`` will take from the file system."""
        paths = map(self.path, range(self.copies if self.reference is None else 0))
        return sum(self.layout.file_bytes for path in paths if not self._usable(path))

    def acquire(self) -> int:
        """Return a generation to write, which no retained manifest names and nobody has acquired.

        Never waits. Raises ``PoolExhausted`` if there is none.
        """
        retained = self._retained()
        with self._lock:
            for generation in [*range(self.copies), *(sorted(self._surplus) if self._grows else ())]:
                if generation not in self._acquired and self.path(generation) not in retained:
                    self._acquired.add(generation)
                    self._synced.pop(generation, None)
                    self._digests.pop(generation, None)
                    return generation
            raise PoolExhausted(
                f"unit {self.name!r} has no free file: {self.copies} exist, {len(self._acquired)} are being"
                f" written, the others belong to retained commits. Publish or release a step first, or keep"
                f" one more copy than durability.retain."
            )

    def acquire_new(self) -> int:
        """Make one more generation and return it. Only for a unit that grows."""
        with self._lock:
            generation = next(k for k in range(self.copies, sys.maxsize) if k not in self._surplus)
            self._surplus.add(generation)
            self._acquired.add(generation)
        self._disk.allocate(self.path(generation), self.layout.file_bytes)
        self._disk.sync_dir(self.folder, why="unit directory")
        return generation

    def release(self, generation: int) -> None:
        """Release an acquired generation, whether it was published or its step was skipped or failed."""
        with self._lock:
            self._acquired.discard(generation)

    def write(
        self, generation: int, image: memoryview, *, kind: str, phase: str, priority: int
    ) -> Future[tuple[str, ...]]:
        """Write ``image``, the whole file, and sync it.

        The result is the checksums of its blocks.
        The header and the filler in ``image`` are set here. ``image`` must not change until the future is done.
        """
        if generation not in self._acquired:
            raise ValueError(f"generation {generation} of unit {self.name!r} was not acquired")
        self._check_writer()
        self._complete(image)
        self._synced.pop(generation, None)
        file = self._file(generation)
        checksums = [""] * len(self._spans)
        requests = [
            Request(
                file,
                view := image[start:stop],
                start,
                True,
                partial(self._digest, generation, checksums, block, view),
            )
            for block, (start, stop) in enumerate(self._spans)
        ]
        finish = partial(self._sync, generation, file, checksums)
        return self._queue.submit(requests, kind=kind, phase=phase, priority=priority, finish=finish)

    def note_written(self, generation: int, image: memoryview) -> tuple[str, ...]:
        """Return the checksums of ``image``, the memory of an acquired generation's file, written there and not here.

        Header and filler are set here. For files in memory, which need no sync.
        """
        if generation not in self._acquired:
            raise ValueError(f"generation {generation} of unit {self.name!r} was not acquired")
        self._check_writer()
        self._complete(image)
        checksums = tuple(xxhash.xxh3_64_hexdigest(image[start:stop]) for start, stop in self._spans)
        self.check_exists(generation)
        self._synced[generation] = checksums
        return checksums

    def adopt(self, image: memoryview) -> tuple[str, ...]:
        """Return the checksums of ``image``, the whole file, after a check that the folder has these bytes.

        For a reference, which is durable on return. Header and filler in ``image`` are set here. Raises
        ``ChunkCorrupt`` where the folder has other bytes, ``FileMissing`` if it has changed.
        """
        self._complete(image)
        checksums = tuple(xxhash.xxh3_64_hexdigest(image[start:stop]) for start, stop in self._spans)
        self.read(0, image, checksums, kind="state", phase="setup", priority=0).result()
        self.keep_reference()
        self._synced[0] = checksums
        return checksums

    def write_through(
        self,
        generation: int,
        fill: Callable[[memoryview, int], None],
        *,
        phase: str,
        priority: int,
        beat: Callable[[], None] = lambda: None,
    ) -> tuple[str, ...]:
        """Write and sync a file whose image is nowhere in memory as a whole.

        ``fill(view, start)`` puts the bytes of the file from ``start`` on into ``view``. ``beat`` is called now and
        then. Returns the checksums of the blocks, as ``write`` does.
        """
        if generation not in self._acquired:
            raise ValueError(f"generation {generation} of unit {self.name!r} was not acquired")
        self._check_writer()
        self._synced.pop(generation, None)
        file, checksums = self._file(generation), [""] * len(self._spans)

        def request(block: int, view: memoryview, start: int) -> Request:
            fill(view, start)
            beat()
            return Request(file, view, start, True, partial(self._digest, generation, checksums, block, view))

        self._by_blocks(request, "base", phase, priority)
        return self._sync(generation, file, checksums)

    def read(
        self,
        generation: int,
        image: memoryview,
        checksums: tuple[str, ...],
        *,
        kind: str,
        phase: str,
        priority: int,
        start: int | None = None,
    ) -> Future[None]:
        """Fill ``image`` with the whole file, or with its bytes from ``start`` on, and verify every byte.

        A part of the file begins and ends at one of ``cuts`` or at an end of the file. The generation must have been
        written or read whole before, else raises ``ValueError``. Raises ``ChunkCorrupt`` for a damaged block,
        ``RunMismatch`` for a file of another size.
        """
        if start is None:
            self._check(image)
        first = start or 0
        if len(checksums) != len(self._spans):
            raise RunMismatch(
                f"{self.path(generation)} was written with {len(checksums)} blocks, this layout has"
                f" {len(self._spans)}: the run holds another model"
            )
        file = self._file(generation)
        requests = [
            Request(file, image[a - first : b - first], a, False, after=check)
            for a, b, check in self._checks(generation, first, image, checksums)
        ]
        return self._queue.submit(requests, kind=kind, phase=phase, priority=priority)

    def verify_through(self, generation: int, checksums: tuple[str, ...]) -> None:
        """Verify a file whose image is nowhere in memory as a whole. Its parts can be read by themselves from then on.

        Raises as ``read`` does.
        """
        file = self._file(generation)

        def request(block: int, view: memoryview, start: int) -> Request:
            check = partial(self._verify_block, generation, block, view, checksums[block])
            return Request(file, view, start, False, after=check)

        self._by_blocks(request, "state", "setup", 0)

    def _by_blocks(
        self, request: Callable[[int, memoryview, int], Request], buffer_kind: str, phase: str, priority: int
    ) -> None:
        """Submit what ``request`` makes of each block, a buffer for it and its start, with ``PIECES`` in memory."""
        size = min(CHECKSUM_BLOCK, self.layout.file_bytes)
        buffers = [Buffer(size, buffer_kind) for _ in self._spans[:PIECES]]
        futures: list[Future] = []
        try:
            for block, (start, stop) in enumerate(self._spans):
                if block >= PIECES:
                    futures[block - PIECES].result()
                view = buffers[block % PIECES].view[: stop - start]
                requests = [request(block, view, start)]
                futures.append(self._queue.submit(requests, kind="state", phase=phase, priority=priority))
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.exception()
            for buffer in buffers:
                buffer.free()

    def verify(self, generation: int, image: memoryview, checksums: tuple[str, ...], start: int) -> None:
        """Verify that ``image`` has the bytes of a part of the file from ``start`` on, as ``read`` would.

        Filler in ``image`` is set here. Raises as ``read`` does.
        """
        for pad in self.layout.pads:
            first, last = max(pad.offset, start), min(pad.end, start + len(image))
            if first < last:
                image[first - start : last - start] = bytes(last - first)
        for _, _, check in self._checks(generation, start, image, checksums):
            check()

    def _checks(
        self, generation: int, first: int, image: memoryview, checksums: tuple[str, ...]
    ) -> list[tuple[int, int, Callable[[], None]]]:
        """Return the ranges in which the bytes from ``first`` on are verified, each with its check.

        Raises ``ValueError`` if they are not all known.
        """
        last, checks = first + len(image), []
        for block in range(first // CHECKSUM_BLOCK, min(-(-last // CHECKSUM_BLOCK), len(self._spans))):
            begin, end = self._spans[block]
            if first <= begin and end <= last:
                view = image[begin - first : end - first]
                check = partial(self._verify_block, generation, block, view, checksums[block])
                checks.append((begin, end, check))
                continue
            for a, b in self._pieces[block]:
                expected = self._digests.get(generation, {}).get(a)
                if first <= a and b <= last and expected is not None:
                    view = image[a - first : b - first]
                    checks.append((a, b, partial(self._verify, generation, a, view, expected)))
        if sum(b - a for a, b, _ in checks) != len(image):
            raise ValueError(
                f"{self.path(generation)}: bytes {first} to {last} cannot be read by themselves: they do not end at"
                " cuts, or the file was not written or read whole before"
            )
        return checks

    def close(self) -> None:
        """Close the files. No transfer may be under way."""
        with self._lock:
            files, self._files = list(self._files.values()), {}
        for file in files:
            file.close()

    def is_synced(self, generation: int, checksums: tuple[str, ...]) -> bool:
        """Return whether a ``write`` with these checksums has ended since ``generation`` was acquired."""
        return self._synced.get(generation) == checksums

    def check_exists(self, generation: int) -> None:
        """Raise ``DiskFailed`` unless the file of ``generation`` is still the one that was written.

        Its name, its size and the open file must agree. Called before a manifest names the file.
        """
        path, file = self.path(generation), self._files.get(generation)
        try:
            there = self._disk.exists(path) and self._disk.size(path) == self.layout.file_bytes
        except FileNotFoundError:
            there = False
        is_other = file is not None and self.reference is None and not self._disk.is_named(path, file)
        if not there or is_other:
            raise DiskFailed(
                f"{path} was removed, replaced or truncated while the run was open: it is not the file of"
                f" {self.layout.file_bytes} bytes that was written. The step is not durable. Let no other program"
                f" touch the run's files, then run again to resume from the newest whole step."
            )

    def _complete(self, image: memoryview) -> None:
        """Set the header and the filler in ``image``, the whole file."""
        self._check(image)
        image[: len(self.layout.header)] = self.layout.header
        for pad in self.layout.pads:
            image[pad.offset : pad.end] = bytes(pad.nbytes)

    def _check(self, image: memoryview) -> None:
        if len(image) != self.layout.file_bytes:
            raise ValueError(
                f"unit {self.name!r} has {self.layout.file_bytes} bytes, the image given has {len(image)}"
            )

    def _usable(self, path: str) -> bool:
        """Return whether ``path`` is there with the right size.

        Raises ``RunMismatch`` if a commit names it with another model's size. A file of a commit that lost its size
        is damaged, as its commit is, and is made anew.
        """
        wanted = self._retained().get(path, self.layout.file_bytes)
        if wanted != self.layout.file_bytes:
            raise RunMismatch(
                f"{path} has {wanted} bytes and belongs to a commit, unit {self.name!r} has"
                f" {self.layout.file_bytes}: the run holds another model. Give this one its own directory."
            )
        try:
            return self._disk.size(path) == wanted
        except FileNotFoundError:
            return False

    def _file(self, generation: int) -> OpenFile:
        """Return the open file of ``generation``, which stays open until ``close``."""
        file = self._files.get(generation)
        if file is None:
            self._check_writer()
            opened = self._disk.open(self.path(generation), direct=self._direct)
            with self._lock:
                file = self._files.setdefault(generation, opened)
            if file is not opened:
                opened.close()
        return file

    def _sync(self, generation: int, file: OpenFile, checksums: list[str]) -> tuple[str, ...]:
        failpoints.reach("before_data_sync")
        self._disk.sync(file, why="unit data")
        failpoints.reach("after_data_sync")
        self.check_exists(generation)
        self._synced[generation] = tuple(checksums)
        return tuple(checksums)

    def _digest(self, generation: int, checksums: list[str], block: int, view: memoryview) -> None:
        checksums[block] = xxhash.xxh3_64_hexdigest(view)
        self._digest_pieces(generation, block, view)

    def _digest_pieces(self, generation: int, block: int, view: memoryview) -> None:
        """Keep the checksums of the pieces of a block that is ``view``, if there are several."""
        pieces, begin = self._pieces[block], self._spans[block][0]
        for start, stop in pieces if len(pieces) > 1 else ():
            digest = xxhash.xxh3_64_hexdigest(view[start - begin : stop - begin])
            self._digests.setdefault(generation, {})[start] = digest

    def _verify_block(self, generation: int, block: int, view: memoryview, expected: str) -> None:
        self._verify(generation, self._spans[block][0], view, expected)
        self._digest_pieces(generation, block, view)

    def _verify(self, generation: int, start: int, view: memoryview, expected: str) -> None:
        got = xxhash.xxh3_64_hexdigest(view)
        if got != expected:
            path = self.path(generation)
            atoms = self.layout.keys_between(start, start + len(view))
            raise corrupt(path, start, len(view), atoms, expected, got, self._way_out(path))


def remove_generations(disk: AnyDisk, unit: str, nbytes: int, retained: Collection[str]) -> None:
    """Remove the files of ``unit``, of ``nbytes`` each, that are not ``retained``."""
    for folder in folders(disk):
        for suffix in (SAFETENSORS, REFERENCE):
            for generation in existing_generations(disk, folder, unit, retained, suffix):
                path = _path(folder, unit, generation, suffix)
                if path not in retained:
                    with unneeded(disk, folder):
                        remove_file(disk, path, nbytes)


def remove_file(disk: AnyDisk, path: str, nbytes: int) -> None:
    """Remove the file ``path`` if its size is ``nbytes``. Of a reference, that alone goes, and never its folder."""
    with suppress(FileNotFoundError):
        if is_reference(path) or disk.size(path) == nbytes:
            disk.unlink(path)


def existing_generations(
    disk: AnyDisk,
    folder: str,
    unit: str,
    retained: Collection[str] | None = None,
    suffix: str = SAFETENSORS,
) -> list[int]:
    """Return the generations of ``unit`` that have a file with ``suffix`` in ``folder``, by name alone.

    A failing drive counts as empty if no file of ``retained`` is on it.
    """
    pattern = re.compile(rf"{re.escape(unit)}\.(0|[1-9]\d*){re.escape(suffix)}")
    names: list[str] = []
    needed = retained is None or any(path.startswith(f"{folder}/") for path in retained)
    with nullcontext() if needed else unneeded(disk, folder):
        names = disk.listdir(folder)
    matches = map(pattern.fullmatch, names)
    return [int(match[1]) for match in matches if match]


def _path(folder: str, unit: str, generation: int, suffix: str) -> str:
    return f"{folder}/{unit}.{generation}{suffix}"


def corrupt(
    path: str, offset: int, nbytes: int, atoms: Collection[str], expected: str, got: str, way_out: str
) -> ChunkCorrupt:
    """Return the error for a checksum block whose bytes are not those that were written."""
    fails = "fail their checksum" if len(atoms) > 1 else "fails its checksum"
    return ChunkCorrupt(
        f"{name_atoms(atoms)} {fails}: expected xxh3:{expected}, read xxh3:{got}"
        f" at {path} offset {offset}, {nbytes} bytes. {way_out}",
        path=path,
        offset=offset,
        nbytes=nbytes,
        atoms=tuple(atoms),
    )


def name_atoms(atoms: Collection[str]) -> str:
    """Return the names of the first few ``atoms`` as text for a person.

    >>> name_atoms(["a/param", "b/param", "c/param", "d/param"])
    "'a/param', 'b/param', 'c/param' and 1 more"
    """
    return shown([repr(atom) for atom in atoms]) or "the header or filler"


def _cut(start: int, stop: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges into which ``cuts``, in ascending order, divide the one from ``start`` to ``stop``.

    >>> _cut(0, 8, [4, 12])
    [(0, 4), (4, 8)]
    """
    return [*pairwise([start, *cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)], stop])]
