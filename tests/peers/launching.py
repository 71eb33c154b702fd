"""Worlds of the real DeepSpeed, each started by torchrun with a list of jobs.

Its teardown may abort after all is done, so what counts are the reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RUN = Path(__file__).with_name("deepspeed_run.py")
TESTS = RUN.parents[1]


def deepspeed(folder: Path, world: int, jobs: list[dict[str, Any]], script: Path = RUN) -> dict[str, Any]:
    """Do ``jobs``, and return what each told."""
    jobs = [{**job, "report": str(folder / f"{job['name']}.report")} for job in jobs]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, *command, str(script), str(folder / "jobs.json")],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    missing = [job["name"] for job in jobs if not Path(job["report"]).exists()]
    assert not missing, f"{missing} were not done: {(done.stdout + done.stderr)[-4000:]}"
    return {job["name"]: torch.load(job["report"], weights_only=True) for job in jobs}
