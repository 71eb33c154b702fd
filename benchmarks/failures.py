"""What failures cost in all: one short job, killed at random moments, to its end under each way to keep its state.

    python benchmarks/failures.py [--steps 240] [--minutes 1 3 10] [--compression 60] [--repeats 1] [--arms ...]
                                  [--folder FOLDER] [--keep] [--small]

The job is a small language model, whose step takes some 30 ms and whose state is to the step what that of a large one
is: saving it takes about half a step. Time is compressed: a mean of 3 minutes between failures is one of 3 seconds at
the default of 60. The moments of the kills are drawn once for each mean and are the same for all arms: so many seconds
after the last kill, during restarts too. A process is forked from this one, which has torch loaded, so that a restart
costs little, and the same for all. It is killed as ``kill -9`` does; what is in /dev/shm stays.

Each baseline runs with a save at every step, and at its best interval: with t seconds per step, C seconds that a save
adds, measured beforehand, and M between failures, what is wasted is least where k steps of sqrt(2 C M) / t lie between
two saves (Young). A step is *lost* when it was done and did not come back, *redone* when it was done again. The end is
compared bit for bit with that of an undisturbed job. Prints a table and one line of JSON; ``--keep`` draws
``results/failures.svg`` as well.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import random
import signal
import statistics
import struct
import sys
import tempfile
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
from arms import ARMS
from baselines import clear
from common import RESULTS, finish, options_of, table
from plot import bars
from snapshots import take_apart
from trainings import TRAININGS

OPTIONS: dict[str, dict[str, Any]] = {"exact": {"base_every": 100}}
RECORDED = {"exact"}
"""Arms that record every step, so that there is no interval to choose."""

NEVER = (math.inf,)
PATIENCE = 30
"""Times the undisturbed job's time; an arm that takes longer will not end."""


class Board:
    """Memory that a process and the one that kills it share: what it did last survives it."""

    NAMES = ("resumed", "done", "digest", "finished", "microseconds")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(self.NAMES))

    def put(self, **values: int) -> None:
        for name, value in values.items():
            struct.pack_into("<Q", self._memory, 8 * self.NAMES.index(name), value)

    def __getitem__(self, name: str) -> int:
        return struct.unpack_from("<Q", self._memory, 8 * self.NAMES.index(name))[0]


@dataclass
class Outcome:
    """Of a job that was run to its end, or given up."""

    seconds: float = 0.0
    failures: int = 0
    lost_steps: int = 0
    redone_steps: int = 0
    finished: bool = False
    digest: int = 0
    step_seconds: float = 0.0
    """The mean, of the last process."""


def run(
    name: str,
    folder: Path,
    steps: int,
    every: int,
    gaps: Iterable[float],
    model: str,
    limit: float = math.inf,
) -> Outcome:
    """The job under arm ``name``, killed ``gaps`` seconds after one another."""
    outcome, reached, executed = Outcome(), 0, 0
    started = time.monotonic()
    for gap in gaps:
        board = Board()
        child = _fork(board, name, folder, steps, every, model)
        killed = _wait(child, gap)
        resumed = board["resumed"] - 1  # 0 is that it did not get so far
        if resumed >= 0:
            outcome.lost_steps += reached - resumed
            executed += board["done"] - resumed
            reached = board["done"]
        if not killed:
            outcome.finished = bool(board["finished"])
            outcome.digest, outcome.step_seconds = board["digest"], board["microseconds"] / 1e6
            break
        outcome.failures += 1
        if time.monotonic() - started > limit:
            break
    outcome.seconds = time.monotonic() - started
    outcome.redone_steps = executed - reached
    return outcome


def _fork(board: Board, name: str, folder: Path, steps: int, every: int, model: str) -> int:
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes one thread with it"
    child = os.fork()
    if child == 0:
        try:
            _job(board, name, folder, steps, every, model)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(not board["finished"])
    return child


def _job(board: Board, name: str, folder: Path, steps: int, every: int, model: str) -> None:
    torch.set_num_threads(1)
    training = TRAININGS[model]()
    arm = ARMS[name](folder, training, every=every, **OPTIONS.get(name, {}))
    done = arm.resume()
    board.put(done=done)
    board.put(resumed=done + 1)
    begun = time.perf_counter()
    for step in range(done, steps):
        training.step()
        arm.step()
        board.put(done=step + 1)
    board.put(microseconds=round(1e6 * (time.perf_counter() - begun) / max(1, steps - done)))
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


def best_interval(step_seconds: float, save_seconds: float, mean: float) -> int:
    """Steps between two saves for which least is wasted: half of them are lost at a failure.

    >>> best_interval(step_seconds=0.1, save_seconds=0.2, mean=10.0)
    20
    """
    return max(1, round(math.sqrt(2 * save_seconds * mean) / step_seconds))


@dataclass
class Contest:
    """All arms on one job. ``saves`` are the seconds that a save of each adds to a step."""

    options: argparse.Namespace
    folder: Path
    bare: Outcome = field(default_factory=Outcome)
    """The undisturbed job, measured anew for each mean."""
    saves: dict[str, float] = field(default_factory=dict)

    def prepare(self) -> None:
        """What a save costs: a part of the job with one at every step, and one without right before it."""
        steps = max(2, self.options.steps // 6)
        self.run("none", 1, NEVER, steps)  # whoever comes first reads what is not in the page cache yet
        for name in self.options.arms:
            bare, found = (self.run(each, 1, NEVER, steps).step_seconds for each in ("none", name))
            self.saves[name] = max(1e-6, found - bare)

    def run(
        self, name: str, every: int, gaps: Iterable[float], steps: int, limit: float = math.inf
    ) -> Outcome:
        place = self.folder / "run"
        try:
            return run(name, place, steps, every, gaps, self.options.model, limit)
        finally:
            clear(place)

    def lines(self, mean: float) -> list[tuple[str, int]]:
        """Arms and the intervals at which they are run for a ``mean`` time between failures."""
        found = []
        for name in self.options.arms:
            best = best_interval(self.bare.step_seconds, self.saves[name], mean)
            found += [(name, every) for every in ([1] if name in RECORDED else sorted({1, best}))]
        return found

    def measure(self, mean: float) -> dict[str, dict[str, Any]]:
        """Every arm to the end of the job, under the same failures."""
        found = {}
        self.bare = self.run("none", 1, NEVER, self.options.steps)
        for name, every in self.lines(mean):
            outcomes = []
            for repeat in range(self.options.repeats):
                limit = PATIENCE * self.bare.seconds
                outcomes.append(self.run(name, every, kills(mean, repeat), self.options.steps, limit))
            found[f"{name}, every {every}"] = self.summary(outcomes)
        return found

    def summary(self, outcomes: list[Outcome]) -> dict[str, Any]:
        """Means over the repeats."""
        seconds = statistics.mean(outcome.seconds for outcome in outcomes)
        return {
            "seconds": seconds,
            "wasted": seconds / self.bare.seconds - 1,
            "bare_seconds": self.bare.seconds,
            "failures": statistics.mean(outcome.failures for outcome in outcomes),
            "lost_steps": statistics.mean(outcome.lost_steps for outcome in outcomes),
            "redone_steps": statistics.mean(outcome.redone_steps for outcome in outcomes),
            "finished": all(outcome.finished for outcome in outcomes),
            "same_end": all(outcome.digest == self.bare.digest for outcome in outcomes),
        }


def kills(mean: float, seed: int) -> Iterator[float]:
    """Seconds from one kill to the next."""
    chance = random.Random(1 + seed)
    while True:
        yield chance.expovariate(1 / mean)


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    lines = [["", "seconds", "wasted %", "failures", "lost steps", "redone", "the same end"]]
    for label, about in found.items():
        if about["finished"]:
            said = [f"{about['seconds']:.1f}", f"{100 * about['wasted']:.0f}"]
        else:
            said = ["not finished", ""]
        counts = [f"{about[key]:g}" for key in ("failures", "lost_steps", "redone_steps")]
        lines.append([label, *said, *counts, "yes" if about["same_end"] else "no"])
    return lines


def picture(result: dict[str, dict], bare_seconds: float, title: str) -> str:
    """Of the seconds of every arm, at every step and at its best interval."""
    groups: dict[str, dict[str, float | None]] = {}
    for minutes, found in result.items():
        for label, about in found.items():
            name, every = label.split(", every ")
            group = name if every == "1" else f"{name}, best"
            groups.setdefault(group, {})[f"{minutes} min between failures"] = (
                about["seconds"] if about["finished"] else None
            )
    return bars(title, groups, "s", least=bare_seconds)


def on_one_thread() -> None:
    """Begin anew without the threads that NumPy and torch make at their import: a fork takes none of them with it."""
    asked = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if not asked.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **asked})


def main() -> None:
    on_one_thread()
    parser = options_of(__doc__)
    parser.add_argument("--model", choices=TRAININGS, default="job")
    parser.add_argument("--steps", type=int, default=240, help="of the job")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 3, 10], help="mean between failures")
    parser.add_argument("--compression", type=float, default=60.0, help="of time")
    parser.add_argument("--repeats", type=int, default=1, help="with other moments of the failures")
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=[*ARMS][1:],
        default=["exact", "save", "dcp", "checkfreq", "gemini", "naive"],
    )
    options = parser.parse_args()
    if options.small:
        options.model, options.steps, options.minutes = "tiny", 60, [1]
        options.compression, options.arms = 100.0, ["exact", "save", "naive"]
    result = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="holdfast-bench-") as folder:
        contest = Contest(options, Path(folder))
        contest.prepare()
        for minutes in options.minutes:
            mean = 60 * minutes / options.compression
            found = result[f"{minutes:g}"] = contest.measure(mean)
            print(
                f"{minutes:g} min between failures, {mean:.2f} s in a job of {contest.bare.seconds:.1f} s\n"
            )
            table(rows(found))
            print()
    if options.keep:
        title = f"Seconds to the end of {options.steps} steps; the line is a job that is never killed"
        (RESULTS / "failures.svg").write_text(picture(result, contest.bare.seconds, title))
    asked = {name: getattr(options, name) for name in ("model", "steps", "compression", "repeats")}
    measured = {"step_seconds": contest.bare.step_seconds, "save_seconds": contest.saves, "minutes": result}
    finish("failures", asked | measured, options.keep)


if __name__ == "__main__":
    main()
