"""What the engine costs where nothing has to move, and what a commit at every step costs.

    python benchmarks/overhead.py [--pairs 15] [--micro-batches 8] [--model 46m] [--keep] [--small]

Each comparison takes turns in one process: (1) the engine with everything in host memory and commits off
against plain PyTorch with activation checkpointing: both fp32; both bf16 with fp32 masters, the same
arithmetic on both sides; and against plain bf16 without masters, which does less; (2) a commit at every step
against none, state on the SSD, and with half of it in host memory. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile

import torch
from common import (
    finish,
    gpt,
    interleaved,
    options_of,
    paired_ratio,
    spread,
    table,
    token_batches,
    with_masters,
)

import holdfast

SIZES = {"46m": (12, 512), "tiny": (3, 64)}
HALF = holdfast.Placement(optimizer_on_host=0.5)
UNCOMMITTED = holdfast.Durability(commit_every=0)
IN_HOST = {
    "placement": holdfast.Placement(params_on_host=1.0, optimizer_on_host=1.0),
    "durability": UNCOMMITTED,
}


class Cases:
    """Engines in temporary folders, and plain models."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.open = options, []
        self.batches = token_batches(options.micro_batches, 256 if options.model == "46m" else 32)

    def engine(self, **choices):
        model = gpt(*SIZES[self.options.model])
        folder = tempfile.mkdtemp(dir=self.options.folder, prefix="holdfast-bench-")
        choices = {"precision": "bf16"} | choices
        engine = holdfast.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), folder, **choices)
        self.open.append((engine, folder))

        def step() -> None:
            engine.step(self.batches)
            engine.wait()

        return step

    def plain(self, dtype: torch.dtype):
        model = gpt(*SIZES[self.options.model], empty=False).to(dtype)
        model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            for batch in self.batches:
                (model(**batch).loss / len(self.batches)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def plain_with_masters(self):
        step = with_masters(gpt(*SIZES[self.options.model], empty=False))
        return lambda: step(self.batches)

    def close(self) -> None:
        for engine, folder in self.open:
            engine.close()
            shutil.rmtree(folder)
        self.open.clear()


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--model", choices=SIZES, default="46m")
    parser.add_argument("--only", nargs="*", help="names of comparisons")
    options = parser.parse_args()
    if options.small:
        options.pairs, options.micro_batches, options.model = 1, 2, "tiny"
    cases = Cases(options)
    comparisons = {
        "in host / plain, fp32": lambda: (
            cases.engine(precision="fp32", **IN_HOST),
            cases.plain(torch.float32),
        ),
        "in host / plain, bf16": lambda: (cases.engine(**IN_HOST), cases.plain_with_masters()),
        "in host / no masters, bf16": lambda: (cases.engine(**IN_HOST), cases.plain(torch.bfloat16)),
        "commit / none, SSD": lambda: (cases.engine(), cases.engine(durability=UNCOMMITTED)),
        "commit / none, half SSD": lambda: (
            cases.engine(placement=HALF),
            cases.engine(placement=HALF, durability=UNCOMMITTED),
        ),
    }
    rows, result = [["", "a min", "median", "max", "b min", "median", "max", "ratio"]], {}
    for name, make in comparisons.items():
        if options.only and name not in options.only:
            continue
        a, b = make()
        seconds = interleaved({"a": a, "b": b}, options.pairs)
        cases.close()
        ratio = paired_ratio(seconds["a"], seconds["b"])
        rows.append([name, *spread(seconds["a"]), *spread(seconds["b"]), f"{ratio:.3f}"])
        result[name] = {"ratio": ratio, **{k: statistics.median(v) for k, v in seconds.items()}}
    print(
        f"{options.model}, {options.micro_batches} micro-batches, {options.pairs} pairs, seconds per step\n"
    )
    table(rows)
    finish(
        "overhead",
        {"pairs": options.pairs, "micro_batches": options.micro_batches, "ratios": result},
        options.keep,
    )


if __name__ == "__main__":
    main()
