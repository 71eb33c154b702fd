"""How much of the disk's speed a unit's write and read keep, checksums and syncs included.

    python benchmarks/store.py [--folder FOLDER] [--mib 512] [--pairs 15] [--small]

Each pair moves the same file twice on the same queue: raw (direct requests, fdatasync after a write) and
through the store (xxh3 of every block, verification on reads). GB/s are 1e9 bytes per second. Prints a table
and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from holdfast.io.buffers import Buffer
from holdfast.io.queue import IOQueue, Request
from holdfast.quantities import MiB
from holdfast.store.commit.generations import Generations
from holdfast.store.format.payload_layout import Layout, block_spans
from holdfast.store.run_store import LocalStore

HOW = {"kind": "state", "phase": "benchmark", "priority": 0}
WARM_UP = 3  # the first round over the three generations allocates their extents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=None, help="where to write; the default is the temporary folder")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="seconds, for the tests")
    options = parser.parse_args()
    if options.small:
        options.mib, options.pairs = 8, 2
    root = Path(tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-"))
    try:
        report(measure(root, options), options)
    finally:
        shutil.rmtree(root)


def measure(root: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """GB/s of each pair, and the seconds of a publication."""
    rates: dict[str, list[float]] = {"raw write": [], "write": [], "raw read": [], "read": [], "publish": []}
    queue = IOQueue(options.threads)
    with LocalStore.open(root / "run", queue=queue) as store:
        store.begin(None)
        index = store.put_index({"version": 1, "atoms": {}})
        unit = store.unit("block", Layout.build([("w/param", "F32", (options.mib * MiB // 4,))]), 3)
        unit.create()
        image = Buffer(unit.layout.file_bytes, "benchmark").view
        image[:] = os.urandom(4096) * (len(image) // 4096)
        for pair in range(options.pairs + WARM_UP):
            generation = unit.acquire()
            seconds = [timed(raw, queue, unit, generation, image, True)]
            start = time.perf_counter()
            checksums = unit.write(generation, image, **HOW).result()
            seconds += [time.perf_counter() - start, timed(raw, queue, unit, generation, image, False)]
            start = time.perf_counter()
            unit.read(generation, image, checksums, **HOW).result()
            seconds += [time.perf_counter() - start]
            files = {"block": (generation, checksums)}
            seconds += [timed(store.publish, pair + 1, files, index, {})]
            if pair >= WARM_UP:
                for name, value in zip(rates, seconds):
                    rates[name].append(value if name == "publish" else len(image) / 1e9 / value)
    queue.close()
    return rates


def raw(queue: IOQueue, unit: Generations, generation: int, image: memoryview, write: bool) -> None:
    """The same requests without checksums."""
    file = unit._file(generation)
    requests = [Request(file, image[start:stop], start, write) for start, stop in block_spans(len(image))]
    finish = (lambda: os.fdatasync(file.fd)) if write else None
    queue.submit(requests, **HOW, finish=finish).result()


def timed(fn, *arguments) -> float:
    start = time.perf_counter()
    fn(*arguments)
    return time.perf_counter() - start


def report(rates: dict[str, list[float]], options: argparse.Namespace) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, commit {commit or '?'}")
    print(f"one unit of {options.mib} MiB, {options.threads} I/O threads, {options.pairs} pairs\n")
    print(f"{'':18}{'min':>8}{'median':>8}{'max':>8}  to raw")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        scale, unit = (1e3, "ms") if name == "publish" else (1, "GB/s")
        row = "".join(f"{value * scale:8.2f}" for value in (min(values), medians[name], max(values)))
        ratio = f"{medians[name] / medians['raw ' + name]:8.2f}" if f"raw {name}" in rates else ""
        print(f"{name + ', ' + unit:18}{row}{ratio}")
    print(json.dumps({"benchmark": "store", "commit": commit, "mib": options.mib, "median": medians}))


if __name__ == "__main__":
    main()
