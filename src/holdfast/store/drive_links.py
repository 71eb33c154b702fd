"""The directories on other disks in which a run keeps some of its generation files and of its log.

The run names each drive by a link, ``data/drive_1``, so that a file there has a path below the run like any other. Code
that reads, verifies, converts or removes files follows the link and knows of no drives. A file in the drive's own
directory names the run that owns it. The invariant: nothing is written through a link to a directory that does not name
this run. Its disk may not be mounted, and a copy of the run has the same links. Rates are bytes per second.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

from holdfast.errors import BadInput, DiskFailed, ManifestCorrupt, RunLocked, RunMismatch
from holdfast.regular_files import home_path, load_json, read_regular
from holdfast.store.disk import TEMPORARY, AnyDisk, Disk, alone_in, write_durably
from holdfast.store.format.manifest import FOLDER, FORMAT, HOME, VERSION, reading, seal, unseal
from holdfast.store.path_checks import check_place

OWNER = "holdfast-drive.json"
"""The file in a drive's directory that names its owner."""
MOST_OWNER_BYTES = 1 << 20
RECORD = "drives.json"
"""The file in the run that records the measured rate of each drive and its share of the state."""
MARK = "holdfast-"
"""Prefix of the empty files by which ranks check for a moment that they see the same drive."""
_GENERATION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.(0|[1-9]\d*)\.safetensors")
_NO_FILES = (OWNER, OWNER + TEMPORARY, "lost+found")


@dataclass(frozen=True)
class Drive:
    """One drive of a run.

    ``folder`` names it within the run, ``directory`` is its own place. The first of several drives is the run's own.
    """

    folder: str
    directory: str
    bytes_per_second: int
    share: float
    """Fraction of the state."""


def folders(disk: AnyDisk) -> list[str]:
    """Return the directories of generation files: the run's own and those of its drives, present or not."""
    names = [name for name in disk.listdir(HOME) if re.fullmatch(FOLDER, name)]
    return [HOME, *(f"{HOME}/{name}" for name in sorted(names, key=lambda name: (len(name), name)))]


def own_folders(disk: AnyDisk) -> list[str]:
    """Return the directories of the run's drives that are there and name this run, other than its own."""
    return [
        folder
        for folder in folders(disk)[1:]
        if (directory := disk.link_of(folder)) is None or _problem(disk.root, folder, directory) is None
    ]


def data_paths(disk: AnyDisk) -> list[str]:
    """Return the paths of all files in these directories."""
    there = folders(disk)
    found = [f"{folder}/{name}" for folder in there for name in disk.listdir(folder) if name != OWNER]
    return [path for path in found if path not in there]


def refuse_no_list(drives: object) -> None:
    """Raise ``BadInput`` unless ``drives`` is a list of directories."""
    if isinstance(drives, (str, Path)):
        raise BadInput(f"drives = {drives!r} is one directory; give a list of them")
    if not (isinstance(drives, (list, tuple)) and all(isinstance(each, (str, Path)) for each in drives)):
        raise BadInput(f"drives = {drives!r} is not a list of directories")


def directories_for(disk: AnyDisk, drives: Sequence[str | Path]) -> dict[str, str]:
    """Return the directory of each of ``drives`` by the folder that names (or will name) it in the run.

    Writes nothing. Raises ``BadInput`` for a drive that cannot be used, ``RunMismatch`` for one that belongs to
    another run.
    """
    root, known = disk.root, {disk.link_of(folder): folder for folder in folders(disk)[1:]}
    free = (f"{HOME}/drive_{number}" for number in count(1))
    free = (folder for folder in free if not os.path.lexists(root / folder))
    found: dict[str, str] = {}
    for drive in drives:
        check_place(drive)
        directory = os.path.realpath(home_path(drive))
        for other in (str(root), os.path.realpath(root / HOME), *found.values()):
            if _within(directory, other) or _within(other, directory):
                raise BadInput(
                    f"drive {drive} and {other} are one directory, or lie one in the other. Give each drive a directory"
                    " of its own, outside of the run's."
                )
        found[known.get(directory) or next(free)] = directory
    for folder, directory in found.items():
        _refuse_strange(disk, folder, directory)
    return found


def refuse_lost(disk: AnyDisk, named: Iterable[str]) -> None:
    """Raise ``RunMismatch`` if a drive with files of commits (``named``) is unusable.

    It may be absent, belong to another run, or have lost its link.
    """
    needed = {path.rpartition("/")[0] for path in named}
    for folder in sorted(needed.difference(folders(disk))):
        raise RunMismatch(
            f"{disk.root} has files of its commits in {folder}, which is not there: turn a link of this name to the"
            " directory of the drive."
        )
    for folder in folders(disk)[1:]:
        directory = disk.link_of(folder)
        if directory is None or folder not in needed:
            continue
        problem = _problem(disk.root, folder, directory)
        if problem is not None:
            raise RunMismatch(f"{disk.root} has files of its commits on the drive {directory}, {problem}")


def lost_drive(disk: AnyDisk, path: str) -> str:
    """Return a text for a message if the file at ``path`` is on a drive that is absent, else ""."""
    folder = path.rpartition("/")[0]
    directory = disk.link_of(folder) if folder != HOME else None
    return "" if directory is None or os.path.isdir(directory) else f": its drive {directory} is not there"


def take(disk: AnyDisk, drives: Sequence[Drive], named: Collection[str]) -> list[str]:
    """Make ``drives`` the drives of the run, durably, and return the folders that are new.

    The first drive is the run's own. A former drive is removed with its files when none of them is ``named`` by a
    commit.
    """
    wanted = {drive.folder: drive.directory for drive in drives[1:]}
    made = [folder for folder, directory in wanted.items() if disk.link_of(folder) != directory]
    for folder, directory in wanted.items():
        _refuse_strange(disk, folder, directory)
    taken: list[str] = []
    try:
        for folder, directory in sorted(
            wanted.items(), key=lambda item: item[1]
        ):  # one run gets all that two want
            _own(disk, folder, directory)
            if folder in made:
                disk.link(folder, directory)
                taken.append(folder)
    except (RunMismatch, RunLocked):
        leave(disk, taken)
        raise
    if made:
        disk.sync_dir(HOME, why="drives")
    if drives and record_of(disk) != tuple(drives):
        table = {"format": FORMAT, "version": VERSION, "drives": [asdict(drive) for drive in drives]}
        write_durably(disk, RECORD, seal(table), why="drives")
    if not drives:
        disk.unlink(RECORD)
    needed = {path.rpartition("/")[0] for path in named}
    leave(disk, [f for f in folders(disk)[1:] if f not in wanted and f not in needed])
    return made


def _own(disk: AnyDisk, folder: str, directory: str) -> None:
    """Record durably in ``directory`` that it is ``folder`` of this run.

    Only one of several runs gets the directory. Raises ``RunMismatch`` or ``RunLocked`` in the others.
    """
    owner = {"format": FORMAT, "version": VERSION, "run": str(disk.root), "folder": folder}
    own = Disk(directory)
    try:
        with alone_in(own):
            _refuse_strange(disk, folder, directory)
            for name in filter(partial(_is_mark, directory), own.listdir("")):
                own.unlink(name)
            if _owner(directory) != owner:
                write_durably(own, OWNER, json.dumps(owner).encode() + b"\n", why="drive")
    except RunLocked:
        raise RunLocked(
            f"{directory} is being made a drive of another run in this moment. Give {disk.root} a directory of its own"
            " there."
        ) from None


def leave(disk: AnyDisk, gone: Sequence[str]) -> None:
    """Remove the links and files of the drives ``gone``, of which no commit needs a file."""
    for folder in gone:
        directory = disk.link_of(folder)
        if directory is None:
            continue
        if _problem(disk.root, folder, directory) is None:
            with unneeded(disk, folder):
                for name in filter(_GENERATION.fullmatch, disk.listdir(folder)):
                    disk.unlink(f"{folder}/{name}")
                disk.unlink(f"{folder}/{OWNER}")
                disk.sync_dir(folder, why="drives")
        disk.unlink(folder)
    if gone:
        disk.sync_dir(HOME, why="drives")


@contextmanager
def unneeded(disk: AnyDisk, folder: str) -> Iterator[None]:
    """Tolerate failures inside the block, if ``folder`` is on a drive and no commit needs a file of it.

    A warning names the failure, and the files stay.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, DiskFailed, BadInput) as error:
        if folder == HOME:
            raise
        cause = error.__cause__ or error
        warnings.warn(
            f"the drive {disk.link_of(folder)} fails ({getattr(cause, 'strerror', None) or cause}). No commit of"
            f" {disk.root} needs a file there, so the run goes on, and leaves what is there.",
            stacklevel=4,
        )


def record_of(disk: AnyDisk) -> tuple[Drive, ...]:
    """Return the drives as last recorded, the run's own first; none without a readable record."""
    with suppress(FileNotFoundError, ManifestCorrupt, RunLocked, RunMismatch):
        table = unseal(disk.read_bytes(RECORD), RECORD)
        with reading(RECORD):
            drives = tuple(Drive(**item) for item in table["drives"])
            numbers = [(int(drive.bytes_per_second), float(drive.share)) for drive in drives]
        if all(rate > 0 and 0.0 <= share <= 1.0 for rate, share in numbers):
            return drives
    return ()


# -- helpers ----------------------------------------------------------------------------------------


def _within(path: str, other: str) -> bool:
    return Path(path).is_relative_to(other)


def _owner(directory: str) -> dict:
    """Return the owner that the directory names."""
    with suppress(OSError, ValueError, ManifestCorrupt):
        found = load_json(read_regular(Path(directory) / OWNER, MOST_OWNER_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


def _problem(root: Path, folder: str, directory: str) -> str | None:
    """Return why nothing may be written through the link ``folder`` to ``directory``, and the way out."""
    if not os.path.isdir(directory):
        return (
            "which is not there. Mount its disk; if that is elsewhere now, turn the link"
            f" {root / folder} to where it is."
        )
    if not _owner(directory):
        return (
            f"which does not say whose it is: {OWNER} is not in it. Is its disk mounted? Otherwise put back what was"
            " there."
        )
    if swapped := _swapped(root, folder, directory):
        return swapped
    other = _other_owner(root, directory)
    if _used_by(other, directory):
        return (
            f"which is a drive of the run {other}; this one is a copy of it. Remove the copy, or take it"
            f" again with the files themselves (`cp -rL {other} ...`), which needs no drives."
        )
    return None


def _swapped(root: Path, folder: str, directory: str) -> str:
    """Return what is wrong if ``directory`` says that it is another folder of this run, else ""."""
    named = _owner(directory).get("folder", folder)
    if named == folder or _other_owner(root, directory):
        return ""
    return f"which says that it is {named} of this run: mount the disks of its drives as they were, or turn the links."


def _is_mark(directory: str, name: str) -> bool:
    """Return whether the file is a mark by which ranks compared drives, left by a kill."""
    path = Path(directory) / name
    return name.startswith(MARK) and path.is_file() and not path.stat().st_size


def _other_owner(root: Path, directory: str) -> str:
    """Return the other run that owns ``directory``, or "" if none does."""
    other = str(_owner(directory).get("run", ""))
    with suppress(OSError):
        if os.path.samefile(other, root):
            return ""
    return "" if not other or os.path.realpath(other) == str(root) else other


def _used_by(other: str, directory: str) -> bool:
    """Return whether the run ``other`` still uses ``directory`` as a drive, so it has not been moved."""
    name = str(_owner(directory).get("folder", ""))
    link = os.path.join(other, name)
    return bool(other) and os.path.islink(link) and os.path.realpath(link) == directory


def _refuse_strange(disk: AnyDisk, folder: str, directory: str) -> None:
    """Raise ``RunMismatch`` if the content of ``directory`` is not this run's."""
    other, linked = _other_owner(disk.root, directory), disk.link_of(folder) == directory
    if other and (not linked or _used_by(other, directory)):
        raise RunMismatch(
            f"{directory} is a drive of another run, {other}. Give this one a directory of its own there; if that run"
            " is gone for good, remove what it has left."
        )
    if linked and (swapped := _swapped(disk.root, folder, directory)):
        raise RunMismatch(f"{folder} of {disk.root} leads to {directory}, {swapped}")
    if linked or not os.path.isdir(directory):
        return
    names = [n for n in os.listdir(directory) if n not in _NO_FILES and not _is_mark(directory, n)]
    if names:
        raise RunMismatch(
            f"{directory} cannot be made a drive of {disk.root}: it has {len(names)} files in it, such as {min(names)},"
            " which may be those of a run whose own disk is not mounted. Give an empty directory, or one that is not"
            " there yet."
        )
