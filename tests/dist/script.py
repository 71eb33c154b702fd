"""An ordinary script for torchrun: ``script.py KIND ROOT OUT STEPS KILLED PAUSE [MEMORY]``. The rank KILLED kills
itself once; PAUSE is slept after every step; ranks have replicas in MEMORY."""

from __future__ import annotations

import json
import os
import sys
import time

from dist.training import main

LINGER_SECONDS = 170.0
"""The time that replicas keep a dead trainer's state: longer than ranks take to be started again on any machine."""

if __name__ == "__main__":
    kind, root, out, steps, killed, pause, *memory = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def say(**what: object) -> None:
        with open(f"{out}/{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}-of-{world_size}", "a") as file:
            print(json.dumps({"time": time.time(), **what}), file=file)

    kill = [int(killed), 12] if first else None
    main(rank, world_size, "env://", say, kind=kind, root=root, steps=int(steps), kill=kill, base_every=5,
        pause=float(pause),
         **({"replica": memory[0], "linger_seconds": LINGER_SECONDS} if memory else {}))  # fmt: skip
