"""What a run of very many tiny steps and of many resumes costs: resume, ls and verify, files and bytes.

    python benchmarks/many_steps.py [--steps 100000] [--resumes 200] [--base-every 200] [--folder FOLDER] [--keep]
                                    [--small]

A model of 20 parameters is trained for ``--steps`` steps, in ``--resumes`` + 1 legs of equal length: each leg opens the
run anew, resumes, trains, and closes. Every resume is timed, from the constructor to the end of ``resume()``; after
every tenth part of the legs ``ls`` and ``verify`` of the run are timed, inside this process, and its files and bytes
are counted. What is to be shown: the last resume costs what the first did. Prints a table, and one line of JSON with
every measurement.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish, options_of, table

import holdfast
from holdfast.cli.inspect import ls, verify
from holdfast.quantities import format_bytes

SAMPLES = 10
"""How often ls and verify are timed."""


def leg(run: Path, steps: int, base_every: int) -> tuple[float, float]:
    """Resume the run and train ``steps`` steps; the seconds of the resume and of all else."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(8, 4)
    started = time.perf_counter()
    ckpt = holdfast.Checkpointer(run, model=model, optimizer=optimizer, base_every=base_every)
    ckpt.resume()
    resumed = time.perf_counter()
    for _ in range(steps):
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    ckpt.close()
    return resumed - started, time.perf_counter() - resumed


def timed(verb: Callable[..., Any], run: Path) -> float:
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        verb(str(run), as_json=True)
    return time.perf_counter() - started


def size_of(run: Path) -> tuple[int, int, int]:
    """Files of the run, their bytes, and timeline records among them."""
    files = [path for path in run.rglob("*") if path.is_file()]
    return (
        len(files),
        sum(path.stat().st_blocks * 512 for path in files),
        len(list((run / "timelines").iterdir())),
    )


def measure(run: Path, steps: int, resumes: int, base_every: int) -> dict[str, Any]:
    legs, each = resumes + 1, steps // (resumes + 1)
    resume_seconds, training, samples = [], 0.0, []
    for number in range(1, legs + 1):
        seconds, rest = leg(run, each, base_every)
        resume_seconds.append(seconds)
        training += rest
        if number % max(1, legs // SAMPLES) == 0 or number == legs:
            files, nbytes, timelines = size_of(run)
            samples.append(
                {
                    "steps": number * each, "resumes": number - 1, "ls": timed(ls, run), "verify": timed(verify, run),
                    "files": files, "bytes": nbytes, "timelines": timelines,
                }
            )  # fmt: skip
    return {"resume_seconds": resume_seconds, "step_seconds": training / (legs * each), "samples": samples}


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--resumes", type=int, default=200)
    parser.add_argument("--base-every", type=int, default=200)
    options = parser.parse_args()
    if options.small:
        options.steps, options.resumes, options.base_every = 40, 3, 5
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder) / "run", options.steps, options.resumes, options.base_every)
    seconds, few = found["resume_seconds"], max(1, min(10, len(found["resume_seconds"]) // 3))
    found |= {"first": statistics.median(seconds[1 : 1 + few]), "last": statistics.median(seconds[-few:])}
    rows = [
        [str(s["steps"]), str(s["resumes"]), f"{s['ls']:.3f} s", f"{s['verify']:.3f} s", str(s["files"]),
         format_bytes(s["bytes"]), str(s["timelines"])]
        for s in found["samples"]
    ]  # fmt: skip
    table([["steps", "resumes", "ls", "verify", "files", "bytes", "timelines"], *rows])
    print(f"resume, median of {few}: the first {found['first']:.3f} s, the last {found['last']:.3f} s")
    about = {"steps": options.steps, "resumes": options.resumes, "base_every": options.base_every}
    finish("many_steps", {**about, **found}, options.keep)


if __name__ == "__main__":
    main()
