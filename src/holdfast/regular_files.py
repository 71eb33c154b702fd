"""The opening of files at paths that people give: only regular files, whatever lies there.

A FIFO in place of a file would block its reader for ever, a socket or a device could answer with anything, and a sparse
file of 200 GiB would fill the memory. So files are opened without blocking and must be regular. Small ones are read in
pieces, up to a limit and only as long as there is content. Sizes are bytes. Called by all parts of the library.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from .errors import Damaged, ManifestCorrupt

MOST_BYTES = 1 << 30
"""The limit for files that are read as a whole: manifests, indexes, timeline records, configurations."""
PIECE_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
_NO_FILE = (errno.ENXIO, errno.ENODEV, errno.EISDIR)
"""Errors of opening a socket, a device without a driver, a FIFO without a reader, or a directory for writing."""


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open the regular file at ``path`` and return its descriptor; the caller closes it.

    Raises:
        Damaged: Something other than a regular file is there.
        OSError: The system cannot open the file.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in _NO_FILE and (kind := _kind_of(os.stat(path).st_mode)):
            raise _not_regular(path, kind) from error
        raise
    if kind := _kind_of(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_regular(path, kind)
    return fd


def read_regular(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a small file.

    Raises:
        ManifestCorrupt: There is no regular file, it is longer than ``most_bytes``, or a piece of it has no content.
        OSError: The system cannot open or read the file.
    """
    try:
        fd = open_regular(path)
    except Damaged as error:
        raise ManifestCorrupt(str(error), path=error.path) from error
    with open(fd, "rb", buffering=0) as file:
        size = os.fstat(fd).st_size
        if size > most_bytes:
            raise ManifestCorrupt(
                f"{path} has {size} bytes, and none of its kind has more than {most_bytes}. {_WAY_OUT}",
                path=str(path),
                nbytes=size,
            )
        pieces = []
        while piece := file.read(PIECE_BYTES):
            if len(piece) == PIECE_BYTES and not any(piece):
                raise ManifestCorrupt(
                    f"{path} has {size} bytes, and nothing is in them. {_WAY_OUT}",
                    path=str(path),
                    nbytes=size,
                )
            pieces.append(piece)
    return b"".join(pieces)


def home_path(text: str | os.PathLike[str]) -> Path:
    """Return a path from user input, in which ``~`` is the home directory."""
    return Path(os.path.expanduser(text))


def load_json(text: str | bytes | bytearray) -> Any:
    """Return the value of the JSON ``text``. Raises ``ValueError`` if it is malformed or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


_WAY_OUT = "Put the file of a copy of the run in its place."


def _kind_of(mode: int) -> str:
    """Return a description of a file of this mode; empty for a regular one."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def _not_regular(path: str | Path, kind: str) -> Damaged:
    return Damaged(f"{path} is {kind}, and no regular file. {_WAY_OUT}", path=str(path))
