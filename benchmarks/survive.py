"""What recording every step costs an ordinary training loop, beside other ways to keep every step.

    python benchmarks/survive.py [--pairs 15] [--model 124m] [--batch 4] [--arms exact save async] [--keep] [--small]

In one process the same loop runs without anything and with each arm, in turn. Arms: ``exact``, a
``holdfast.Checkpointer``; ``save``, ``torch.save`` of the whole state with an fsync; ``async``,
``torch.distributed.checkpoint.async_save`` of it, after the one before has ended. Stall is the time that the training
thread spends in the arm; overhead the median over pairs of the whole step's time against the bare loop's, which the
arm's threads slow down as well. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp
from common import finish, gpt, table

from holdfast.checkpointer import Checkpointer

SIZES = {"124m": (12, 768, 50257, 256), "46m": (12, 512, 16384, 256), "tiny": (2, 64, 256, 32)}


class Loop:
    """A model in fp32 with AdamW; ``step`` is one optimizer step on random tokens."""

    def __init__(self, options: argparse.Namespace) -> None:
        layers, width, self.vocabulary, self.context = SIZES[options.model]
        self.batch = options.batch
        self.model = gpt(layers, width, self.vocabulary, self.context, empty=False).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        x = torch.randint(0, self.vocabulary, (self.batch, self.context))
        self.model(input_ids=x, labels=x).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Exact:
    """Every step a record."""

    def __init__(self, loop: Loop, folder: str) -> None:
        self.checkpointer = Checkpointer(
            folder, model=loop.model, optimizer=loop.optimizer, base_every=50, memory="6GiB"
        )
        self.checkpointer.resume()

    def after(self) -> float:
        self.checkpointer.step()
        return self.checkpointer.stall_seconds

    def lag(self) -> int:
        return self.checkpointer.steps_done - self.checkpointer.durable_step

    def close(self) -> None:
        self.checkpointer.close()


class Save:
    """The whole state in one file, durable before the next step."""

    def __init__(self, loop: Loop, folder: str) -> None:
        self.loop, self.path = loop, os.path.join(folder, "state.pt")

    def after(self) -> float:
        started = time.perf_counter()
        with open(self.path + ".tmp", "wb") as file:
            torch.save(self.loop.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path + ".tmp", self.path)
        return time.perf_counter() - started

    def lag(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Async:
    """The whole state copied, and written by a thread; the next one waits for it."""

    def __init__(self, loop: Loop, folder: str) -> None:
        self.loop, self.folder, self.future, self.count = loop, folder, None, 0

    def after(self) -> float:
        started = time.perf_counter()
        self.close()
        path = os.path.join(self.folder, str(self.count % 2))
        self.count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process only
            self.future = dcp.async_save(
                self.loop.state(), storage_writer=dcp.FileSystemWriter(path, overwrite=True), no_dist=True
            )
        return time.perf_counter() - started

    def lag(self) -> int:
        return int(self.future is not None and not self.future.done())

    def close(self) -> None:
        if self.future is not None:
            self.future.result()
            self.future = None


ARMS = {"exact": Exact, "save": Save, "async": Async}


def measure(options: argparse.Namespace, name: str) -> dict:
    """Pairs of a bare step and one with the arm, two loops in turn."""
    bare, loop = Loop(options), Loop(options)
    folder = tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-")
    arm = ARMS[name](loop, folder)
    seconds: dict[str, list[float]] = {"bare": [], "arm": [], "stall": [], "lag": []}
    for turn in range(options.pairs + 2):
        started = time.perf_counter()
        bare.step()
        middle = time.perf_counter()
        loop.step()
        stall = arm.after()
        ended = time.perf_counter()
        if turn >= 2:
            for key, value in (
                ("bare", middle - started), ("arm", ended - middle), ("stall", stall), ("lag", arm.lag())
            ):  # fmt: skip
                seconds[key].append(value)
    arm.close()
    shutil.rmtree(folder)
    ratios = [a / b for a, b in zip(seconds["arm"], seconds["bare"], strict=True)]
    step = statistics.median(seconds["bare"])
    stalls = sorted(value / step for value in seconds["stall"])
    low, high = interval(ratios)
    return {
        "step_seconds": step,
        "stall_median": statistics.median(stalls),
        "stall_p95": quantile(stalls, 0.95),
        "stall_p99": quantile(stalls, 0.99),
        "overhead_median": statistics.median(ratios) - 1,
        "overhead_95": [low - 1, high - 1],
        "overhead_p95": quantile(sorted(ratios), 0.95) - 1,
        "lag_most": max(seconds["lag"]),
    }


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interval(values: list[float], rounds: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--model", choices=SIZES, default="124m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--folder", default=None, help="where to write; the default is the temporary folder")
    parser.add_argument("--keep", action="store_true", help="append the result to benchmarks/results/")
    parser.add_argument("--small", action="store_true", help="seconds, for the tests")
    options = parser.parse_args()
    if options.small:
        options.pairs, options.model, options.batch = 2, "tiny", 1
    rows = [["", "step s", "stall %", "p95", "p99", "overhead %", "95 % interval", "p95", "lag"]]
    result = {}
    for name in options.arms:
        found = result[name] = measure(options, name)
        percent = [
            f"{100 * found[key]:.1f}" for key in ("stall_median", "stall_p95", "stall_p99", "overhead_median")
        ]
        low, high = (100 * value for value in found["overhead_95"])
        rows.append([name, f"{found['step_seconds']:.2f}", *percent, f"{low:.1f} to {high:.1f}",
                     f"{100 * found['overhead_p95']:.1f}", str(found["lag_most"])])  # fmt: skip
    print(f"{options.model}, batches of {options.batch}, {options.pairs} pairs, shares of the bare step\n")
    table(rows)
    finish(
        "survive",
        {"model": options.model, "batch": options.batch, "pairs": options.pairs, "arms": result},
        options.keep,
    )


if __name__ == "__main__":
    main()
