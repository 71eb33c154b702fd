"""A model whose training state is larger than the machine's memory: trained, killed, verified and resumed.

    python benchmarks/size.py [--blocks 48] [--width 2048] [--micro-batches 4] [--keep] [--small]

`holdfast train` as a user would type it, two files for each block, 256 bytes of text a sample. The first process is
killed in the second step; what it left is verified; the second process takes that step again and ends; what it left is
verified, too. Prints a table and one line of JSON. `--keep` keeps the run's report beside that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import RESULTS, finish, options_of, table

from holdfast.store.run_store import LocalStore

GIB = 1 << 30
STEPS = 2


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    if options.small:
        options.blocks, options.width, options.micro_batches = 2, 32, 2
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-"))
    run = folder / "run"
    try:
        result = measure(run, options)
        if options.keep:
            page = RESULTS / "size.html"
            holdfast("report", run, "--out", page)
            page.write_text(page.read_text().replace(str(run), "run"))
    finally:
        shutil.rmtree(folder)
    table([["", ""], *([name.replace("_", " "), f"{value:,}"] for name, value in result.items())])
    finish("size", {"micro_batches": options.micro_batches, **result}, options.keep)


def measure(run: Path, options: argparse.Namespace) -> dict[str, float]:
    """Sizes in bytes, times in seconds."""
    train = training(run, options)
    started = time.perf_counter()
    killed = subprocess.Popen(train, stdout=subprocess.DEVNULL)
    moments = {}
    try:
        for name, reached in (("until_ready", 0), ("first_step_durable", 1)):
            while newest(run) < reached:
                assert killed.poll() is None, (
                    f"it ended with {killed.returncode} before step {reached} was durable"
                )
                time.sleep(0.05)
            moments[name] = round(time.perf_counter() - started, 1)
        if not options.small:
            time.sleep(steps_of(run)[0]["seconds"] / 2)
    finally:
        killed.send_signal(signal.SIGKILL)
        _, status, usage = os.wait4(killed.pid, 0)
    assert os.WIFSIGNALED(status), "it ended before it was killed"
    peaks = [usage.ru_maxrss * 1024]
    left, seconds = verified(run)
    started = time.perf_counter()
    resumed = subprocess.Popen(train, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(resumed.pid, 0)
    assert status == 0, f"the resumed process ended with {os.waitstatus_to_exitcode(status)}"
    peaks.append(usage.ru_maxrss * 1024)
    resuming = time.perf_counter() - started
    end, _ = verified(run)
    assert left >= 1 and end == STEPS, (left, end)
    assert options.small or left < end, "it was killed after its last step"
    steps = steps_of(run)
    return {
        **sizes(run),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "peak_bytes": max(peaks),
        **moments,
        "step_seconds": round(steps[-1]["seconds"], 1),
        "read_bytes_of_a_step": max(step["read_bytes"] for step in steps),
        "written_bytes_of_a_step": max(step["written_bytes"] for step in steps),
        "loss_of_the_last_step": round(steps[-1]["loss"], 4),
        "step_that_the_kill_left": left,
        "verifying_seconds": round(seconds, 1),
        "resumed_to_the_end_seconds": round(resuming, 1),
    }


def steps_of(run: Path) -> list[dict]:
    """The events of the steps that were taken, in the order in which they were."""
    lines = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "step"]


def training(run: Path, options: argparse.Namespace) -> list[str]:
    values = {
        "run.dir": f'"{run}"',
        "model.blocks": options.blocks,
        "model.width": options.width,
        "model.heads": max(2, options.width // 128),
        "model.kv_heads": max(1, options.width // 256),
        "train.steps": STEPS,
        "train.micro_batches": options.micro_batches,
        "train.micro_batch_size": 1,
        "durability.retain": 1,
    }
    settings = [argument for key, value in values.items() for argument in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "holdfast", "train", *settings]


def holdfast(*arguments: object) -> str:
    command = [sys.executable, "-m", "holdfast", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def newest(run: Path) -> int:
    """The newest step that has a commit, -1 before there is one."""
    if not (run / "commits").exists():
        return -1
    return max((ref.step for ref in LocalStore.read(run).commits()), default=-1)


def verified(run: Path) -> tuple[int, float]:
    """The newest step, all of which was read and is what was written, and the seconds that took."""
    started = time.perf_counter()
    found = json.loads(holdfast("verify", run, "--json"))
    assert found["whole"], found
    return found["step"], time.perf_counter() - started


def sizes(run: Path) -> dict[str, int]:
    """Elements of all parameters, and bytes of the state, which a commit holds once."""
    shown = json.loads(holdfast("show", run, "--json"))
    shapes = [atom["shape"] for atom in shown["atoms"] if atom["slot"] == "param"]
    return {"parameters": sum(map(math.prod, shapes)), "state_bytes": shown["bytes"]}


if __name__ == "__main__":
    main()
