"""What this machine has: host memory that may be used, and the device to compute on. Bytes."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError

CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of cgroup v2 and v1, as a container sees them."""


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that can be taken without swapping, or the container's limit if that is less."""
    limits = [_limit(cgroup / name) for name in CGROUP_LIMITS]
    return min([_available(proc / "meminfo"), *(limit for limit in limits if limit is not None)])


def choose_device(wanted: str) -> str:
    """``wanted`` if this machine has it, or for "auto" CUDA where there is one. Raises ``ConfigError``."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "cuda" if count else "cpu"
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{number}" for number in range(count))]
    if wanted not in known:
        raise ConfigError(
            f"offload.device = {wanted!r}: this machine has {', '.join(known)}; --set offload.device=cpu"
        )
    return wanted


def _available(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
