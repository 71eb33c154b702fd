"""A family of models out of core in a process of its own: ``families_run.py NAME RUN STEPS``. Prints the losses."""

from __future__ import annotations

import json
import sys

import torch

import families
import holdfast


def main(name: str, run: str, steps: str) -> None:
    torch.set_num_threads(1)
    model = families.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with holdfast.offload(model, optimizer, run, precision="fp32", clipping=0.5) as engine:
        for step in range(engine.steps_done, int(steps)):
            print(json.dumps(engine.step(families.micro_batches(name, step))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
