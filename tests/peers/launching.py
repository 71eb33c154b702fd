"""Worlds of the real DeepSpeed, each with a list of jobs. Their ranks are forked from a process that imported it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from dist.world import World

os.environ["DS_ACCELERATOR"] = "cpu"  # before the server of processes imports DeepSpeed


def parameters_asked(request: Any, fixture: str) -> list[dict[str, Any]]:
    """The parameters of each test of the module that is to run and asks for ``fixture``."""
    items = [item for item in request.session.items if item.module is request.module]
    return [
        item.callspec.params if hasattr(item, "callspec") else {}
        for item in items
        if fixture in item.fixturenames
    ]


def deepspeed(
    folder: Path, world: int, jobs: list[dict[str, Any]], script: str = "peers.deepspeed_run"
) -> dict[str, Any]:
    """Do ``jobs``, and return what each told."""
    jobs = [{**job, "report": str(folder / f"{job['name']}.report")} for job in jobs]
    said = World(script, patience_seconds=500).run(world, jobs=jobs)
    missing = [job["name"] for job in jobs if not Path(job["report"]).exists()]
    assert not missing, f"{missing} were not done: {said}"[-4000:]
    return {job["name"]: torch.load(job["report"], weights_only=True) for job in jobs}
