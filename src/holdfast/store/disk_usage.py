"""The disk space that a run takes, and the segments of its logs that nobody needs. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from holdfast.store.disk import AnyDisk
from holdfast.store.drive_links import data_paths
from holdfast.store.format.manifest import CommitRef, Manifest
from holdfast.store.log.segments import steps_of_segments, streams

SMALL = ("index", "commits", "timelines")
"""The directories of small files."""


def used_bytes(
    disk: AnyDisk, is_mine: Callable[[str], bool] = lambda unit: True, small: Collection[str] | None = None
) -> int:
    """Return the bytes of all files of a run, reserved space included, but for the log of events.

    For one of several ranks, count only its units and logs (by ``is_mine``) and the files in ``small``; None counts
    all small files.
    """
    paths = [path for path in data_paths(disk) if is_mine(path.rpartition("/")[2])]
    for stream in streams(disk):
        if is_mine(f"{stream}."):
            paths += [f"journal/{stream}/{name}" for name in disk.listdir(f"journal/{stream}")]
    if small is None:
        small = [f"{folder}/{name}" for folder in SMALL for name in disk.listdir(folder)]
    total = 0
    for path in (*paths, *small):
        with suppress(FileNotFoundError):
            total += disk.size(path)
    return total


Need = tuple[int, int | None]
"""The step after which a commit needs log records, and the last step that it needs (None: all since)."""


def needs(manifests: Collection[Manifest | None], alone: Collection[CommitRef]) -> list[Need]:
    """Return the log records that each commit needs.

    A commit in ``alone`` needs the records of its own steps only; any other also needs the later ones.
    """
    return [
        (manifest.oldest_step, manifest.step if manifest.ref in alone else None)
        for manifest in manifests
        if manifest is not None
    ]


def unneeded_segments(disk: AnyDisk, needed: Collection[Need], timeline: int | None) -> Iterator[str]:
    """Yield the segments without a record that is ``needed``, oldest first.

    The segment that ``timeline`` appends to is left out.
    """
    for stream in streams(disk):
        found = steps_of_segments(disk, stream)
        appended_to = max((ref for ref, _ in found if ref.timeline == timeline), default=None)
        for ref, last in found:
            used = any(
                last > oldest and (newest is None or ref.first_step <= newest) for oldest, newest in needed
            )
            if not used and ref != appended_to:
                yield ref.path
