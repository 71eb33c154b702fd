"""How long training stands still after a SIGKILL: with a standby, and where the same command is started again.

    python benchmarks/standby.py [--folder FOLDER] [--keep] [--small]

A script trains a GPT-2 of transformers under a ``Checkpointer``, on one core, so that the standby has the other, as it
has beside a training on a device. It is killed again and again: under ``holdfast standby``, where a process takes over
that has the model, and by itself, where it is started again at the moment of the kill. Seconds are from the kill to the
return of ``resume()``, and to the end of the first step. A process that is started again loads the newest base and
replays the records after it; the standby has done most of that before.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common import finish, gpt, options_of, spread, table, token_batches

SIZES = {"46 M": (12, 512, 16384), "small": (2, 64, 512)}
"""Layers, width and vocabulary."""
STEPS_BEFORE = 5
"""The steps that a process does before it is killed, at least."""
READY_SECONDS = 20.0
"""From the moment when a standby is ready until the kill. Kills come much further apart, but not the first moments in
which the standby has yet to catch up."""
PATIENCE_SECONDS = 600.0


class Told(NamedTuple):
    """A line of the script: its process resumed, or did a step."""

    time: float
    pid: int
    event: str
    step: int


def train(run: str, out: str, size: str) -> None:
    """Train until killed, and tell times in the file ``out``."""
    import torch

    import holdfast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, width, vocabulary = SIZES[size]
    model = gpt(layers, width, vocabulary, empty=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with open(out, "a", buffering=1) as file:
        checkpointer = holdfast.Checkpointer(run, model=model, optimizer=optimizer)
        step = checkpointer.resume()
        file.write(f"{time.time()} {os.getpid()} resumed {step}\n")
        while True:
            torch.manual_seed(step)
            model(**token_batches(1, 64, vocabulary)[0]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            step += 1
            file.write(f"{time.time()} {os.getpid()} step {step}\n")


class Job:
    """The script in a folder, and what it has told."""

    def __init__(self, folder: Path, size: str) -> None:
        folder.mkdir()
        self.out, self.errors = folder / "told", folder / "errors"
        self.out.touch()
        self.command = [sys.executable, __file__, "--child", str(folder / "run"), str(self.out), size]

    def start(self, *before: str) -> subprocess.Popen[bytes]:
        with open(self.errors, "ab") as errors:
            return subprocess.Popen([*before, *self.command], stdout=subprocess.DEVNULL, stderr=errors)

    def told(self) -> list[Told]:
        lines = [line.split() for line in self.out.read_text().splitlines()]
        return [Told(float(a), int(b), c, int(d)) for a, b, c, d in lines]

    def until(self, true: Callable[[list[Told]], bool]) -> list[Told]:
        """Return what was told once it is ``true``."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not true(told := self.told()):
            assert time.monotonic() < end, self.errors.read_text()[-4000:]
            time.sleep(0.01)
        return told

    def kill(self) -> tuple[float, int]:
        """Kill the process that trains, once it has done its steps; the time, and the process."""
        told = self.until(lambda told: bool(told) and _steps_of(told, told[-1].pid) >= STEPS_BEFORE)
        pid = told[-1].pid
        now = time.time()
        os.kill(pid, signal.SIGKILL)
        return now, pid

    def seconds_until_trained(self, killed: float, pid: int) -> tuple[float, float]:
        """Return the seconds from the kill of ``pid`` to the next resume, and to its first step."""

        def over(told: list[Told]) -> bool:
            return told[-1].time > killed and told[-1].pid != pid and told[-1].event == "step"

        new = [each for each in self.until(over) if each.time > killed and each.pid != pid]
        resumed = next(each for each in new if each.event == "resumed")
        stepped = next(each for each in new if each.event == "step")
        return resumed.time - killed, stepped.time - killed


def _steps_of(told: list[Told], pid: int) -> int:
    return sum(each.pid == pid and each.event == "step" for each in told)


def cold(job: Job, rounds: int) -> list[tuple[float, float]]:
    """Kill the script and start it again, ``rounds`` times."""
    seconds = []
    process = job.start()
    for _ in range(rounds):
        killed, pid = job.kill()
        process.wait()
        process = job.start()
        seconds.append(job.seconds_until_trained(killed, pid))
    process.kill()
    process.wait()
    return seconds


def with_standby(job: Job, rounds: int, ready_seconds: float) -> list[tuple[float, float]]:
    """Kill the process that trains under ``holdfast standby``, ``ready_seconds`` after another is ready."""
    seconds = []
    before = [sys.executable, "-m", "holdfast", "standby", "--restarts", str(rounds + 1), "--"]
    process = job.start(*before)
    for number in range(1, rounds + 1):
        job.until(lambda _, number=number: job.errors.read_text().count("is ready to take over") >= number)
        time.sleep(ready_seconds)
        killed, pid = job.kill()
        seconds.append(job.seconds_until_trained(killed, pid))
    process.terminate()
    process.wait()
    return seconds


def main() -> None:
    arguments = options_of(__doc__).parse_args()
    size, rounds, ready_seconds = ("small", 1, 0.0) if arguments.small else ("46 M", 7, READY_SECONDS)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = {
            "started again": cold(Job(Path(folder) / "cold", size), rounds),
            "standby": with_standby(Job(Path(folder) / "standby", size), rounds, ready_seconds),
        }
    rows, medians = [], {}
    for name, seconds in found.items():
        resumed, stepped = ([each[i] for each in seconds] for i in (0, 1))
        rows.append({"way": name, "resumed seconds": resumed, "first step seconds": stepped})
        medians[name] = statistics.median(resumed), statistics.median(stepped)
    titles = ["to resume(): least", "median", "most", "to a step: least", "median", "most"]
    table(
        [
            ["", *titles],
            *(
                [row["way"], *spread(row["resumed seconds"]), *spread(row["first step seconds"])]
                for row in rows
            ),
        ]
    )
    ratios = [cold / warm for cold, warm in zip(medians["started again"], medians["standby"], strict=True)]
    result = {"size": size, "rows": rows, "times as fast": ratios}
    finish("standby", result, arguments.keep)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train(*sys.argv[2:])
    else:
        main()
