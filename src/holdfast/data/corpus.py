"""A corpus: any text as a sequence of fixed windows of bytes, read on demand and never held whole.

The files, sorted by name, are one long string of bytes. A byte is a token, so there is no tokenizer and nothing to
download. Window ``k`` is bytes ``k * context`` to ``(k + 1) * context`` inclusive: its last byte is only ever a target,
so every byte is predicted once per epoch. Every n-th window is held out for validation, evenly over the text, because
the tail of a sorted folder is rarely like the rest.
"""

from __future__ import annotations

import glob
import os
import sysconfig
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from ..errors import BadInput, DiskFailed
from ..quantities import MiB, counted
from .documents import TABLE, form_of, is_packed

NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders below the standard library that hold other people's code, or tests."""
HASHED_BYTES, PIECE_BYTES = 1024 * MiB, MiB
"""The most bytes of a text that its fingerprint reads, and the bytes of each piece. It is read at every start."""


class Corpus:
    """The bytes of ``text``: "stdlib" (Python's own source), a file, a folder or a glob.

    ``training`` and ``validation`` are map-style datasets of ``{"tokens", "targets"}``, int64[context].
    ``fingerprint`` tells one text from another by the names, sizes and content of its files.

    >>> corpus = Corpus("stdlib", context=64)
    >>> corpus.training[0]["tokens"].shape
    torch.Size([64])
    """

    def __init__(self, text: str, *, context: int, validation_fraction: float = 0.02) -> None:
        root, paths = find_files(text)
        for path in paths:
            if not os.access(path, os.R_OK):
                raise BadInput(
                    f"the text {text!r} holds {path}, which may not be read. Change its mode or leave it out."
                )
            if is_packed(path):
                raise BadInput(
                    f"the text {text!r} holds {path}, which is packed, and bytes are read where they lie. Unpack it or"
                    " leave it out."
                )
            if form_of(path) == TABLE:
                raise BadInput(
                    f"the text {text!r} holds {path}, which is a table, and bytes are read where they lie. Its rows are"
                    " read for the model of a folder: --model FOLDER."
                )
        sized = [(path, path.stat().st_size) for path in paths]
        self.context = context
        self.paths = [path for path, size in sized if size]
        self._ends = list(accumulate(size for _, size in sized if size))
        self.num_bytes = self._ends[-1] if self._ends else 0
        self._names = self._named(root)
        needed = context * (2 if validation_fraction else 1) + 1
        if self.num_bytes < needed:
            raise BadInput(
                f"the text {text!r} has {counted(self.num_bytes, 'byte')}; with a context of {context} at least "
                f"{needed:,} are needed. Name more text, or lower model.context."
            )
        self.training, self.validation = split(self, validation_fraction)

    @property
    def num_windows(self) -> int:
        return (self.num_bytes - 1) // self.context

    def window(self, index: int) -> dict[str, Tensor]:
        """Return window ``index`` of the whole text: ``tokens`` and, one byte later, ``targets``."""
        raw = self.read(index * self.context, self.context + 1)
        values = torch.frombuffer(raw, dtype=torch.uint8).long()
        return {"tokens": values[:-1], "targets": values[1:]}

    def read(self, start: int, length: int) -> bytearray:
        """Return bytes ``start`` to ``start + length`` of the text, across files."""
        found = bytearray()
        number = bisect_right(self._ends, start)
        while len(found) < length:
            position = start + len(found)
            wanted = min(length - len(found), self._ends[number] - position)
            begin = self._ends[number - 1] if number else 0
            found += _read_from(self.paths[number], position - begin, wanted)
            number += 1
        return found

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The identity of the text, computed at the first request because it reads the text."""
        names = {"files": len(self.paths), "bytes": self.num_bytes, "xxh3": self._names}
        return names | {"content": self._content()}

    def _named(self, root: Path) -> str:
        digest = xxhash.xxh3_64()
        for path, end in zip(self.paths, self._ends, strict=True):
            digest.update(os.fsencode(path.relative_to(root).as_posix()) + b"\0%d\0" % end)
        return digest.hexdigest()

    def _content(self) -> str:
        """Return the digest of all of the text, or of pieces that are spread evenly over it."""
        digest, count = xxhash.xxh3_128(), -(-min(self.num_bytes, HASHED_BYTES) // PIECE_BYTES)
        for number in range(count):
            start, stop = (self.num_bytes * each // count for each in (number, number + 1))
            digest.update(self.read(start, min(stop - start, PIECE_BYTES)))
        return digest.hexdigest()


class Windowed(Protocol):
    """A text that is divided into samples."""

    paths: list[Path]
    num_bytes: int
    context: int
    training: Windows
    validation: Windows

    @property
    def fingerprint(self) -> dict[str, Any]: ...
    @property
    def num_windows(self) -> int: ...
    def window(self, index: int) -> dict[str, Tensor]: ...


class Windows:
    """Some of a corpus's windows: all but, or only, the last of every ``stride``."""

    def __init__(self, corpus: Windowed, length: int, stride: int, held_out: bool) -> None:
        self.corpus = corpus
        self._length, self._stride, self._held_out = length, stride, held_out

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.corpus.window(self.number(index))

    def number(self, index: int) -> int:
        """Return the number of window ``index`` in the whole text."""
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        if self._held_out:
            return (index + 1) * self._stride - 1
        return index + index // (self._stride - 1)

    @property
    def fingerprint(self) -> dict[str, Any]:
        return self.corpus.fingerprint | {"context": self.corpus.context, "windows": self._length}


def split(corpus: Windowed, validation_fraction: float) -> tuple[Windows, Windows]:
    """Return training and validation windows: the last of every ``round(1 / fraction)`` windows is held out."""
    total = corpus.num_windows
    stride = min(round(1 / validation_fraction), total) if validation_fraction else total + 1
    held_out = total // stride
    return Windows(corpus, total - held_out, stride, False), Windows(corpus, held_out, stride, True)


def find_files(text: str) -> tuple[Path, list[Path]]:
    """Return the files that ``text`` names, sorted, and the directory that their names are relative to.

    Raises ``BadInput`` if there are none.
    """
    text = os.path.expanduser(text)
    if text == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [path for path in _walk(root, NOT_THE_LIBRARY) if path.suffix == ".py"]
    elif os.path.isfile(text):
        root, found = Path(text).parent, [Path(text)]
    elif os.path.isdir(text):
        root, found = Path(text), list(_walk(Path(text), set()))
    elif glob.has_magic(text):
        # several ** name files more than once, and so do links to folders
        names = sorted(set(glob.glob(text, recursive=True)), reverse=True)
        files = [Path(name) for name in names if os.path.isfile(name)]
        found = list({(path.parent.resolve(), path.name): path for path in files}.values())
        root = Path(os.path.commonpath([path.parent for path in found]) if found else ".")
    else:
        raise BadInput(f'the text {text!r} does not exist; name a file, a folder, a glob or "stdlib"')
    if not found:
        raise BadInput(f'the text {text!r} names no files; name others, or use "stdlib" for Python\'s own')
    return root, sorted(found)


def _walk(root: Path, skipped: set[str]) -> Iterator[Path]:
    """Yield the regular files below ``root``, without hidden files, ``skipped`` folders and runs.

    Runs are left out because a run that trains on its own folder must find the same text when it resumes.
    """
    for folder, subfolders, names in os.walk(root):
        if "events.jsonl" in names or {"commits", "timelines"} <= set(subfolders):
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        if links := [path for name in subfolders if os.path.islink(path := os.path.join(folder, name))]:
            warnings.warn(
                f"{links[0]} is a link to a folder, which is not read. A glob reads it:"
                f" {os.path.join(glob.escape(str(root)), '**', '*')}",
                stacklevel=4,
            )
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _read_from(path: Path, offset: int, length: int) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.pread(file, length, offset)
    finally:
        os.close(file)
    if len(found) != length:
        raise DiskFailed(
            f"{path} gave {len(found)} of {length} bytes at offset {offset}: the file became shorter while "
            "training. Put the text back as it was and run the same command again."
        )
    return found
