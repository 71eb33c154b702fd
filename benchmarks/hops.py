"""How many calls, through how many files of the library, the four most usual ways take.

    python benchmarks/hops.py [--folder FOLDER] [--keep] [--small]

A profile hook on every thread counts calls of functions of ``holdfast``, and the files that these are in: of a step
under a ``Checkpointer`` from the optimizer's step until it is durable, of ``resume()``, of ``engine.step``, and of what
a ZeRO-3 source takes to open and load. Each is counted the second time, when nothing is imported any more. The numbers
are the same on every machine but for how often waits ask; with fewer hops a house is easier to read.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from common import Stack, finish, options_of, table
from torch import nn

import holdfast

sys.path.append(str(Path(__file__).parents[1] / "tests"))
SOURCE = str(Path(holdfast.__file__).parent)


class Hops:
    """Counts calls while it is ``counting``. Made before the threads that it is to see."""

    def __init__(self) -> None:
        self.counting = False
        self.calls: Counter[str] = Counter()
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def _hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.counting and event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            self.calls[frame.f_code.co_filename[len(SOURCE) + 1 :]] += 1

    @contextmanager
    def counted(self, found: dict[str, dict[str, int]], name: str) -> Iterator[None]:
        """Put into ``found`` how many calls and files the body took, on all threads."""
        self.calls.clear()
        self.counting = True
        try:
            yield
        finally:
            self.counting = False
        found[name] = {"calls": sum(self.calls.values()), "files": len(self.calls)}

    def close(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def net() -> Stack:
    """Return a model of four blocks."""
    return Stack(Block() for _ in range(4))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def in_memory(folder: Path, hops: Hops, found: dict[str, dict[str, int]]) -> None:
    """A step until it is durable, and a resume."""
    for _ in range(2):
        model, optimizer = trained()
        with holdfast.Checkpointer(folder / "steps", model=model, optimizer=optimizer) as checkpointer:
            with hops.counted(found, "resume()"):
                start = checkpointer.resume()
            for step in range(start, start + 4):
                model(torch.ones(2, 8)).backward()
                with hops.counted(found, "step until durable"):
                    optimizer.step()
                    checkpointer.step()
                    time.sleep(0.2)  # rather than ask again and again, which counts
                    while checkpointer.durable_step <= step:
                        time.sleep(0.2)
                optimizer.zero_grad()


def out_of_core(folder: Path, hops: Hops, found: dict[str, dict[str, int]]) -> None:
    model, optimizer = trained()
    with holdfast.offload(model, optimizer, folder / "engine", precision="fp32") as engine:
        for _ in range(3):
            with hops.counted(found, "engine.step()"):
                engine.step([(torch.ones(2, 8),)])
                engine.wait()


def from_zero(folder: Path, hops: Hops, found: dict[str, dict[str, int]]) -> None:
    """A checkpoint of ZeRO-3 of four ranks, as a source."""
    from formats import deepspeed_files

    shapes = {name: tuple(parameter.shape) for name, parameter in net().named_parameters()}
    deepspeed_files.write(folder / "zero", deepspeed_files.random_state([shapes]), 3, 4)
    for turn in range(2):
        model, optimizer = trained()
        checkpointer = holdfast.Checkpointer(folder / f"from{turn}", model=model, optimizer=optimizer)
        with checkpointer, hops.counted(found, "ZeRO-3 source"):
            checkpointer.resume(source=folder / "zero")


def main() -> None:
    arguments = options_of(__doc__).parse_args()
    hops, found = Hops(), {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for count in (in_memory, out_of_core, from_zero):
            count(Path(folder), hops, found)
    hops.close()
    table(
        [["", "calls", "files"], *([name, f"{n['calls']:,}", f"{n['files']}"] for name, n in found.items())]
    )
    finish("hops", {"hops": found}, arguments.keep)


if __name__ == "__main__":
    main()
