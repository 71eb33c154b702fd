"""What it costs an ordinary training loop to keep every step, in each of the ways of ``arms.ARMS``.

    python benchmarks/survive.py [--models gpt2 resnet18 resnet18-b64 vgg11] [--arms none exact save ...] [--rounds 4]
                                 [--steps 40] [--seconds 5] [--folder FOLDER] [--keep] [--small]

In one process one training goes on and on, and the arms take turns on it, in another order in every round: each gets
a fresh folder, some steps that do not count, so that what waits to be written has reached its usual length, and then
``--steps`` steps that do, or as many as fit in ``--seconds``. So nothing that one arm still writes disturbs another.
An arm that cannot keep up gets through few steps, and its name has a star.

Stall is the time that the training thread spends in the arm or waits for it, as a share of the median step without
any; overhead the ratio of the mean step to that without any, with its 95 % bootstrap interval, which has in it what
the arm's threads take from training. Likewise the median, p95 and p99 of its steps, each beside the same of the steps
without any; of fewer than a hundred steps p99 is the longest. Bytes are those that the process gave to the file
system, lag the steps that would be lost by a kill at the end of a step, memory the process's peak above that without
an arm, /dev/shm included.

``resnet18`` and ``vgg11`` train on 8 small images, so that there are many gradients beside little work;
``resnet18-b64`` has the same gradients beside 64. ``exact`` is a ``Checkpointer`` as it is; few steps hold none of
its bases, of which it makes one in 100 steps, so ``bases`` makes them all the time in ``gpt2`` (one in 24 steps), and
every 20 steps in the others. ``auto`` is ``every="auto"``, counted once it has chosen. ``topk`` is compared with
``sparse``, the same training without a record. Prints a table for each model and one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from arms import AGAINST, ARMS
from baselines import Arm
from common import finish, options_of, table
from trainings import TRAININGS, Training

from holdfast.quantities import format_bytes


@dataclass(frozen=True)
class Plan:
    """Of one model: rounds, steps that do not count and that do in each of them, and most seconds for either."""

    rounds: int
    before: int
    steps: int
    seconds: float
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of arms."""


BASES = {"bases": {"base_every": 20}, "naive": {"base_every": 20}}
PLANS = {
    "gpt2": Plan(2, 2, 6, 16.0, {"bases": {"base_every": 1, "memory": "2GiB"}}),
    "resnet18": Plan(3, 9, 40, 5.0, BASES),
    "vgg11": Plan(3, 9, 40, 5.0, BASES),
    "resnet18-b64": Plan(3, 5, 20, 14.0, BASES),
    "tiny": Plan(1, 1, 3, 1.0, BASES),
}


@dataclass
class Block:
    """What was measured of one arm in one round: each list has an entry per step."""

    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    written_bytes: int = 0
    peak_bytes: int = 0


def measure(name: str, training: Training, folder: str, plan: Plan) -> Block:
    """A turn of one arm."""
    reset_peak()
    place = Path(tempfile.mkdtemp(dir=folder, prefix="holdfast-bench-"))
    arm = ARMS[name](place / "run", training, **plan.options.get(name, {}))
    try:
        arm.resume()
        begin = time.perf_counter()
        for _ in range(plan.before):
            training.step()
            arm.step()
            if time.perf_counter() - begin > plan.seconds:
                break
        while not arm.is_settled:
            training.step()
            arm.step()
        block = _counted(arm, training, plan)
        arm.close()
        block.peak_bytes = peak()
    finally:
        arm.remove()
        place.rmdir()
    return block


def _counted(arm: Arm, training: Training, plan: Plan) -> Block:
    block, before, begin = Block(), written(), time.perf_counter()
    while len(block.seconds) < plan.steps:
        started = time.perf_counter()
        training.step()
        arm.step()
        ended = time.perf_counter()
        block.seconds.append(ended - started)
        block.stalls.append(arm.stall_seconds)
        block.lags.append(arm.lag)
        if ended - begin > plan.seconds and len(block.seconds) >= 2:
            break
    block.written_bytes = written() - before
    return block


def compare(model: str, training: Training, arms: list[str], plan: Plan, folder: str) -> dict[str, dict]:
    """All arms of one model, a block of each in every round."""
    blocks: dict[str, list[Block]] = {name: [] for name in arms}
    for _ in range(2):
        training.step()
    for turn in range(plan.rounds):
        for name in random.Random(turn).sample(arms, len(arms)):
            started = time.perf_counter()
            blocks[name].append(measure(name, training, folder, plan))
            took = time.perf_counter() - started
            print(f"{model}, round {turn + 1} of {plan.rounds}: {name} took {took:.0f} s", file=sys.stderr)
    bare = {name: blocks[AGAINST.get(name, "none")] for name in arms}
    return {name: summary(blocks[name], bare[name]) for name in arms}


def summary(blocks: list[Block], bare: list[Block]) -> dict[str, Any]:
    """Of an arm's blocks, beside those of the bare loop."""
    step = statistics.median(joined(bare, "seconds"))
    seconds, stalls, lags = (joined(blocks, what) for what in ("seconds", "stalls", "lags"))
    arm, without = [b.seconds for b in blocks], [b.seconds for b in bare]
    ratio = mean_ratio(arm, without)
    low, high = interval(arm, without)
    return {
        "steps": len(seconds),
        "step_seconds": statistics.median(seconds),
        "stall": {q: quantile(stalls, share) / step for q, share in QUANTILES.items()},
        "stall_mean": statistics.mean(stalls) / step,
        "overhead": ratio - 1,
        "overhead_95": [low - 1, high - 1],
        "step": {
            q: [value - 1 for value in quantile_ratio(arm, without, share)] for q, share in QUANTILES.items()
        },
        "bytes_per_step": round(sum(b.written_bytes for b in blocks) / len(seconds)),
        "lag": {"median": statistics.median(lags), "most": max(lags)},
        "memory_bytes": statistics.median(b.peak_bytes for b in blocks)
        - statistics.median(b.peak_bytes for b in bare),
        "keeps_up": ratio < CANNOT_KEEP_UP,
    }


QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}
CANNOT_KEEP_UP = 1.5
"""Of the bare loop's time."""


def joined(blocks: list[Block], what: str) -> list:
    return [value for block in blocks for value in getattr(block, what)]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def mean_ratio(arm: list[list[float]], bare: list[list[float]]) -> float:
    """The mean over rounds of the ratio of mean steps, so that a slow round counts on both sides."""
    return statistics.mean(float(np.mean(a) / np.mean(b)) for a, b in zip(arm, bare, strict=True))


def interval(arm: list[list[float]], bare: list[list[float]], draws: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of ``mean_ratio``: steps are drawn anew within each round."""
    chance = np.random.default_rng(0)

    def means(rounds: list[list[float]]) -> np.ndarray:
        return np.stack([chance.choice(r, (draws, len(r))).mean(1) for r in rounds])

    low, high = np.quantile((means(arm) / means(bare)).mean(0), [0.025, 0.975])
    return float(low), float(high)


def quantile_ratio(
    arm: list[list[float]], bare: list[list[float]], share: float, draws: int = 2000
) -> tuple[float, float, float]:
    """A quantile of the steps of all rounds over the same one of those without any, and its 95 % bootstrap interval:
    steps are drawn anew within each round. Of few steps, a high quantile is the longest of them."""
    chance = np.random.default_rng(0)

    def drawn(rounds: list[list[float]]) -> np.ndarray:
        return _quantile(np.concatenate([chance.choice(r, (draws, len(r))) for r in rounds], axis=1), share)

    low, high = np.quantile(drawn(arm) / drawn(bare), [0.025, 0.975])
    ratio = _quantile(np.concatenate(arm), share) / _quantile(np.concatenate(bare), share)
    return float(ratio), float(low), float(high)


def _quantile(values: np.ndarray, share: float) -> np.ndarray:
    """Along the last axis, as ``quantile``."""
    count = values.shape[-1]
    return np.sort(values, axis=-1)[..., min(count - 1, int(share * count))]


def written() -> int:
    """Bytes that this process has given to file systems on devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most memory that was resident since ``reset_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def disk_bytes_per_second(folder: str, size: int) -> float:
    """Of a file that is written and synced, the second time."""
    data = os.urandom(size)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(2):
            started = time.perf_counter()
            file.seek(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    return size / (time.perf_counter() - started)


def rows(found: dict[str, dict]) -> list[list[str]]:
    head = ["", "steps", "step s", "stall %", "p95", "p99", "overhead %", "95 % interval", "step median", "p95", "p99",
            "bytes/step", "lag", "most", "memory"]  # fmt: skip
    lines = [head]
    for name, about in found.items():
        low, high = about["overhead_95"]
        lines.append([
            name + ("" if about["keeps_up"] else "*"), str(about["steps"]), f"{about['step_seconds']:.3f}",
            *(f"{100 * about['stall'][q]:.1f}" for q in QUANTILES),
            f"{100 * about['overhead']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}",
            *(_with_interval(about["step"][q]) for q in QUANTILES),
            format_bytes(about["bytes_per_step"]), f"{about['lag']['median']:g}", str(about["lag"]["most"]),
            format_bytes(max(0, int(about["memory_bytes"]))),
        ])  # fmt: skip
    return lines


def _with_interval(ratio: list[float]) -> str:
    value, low, high = (100 * part for part in ratio)
    return f"{value:.1f} ({low:.0f} to {high:.0f})"


def plan_of(options: argparse.Namespace, plan: Plan) -> Plan:
    pick: Callable[[Any, Any], Any] = lambda given, default: default if given is None else given  # noqa: E731
    return Plan(
        pick(options.rounds, plan.rounds), plan.before, pick(options.steps, plan.steps),
        pick(options.seconds, plan.seconds), plan.options,
    )  # fmt: skip


def summary_line(name: str, model: str, found: dict[str, dict]) -> str:
    """Return one line with the overhead of each arm, and its 95 % interval, in percent."""
    told = [
        f"{arm} {100 * about['overhead']:.1f} ({' to '.join(f'{100 * end:.1f}' for end in about['overhead_95'])})"
        for arm, about in found.items()
        if arm != "none"
    ]
    step = found["none"]["step_seconds"] if "none" in found else 0.0
    return f"summary {name} {model}: step {step:.4f} s; overhead % {', '.join(told)}"


def run(
    name: str,
    trainings: dict[str, Callable[..., Training]],
    plans: dict[str, Plan],
    choices: list[str],
    default: Sequence[str] = (),
) -> None:
    """``plans`` are of all models that can be named, the last of them the tiny one; ``choices`` of the arms, of which
    the ``default`` are those that are measured where none are named (all, if it is empty)."""
    parser = options_of(__doc__)
    *models, tiny = plans
    parser.add_argument("--models", nargs="+", choices=plans, default=models)
    parser.add_argument("--arms", nargs="+", choices=choices, default=list(default) or choices)
    parser.add_argument(
        "--rounds", type=int, help="of all arms; the default is the model's, as of the next two"
    )
    parser.add_argument("--steps", type=int, help="that count, of each arm in a round")
    parser.add_argument("--seconds", type=float, help="for these")
    options = parser.parse_args()
    if options.small:
        options.models = [tiny]
    folder = options.folder or tempfile.gettempdir()
    arms = list(dict.fromkeys(["none", *(AGAINST.get(name, "none") for name in options.arms), *options.arms]))
    rate = disk_bytes_per_second(folder, 1 << 20 if options.small else 1 << 28)
    result = {}
    for model in options.models:
        result[model] = compare(model, trainings[model](), arms, plan_of(options, plans[model]), folder)
        print(f"{model}: shares of the step without any; * cannot keep up\n")
        table(rows(result[model]))
        print(f"\n{summary_line(name, model, result[model])}\n")
    finish(name, {"disk_bytes_per_second": round(rate), "models": result}, options.keep)


def main() -> None:
    run("survive", TRAININGS, PLANS, list(ARMS))


if __name__ == "__main__":
    main()
