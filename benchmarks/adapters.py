"""What bases cost where adapters train on a frozen model: bytes, and the time that training waits for them.

    python benchmarks/adapters.py [--width 4096] [--layers 18] [--rank 16] [--steps 200] [--base-every 10] [--pause 0]
                                  [--folder FOLDER] [--keep] [--small]

A stack of linear layers of ``--width`` in bf16, one of six with an adapter of ``--rank`` in fp32 (a Llama with adapters
on two projections has as many), trained by AdamW under a ``Checkpointer``. The first base is the one that training
waits for; later ones are made beside it, one in ``--base-every`` steps. Stall is what a step waits for a base and for
its record. With ``--pause`` each step takes so many seconds more, as a larger one would. Prints a table and one line
of JSON.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import finish, options_of, table
from torch import nn

from holdfast import Checkpointer
from holdfast.quantities import format_bytes


class Adapted(nn.Module):
    """Six frozen linear layers, the first with a low-rank adapter."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(6)]
        self.layers = nn.ModuleList(layers).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.up(self.down(x))
        for layer in self.layers:
            x = x + layer(x.bfloat16()).float()
        return x


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--base-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    if options.small:
        options.width, options.layers, options.steps, options.base_every = 512, 6, 12, 3
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(options.width, options.rank) for _ in range(options.layers // 6)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    waits: list[float] = []
    steps: list[float] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpointer(
            Path(folder), model=model, optimizer=optimizer, base_every=options.base_every
        ) as checkpointer:
            began = time.perf_counter()
            checkpointer.resume()
            first_seconds, writer = time.perf_counter() - began, checkpointer._backend.pace.bases
            first, bases = writer.written_bytes, []
            for _ in range(options.steps):
                began = time.perf_counter()
                model(torch.randn(8, options.width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(options.pause)
                checkpointer.step()
                steps.append(time.perf_counter() - began)
                waits.append(checkpointer.stall_seconds)
                if checkpointer._backend.base_step not in bases:
                    bases.append(checkpointer._backend.base_step)
            checkpointer.wait()
            later = (writer.written_bytes - first) / max(len(bases) - 1, 1)
    step, stall = statistics.median(steps), max(waits[1:])
    rows = [
        ["bytes of the first base", format_bytes(first)],
        ["seconds of it", f"{first_seconds:.2f}"],
        ["bytes of a later one, in the mean", f"{format_bytes(int(later))}, {later / first:.2%}"],
        ["bases", str(len(bases))],
        ["median step, with its record", f"{step * 1000:.1f} ms"],
        ["mean stall of a step", f"{statistics.mean(waits) * 1000:.2f} ms"],
        ["longest stall of a step", f"{stall * 1000:.2f} ms, {stall / step:.1%} of a step"],
    ]
    table([["of a base", ""], *rows])
    found = {
        "width": options.width, "layers": options.layers, "rank": options.rank, "steps": options.steps,
        "base_every": options.base_every, "first_bytes": first, "first_seconds": first_seconds, "later_bytes": later,
        "bases": len(bases), "step_seconds": step, "mean_stall_seconds": statistics.mean(waits),
        "longest_stall_seconds": stall,
    }  # fmt: skip
    finish("adapters", found, options.keep)


if __name__ == "__main__":
    main()
