"""Housekeeping: what a new writer puts in order before it begins.

Only what is known to be ours by name is touched; anything else in the directory belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import Damaged
from holdfast.store.files import TEMPORARY, AnyDisk, write_durably
from holdfast.store.manifest import Timeline, is_ours


def sweep(disk: AnyDisk) -> None:
    """Remove what an earlier process left half-made: our temporary files and our scratch."""
    for directory in ("commits", "index", "timelines"):
        for name in disk.listdir(directory):
            if name.endswith(TEMPORARY) and is_ours(directory, name.removesuffix(TEMPORARY)):
                disk.unlink(f"{directory}/{name}")
    for name in disk.listdir("scratch"):
        if name.endswith(".bin"):
            disk.unlink(f"scratch/{name}")


def restore(disk: AnyDisk, timelines: Mapping[int, Timeline], damaged: Iterable[Damaged]) -> None:
    """Write anew the timeline records that are damaged and that manifests say as well."""
    lost = {error.path for error in damaged}
    for record in timelines.values():
        if record.path in lost:
            write_durably(disk, record.path, record.encode(), why="timeline")
