"""Tier: where a replica keeps things in shared memory, and a whole state there in the format of any run directory.

A run's tier is a directory of its own in ``/dev/shm``, named after the run's: what is in it survives the processes,
and not the machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from ..errors import BadInput
from ..io.threads import open_file
from ..state.live import LiveState
from ..store.files import Disk
from ..store.journal import Record
from ..store.local import LocalStore
from ..store.manifest import ALONE
from .bases import BaseMaker
from .recorder import Inline

MEMORY = Path("/dev/shm")


class MemoryDisk(Disk):
    """A directory in memory: space is taken when it is written."""

    def allocate(self, path: str, nbytes: int) -> None:
        with open_file(self.root / path, write=True, create=True, direct=False) as file:
            os.ftruncate(file.fd, nbytes)


def place_of(run: str | Path, memory: Path, suffix: str = "") -> Path:
    """The tier of the run in directory ``run``; of several ranks each has its own ``suffix``."""
    name = xxhash.xxh3_64_hexdigest(os.path.realpath(run).encode())
    return memory / f"holdfast-{os.getuid()}-{name}{suffix}"


def places_of(run: str | Path, memory: Path) -> list[Path]:
    """The tiers of the run in directory ``run`` that are there, of whatever ranks left them on this host."""
    name = place_of(run, memory).name
    found = sorted(path for path in memory.glob(f"{name}*") if path.name.removeprefix(name)[:1] in ("", "."))
    return [path for path in found if os.lstat(path).st_uid == os.getuid() and not path.is_symlink()]


def make(place: Path) -> None:
    """Make the directory of a tier, for this user alone. Raises ``BadInput`` if it is somebody else's."""
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(place)
    except OSError as error:
        raise BadInput(
            f"replica: {place} cannot be made: {error.strerror}. Give replica= a directory in memory (a tmpfs)."
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or place.is_symlink():
        raise BadInput(
            f"replica: {place} is not a directory of this user alone. Remove it, or give replica= another directory in"
            " memory."
        )


def remove(place: Path) -> None:
    """Remove ``place`` and all that is in it, if it is there."""
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def opened(place: Path) -> Iterator[LocalStore]:
    """The store in ``place``, for reading and for ``put``."""
    store = LocalStore(place, retain=1, disk=MemoryDisk(place), direct=False)
    try:
        yield store
    finally:
        store.close()


def put(
    place: Path, state: LiveState, step: int, progress: dict[str, Any], records: Sequence[Record] = ()
) -> None:
    """Make ``place``, which is not there, hold ``state`` at ``step``, as a commit that stands alone, and the
    ``records`` that follow it."""
    with opened(place) as store:
        store.enter()
        store.begin(None)
        if records:
            journal = store.journal(ALONE)
            journal.append(records)
            journal.close()
        bases = BaseMaker(store, state, Inline())
        bases.begin()
        while not bases.all_staged:
            bases.write_next(step)
        bases.publish(progress)
