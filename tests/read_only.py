"""A file system that becomes read-only under a process, as after an error of its device: calls that would change it
fail as the kernel fails them, also on files that are open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.store import disk


def make_read_only(root: Path, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From here on nothing below ``root`` can be changed. ``put`` sets attributes, as ``monkeypatch.setattr`` does."""
    top = os.path.realpath(root)

    def refusing(
        real: Callable, where: Callable[..., Any], writes: Callable[..., bool] = lambda *_: True
    ) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if writes(*args) and os.path.realpath(where(args[0])).startswith(top):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(*args, **kwargs)

        return call

    def opened(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    for name in ("pwritev", "write", "ftruncate", "posix_fallocate", "fsync", "fdatasync"):
        put(os, name, refusing(getattr(os, name), opened))
    for name in ("replace", "unlink", "mkdir", "truncate"):
        put(os, name, refusing(getattr(os, name), os.fspath))
    put(
        os,
        "open",
        refusing(
            os.open, os.fspath, lambda _, flags, *__: bool(flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT))
        ),
    )
    put(Path, "write_bytes", refusing(Path.write_bytes, os.fspath))
    put(disk, "_data_sync", os.fdatasync)
