"""The CPUs of helper threads, which hash, compress and write beside training.

Such threads take time from the cores that train. Where the system has CPUs that no training process of the run is
confined to, each helper thread puts itself there. No other thread is touched. Called by the threads of the I/O queue
and by the recorder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress


def use_cpus(cpus: Collection[int]) -> None:
    """Confine the calling thread to ``cpus``, as far as the system allows. Without any, nothing happens."""
    if cpus:
        with suppress(OSError):  # they were taken away meanwhile
            os.sched_setaffinity(0, cpus)


def used_cpus() -> set[int]:
    """Return the CPUs that threads of this process may run on: those of all their masks."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            found |= os.sched_getaffinity(int(thread))
    return found


def allowed_cpus() -> set[int]:
    """Return the CPUs on which the system lets this process run, whatever its present mask is.

    A cpuset (of a container, or of a batch system) holds for every thread; a mask can be changed. A thread of its own
    asks for all CPUs and sees which of them it gets.
    """
    found: set[int] = set()

    def ask() -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        found.update(os.sched_getaffinity(0))

    asking = threading.Thread(target=ask, name="holdfast-cpus", daemon=True)
    asking.start()
    asking.join()
    return found
