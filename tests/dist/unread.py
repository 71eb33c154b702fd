"""Disks that do not give back what is on them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from holdfast.store.log.chain import read_journal
from holdfast.store.run_store import LocalStore


def lose_payload(root: Path, stream: str, step: int) -> None:
    """From here on this process does not get what the record of ``step`` holds, but for its header."""
    with LocalStore.read(root) as reader:
        record = read_journal(reader, stream).records[step]
    lose(root / record.path, record.offset + record.header_bytes)


def lose(path: Path, place: int | None = None) -> None:
    """From here on this process does not get the byte at ``place`` of a file; None of it if there is no ``place``."""
    real = os.preadv

    def read(fd: int, views: Any, offset: int, *rest: Any) -> int:
        there = place is None or offset <= place < offset + sum(map(len, views))
        if there and os.readlink(f"/proc/self/fd/{fd}") == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset, *rest)

    os.preadv = read
