"""A job in a process of its own that is killed again and again until it comes to its end, and what that took.

The process is forked from this one, which has torch loaded and one thread, so that a restart costs little, and the same
for all arms. It is killed as ``kill -9`` does: what is in /dev/shm stays. A step is *lost* when it was done and did not
come back, *redone* when it was done again. Seconds.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what an optimizer imports at its first step
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
import xxhash
from arms import ARMS, Holdfast
from snapshots import take_apart
from trainings import TRAININGS

NEVER = (math.inf,)
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Job:
    """``steps`` of ``model`` under the arm ``name``, kept in ``folder``."""

    name: str
    folder: Path
    steps: int
    model: str
    every: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """Of the arm."""
    told: Path | None = None
    """Where what the arm's tuner has measured is left, with the limits it keeps to."""


@dataclass
class Outcome:
    """Of a job that was run to its end, or given up."""

    seconds: float = 0.0
    failures: int = 0
    lost_steps: int = 0
    redone_steps: int = 0
    restart_seconds: float = 0.0
    """From a kill until training goes on, over all of them."""
    ready_seconds: float = 0.0
    """Until training began, of the last process."""
    step_seconds: float = 0.0
    """The mean, of the last process."""
    finished: bool = False
    digest: int = 0


class Board:
    """Memory that a process and the one that kills it share: what it did last survives it."""

    NAMES = ("resumed", "ready", "done", "digest", "finished", "step")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(self.NAMES))

    def put(self, **values: int) -> None:
        for name, value in values.items():
            struct.pack_into("<Q", self._memory, 8 * self.NAMES.index(name), value)

    def __getitem__(self, name: str) -> int:
        return struct.unpack_from("<Q", self._memory, 8 * self.NAMES.index(name))[0]


def run(job: Job, gaps: Iterable[float] = NEVER, limit: float = math.inf) -> Outcome:
    """The job, killed ``gaps`` seconds after one another; given up at a kill after ``limit`` seconds."""
    outcome, reached, executed = Outcome(), 0, 0
    started = time.monotonic()
    for gap in gaps:
        board, born = Board(), time.monotonic()
        killed = _wait(_fork(board, job), gap)
        resumed = board["resumed"] - 1  # 0 is that it did not get so far
        if outcome.failures:
            outcome.restart_seconds += board["ready"] / 1e6 if resumed >= 0 else time.monotonic() - born
        if resumed >= 0:
            outcome.lost_steps += reached - resumed
            executed += board["done"] - resumed
            reached = board["done"]
        if not killed:
            outcome.finished = bool(board["finished"])
            outcome.ready_seconds, outcome.step_seconds = board["ready"] / 1e6, board["step"] / 1e6
            outcome.digest = board["digest"]
            break
        outcome.failures += 1
        if time.monotonic() - started > limit:
            break
    outcome.seconds = time.monotonic() - started
    outcome.redone_steps = executed - reached
    return outcome


def kills(mean: float, repeat: int) -> Iterator[float]:
    """Seconds from one kill to the next, ``mean`` on the average, of an exponential distribution. The numbers behind
    them lie evenly, so that a few of them stand for many.

    >>> gaps = kills(1.0, 0)
    >>> [round(next(gaps), 2) for _ in range(5)]
    [0.69, 0.13, 1.33, 0.44, 3.58]
    """
    number = (0.5 + repeat * math.sqrt(2)) % 1
    while True:
        yield -mean * math.log1p(-number)
        number = (number + GOLDEN) % 1


def on_one_thread() -> None:
    """Begin anew without the threads that NumPy and torch make at their import: a fork takes none of them with it."""
    asked = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if not asked.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **asked})


# -- helpers ----------------------------------------------------------------------------------------


def _fork(board: Board, job: Job) -> int:
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes one thread with it"
    born = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _work(board, job, born)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(not board["finished"])
    return child


def _work(board: Board, job: Job, born: float) -> None:
    torch.set_num_threads(1)
    training = TRAININGS[job.model]()
    arm = ARMS[job.name](job.folder, training, every=job.every, **job.options)
    done = arm.resume()
    board.put(done=done, ready=round(1e6 * (time.monotonic() - born)))
    board.put(resumed=done + 1)
    begun = time.perf_counter()
    for step in range(done, job.steps):
        training.step()
        arm.step()
        board.put(done=step + 1)
    board.put(step=round(1e6 * (time.perf_counter() - begun) / max(1, job.steps - done)))
    if job.told is not None and isinstance(arm, Holdfast):
        job.told.write_bytes(pickle.dumps(arm.tuned))
    arm.close()
    board.put(digest=_digest(training.state()), finished=1)


def _digest(state: dict[str, Any]) -> int:
    hashed = xxhash.xxh3_64()
    for name, tensor in take_apart(state)[0].items():
        hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return hashed.intdigest()


def _wait(child: int, seconds: float) -> bool:
    """Until the process has ended, or ``seconds`` are over: then it is killed. Whether it was."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            assert status == 0, f"the job failed with status {status}"
            return False
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            return os.WIFSIGNALED(os.waitpid(child, 0)[1])
        time.sleep(0.001)
