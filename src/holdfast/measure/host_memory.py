"""The host memory that is really free, in bytes.

What the system calls free leaves out files in the page cache, which it gives up on demand, and ignores the limit of a
container. Both are counted here. Called before memory budgets are chosen.
"""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""The files of limits and usage, of cgroup v2 and v1, as a container sees them."""
CACHED = ("inactive_file ", "active_file ")
"""The statistics of memory that a group returns on demand: files in the page cache."""


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the host memory that is available without swapping, within the container's limit."""
    left = [_left(cgroup / limit, cgroup / used) for limit, used in GROUPS]
    return max(min([_available(proc / "meminfo"), *(count for count in left if count is not None)]), 0)


def _available(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left(limit: Path, used: Path) -> int | None:
    allowed = _number(limit)
    return None if allowed is None else allowed - (_number(used) or 0) + _cached(limit.parent / "memory.stat")


def _cached(stat: Path) -> int:
    try:
        lines = stat.read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(CACHED))
    except (OSError, ValueError, IndexError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
