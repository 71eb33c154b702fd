"""The thread counts of torch, for threads that work beside the model's computations.

A thread of I/O or updates that computed with all cores would take them from the model. So such threads compute alone,
or beside a separate device with the cores that are idle there. The count of the calling thread stays as the script set
it. Called by the engine, measurements and replays.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

RESERVED_CORES = 4
"""Cores beside a separate device that are left to the threads that start its work, copy and write."""
LOOK_SECONDS = 0.5
"""The kernel counts in ticks of 10 ms; over less time a few of them would decide."""
BUSY_SHARE, IDLE_SHARE = 0.25, 0.1
"""Cores used by other processes from which OpenMP's threads spin briefly, and below which they spin long."""
_setting = threading.Lock()


def update_threads(unified: bool, workers: int) -> int:
    """Return how many of torch's threads each of the ``workers`` of updates uses in a fused kernel; at least 1.

    Where the model computes in host memory (``unified``) it needs the cores. Beside a separate device they are idle: on
    an H200 with 16 cores two workers of one thread took 2.7 s for 1.3 billion parameters, of a step of 3.6 s.
    """
    return 1 if unified else max(1, (torch.get_num_threads() - RESERVED_CORES) // workers)


def keep_torch_threads() -> None:
    """Keep torch's thread count for the calling thread, whatever its worker threads set for themselves.

    Without this call, a thread that asks torch for the first time while another sets its count would keep 1. Roots and
    similar functions go through MKL, which chooses its code at the first call. While another thread sets its count, MKL
    may choose code of 12 bits (torch 2.13), and no replay would reproduce the bits of that step. So this function calls
    them beforehand.
    """
    with _setting:
        torch.get_num_threads()
        for dtype in (torch.float32, torch.float64):
            for function in (torch.sqrt, torch.exp, torch.log, torch.tanh):
                function(torch.ones(1, dtype=dtype, device="cpu"))


def set_torch_threads(count: int) -> None:
    """Set torch's thread count, never at the same time as ``limit_torch_threads`` in another thread."""
    with _setting:
        torch.set_num_threads(count)


def one_torch_thread() -> None:
    """Limit torch to this thread alone; other threads, and later ones, are unaffected."""
    limit_torch_threads(1)


def limit_torch_threads(count: int) -> None:
    """Limit torch's parallel loops of the calling thread to ``count`` threads; other threads are unaffected.

    Whoever starts such threads calls ``keep_torch_threads`` first. libgomp keeps helpers for every thread that has
    computed with several. With more helpers than cores, it lets all of them sleep at the end of every parallel loop,
    the model's loops included.
    """
    with _setting:
        before = torch.get_num_threads()
        torch.set_num_threads(count)  # this also changes the count of threads that have not computed yet
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


class SpinRule:
    """Rule for OpenMP's threads at the end of a parallel loop: spin long on idle cores, briefly beside other processes.

    At the end of a loop torch's threads wait for the slowest by spinning, for about 300,000 rounds. On idle cores that
    is fastest; elsewhere they hold cores that other processes need. With more threads than cores libgomp spins for
    1,000 rounds. So while they are to spin briefly there is one thread more, which has computed once with two, so that
    libgomp keeps a helper for it, and which waits.

    Nothing is changed if torch computes with one thread, or if OMP_WAIT_POLICY or GOMP_SPINCOUNT say how long to spin.
    Where the use of the CPUs cannot be read, they spin briefly.
    """

    def __init__(self) -> None:
        self._chosen = bool({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys())
        self._spare: Lane | None = None
        self._seen: CpuTimes | None = None

    def choose(self) -> None:
        """Choose anew by what other processes computed since the last choice; called at the beginning of a step."""
        if self._chosen or torch.get_num_threads() == 1:
            return
        before = self._seen
        if before is not None and time.monotonic() - before.at < LOOK_SECONDS:
            return
        self._seen = now = cpu_times()
        share = inf if before is None or now is None else now.of_others_since(before)
        if share > BUSY_SHARE:
            self._spin_briefly(True)
        elif share < IDLE_SHARE:
            self._spin_briefly(False)

    def _spin_briefly(self, briefly: bool) -> None:
        if not briefly:
            self.close()
        elif self._spare is None:
            self._spare = Lane(1, "holdfast-spare", _compute_with_two)

    def close(self) -> None:
        """Let them spin as long as libgomp's default says."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()


def _compute_with_two() -> None:
    limit_torch_threads(2)
    torch.zeros(1 << 17, device="cpu").add_(1)  # long enough for torch to share it out


@dataclass(frozen=True)
class CpuTimes:
    """Seconds computed on the CPUs that this process may use."""

    at: float
    """Seconds of the monotonic clock at which they were read."""
    by_all: float
    by_this_process: float

    def of_others_since(self, before: CpuTimes) -> float:
        """Return how many cores other processes used on average since ``before``."""
        own = self.by_this_process - before.by_this_process
        return (self.by_all - before.by_all - own) / (self.at - before.at)


def cpu_times() -> CpuTimes | None:
    """Return the seconds computed so far; None where the system does not tell them for each CPU.

    Linux does, but some containers show other CPUs, or none that computes.
    """
    try:
        allowed = {f"cpu{index}" for index in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text().splitlines()
        ticks_per_second = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None
    ticks = 0
    for line in lines:
        name, *counts = line.split()
        if name in allowed:
            user, nice, system, _idle, _wait, interrupts, soft_interrupts = map(int, counts[:7])
            ticks += user + nice + system + interrupts + soft_interrupts
    if not ticks:
        return None
    return CpuTimes(time.monotonic(), ticks / ticks_per_second, time.process_time())


class Lane:
    """Threads that run the functions put to them, in order.

    A standard library pool would start its threads late and wait on locks in Python; an interrupt can break off both
    half way. It also takes no more work once the interpreter ends, when an engine that nobody closed finishes its last
    step.
    """

    def __init__(self, workers: int, name: str, prepare: Callable[[], object] = lambda: None) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.put = self._todo.put
        self._threads = [
            threading.Thread(target=self._work, args=(prepare,), name=f"{name}-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads once everything that was put is done."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, prepare: Callable[[], object]) -> None:
        prepare()
        while (do := self._todo.get()) is not None:
            do()
            del do


def shared_out(lane: Lane, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Return the results of ``function`` on the threads of ``lane``, in the order of ``items``.

    Raises the first error once all are done.
    """
    futures = []
    for item in items:
        futures.append(future := Future[Any]())
        lane.put(partial(_complete, future, function, item))
    wait(futures)
    return [future.result() for future in futures]


def _complete(future: Future[Any], function: Callable[[Any], Any], item: Any) -> None:
    try:
        future.set_result(function(item))
    except BaseException as error:
        future.set_exception(error)
