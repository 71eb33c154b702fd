"""The memory that a process may still take.

What the system calls free leaves out files in the page cache, which it gives up on demand, and ignores the limit of a
container; ``free_host_bytes`` counts both. Called by the planning of runs and plans, ``recomputation`` and
``memory_copies``.
"""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
"""The folder of a hierarchy of groups, and the files of limit and usage in each group: cgroup v2, then v1."""
CACHED = ("inactive_file ", "active_file ")
"""The statistics of memory that a group returns on demand: files in the page cache."""


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the host memory that is available without swapping, within the limits of the process's own groups."""
    own = _own_groups(proc / "self" / "cgroup")
    left = [
        _left(group / limit, group / used)
        for hierarchy, limit, used in GROUPS
        for group in (cgroup / hierarchy / each for each in own.get(hierarchy, [""]))
    ]
    return max(min([_available(proc / "meminfo"), *(count for count in left if count is not None)]), 0)


def _own_groups(listed: Path) -> dict[str, list[str]]:
    """Return the paths of the groups that the process is in, the outermost first, by the folder of their hierarchy.

    Where a container sees its own group as the outermost, the others are not there.
    """
    found: dict[str, list[str]] = {}
    for line in listed.read_text().splitlines() if listed.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            parts = [part for part in path.split("/") if part]
            hierarchy = "memory" if controllers else ""
            found[hierarchy] = ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return found


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
