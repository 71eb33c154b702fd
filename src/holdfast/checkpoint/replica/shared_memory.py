"""The shared-memory store of a replica: a whole state in ``/dev/shm``, in the format of a run directory.

The store of a run is a directory that survives the processes, but not the machine. A file in it names the owner, by two
marks:

- the key of the run, which the run's timelines have;
- the run's directory, by device and inode. A rename, a link, a bind mount or a container's mount leave these as they
  are.

So a run that was moved finds its store. A copy of a run has the same key, and does not take the store of the original.
A new run in a directory with the inode of a removed one has another key, and does not take that store either.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from ...errors import BadInput, Damaged, HoldfastError
from ...io.queue import IOQueue
from ...io.threads import open_file
from ...regular_files import load_json, read_regular
from ...state.live_state import LiveState
from ...store.disk import Disk
from ...store.format.manifest import ALONE
from ...store.log.journal import Record
from ...store.reader import RunReader
from ...store.run_store import LocalStore
from ..log.recorder import InlineRecorder
from ..snapshot.snapshot_writer import SnapshotWriter

MEMORY = Path("/dev/shm")

OWNER = "run.json"
"""The file in the store that names the owner."""

MOST_OWNER_BYTES = 1 << 16

FOLDERS = ("state", "sync")
"""The folders of kept states in the store."""


class MemoryDisk(Disk):
    """A directory in memory, where space is taken only when it is written."""

    def allocate(self, path: str, nbytes: int) -> None:
        with open_file(self.root / path, write=True, create=True, direct=False) as file:
            os.ftruncate(file.fd, nbytes)


@dataclass(frozen=True)
class Owner:
    """The owner of a store: the key of the run, and the run's directory by path, device and inode."""

    run: str
    device: int
    inode: int
    key: str = ""

    def is_at(self, path: str | Path) -> bool:
        """Return whether the directory is at ``path`` now."""
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)

    def is_run(self, path: str | Path, key: str) -> bool:
        """Return whether the owner is the run with ``key`` ("": not begun yet) in the directory at ``path``.

        An owner written before its run began has no key, and is known by the directory alone.
        """
        return self.is_at(path) and self.key in ("", key)


def say_owner(place: Path, run: str | Path, key: str) -> None:
    """Write into the store that it belongs to the run in directory ``run``, with ``key`` ("": none yet).

    Does nothing if the directory does not exist: a rank that sees another directory is refused later.
    """
    try:
        found = os.stat(run)
    except FileNotFoundError:
        return
    owner, disk = Owner(os.path.realpath(run), found.st_dev, found.st_ino, key), Disk(place)
    disk.write_bytes(f"{OWNER}.tmp", json.dumps(asdict(owner)).encode())
    disk.rename(f"{OWNER}.tmp", OWNER)


def owner_of(place: Path) -> Owner | None:
    """Return the owner of the store; None where it cannot be read, as in a store of an earlier version."""
    try:
        owner = Owner(**load_json(read_regular(place / OWNER, MOST_OWNER_BYTES)))
    except (OSError, Damaged, ValueError, TypeError):
        return None
    told = isinstance(owner.run, str) and isinstance(owner.key, str)
    return owner if told and isinstance(owner.device, int) and isinstance(owner.inode, int) else None


def place_of(run: str | Path, memory: Path, suffix: str = "", number: int = 0) -> Path:
    """Return the path of the store for a new run in directory ``run``.

    ``number`` counts up where another run has that path. Each of several ranks has its own ``suffix``. An existing
    store is found by its owner instead.
    """
    name = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(run)) + b"\0%d" % number * bool(number))
    return memory / f"holdfast-{os.getuid()}-{name}{suffix}"


def place_for(run: str | Path, memory: Path, key: str, suffix: str = "") -> Path:
    """Return the store that the run with ``key`` has already, or a path that no other run uses."""
    own = [place for place in places_of(run, memory, key) if suffix_of(place) == suffix]
    if own:
        return max(own, key=lambda place: (any((place / name).is_dir() for name in FOLDERS), place.name))
    names = (place_of(run, memory, suffix, number) for number in count())
    return next(place for place in names if not _is_of_another(place, run, key))


def _is_of_another(place: Path, run: str | Path, key: str) -> bool:
    owner = owner_of(place)
    return owner is not None and not owner.is_run(run, key)


def places_of(run: str | Path, memory: Path, key: str) -> list[Path]:
    """Return the stores that the run in directory ``run`` has on this host, of all ranks.

    Args:
        run: The directory. Its inode may be that of another run's removed directory.
        memory: The directory that holds stores.
        key: The key of the run; "" if the run is not begun, so that no store with a key belongs to it.
    """
    name = place_of(run, memory).name

    def is_own(place: Path) -> bool:
        owner = owner_of(place)
        return place.name.partition(".")[0] == name if owner is None else owner.is_run(run, key)

    return [place for place in _tiers(memory) if is_own(place)]


def strays_of(run: str | Path, memory: Path, key: str) -> list[Path]:
    """Return the stores of a run with this ``key`` whose directory is no longer in its place.

    They belong to this run, moved to another disk, or to a run that it is a copy of. They may be read, but not removed.
    """

    def is_stray(place: Path) -> bool:
        owner = owner_of(place)
        return owner is not None and owner.key == key and not owner.is_at(run) and not _is_where_it_was(owner)

    return [place for place in _tiers(memory) if key and is_stray(place)]


def _is_where_it_was(owner: Owner) -> bool:
    """Return whether the owner's directory still holds its run, and not another run with the same inode."""
    if not owner.is_at(owner.run):
        return False
    try:
        return RunReader(owner.run).run_key() == owner.key
    except (HoldfastError, OSError):  # unreadable, so nothing says that it is another run
        return True


def suffix_of(place: Path) -> str:
    """Return the part of the store's name that says which rank it belongs to."""
    return "".join(place.name.partition(".")[1:])


def _tiers(memory: Path) -> list[Path]:
    """Return the stores of all runs of this user. Other runs may remove theirs meanwhile."""
    found = sorted(memory.glob(f"holdfast-{os.getuid()}-*"))
    return [path for path in found if _is_own_directory(path)]


def _is_own_directory(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)


def make(place: Path) -> None:
    """Make the directory of a store, for this user alone. Raises ``BadInput`` if it belongs to somebody else."""
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
    """Remove ``place`` with its content, if it exists."""
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def opened(place: Path, queue: IOQueue | None = None) -> Iterator[LocalStore]:
    """Open the store in ``place``, for reading and for ``put``. Without ``queue`` it has one of its own."""
    store = LocalStore(place, retain=1, disk=MemoryDisk(place), queue=queue, direct=False)
    try:
        yield store
    finally:
        store.close()


def put(
    place: Path, state: LiveState, step: int, progress: dict[str, Any], records: Sequence[Record] = ()
) -> None:
    """Write ``state`` at ``step`` to the new store ``place``, as a commit of its own, followed by ``records``."""
    with opened(place) as store:
        store.enter()
        store.begin(None)
        if records:
            journal = store.journal(ALONE)
            journal.append(records)
            journal.close()
        bases = SnapshotWriter(store, state, InlineRecorder())
        bases.begin()
        while not bases.all_staged:
            bases.write_next(step)
        bases.publish(progress)
