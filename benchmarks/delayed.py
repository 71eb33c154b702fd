"""How much of the update to delay, and how to clip, where computing and the SSD take equally long.

    python benchmarks/delayed.py [--pairs 9] [--fractions 0.125 0.25 0.375] [--clipping defer speculate auto]
                                 [--blocks 32] [--keep] [--small]

Parameters are in host memory and optimizer state is on the SSD, so that without delay the forward pass, a quarter
of the computing, moves nothing. The SSD's limit is such that it takes as long for a step's bytes as the model's
computations take beside it: measured, set, and measured again under the new limit. Engines of all fractions, and of
all ways to clip (without delay, to a norm that no step reaches), live in one process and take turns of a few steps,
each after one that is not timed. Prints a table and one line of JSON: seconds per step, how many times as long it takes
without delay and clipping, and how much longer it takes than its busiest lane.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from common import finish, options_of, paired_ratio, table

import holdfast
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.quantities import format_bytes
from holdfast.schedule.operations import COMPUTE, UPDATE

STEPS = 4
"""Of one engine before the next engine's turn."""
UNREACHED_NORM = 1e6


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.125, 0.25, 0.375])
    parser.add_argument("--clipping", nargs="*", default=["defer", "speculate", "auto"])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    if options.small:
        options.blocks, options.width, options.context, options.micro_batches = 4, 32, 8, 2
        options.pairs, options.fractions, options.clipping = 1, [0.25], ["auto"]
    torch.set_num_threads(1)  # the other core is for updates, hashing and the SSD
    limit = balanced(options)
    by_fraction = measure(options, limit)
    print(f"{options.blocks} blocks of width {options.width}, {options.micro_batches} micro-batches,")
    print(f"SSD limited to {format_bytes(limit)}/s, {options.pairs} rounds, medians\n")
    rows = [
        ["delayed, or clipping", "seconds", "without delay", "computing", "SSD", "updating", "to the busiest"]
    ]
    table(rows + [[name, *(f"{v:.3f}" for v in found.values())] for name, found in by_fraction.items()])
    sizes = {
        name: getattr(options, name) for name in ("pairs", "blocks", "width", "context", "micro_batches")
    }
    finish("delayed", {**sizes, "limit": limit, "by_fraction": by_fraction}, options.keep)


def balanced(options: argparse.Namespace) -> int:
    """Bytes per second at which the SSD takes as long as the computations beside it."""
    limit = None
    for _ in range(2):
        with engine_of(options, 0.0, limit) as engine:
            steps(engine, options, 1)
            computing, _, moved = lanes(engine, options)
            limit = int(moved / computing)
    assert limit is not None
    return limit


def measure(options: argparse.Namespace, limit: int) -> dict[str, dict[str, float]]:
    """Medians of seconds per step and of its lanes, by fraction."""
    with ExitStack() as stack:
        fractions = (0.0, *options.fractions)
        engines = {str(each): stack.enter_context(engine_of(options, each, limit)) for each in fractions}
        for mode in options.clipping:
            engines[mode] = stack.enter_context(engine_of(options, 0.0, limit, mode))
            if mode == "auto":  # until it has tried both ways
                steps(engines[mode], options, 8)
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.pairs + 1):
            for name, engine in engines.items():
                steps(engine, options, 1)
                taken[name].append(steps(engine, options, STEPS) / STEPS)
                engine.wait()
        found = {}
        for name, engine in engines.items():
            computing, updating, moved = lanes(engine, options)
            busy = {"computing": computing, "ssd": moved / limit, "updating": updating}
            seconds = taken[name][1:]
            typical, against = statistics.median(seconds), paired_ratio(taken["0.0"][1:], seconds)
            found[name] = {
                "seconds": typical,
                "without_delay": against,
                **busy,
                "to_the_busiest": typical / max(busy.values()),
            }
        return found


def steps(engine: holdfast.Engine, options: argparse.Namespace, count: int) -> float:
    """Seconds of ``count`` steps, as training goes on: what the last one leaves is not waited for."""
    tokens = torch.randint(0, 256, (1, options.context))
    batches = [{"tokens": tokens, "targets": tokens}] * options.micro_batches
    start = time.perf_counter()
    for _ in range(count):
        engine.step(batches)
    return time.perf_counter() - start


def lanes(engine: holdfast.Engine, options: argparse.Namespace) -> tuple[float, float, float]:
    """Of one step among others: seconds of computing and of updating, and bytes of the SSD."""
    spans: list = []
    before = engine.traffic()
    engine.trace(spans)
    steps(engine, options, STEPS)
    engine.wait()
    engine.trace(None)
    busy: Counter[str] = Counter()
    for span in spans:
        busy[span.lane] += span.end - span.start
    moved = {key: n - before.get(key, 0) for key, n in engine.traffic().items() if key[0].startswith("ssd")}
    return busy[COMPUTE] / STEPS, busy[UPDATE] / STEPS, sum(moved.values()) / STEPS


@contextmanager
def engine_of(
    options: argparse.Namespace, delayed_fraction: float, limit: int | None, clipping: str | None = None
) -> Iterator[holdfast.Engine]:
    folder = tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-")
    config = DecoderConfig(
        blocks=options.blocks, width=options.width, heads=4, kv_heads=4, context=options.context, dropout=0.0
    )
    with holdfast.empty_parameters():
        model = Decoder(config)
    try:
        with holdfast.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            folder,
            precision="fp32",
            placement=holdfast.Placement(params_on_host=1.0, delayed_fraction=delayed_fraction),
            clipping=None if clipping is None else holdfast.Clipping(UNREACHED_NORM, clipping),
            durability=holdfast.Durability(retain=1),
            io=holdfast.IO(total_limit=limit, update_workers=1),
        ) as engine:
            yield engine
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
