"""The copies of weights that a run keeps for good: their names, and the space that they take.

A copy is one file of safetensors, ``weights/step-000000001000.t0001.safetensors``, named by the step and the timeline
in which it was made. No commit needs it, and it needs nothing. Called by the writer of commits and by
``saved_weights``. Sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from holdfast.store.commit.retention import WEIGHTS, ancestry
from holdfast.store.disk import TEMPORARY, AnyDisk
from holdfast.store.format.manifest import CommitRef, Timeline

_NAME = re.compile(r"step-(\d{12,})\.t(\d{4,})\.safetensors")


def copy_path(ref: CommitRef) -> str:
    """Return the place of the copy of a step.

    >>> copy_path(CommitRef(1, 1000))
    'weights/step-000000001000.t0001.safetensors'
    """
    return f"{WEIGHTS}/step-{ref.step:012d}.t{ref.timeline:04d}.safetensors"


def copies_in(disk: AnyDisk) -> list[CommitRef]:
    """Return the steps with a copy of the weights, oldest first."""
    matches = (_NAME.fullmatch(name) for name in disk.listdir(WEIGHTS))
    found = [CommitRef(int(match[2]), int(match[1])) for match in matches if match]
    return sorted(found, key=lambda ref: (ref.step, ref.timeline))


def is_on_line(ref: CommitRef, timelines: Mapping[int, Timeline], tip: int) -> bool:
    """Return whether the step of a copy led to the newest step of the timeline ``tip``."""
    return any(
        ref.timeline == timeline and (limit is None or ref.step <= limit)
        for timeline, limit in ancestry(timelines, tip)
    )


def copies_bytes(disk: AnyDisk) -> int:
    """Return the bytes of all copies."""
    total = 0
    for ref in copies_in(disk):
        with suppress(FileNotFoundError):
            total += disk.size(copy_path(ref))
    return total


def remove_unfinished(disk: AnyDisk) -> None:
    """Remove what a killed process left of a copy in the making."""
    for name in disk.listdir(WEIGHTS):
        if name.endswith(TEMPORARY) and _NAME.fullmatch(name.removesuffix(TEMPORARY)):
            disk.unlink(f"{WEIGHTS}/{name}")
