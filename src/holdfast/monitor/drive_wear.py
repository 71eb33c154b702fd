"""Drives: what the bytes that a run writes mean for the life of its SSD."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ..quantities import format_bytes

RATED_BYTES = 600 * 10**12
"""The bytes that an SSD may be written in its life: an assumption, typical of consumer drives of 1 TB."""

SECTOR = 512
"""The unit of the system's counters, in bytes, whatever the drive's own sector is."""


@dataclass(frozen=True)
class Drive:
    """A drive of this machine, and the bytes that all processes moved since it was started."""

    name: str
    read_bytes: int
    written_bytes: int


def drive_of(path: Path, system: Path = Path("/sys")) -> Drive | None:
    """Return the drive that ``path`` is on; None if the system counts none, as on network storage."""
    try:
        device = os.stat(path).st_dev
        place = (system / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        if (place / "partition").exists():
            place = place.parent
        counters = [int(word) for word in (place / "stat").read_text().split()]
        return Drive(place.name, counters[2] * SECTOR, counters[6] * SECTOR)
    except (OSError, ValueError, IndexError):
        return None


def wear(written_bytes: int) -> str:
    """Describe what writing so many bytes means for the life of a drive.

    >>> wear(30 * 2**30)
    "30.0 GiB in all, 0.0054 % of an SSD's life if rated for 600 TB"
    """
    rated = f"{RATED_BYTES // 10**12} TB"
    share = percent(written_bytes / RATED_BYTES)
    return f"{format_bytes(written_bytes)} in all, {share} of an SSD's life if rated for {rated}"


def percent(share: float) -> str:
    """Format ``share`` with two digits, or as whole percent.

    >>> percent(0.0000537), percent(0.31)
    ('0.0054 %', '31 %')
    """
    share *= 100
    digits = max(0, 1 - math.floor(math.log10(share))) if 0 < share < 10 else 0
    precise = f"{share:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{share:.0f}"
    return f"{precise} %"
