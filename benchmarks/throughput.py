"""Tokens per second and peak memory: state on the SSD, durable at every step, beside plain PyTorch.

    python benchmarks/throughput.py [--model 46m|319m] [--micro-batches 1 4 8 16] [--steps 8] [--peers PYTHON]
                                    [--ssd-limit BYTES] [--before CHECKOUT] [--keep] [--small]

Each case runs in a process of its own, so that peak memory is its own. They take turns, `--rounds` times: the engine;
the engine with no block computed again in the backward pass ("kept"), and with embedding and head streamed
("streamed"); plain PyTorch with fused AdamW, activation checkpointing and everything in memory, once with fp32 masters
and gradient sums as the engine has them ("masters"), once, where bf16 is measured, with bf16 parameters and nothing
else ("plain"), which is a tenth of the optimizer's work and another arithmetic; with ``--before``, the engine of
another checkout ("before"); and with ``--peers``, a Python that has DeepSpeed and transformers, its ZeRO-3 with
optimizer and parameters on the SSD. That one is untuned, keeps activations instead of recomputing them, and makes no
step durable. Its operators need a compiler and libaio's headers, and are compiled when they are first used.

With ``--ssd-limit`` every case reads at most that many bytes a second from the SSD, and writes at most as many (as
root, with cgroups of version 1). Sequences of 256 tokens, one per micro-batch, no clipping. All cases compute in bf16,
or in fp32 on a processor that is more than four times as fast in it. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

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
    parser.add_argument("--ssd-limit", type=int, default=0, help="bytes per second, each way; 0 is none")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, help="cases that run besides the engine; all by default"
    )
    parser.add_argument("--peers", help="a Python that has DeepSpeed; without it that case is left out")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="measured by default")
    parser.add_argument("--before", type=Path, help="a checkout whose engine is measured too")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.model, options.micro_batches, options.steps, options.rounds = "tiny", [2], 2, 1
    if options.case:
        print(json.dumps(run_case(options)))
        return
    from common import fast_precision, finish, slow_disk, table

    options.precision = options.precision or fast_precision()
    pythons = dict.fromkeys(("engine", "kept", "streamed", "masters", "plain"), sys.executable)
    if options.precision == "fp32":
        del pythons["plain"]
    if options.peers:
        pythons["deepspeed"] = options.peers
    wanted = {"engine", *(options.cases or pythons)}
    pythons = {case: python for case, python in pythons.items() if case in wanted}
    if options.before:
        pythons["before"] = sys.executable
    rows = [["tokens/s", *pythons, *(f"of {name}" for name in pythons if name != "engine"),
             *(f"{name} peak MB" for name in pythons), "SSD GB/step"]]  # fmt: skip
    result, folder = {}, options.folder or tempfile.gettempdir()
    for m in options.micro_batches:
        found: dict[str, list[dict]] = {case: [] for case in pythons}
        for turn in range(options.rounds):
            for case, python in pythons.items():
                with slow_disk(folder, options.ssd_limit) if options.ssd_limit else nullcontext() as group:
                    found[case].append(in_process(python, case, m, options, group))
                print(f"{m} micro-batches, round {turn + 1}: {case} done", file=sys.stderr)
        seconds = {
            case: statistics.median(s for f in runs for s in f["seconds"]) for case, runs in found.items()
        }
        speed = {case: m * TOKENS / each for case, each in seconds.items()}
        peak = {case: max(f["peak"] for f in runs) / 1e6 for case, runs in found.items()}
        moved = found["engine"][0]["moved"] / 1e9
        rows.append([
            f"{m} micro-batches", *(f"{speed[case]:.0f}" for case in pythons),
            *(f"{speed['engine'] / speed[case]:.2f}" for case in pythons if case != "engine"),
            *(f"{peak[case]:.0f}" for case in pythons), f"{moved:.2f}",
        ])  # fmt: skip
        result[m] = {"tokens_per_second": speed, "peak_mb": peak, "ssd_gb_per_step": moved}
    table(rows)
    finish(
        "throughput",
        {
            "model": options.model,
            "steps": options.steps,
            "precision": options.precision,
            "ssd_limit": options.ssd_limit,
            "by_micro_batches": result,
        },
        options.keep,
    )


def in_process(python: str, case: str, m: int, options: argparse.Namespace, group: Path | None) -> dict:
    command = [python, "-W", "ignore", __file__, "--case", case, "--model", options.model]
    command += ["--micro-batches", str(m), "--steps", str(options.steps), "--precision", options.precision]
    if options.folder:
        command += ["--folder", options.folder]
    procs = None if group is None else group / "cgroup.procs"
    source = {"PYTHONPATH": str(options.before / "src")} if case == "before" else {}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | source,
        preexec_fn=None if procs is None else lambda: procs.write_text(str(os.getpid())),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    failed = done.returncode and case != "deepspeed"  # which may abort after all is done
    assert lines and not failed, f"{case}: {done.stderr[-4000:]}"
    return json.loads(lines[-1])


def run_case(options: argparse.Namespace) -> dict:
    """Seconds of each step but the first two, peak memory, and bytes moved to and from the SSD per step."""
    step, close, moved = CASES[options.case](options)
    seconds = []
    for _ in range(options.steps + 2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"seconds": seconds[2:], "peak": peak, "moved": moved()}
    close()
    return result


def engine_case(
    options: argparse.Namespace, recomputed_fraction: float = 1.0, embedding_and_head: str = "resident"
):
    import torch
    from common import gpt, token_batches

    import holdfast

    model = gpt(*SIZES[options.model])
    folder = tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    placement = holdfast.Placement(
        recomputed_fraction=recomputed_fraction, embedding_and_head=embedding_and_head
    )
    engine = holdfast.offload(model, optimizer, folder, placement=placement, precision=options.precision)

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

    model = gpt(*SIZES[options.model], empty=False)
    if options.precision == "bf16":
        model.bfloat16()
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


def masters_case(options: argparse.Namespace):
    from common import gpt, token_batches, with_masters

    if options.precision == "fp32":  # parameters are their own masters
        return plain_case(options)
    step = with_masters(gpt(*SIZES[options.model], empty=False))
    return lambda: step(token_batches(options.micro_batches[0], TOKENS)), lambda: None, lambda: 0.0


def deepspeed_case(options: argparse.Namespace):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29541")
    import deepspeed
    from common import gpt, token_batches

    count = options.micro_batches[0]
    folder = tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-")
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=gpt(*SIZES[options.model], empty=False),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": count,
            "bf16": {"enabled": options.precision == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": folder},
                "offload_param": {"device": "nvme", "nvme_path": folder},
            },
        },
    )
    engine.train()

    def step() -> None:
        for batch in token_batches(count, TOKENS):
            engine.backward(engine(**batch).loss)
            engine.step()

    return step, lambda: shutil.rmtree(folder), lambda: 0.0


CASES: dict[str, Callable[[argparse.Namespace], tuple[Callable, Callable, Callable]]] = {
    "engine": engine_case,
    "kept": partial(engine_case, recomputed_fraction=0.0),
    "streamed": partial(engine_case, embedding_and_head="streamed"),
    "before": engine_case,
    "masters": masters_case,
    "plain": plain_case,
    "deepspeed": deepspeed_case,
}


if __name__ == "__main__":
    main()
