"""How long a resume takes against the number of records behind the base, and what that could take at the least.

    python benchmarks/recovery.py [--models resnet18 gpt2] [--arms exact topk] [--lengths 0 10 50 100] [--rounds 5]
                                  [--folder FOLDER] [--keep] [--small]

A run of the longest length is recorded once, with gradients that are made up, since replay does not ask where they
come from. Each measurement resumes a copy of it (of links) at one length, in turn, from the disk and not from the
page cache; what was recovered is compared bit for bit. What a record costs is the slope of a line through the lengths
above 0, by least squares, one line for each round; what the line has at 0 is the load of the base, its verification,
and the preparations for training. Length 0 itself is measured and not part of it, since nothing is replayed there.
Beside the slope are, of the same round, the optimizer's own time for a step, and that of reading a record by four
threads that do nothing else. The goal is at most 1.2 of the larger, and with ``topk``, whose records are small, of
the optimizer's. How long other arms load their newest state is given for comparison. Prints tables, min, median and
max over the rounds, and one line of JSON with every measurement.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash
from arms import ARMS
from common import finish, options_of, spread, table
from trainings import TRAININGS, Training

from holdfast.distributed import stream_of
from holdfast.io.buffers import Buffer
from holdfast.quantities import counted, format_bytes
from holdfast.store.log.chain import read_journal
from holdfast.store.reader import RunReader

LENGTHS = {"resnet18": (0, 10, 50, 100, 200), "gpt2": (0, 10, 50, 100), "tiny": (0, 2, 5)}
SHORTER = {("gpt2", "exact"): (0, 5, 10, 20, 40)}
"""Where a record takes half a gigabyte."""
RECORDED = ("exact", "topk")
PEERS = ("save", "dcp", "gemini")
CHUNK, READERS = 4 << 20, 4


class Cheap:
    """A training whose gradients are made up once: ``step`` is the optimizer's alone."""

    def __init__(self, model: str) -> None:
        self.training: Training = TRAININGS[model]()
        generator = torch.Generator().manual_seed(1)
        self.parameters = list(self.training.model.parameters())
        self.grads = [torch.randn(p.shape, generator=generator) * 1e-3 for p in self.parameters]

    def step(self) -> float:
        """Returns the seconds."""
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad.clone()  # a codec may write what it chose over it
        started = time.perf_counter()
        self.training.optimizer.step()
        seconds = time.perf_counter() - started
        self.training.steps_done += 1
        return seconds

    def digest(self) -> str:
        """Of parameters and optimizer state."""
        hashed = xxhash.xxh3_64()
        for parameter in self.parameters:
            held = self.training.optimizer.state[parameter]
            for tensor in (parameter.detach(), *(held[key] for key in sorted(held))):
                hashed.update(tensor.numpy())
        return hashed.hexdigest()


def record(model: str, name: str, folder: Path, lengths: tuple[int, ...]) -> dict[int, str]:
    """A run of one step more than the longest length in ``folder``, since a codec with residuals ends with a base.
    Returns digests of the state by length."""
    cheap, digests = Cheap(model), {}
    arm = ARMS[name](folder, cheap.training, base_every=10**9, storage="1TB")
    arm.resume()
    for step in range(max(lengths) + 1):
        if step in lengths:
            digests[step] = cheap.digest()
        cheap.step()
        arm.step()
    arm.close()
    return digests


def resume_seconds(model: str, name: str, run: Path, length: int, digest: str) -> float:
    """Of a resume at ``length``, in a copy of the run that goes away."""
    copy = run.with_name("copy")
    shutil.copytree(run, copy, copy_function=os.link)
    cheap = Cheap(model)
    arm = ARMS[name](copy, cheap.training, base_every=10**9, storage="1TB")
    forget_pages(copy)
    started = time.perf_counter()
    step = arm.resume(step=length) if length else arm.resume(before=1)
    seconds = time.perf_counter() - started
    assert step == length and cheap.digest() == digest, f"step {length} did not come back"
    arm.close()
    shutil.rmtree(copy)
    return seconds


def reading_seconds(run: Path) -> tuple[float, int]:
    """Of all records, one after another without a look at them, and their bytes."""
    ends: dict[str, int] = {}
    with RunReader(run) as reader:
        for record in read_journal(reader, stream_of(0)).records.values():
            ends[record.path] = record.end
    forget_pages(run)
    chunks = [(run / path, offset) for path, end in ends.items() for offset in range(0, end, CHUNK)]
    with ThreadPoolExecutor(READERS) as pool:
        buffers = [
            Buffer(CHUNK, "reading").view for _ in range(READERS)
        ]  # three times as fast as plain mmaps
        started = time.perf_counter()
        list(pool.map(_read, buffers, (chunks[reader::READERS] for reader in range(READERS))))
        return time.perf_counter() - started, sum(ends.values())


def _read(memory: memoryview, chunks: list[tuple[Path, int]]) -> None:
    for path, offset in chunks:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # a file system that has no direct I/O
            fd = os.open(path, os.O_RDONLY)
        os.preadv(fd, [memory], offset)
        os.close(fd)


def forget_pages(folder: Path) -> None:
    """What the page cache holds of the files in ``folder``."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(model: str, name: str, lengths: tuple[int, ...], rounds: int, folder: str) -> dict:
    place = Path(tempfile.mkdtemp(dir=folder, prefix="holdfast-bench-"))
    run, records = place / "run", max(lengths) + 1
    resumes: dict[int, list[float]] = {length: [] for length in lengths}
    steps, reads, nbytes = [], [], 0
    try:
        digests = record(model, name, run, lengths)
        cheap = Cheap(model)
        cheap.step()
        warm = lengths[1]  # the first resume of a process imports and touches what the others find
        resume_seconds(model, name, run, warm, digests[warm])
        for _ in range(rounds):
            own = []
            for length in lengths:
                resumes[length].append(resume_seconds(model, name, run, length, digests[length]))
                own += [cheap.step() for _ in range(5)]
            steps.append(statistics.median(own))
            seconds, nbytes = reading_seconds(run)
            reads.append(seconds / records)
        peers = {peer: peer_seconds(peer, model, place) for peer in PEERS}
    finally:
        shutil.rmtree(place)
    return {
        "record_bytes": round(nbytes / records),
        "resume_seconds": resumes,
        "optimizer_seconds": steps,
        "reading_seconds": reads,
        **fitted(resumes, steps, reads, sparse=name == "topk"),
        "peers": peers,
    }


def fitted(
    resumes: dict[int, list[float]], steps: list[float], reads: list[float], sparse: bool
) -> dict[str, list[float]]:
    """Of each round: the line through its resumes, and its slope beside what a record takes at the least.

    >>> fitted({0: [9.0], 10: [2.0], 20: [3.0], 40: [5.0]}, steps=[0.05], reads=[0.08], sparse=False)
    {'load_seconds': [1.0], 'record_seconds': [0.1], 'ratio': [1.25]}
    """
    lengths = [length for length in resumes if length]
    found: dict[str, list[float]] = {"load_seconds": [], "record_seconds": [], "ratio": []}
    for turn, (step, read) in enumerate(zip(steps, reads, strict=True)):
        slope, load = np.polyfit(lengths, [resumes[length][turn] for length in lengths], 1)
        least = step if sparse else max(step, read)
        for key, value in (("load_seconds", load), ("record_seconds", slope), ("ratio", slope / least)):
            found[key].append(round(float(value), 9))
    return found


def peer_seconds(name: str, model: str, place: Path) -> float:
    """To load the newest state of another arm."""
    cheap = Cheap(model)
    arm = ARMS[name](place / name, cheap.training)
    arm.resume()
    for _ in range(2):
        cheap.step()
        arm.step()
    arm.close()
    again = ARMS[name](place / name, TRAININGS[model]())
    forget_pages(place / name)
    try:
        started = time.perf_counter()
        assert again.resume() == 2
        return time.perf_counter() - started
    finally:
        again.close()
        again.remove()


SAID = {
    "load_seconds": "load, ms",
    "record_seconds": "a record, ms",
    "optimizer_seconds": "the optimizer's step, ms",
    "reading_seconds": "reading a record, ms",
}


def rows(found: dict) -> list[list[str]]:
    lines = [["", "min", "median", "max"]]
    for length, seconds in found["resume_seconds"].items():
        lines.append([f"resume of {counted(length, 'record')}, s", *spread(seconds)])
    for key, said in SAID.items():
        lines.append([said, *spread([1000 * seconds for seconds in found[key]])])
    return [*lines, ["a record, of the least", *spread(found["ratio"])]]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=LENGTHS, default=["resnet18", "gpt2"])
    parser.add_argument("--arms", nargs="+", choices=RECORDED, default=RECORDED)
    parser.add_argument("--lengths", nargs="+", type=int, help="of all runs; 0 is among them in any case")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.lengths is not None and len({*options.lengths} - {0}) < 2:
        parser.error("a line needs two lengths above 0")
    if options.small:
        options.models, options.rounds = ["tiny"], 1
    result: dict[str, dict] = {}
    folder = options.folder or tempfile.gettempdir()
    for model, name in itertools.product(options.models, options.arms):
        asked = options.lengths or SHORTER.get((model, name), LENGTHS[model])
        lengths = tuple(sorted({0, *asked}))
        found = measure(model, name, lengths, options.rounds, folder)
        result.setdefault(model, {})[name] = found
        record_bytes = format_bytes(found["record_bytes"])
        least = (
            "the optimizer's step" if name == "topk" else "the larger of the optimizer's step and reading it"
        )
        print(
            f"{model}, {name}: records of {record_bytes}, {options.rounds} rounds; a record is the slope over"
        )
        print(f"lengths above 0 in one round, load what the line has at 0, the least {least}\n")
        table(rows(found))
        loads = (f"{peer} loads in {value:.2f} s" for peer, value in found["peers"].items())
        print("\n" + ", ".join(loads) + "\n")
    finish("recovery", {"rounds": options.rounds, "models": result}, options.keep)


if __name__ == "__main__":
    main()
