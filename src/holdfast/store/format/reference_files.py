"""Reference files: payload files whose tensors lie in a folder outside of the run, and are read from there.

In place of the payload the run has a small sealed file, ``data/<unit>.0.reference``, with the header of the payload
file and the place of each tensor in the folder. Reading it gives the bytes that a copy in the run would have, header
and filler included. So layout, size and checksums are those of a copy, and whoever reads or verifies payload need not
know the difference. Nothing is ever written to the folder. Offsets and sizes are bytes.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast.errors import FileMissing
from holdfast.io.buffers import Buffer
from holdfast.io.threads import File, open_file
from holdfast.quantities import PAGE, MiB, round_up
from holdfast.store.format.manifest import FORMAT, SAFETENSORS, VERSION, reading, seal, unseal
from holdfast.store.format.payload_layout import Layout

WAYS_OUT = (
    "Put its files back as they were, or resume with the place of an unchanged copy:"
    " source= of holdfast.pretrained(FOLDER, reference=True)."
)


BUFFER_BYTES = 4 * MiB + 2 * PAGE
"""Bytes of a thread's buffer: a checksum block and the pages around it."""
_threads = threading.local()


class Span(NamedTuple):
    """Bytes of a payload file, from ``start`` on, that lie in the folder's ``file`` from ``offset`` on."""

    start: int
    nbytes: int
    file: str
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


class PlacedArray(Protocol):
    """One array in a file: ``nbytes`` of the file ``path`` from ``offset`` on."""

    @property
    def path(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class Place(NamedTuple):
    """A ``PlacedArray`` that a reference file names."""

    path: str
    offset: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Reference:
    """The places of a payload file's bytes: the content of a reference file."""

    folder: str
    """Absolute path of the folder."""
    files: Mapping[str, int]
    """Size of each file of the folder that is read, by name."""
    header: bytes
    """Header of the payload file."""
    nbytes: int
    """Size of the payload file."""
    spans: tuple[Span, ...]
    """Place of each tensor, in the order of the payload file. All bytes between them are filler."""

    @classmethod
    def of(cls, layout: Layout, places: Mapping[str, PlacedArray]) -> Reference | None:
        """Return the reference for a payload file of ``layout``, whose tensors lie at ``places``, by key.

        None if one of them does not lie there in its dtype, or if they lie in several folders.
        """
        spans: list[Span] = []
        files: dict[str, int] = {}
        folders: set[str] = set()
        for entry in layout.entries:
            place = places.get(entry.key)
            if place is None or (place.dtype, place.nbytes) != (entry.dtype, entry.nbytes):
                return None
            folder, name = os.path.split(os.path.abspath(place.path))
            folders.add(folder)
            if name not in files:
                files[name] = os.stat(place.path).st_size
            spans.append(Span(entry.offset, entry.nbytes, name, place.offset))
        if len(folders) != 1:
            return None
        return cls(folders.pop(), files, layout.header, layout.file_bytes, tuple(spans))

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.header)

    def places(self) -> dict[str, PlacedArray]:
        """Return where each tensor lies in the folder, by key."""
        spans = {(span.start, span.nbytes): span for span in self.spans}
        return {
            entry.key: Place(os.path.join(self.folder, span.file), span.offset, span.nbytes, entry.dtype)
            for entry in self.layout.entries
            if (span := spans.get((entry.offset, entry.nbytes))) is not None
        }

    def encode(self) -> bytes:
        """Return the content of the reference file."""
        return seal(
            {
                "format": FORMAT,
                "version": VERSION,
                "folder": self.folder,
                "files": dict(self.files),
                "bytes": self.nbytes,
                "header_bytes": len(self.header),
                "header": self.header[8:].decode().rstrip(),
                "tensors": [list(span) for span in self.spans],
            }
        )

    @classmethod
    def decode(cls, data: bytes, path: str) -> Reference:
        """Decode ``data``, the content of ``path``. Raises ``ManifestCorrupt``."""
        table = unseal(data, path)
        with reading(path):
            length = table["header_bytes"] - 8
            header = length.to_bytes(8, "little") + table["header"].encode().ljust(length)
            spans = tuple(Span(*item) for item in table["tensors"])
            position = len(header)
            for span in spans:
                if span.start < position or span.nbytes < 0 or span.offset < 0:
                    raise ValueError(f"{list(span)} does not follow what is before it")
                plain = os.path.basename(span.file) == span.file and span.file.endswith(SAFETENSORS)
                if span.file not in table["files"] or not plain:
                    raise ValueError(f"{span.file!r} is no file of the folder")
                position = span.stop
            if position > table["bytes"] or not os.path.isabs(table["folder"]):
                raise ValueError("its places and its size do not fit together")
            return cls(table["folder"], table["files"], header, table["bytes"], spans)

    def check(self, path: str) -> None:
        """Raise ``FileMissing``, about the reference file ``path``, if a file of the folder has not its size."""
        for name, nbytes in self.files.items():
            file = os.path.join(self.folder, name)
            try:
                there = os.stat(file).st_size
            except OSError as error:
                found = f"{file} cannot be read ({error.strerror})"
            else:
                if there == nbytes:
                    continue
                found = f"{file} has {there} bytes, and had {nbytes}"
            raise FileMissing(
                f"the run reads frozen weights from {self.folder}, which has changed: {found}. {WAYS_OUT}",
                path=path,
            )

    def way_out(self) -> str:
        """Return advice for bytes of the folder that fail their checksum."""
        return f"These bytes are read from {self.folder}, which was changed since the run began. {WAYS_OUT}"


class ReferencedFile:
    """An open payload file whose bytes come from a folder. ``read`` may be called from several threads at once.

    Direct I/O takes whole pages of the folder's files. They are read into a buffer of the thread, and copied from there
    to where they belong. The last bytes of a file, less than a page, are read through the page cache.
    """

    def __init__(self, path: Path, reference: Reference, direct: bool) -> None:
        """Open the files of the folder.

        ``path`` is that of the reference file. Without ``direct`` all is read through the page cache. Raises
        ``FileMissing`` if a file is absent or of another size.
        """
        reference.check(f"{path.parent.name}/{path.name}")
        self.path, self._reference = path, reference
        self._starts = [span.start for span in reference.spans]
        with ExitStack() as undo:
            self._files: dict[str, tuple[File, File]] = {}
            for name in reference.files:
                place = Path(reference.folder) / name
                whole_pages = undo.enter_context(open_file(place, write=False, direct=direct))
                rest = (
                    undo.enter_context(open_file(place, write=False, direct=False)) if direct else whole_pages
                )
                self._files[name] = whole_pages, rest
            undo.pop_all()

    def read(self, view: memoryview, offset: int) -> None:
        """Fill all of ``view`` from ``offset``, or raise ``DiskFailed``."""
        stop, at = offset + len(view), offset
        header = self._reference.header[offset:stop]
        first = max(0, bisect_right(self._starts, offset) - 1)
        for span in self._reference.spans[first:]:
            if span.start >= stop:
                break
            start, end = max(span.start, offset), min(span.stop, stop)
            if start < end:
                _clear(view, at - offset, start - offset)
                self._read(span.file, view[start - offset : end - offset], span.offset + start - span.start)
                at = end
        _clear(view, at - offset, stop - offset)
        view[: len(header)] = header

    def write(self, view: memoryview, offset: int) -> None:
        raise AssertionError(
            f"{self.path} is a reference, and nothing is written to the folder that it names"
        )

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for file in (each for both in self._files.values() for each in both):
            file.close()

    def _read(self, name: str, view: memoryview, offset: int) -> None:
        whole_pages, rest = self._files[name]
        last = self._reference.files[name] // PAGE * PAGE if whole_pages.direct else 0
        done = 0
        while done < len(view) and offset + done < last:
            begin = offset + done
            first = begin // PAGE * PAGE
            end = min(round_up(offset + len(view)), last, first + BUFFER_BYTES)
            pages = _thread_buffer()[: end - first]
            whole_pages.read(pages, first)
            count = min(end - begin, len(view) - done)
            view[done : done + count] = pages[begin - first : begin - first + count]
            done += count
        if done < len(view):
            rest.read(view[done:], offset + done)


def _thread_buffer() -> memoryview:
    """Return the memory of this thread for pages of a folder."""
    if not hasattr(_threads, "buffer"):
        _threads.buffer = Buffer(BUFFER_BYTES, "reference")
    return _threads.buffer.view


def _clear(view: memoryview, start: int, stop: int) -> None:
    if start < stop:
        view[start:stop] = bytes(stop - start)
