"""Tokens per second and peak memory: state on the SSD, durable at every step, beside plain PyTorch.

    python benchmarks/throughput.py [--model 46m|319m] [--micro-batches 1 4 8 16] [--steps 8] [--keep] [--small]

Each case runs in a process of its own, so that peak memory is its own; the engine and plain PyTorch (bf16
parameters, fused AdamW, activation checkpointing, everything in memory) take turns, `--rounds` times.
Sequences of 256 tokens, one per micro-batch, no clipping. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = {"46m": (12, 512), "319m": (24, 1024), "tiny": (3, 64)}
TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="46m")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", default=None, help="where to write; the default is the temporary folder")
    parser.add_argument("--keep", action="store_true", help="append the result to benchmarks/results/")
    parser.add_argument("--small", action="store_true", help="seconds, for the tests")
    parser.add_argument("--case", choices=("engine", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.model, options.micro_batches, options.steps, options.rounds = "tiny", [1, 2], 2, 1
    if options.case:
        print(json.dumps(run_case(options)))
        return
    from common import finish, table

    rows, result = (
        [["tokens/s", "engine", "plain", "ratio", "engine peak MB", "plain peak MB", "SSD GB/step"]],
        {},
    )
    for m in options.micro_batches:
        found: dict[str, list[dict]] = {"engine": [], "plain": []}
        for _ in range(options.rounds):
            for case in found:
                found[case].append(in_process(case, m, options))
        engine, plain = (
            statistics.median(s for f in found[c] for s in f["seconds"]) for c in ("engine", "plain")
        )
        speed = {"engine": m * TOKENS / engine, "plain": m * TOKENS / plain}
        peak = {case: max(f["peak"] for f in found[case]) / 1e6 for case in found}
        moved = found["engine"][0]["moved"] / 1e9
        rows.append(
            [f"{m} micro-batches", f"{speed['engine']:.0f}", f"{speed['plain']:.0f}", f"{plain / engine:.2f}",
             f"{peak['engine']:.0f}", f"{peak['plain']:.0f}", f"{moved:.2f}"]
        )  # fmt: skip
        result[m] = {"tokens_per_second": speed, "peak_mb": peak, "ssd_gb_per_step": moved}
    table(rows)
    finish(
        "throughput",
        {"model": options.model, "steps": options.steps, "by_micro_batches": result},
        options.keep,
    )


def in_process(case: str, m: int, options: argparse.Namespace) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--case", case, "--model", options.model]
    command += ["--micro-batches", str(m), "--steps", str(options.steps)]
    if options.folder:
        command += ["--folder", options.folder]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def run_case(options: argparse.Namespace) -> dict:
    """Seconds of each step but the first two, peak memory, and bytes moved to and from the SSD per step."""
    step, close, moved = (engine_case if options.case == "engine" else plain_case)(options)
    seconds = []
    for _ in range(options.steps + 2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"seconds": seconds[2:], "peak": peak, "moved": moved()}
    close()
    return result


def engine_case(options: argparse.Namespace):
    import torch
    from common import gpt, token_batches

    import holdfast

    model = gpt(*SIZES[options.model])
    folder = tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-")
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), folder, dtype="bf16")

    def close() -> None:
        engine.close()
        shutil.rmtree(folder)

    def moved() -> float:
        engine.wait()
        return engine.last["read_bytes"] + engine.last["written_bytes"]

    return lambda: engine.step(token_batches(options.micro_batches[0], TOKENS)), close, moved


def plain_case(options: argparse.Namespace):
    import torch
    from common import gpt, token_batches

    model = gpt(*SIZES[options.model], empty=False).bfloat16()
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        batches = token_batches(options.micro_batches[0], TOKENS)
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None, lambda: 0.0


if __name__ == "__main__":
    main()
