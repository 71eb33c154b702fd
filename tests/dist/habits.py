"""Habits of scripts that train by other libraries, and that they end as if they had not been killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist.world import World

ACCELERATE: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"kind": "in order"},
    "seedable": {"kind": "seedable"},
    "generator": {"kind": "generator"},
    "noise": {"noise": True},
    "workers": {"num_workers": 2},
    "persistent": {"kind": "persistent", "num_workers": 2},
    "accumulation": {"accumulate": 3},
    "noise and accumulation": {"noise": True, "accumulate": 2},
    "scaler": {"scaler": True},
    "left early": {"leave_at": 3},
    "holdfast": {"kind": "holdfast", "noise": True},
}
"""In one process 8 batches a pass, in two 4; three passes."""

LIGHTNING: dict[str, dict[str, Any]] = {
    "plain": {},
    "noise": {"noise": True},
    "own generator": {"own_generator": True},
    "workers": {"num_workers": 2},
    "accumulation": {"accumulate_grad_batches": 3},
    "often validated": {"val_check_interval": 2},
    "not validated": {"validate": False, "noise": True},
    "plateau": {"plateau": True},
    "part of the data": {"limit_train_batches": 3, "own_generator": True, "noise": True},
    "steps": {"max_steps": 10, "max_epochs": -1},
    "by hand": {"by_hand": True},
    "stopping": {"stopping": True, "max_epochs": 9},
}
"""The same batches and epochs."""

TRAINER: dict[str, dict[str, Any]] = {
    "plain": {},
    "own generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "accumulation": {"gradient_accumulation_steps": 3},
    "workers": {"dataloader_num_workers": 2},
    "masks": {"data": "masks"},
    "masks and accumulation": {"data": "masks", "gradient_accumulation_steps": 2},
    "drop": {"dataloader_drop_last": True},
    "stream": {"data": "stream", "max_steps": 8},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "steps": {"max_steps": 7, "optim": "adafactor"},
    "notes": {"logging_steps": 1, "notes": True},
}
"""Two processes: 4 batches of each in an epoch, two epochs."""


def ended(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for said in ranks:
        assert said.get("finished"), (said.get("trace", ""), said.get("stacks", ""), said)
        assert said["processes"] == len(ranks)
    return ranks


def compare(rest: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """Each rank came to the same end, by the last of the same losses."""
    for one, other in zip(whole, rest, strict=True):
        assert 0 < len(other["losses"]) < len(one["losses"])
        assert other["losses"] == one["losses"][len(one["losses"]) - len(other["losses"]) :]
        assert other["digests"] == one["digests"]
        assert other["steps"] == one["steps"]


def killed_it_ends_the_same(
    world: World,
    folder: Path,
    ranks: int,
    habit: dict[str, Any],
    steps: Callable[[int], set[int]] = lambda last: {last // 3 + 1, last},
) -> None:
    """The last rank is killed at ``steps``, given the number of the last. Undisturbed is a script without a run."""
    whole = ended(world.run_undisturbed(ranks, has_run=False, **habit))
    for step in sorted(steps(whole[0]["steps"])):
        cut = world.run(ranks, root=folder / "run", output=folder / "cut", kill=[ranks - 1, step], **habit)
        assert cut[ranks - 1]["code"] == -9, cut
        assert not any(said.get("finished") for said in cut)
    compare(ended(world.run(ranks, root=folder / "run", output=folder / "cut", **habit)), whole)
