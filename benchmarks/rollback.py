"""How long a living process takes to go back to a recorded step, against a resume of the same step in a new one.

    python benchmarks/rollback.py [--gigabytes 1] [--lengths 0 1 2 5] [--rounds 5] [--folder FOLDER] [--keep] [--small]

A state of the given size (parameters and the moments of Adam, fp32) is trained with made-up gradients. For each length
a base is made, so many steps follow it, and the process goes back to the last of them, after everything was written:
what a rollback waits for otherwise is the disk's. State is compared bit for bit. ``cached`` runs with ``direct=False``,
so that the files are in the page cache; ``direct`` reads the disk. ``copy`` is a guard's rollback to its copy in host
memory. ``resume`` is what a new Checkpointer takes for the same step, without the start of a process, of the imports
and of the model. Prints a table of seconds, min, median and max, and one line of JSON with every measurement.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from pathlib import Path

import torch
import xxhash
from common import finish, options_of, spread, table
from torch import nn

from holdfast.checkpointer import Checkpointer

BYTES_PER_PARAMETER = 12
WIDTH = 1024


class Made:
    """A model of ``nbytes`` of state, and gradients that are made up once."""

    def __init__(self, nbytes: int) -> None:
        layers = max(1, nbytes // BYTES_PER_PARAMETER // WIDTH**2)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.grads = [torch.randn_like(p) * 1e-3 for p in self.model.parameters()]
        self.state_bytes = layers * WIDTH**2 * BYTES_PER_PARAMETER

    def step(self) -> None:
        for parameter, grad in zip(self.model.parameters(), self.grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()

    def digest(self) -> str:
        hashed = xxhash.xxh3_64()
        for parameter in self.model.parameters():
            held = self.optimizer.state[parameter]
            for tensor in (parameter.detach(), *(held[key] for key in sorted(held))):
                hashed.update(tensor.numpy())
        return hashed.hexdigest()

    def checkpointer(self, run: Path, direct: bool) -> Checkpointer:
        return Checkpointer(
            run, model=self.model, optimizer=self.optimizer, base_every=10**9, storage="1TB", direct=direct
        )


def measure(nbytes: int, lengths: list[int], rounds: int, run: Path, direct: bool) -> dict:
    """Return the seconds of rollbacks by length, and of resumes."""
    made = Made(nbytes)
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    with made.checkpointer(run, direct) as checkpointer:
        checkpointer.resume()
        made.step()
        checkpointer.step()
        for turn in range(rounds + 1):  # the first one touches what the others find
            for length in lengths:
                checkpointer.save()
                for _ in range(length):
                    made.step()
                    checkpointer.step()
                wanted, target = made.digest(), checkpointer.steps_done
                made.step()
                checkpointer.step()
                checkpointer.wait()
                started = time.perf_counter()
                checkpointer.rollback(target)
                if turn:
                    seconds[length].append(time.perf_counter() - started)
                assert made.digest() == wanted, f"step {target} did not come back"
        copies = guarded(made, checkpointer, rounds)
        target = checkpointer.steps_done
    resumes = []
    for _ in range(rounds):
        made = Made(nbytes)
        with made.checkpointer(run, direct) as checkpointer:
            started = time.perf_counter()
            assert checkpointer.resume(step=target) == target
            resumes.append(time.perf_counter() - started)
    return {"rollback_seconds": seconds, "copy_seconds": copies, "resume_seconds": resumes}


def guarded(made: Made, checkpointer: Checkpointer, rounds: int) -> list[float]:
    """Return the seconds of a guard's rollbacks to the copy of the step before."""
    guard, found = checkpointer.guard(copy_every=2), []
    for turn in range(rounds + 1):
        while True:
            made.step()
            checkpointer.step()
            if checkpointer.steps_done % 2 == 0:
                break
        wanted, target = made.digest(), checkpointer.steps_done
        made.step()
        checkpointer.step()
        checkpointer.wait()
        started = time.perf_counter()
        assert guard.check(float("nan"))
        if turn:
            found.append(time.perf_counter() - started)
        assert checkpointer.steps_done == target and made.digest() == wanted, "the copy did not come back"
    return found


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of state: parameters and two moments")
    parser.add_argument("--lengths", nargs="+", type=int, default=[0, 1, 2, 5], help="records to replay")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("holdfast").setLevel(logging.WARNING)  # otherwise a line for each rollback
    if options.small:
        options.gigabytes, options.lengths, options.rounds = 0.02, [0, 2], 1
    nbytes = int(options.gigabytes * 1e9)
    result: dict = {"state_bytes": Made(nbytes).state_bytes, "rounds": options.rounds}
    for name, direct in (("cached", False), ("direct", True)):
        place = Path(tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-"))
        try:
            found = measure(nbytes, options.lengths, options.rounds, place / "run", direct)
        finally:
            shutil.rmtree(place)
        result[name] = found
        rows = [[f"{name}, s", "min", "median", "max"]]
        rows += [[f"rollback over {n} records", *spread(s, 3)] for n, s in found["rollback_seconds"].items()]
        rows.append(["rollback to a copy in memory", *spread(found["copy_seconds"], 3)])
        table([*rows, ["resume of the last", *spread(found["resume_seconds"], 3)]])
    finish("rollback", result, options.keep)


if __name__ == "__main__":
    main()
