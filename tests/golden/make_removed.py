"""Writes ``fsdp1.tar.xz`` and ``powersgd.tar.xz``: runs of wrappers and codecs that this version writes no more.

Run once, with the code of commit 22b07fe9, the last one that has both, checked out in ``OLD``:

    PYTHONPATH=OLD/src:OLD/tests python tests/golden/make_removed.py TARGET

It prints the digests that the tests compare with. A replay is exact on every machine: SGD with momentum has no square
root, its hyper-parameters are powers of two, so that each product is exact and every sum is rounded once, and PowerSGD
of rank 1 makes each element of a gradient by one multiplication. Losses and gradients need not be exact: the records
have what the writer's optimizer consumed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what an optimizer imports at its first step
import torch.multiprocessing as mp

from dist import training

RUNS: dict[str, dict[str, Any]] = {
    "fsdp1": {"kind": "fsdp1 layers", "base_every": 2, "keep_last": 1, "pause": 0.3, "unit_bytes": 250},
    "powersgd": {
        "kind": "ddp",
        "codec": ("powersgd", 1),
        "unit_bytes": 500,
        "save_at": 8,
        "base_every": 99,
        "keep_last": 9,
    },
}
"""The orders for two ranks of ``dist.training``, which take eight steps. The steps of a base depend on the disk."""


def write(target: Path) -> None:
    for name, order in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "run"
            mp.start_processes(_rank, (f"file://{folder}/meeting", str(root), order), 2, start_method="fork")
            for lock in root.glob("**/lock*"):
                lock.unlink()
            shutil.make_archive(str(target / name), "xztar", root)


def _rank(rank: int, meeting: str, root: str, order: dict[str, Any]) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sgd: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=2**-4, momentum=0.5)
    training.OPTIMIZERS["sgd"] = sgd
    steps: Any = lambda optimizer, _: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)  # noqa: E731
    torch.optim.lr_scheduler.CosineAnnealingLR = steps
    told: dict[str, Any] = {}
    training.train(
        rank, 2, meeting, lambda **what: told.update(what), root=root, steps=8, optimizer="sgd", **order
    )
    if rank == 0:
        print(order["kind"], told["digests"])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
