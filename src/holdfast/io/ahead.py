"""Reading ahead: files are brought into the page cache by a thread, while the process is busy with something else.

A window of a file is read into one small buffer, again and again, in one call: what is read is not wanted here, and the
interpreter is let go for the whole of a window.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..units import MiB

BUFFER, BUFFERS = 4 * MiB, 16
"""Of a window; it may be named this many times in one call."""


@contextmanager
def reading_ahead(path: Path, most_bytes: int) -> Iterator[None]:
    """While the block runs, read what lies at ``path``, the newest files first and ``most_bytes`` at most. What is not
    there, or cannot be read, is left."""
    over = threading.Event()
    thread = threading.Thread(target=_read, args=(path, most_bytes, over), name="holdfast-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _read(path: Path, most_bytes: int, over: threading.Event) -> None:
    window = [memoryview(bytearray(BUFFER))] * BUFFERS
    with suppress(OSError):
        for file in _newest_first(path):
            with suppress(OSError), open(file, "rb", 0) as opened:
                offset = 0
                while not over.is_set() and most_bytes > 0:
                    if not (count := os.preadv(opened.fileno(), window, offset)):
                        break
                    offset, most_bytes = offset + count, most_bytes - count


def _newest_first(path: Path) -> list[Path]:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
