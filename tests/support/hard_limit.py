"""Memory that the system does not let processes exceed."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path

GROUP = Path("/sys/fs/cgroup/memory")


@contextmanager
def hard_limit(nbytes):
    """A cgroup of ``nbytes``, or the reason why there is none."""
    group = GROUP / f"holdfast-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        yield None, f"no cgroup to be had ({error}), so the peak is looked at instead"
        return
    try:
        yield group, ""
    finally:
        group.rmdir()
