"""Segments of the log that lie on several drives.

With several drives a segment is cut into stripes of 4 MiB, which go round its files in a fixed order, so that a write
of records keeps all drives busy, and so does reading them. Records have offsets as in one file, and this module finds
their bytes. The first page of the segment's own file, a sealed JSON, says how the segment is cut; without such a page
the segment is one file. The other files are ``data/drive_1/<stream>.step-<first>.t<timeline>.log``. Two invariants:

1. All names and the first page are durable before a record is written.
2. The segment's own file is removed first. So a file of stripes without it belongs to nothing, unless a person moved
   the segment's own file away and has to put it back.

Called by the writer and the readers of segments. Sizes and offsets are bytes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.errors import Damaged, DiskFailed, FileMissing, ManifestCorrupt
from holdfast.io.queue import IOQueue, Request
from holdfast.quantities import PAGE, MiB
from holdfast.store.disk import AnyDisk, OpenFile
from holdfast.store.drive_links import Drive, lost_drive, own_folders, unneeded
from holdfast.store.format.manifest import FOLDER, FORMAT, HOME, seal, unseal

STRIPE_BYTES = 4 * MiB
MOST_STRIPES = 32
"""The most stripes in one round of the files."""
WITH_STRIPES = 2
"""The version of the first page, which earlier versions of this library refuse."""
_HEAD = re.compile(rb'\{\n "bytes": 4096,\n "format": "holdfast",\n "version": 2,\n "stripes": ')
_FILE = re.compile(r"(rank-\d{5})\.(step-\d{12,}\.t\d{4,}\.log)")


@dataclass(frozen=True)
class Stripes:
    """The way in which the bytes of a segment go round its files.

    Attributes:
        folders: The folders of the further files, which name their drives.
        order: The file of each stripe in turn, again and again: 0 is the segment's own, 1 that in the first folder.
        stripe_bytes: The bytes of a stripe.
    """

    folders: tuple[str, ...]
    order: tuple[int, ...]
    stripe_bytes: int

    @classmethod
    def over(cls, drives: Sequence[Drive]) -> Stripes | None:
        """Return the stripes of new segments on ``drives``, by their shares; None if all is on the run's own."""
        order = _order([drive.share for drive in drives])
        used = sorted({*order} - {0})
        if not used:
            return None
        number = {0: 0} | {drive: number for number, drive in enumerate(used, 1)}
        return cls(
            tuple(drives[drive].folder for drive in used),
            tuple(number[drive] for drive in order),
            STRIPE_BYTES,
        )

    @classmethod
    def decode(cls, page: bytes, path: str) -> Stripes | None:
        """Return what the first page of the segment at ``path`` says; None if that is no page of this kind.

        Raises ``Damaged`` if the page fails its digest, or names other places than a run has.
        """
        if not _HEAD.match(page):
            return None
        try:
            table = unseal(page, path, newest=WITH_STRIPES)["stripes"]
            found = cls(tuple(table["folders"]), tuple(table["order"]), table["bytes"])
            whole = found.stripe_bytes > 0 and found.stripe_bytes % PAGE == 0
            named = all(re.fullmatch(rf"{HOME}/{FOLDER}", folder) for folder in found.folders)
            if not (whole and named and {*found.order} | {0} == {*range(len(found.folders) + 1)}):
                raise ManifestCorrupt("it names other places than a run has")
        except (ManifestCorrupt, KeyError, TypeError) as error:
            raise Damaged(
                f"{path} does not say any more on which drives its records are: {error}. The records before it are"
                " whole as far as they verify.",
                path=path,
                offset=0,
            ) from error
        return found

    def encode(self) -> bytes:
        """Return the first page of a segment."""
        table = {"bytes": self.stripe_bytes, "folders": self.folders, "order": self.order}
        return seal({"bytes": PAGE, "format": FORMAT, "version": WITH_STRIPES, "stripes": table}, PAGE)

    def paths(self, path: str) -> list[str]:
        """Return the paths of the files of the segment at ``path``, its own first."""
        stream, name = path.split("/")[-2:]
        return [path, *(f"{folder}/{stream}.{name}" for folder in self.folders)]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the file, the offset there and the bytes of each piece of the segment from ``start`` to ``stop``."""
        while start < stop:
            stripe, within = divmod(start, self.stripe_bytes)
            turn, place = divmod(stripe, len(self.order))
            file = self.order[place]
            before = turn * len(self._places[file]) + self._places[file].index(place)
            nbytes = min(stop - start, self.stripe_bytes - within)
            yield file, (PAGE if file == 0 else 0) + before * self.stripe_bytes + within, nbytes
            start += nbytes

    def sizes(self, nbytes: int) -> list[int]:
        """Return how many bytes each file has of a segment of ``nbytes``, its first page included."""
        stripes, rest = divmod(nbytes, self.stripe_bytes)
        turns, place = divmod(stripes, len(self.order))
        sizes = [
            (turns * len(places) + sum(each < place for each in places)) * self.stripe_bytes
            for places in self._places
        ]
        sizes[self.order[place]] += rest
        return [PAGE + sizes[0], *sizes[1:]]

    def whole_bytes(self, sizes: Sequence[int]) -> int:
        """Return how many bytes of a segment, without a hole, are in files of ``sizes``.

        >>> Stripes(("data/drive_1",), (0, 1), 4096).whole_bytes([3 * 4096, 4096])
        12288
        """
        ends = []
        for file, (nbytes, places) in enumerate(zip(sizes, self._places, strict=True)):
            if places:
                stripes, rest = divmod(max(0, nbytes - (PAGE if file == 0 else 0)), self.stripe_bytes)
                turn, place = divmod(stripes, len(places))
                ends.append((turn * len(self.order) + places[place]) * self.stripe_bytes + rest)
        return min(ends)

    @cached_property
    def _places(self) -> list[list[int]]:
        """The places of each file in a round."""
        found: list[list[int]] = [[] for _ in range(len(self.folders) + 1)]
        for place, file in enumerate(self.order):
            found[file].append(place)
        return found


class SegmentFile:
    """An open segment: its files, of which the first is its own."""

    def __init__(self, files: Sequence[OpenFile], stripes: Stripes | None, nbytes: int = 0) -> None:
        self.files, self.stripes, self.nbytes = files, stripes, nbytes

    @property
    def path(self) -> Path:
        return self.files[0].path

    def read(self, view: memoryview, offset: int) -> None:
        """Fill all of ``view`` from ``offset``."""
        for file, piece, at in self._pieces(view, offset):
            file.read(piece, at)

    def requests(
        self,
        view: memoryview,
        offset: int,
        write: bool,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> list[Request]:
        """Return the requests that move ``view``, one for each piece. ``after`` runs after the last read of them."""
        pieces = list(self._pieces(view, offset))
        if after is not None and len(pieces) > 1:
            after = _once_after(len(pieces), after)
        return [Request(file, piece, at, write, before, after) for file, piece, at in pieces]

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _pieces(self, view: memoryview, offset: int) -> Iterator[tuple[OpenFile, memoryview, int]]:
        if self.stripes is None:
            yield self.files[0], view, offset
            return
        done = 0
        for number, at, nbytes in self.stripes.pieces(offset, offset + len(view)):
            yield self.files[number], view[done : done + nbytes], at
            done += nbytes


def find_segment(disk: AnyDisk, path: str) -> SegmentFile:
    """Open the segment at ``path`` for reading its headers, through the page cache.

    Raises ``FileNotFoundError`` if it is gone, ``FileMissing`` if one of its further files is, ``Damaged`` if its first
    page is not whole.
    """
    nbytes = disk.size(path)
    file = disk.open(path, write=False, direct=False)
    try:
        stripes = _stripes_in(file, nbytes, path)
    except BaseException:
        file.close()
        raise
    if stripes is None:
        return SegmentFile([file], None, nbytes)
    file.close()
    found = open_segment(disk, path, stripes, direct=False)
    try:
        found.nbytes = stripes.whole_bytes([*map(disk.size, stripes.paths(path))])
    except BaseException:
        found.close()
        raise
    return found


def open_segment(
    disk: AnyDisk, path: str, stripes: Stripes | None, *, write: bool = False, direct: bool = True
) -> SegmentFile:
    """Open the segment at ``path``, of which ``stripes`` are known. Raises as ``find_segment`` does."""
    files: list[OpenFile] = [disk.open(path, write=write, direct=direct)]
    try:
        for other in [] if stripes is None else stripes.paths(path)[1:]:
            files.append(_opened(disk, path, other, write, direct))
    except BaseException:
        for file in files:
            file.close()
        raise
    return SegmentFile(files, stripes)


def _opened(disk: AnyDisk, path: str, other: str, write: bool, direct: bool) -> Any:
    try:
        return disk.open(other, write=write, direct=direct)
    except FileNotFoundError:
        if not disk.exists(path):  # its writer has removed it
            raise
        raise FileMissing(
            f"{other} is missing, which has records of {path}{lost_drive(disk, other)}. The records before these are"
            " whole as far as they verify.",
            path=path,
            offset=0,
        ) from None


def _stripes_in(file: OpenFile, nbytes: int, path: str) -> Stripes | None:
    """Return what the first page of a segment's own ``file``, of ``nbytes``, says; None if it is one file."""
    if nbytes < PAGE:
        return None
    page = bytearray(PAGE)
    file.read(memoryview(page), 0)
    return Stripes.decode(bytes(page), path)


def make_segment(disk: AnyDisk, path: str, stripes: Stripes | None, nbytes: int) -> None:
    """Make the segment ``path``, with durable names and reserved space for ``nbytes``."""
    if stripes is None:
        disk.allocate(path, nbytes)
    else:
        own, *sizes = stripes.sizes(nbytes)
        for other, size in zip(stripes.paths(path)[1:], sizes, strict=True):
            disk.allocate(other, size)
        for folder in stripes.folders:
            disk.sync_dir(folder, why="stripe directory")
        disk.allocate(path, own)
        with closing(disk.open(path, direct=False)) as file:
            file.write(memoryview(bytearray(stripes.encode())), 0)
        disk.sync(path, why="stripes")
    disk.sync_dir(path.rpartition("/")[0], why="segment directory")


def cut_segment(disk: AnyDisk, path: str, stripes: Stripes | None, nbytes: int) -> None:
    """Release the space that the segment reserves behind its first ``nbytes``."""
    paths, sizes = ([path], [nbytes]) if stripes is None else (stripes.paths(path), stripes.sizes(nbytes))
    for each, size in zip(paths, sizes, strict=True):
        if size < disk.size(each):
            disk.cut(each, size)


def segment_paths(disk: AnyDisk, path: str) -> list[str]:
    """Return the paths of the files of the segment ``path``, its own first. That alone if it cannot be read."""
    with suppress(FileNotFoundError, Damaged, DiskFailed):
        with closing(disk.open(path, write=False, direct=False)) as file:
            stripes = _stripes_in(file, disk.size(path), path)
        return [path] if stripes is None else stripes.paths(path)
    return [path]


def segment_bytes(disk: AnyDisk, path: str) -> int:
    """Return the bytes that the segment takes on all drives."""
    total = 0
    for each in segment_paths(disk, path):
        with suppress(FileNotFoundError):
            total += disk.size(each)
    return total


def remove_segment(disk: AnyDisk, path: str) -> None:
    """Remove the segment ``path``, its own file first."""
    others = segment_paths(disk, path)[1:]
    disk.unlink(path)
    for other in others:
        with unneeded(disk, other.rpartition("/")[0]):
            disk.unlink(other)


def loose_stripes(disk: AnyDisk) -> dict[str, str]:
    """Return the files of stripes without their segment, each with the path at which the segment would be."""
    found: dict[str, str] = {}
    for folder in own_folders(disk):
        with unneeded(disk, folder):
            for match in filter(None, map(_FILE.fullmatch, disk.listdir(folder))):
                if not disk.exists(path := f"journal/{match[1]}/{match[2]}"):
                    found[f"{folder}/{match.string}"] = path
    return found


def submitted(queue: IOQueue, requests: Sequence[Request], **kinds: Any) -> list[Future]:
    """Queue ``requests`` as one group for each file, since each file has a drive of its own."""
    groups: dict[int, list[Request]] = {}
    for request in requests:
        groups.setdefault(id(request.file), []).append(request)
    futures: list[Future] = []
    try:
        for group in groups.values() or [[]]:
            futures.append(queue.submit(group, **kinds))
    except BaseException:
        wait(futures)  # their memory may be freed now
        raise
    return futures


def joined(futures: Sequence[Future]) -> Future[None]:
    """Return a future that is done when all ``futures`` are, with the first error of any."""
    if len(futures) == 1:
        return futures[0]
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def end() -> None:
        errors = [error for future in futures if (error := future.exception()) is not None]
        done.set_exception(errors[0]) if errors else done.set_result(None)

    ended = _once_after(len(futures), end)
    for future in futures:
        future.add_done_callback(lambda _: ended())
    return done


def _once_after(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``call`` when it is itself called the ``count``-th time, by any thread."""
    lock, left = threading.Lock(), count

    def counted() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            call()

    return counted


def _order(shares: Sequence[float]) -> tuple[int, ...]:
    """Return the files of a round of stripes, in proportion to ``shares``.

    >>> _order([0.5, 0.5]), _order([0.25, 0.75]), _order([1.0])
    ((0, 1), (1, 0, 1, 1), (0,))
    """
    order: list[int] = []
    errors: list[float] = []
    placed = [0] * len(shares)
    for count in range(1, MOST_STRIPES + 1 if shares else 1):
        behind = [share * count - there for share, there in zip(shares, placed, strict=True)]
        file = behind.index(max(behind))
        placed[file] += 1
        order.append(file)
        off = [abs(there / count - share) for share, there in zip(shares, placed, strict=True)]
        errors.append(round(max(off), 6))
    return tuple(order[: errors.index(min(errors)) + 1]) if errors else (0,)
