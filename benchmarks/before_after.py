"""Two checkouts in turn: a step out of core, a step under a Checkpointer, a resume and a ZeRO-3 source, and memory.

    python benchmarks/before_after.py --before CHECKOUT [--pairs 15] [--folder FOLDER] [--keep] [--small]

Each measurement runs in a process of its own, with the library of one checkout and then of the other; the order changes
from pair to pair. A ratio is the median over pairs of after / before: below 1 the checkout that this file is in is
faster, or smaller. Without ``--before`` it is compared with itself, which shows the noise.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import Stack, finish, options_of, paired_ratio, table
from torch import nn

HERE = Path(__file__).parents[1]
WIDTH, ROWS = 256, 64
STEPS, WARM_UP = 32, 8


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net() -> Stack:
    """Return a model of eight blocks, 4.2 million parameters."""
    return Stack(Block(WIDTH) for _ in range(8))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


# Measurements, each in its own process: seconds by name


def out_of_core(holdfast, folder: Path, zero: Path) -> dict[str, float]:
    model, optimizer = trained()
    known = inspect.signature(holdfast.offload).parameters
    named = "precision" if "precision" in known else "dtype"  # what earlier versions call it
    batch, seconds = (torch.randn(ROWS, WIDTH),), []
    with holdfast.offload(model, optimizer, folder / "engine", **{named: "fp32"}) as engine:
        for _ in range(STEPS):
            start = time.perf_counter()
            engine.step([batch] * 4)
            engine.wait()
            seconds.append(time.perf_counter() - start)
    return {"engine step": statistics.median(seconds[WARM_UP:])}


def recorded(holdfast, folder: Path, zero: Path) -> dict[str, float]:
    model, optimizer = trained()
    x, seconds = torch.randn(ROWS, WIDTH), []
    with holdfast.Checkpointer(folder / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(STEPS):
            model(x).backward()
            start = time.perf_counter()
            optimizer.step()
            checkpointer.step()
            seconds.append(time.perf_counter() - start)
            optimizer.zero_grad()
            time.sleep(0.02)
    model, optimizer = trained()
    with holdfast.Checkpointer(folder / "run", model=model, optimizer=optimizer) as checkpointer:
        start = time.perf_counter()
        checkpointer.resume()
        resumed = time.perf_counter() - start
    return {"optimizer and record": statistics.median(seconds[WARM_UP:]), "resume": resumed}


def from_zero(holdfast, folder: Path, zero: Path) -> dict[str, float]:
    model, optimizer = trained()
    with holdfast.Checkpointer(folder / "run", model=model, optimizer=optimizer) as checkpointer:
        start = time.perf_counter()
        checkpointer.resume(source=zero)
        return {"ZeRO-3 source": time.perf_counter() - start}


MEASUREMENTS = {"out of core": out_of_core, "recorded": recorded, "from ZeRO-3": from_zero}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--before", type=Path, default=HERE, help="another checkout of this repository")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    pairs = 1 if options.small else options.pairs
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_zero(Path(folder) / "zero")
        found = [
            figures(options.before, Path(folder), n, name) for name in MEASUREMENTS for n in range(pairs)
        ]
    ratios = {}
    for name in dict.fromkeys(name for pair in found for name in pair[0]):
        before, after = ([pair[i][name] for pair in found if name in pair[0]] for i in (0, 1))
        ratios[name] = {
            "before": statistics.median(before), "after": statistics.median(after),
            "ratio": paired_ratio(after, before),
        }  # fmt: skip
    rows = [["", "before", "after", "after / before"]]
    table(rows + [[name, *(f"{value:.4g}" for value in one.values())] for name, one in ratios.items()])
    git = ["git", "-C", str(options.before), "rev-parse", "--short", "HEAD"]
    before = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    finish("before_after", {"before": before, "pairs": pairs, "ratios": ratios}, options.keep)


def write_zero(folder: Path) -> None:
    """Write a checkpoint of ZeRO-3 of four ranks."""
    sys.path.append(str(HERE / "tests"))
    from formats import deepspeed_files

    shapes = {name: tuple(parameter.shape) for name, parameter in net().named_parameters()}
    deepspeed_files.write(folder, deepspeed_files.random_state([shapes]), 3, 4)


def figures(before: Path, folder: Path, number: int, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """One pair of a measurement, before and after."""
    found, checkouts = [{}, {}], (before, HERE)
    for side in (0, 1) if number % 2 else (1, 0):
        command = [sys.executable, "-P", __file__, "--measure", name, "--folder", str(folder)]
        path = os.pathsep.join([str(checkouts[side] / "src"), str(HERE / "benchmarks")])
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
        )
        found[side] = json.loads(done.stdout)
    return found[0], found[1]


def measure(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    import holdfast

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = MEASUREMENTS[options.measure](holdfast, Path(folder), Path(options.folder) / "zero")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**found, f"{options.measure}, peak MiB": peak}))


if __name__ == "__main__":
    main()
