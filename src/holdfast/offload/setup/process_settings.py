"""The settings of the process that an engine needs: its memory, its OpenMP threads, and the default device.

Freed memory is kept by few heaps and returned on request, and threads that a phase of a step no longer needs are ended.
What the engine creates without naming a device belongs on the host, whatever ``torch.set_default_device`` the script
has set, so every public call runs with the host as the default device. The model's own code gets the caller's default
back (``callers_default``). Called by the engine and wherever it runs code of the model.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from ...errors import BadInput
from ...quantities import MiB

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
"""Parameter numbers of glibc's ``mallopt``."""
RETURNED_BYTES = 1 * MiB
"""Size from which freed memory returns to the system at once, where memory is short."""


def process_bytes() -> int:
    """Return the bytes of memory that this process holds now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def most_process_bytes() -> int | None:
    """Return the most bytes of memory that this process has held at once; None if the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def share_heaps() -> None:
    """Let all threads but the main one share one glibc heap.

    Otherwise each thread keeps freed memory in a heap of its own: with 16 micro-batches that kept 60 MB. One heap for
    all would cost a step up to a tenth, in waiting for its lock. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 2)


def return_freed_at_once() -> None:
    """Have freed memory of ``RETURNED_BYTES`` and more return to the system at once, for the rest of the process.

    glibc would keep blocks of up to 32 MiB for the next allocation. Then new pages are needed each time, which takes
    longer. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)


def give_back_freed() -> None:
    """Return freed memory that the allocator still keeps to the system. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def end_openmp_threads() -> None:
    """End the threads that libgomp keeps for the calling thread. Called when a thread hands over to another.

    If more of them are kept than there are cores, libgomp lets all of them sleep at the end of every parallel loop
    instead of spinning for a while. That cost 20000 wake-ups in a step of a 46 M model, and made the step a tenth
    slower. Does nothing with another OpenMP.
    """
    _pause_openmp()(1)  # omp_pause_soft


@cache
def _pause_openmp() -> Callable[[int], int]:
    with suppress(OSError, AttributeError):
        libraries = {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/libgomp" in line
        }
        if len(libraries) == 1:
            return ctypes.CDLL(libraries.pop()).omp_pause_resource_all
    return lambda kind: 0


HOST = torch.device("cpu")
_callers: ContextVar[torch.device | None] = ContextVar("holdfast_default_device", default=None)
"""The caller's default device, inside a call that has changed it."""
P = ParamSpec("P")
R = TypeVar("R")


def on_host_by_default(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap the public call ``function`` so that the host is the default device inside it."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.get_default_device()
        if before == HOST:
            return function(*args, **kwargs)
        token = _callers.set(before)
        try:
            with HOST:
                return function(*args, **kwargs)
        finally:
            _callers.reset(token)

    return called


def callers_default_device() -> torch.device:
    """Return the default device that the script has set."""
    return _callers.get() or torch.get_default_device()


@contextmanager
def callers_default() -> Iterator[None]:
    """Restore the script's own default device, for code of its model."""
    device = _callers.get()
    if device is None:
        yield
        return
    with device:
        yield


SPARE_FILES = 256
"""Files that a process has open beside those of its run."""


def allow_open_files(count: int) -> None:
    """Let the process have ``count`` files of a run open, each of which stays open.

    Raises ``BadInput`` if the system allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise BadInput(
            f"the state of this model lies in {count} files, all of which are open while the run is, and the system"
            f" allows {hard} open files (ulimit -Hn). Raise that limit to {needed} or more."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
