"""Training in a process of its own, everything on the SSD, that says how much memory it took: ``memory_run.py``
with one argument, a JSON object of ``Order``'s fields. Prints a JSON object per event, sizes in bytes.

With ``cgroup`` the process puts itself there before it loads torch, so that the limit counts from the start.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Order:
    root: str
    steps: int
    blocks: int = 4
    width: int = 512
    vocabulary: int = 256
    tokens: int = 256
    micro_batches: int = 1
    options: dict = field(default_factory=dict)
    """Of the engine, besides keeping everything on the SSD."""
    budget: str = ""
    """Of host memory; by default there is none."""
    tile_bytes: int = 0
    """The size of a tile of state, if not the usual one."""
    cgroup: str = ""
    dies: bool = False
    """After its steps the process kills itself when half of the blocks of another one are written."""


def main(order: Order) -> None:
    if order.cgroup:
        Path(order.cgroup, "cgroup.procs").write_text(str(os.getpid()))
    import torch

    import holdfast
    from holdfast import failpoints
    from holdfast.models.decoder import Decoder, DecoderConfig
    from holdfast.schedule import work
    from support.grouped import grouped

    torch.set_num_threads(1)
    work.TILE_BYTES = order.tile_bytes or work.TILE_BYTES
    config = DecoderConfig(
        vocabulary=order.vocabulary,
        blocks=order.blocks,
        width=order.width,
        heads=8,
        kv_heads=4,
        context=order.tokens,
    )
    with holdfast.empty_parameters():
        model = Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    spilled = {"dtype": "bf16", "params_on_host": 0.0, "optimizer_on_host": 0.0, "activations_on_host": 0.0}
    engine = holdfast.offload(
        model,
        optimizer,
        order.root,
        budget=holdfast.Budget(host=order.budget) if order.budget else None,
        **grouped(
            sample=batches(order, 0)[0], micro_batches=order.micro_batches, **(spilled | order.options)
        ),
    )
    preflight = engine.preflight
    say(
        resumed=engine.resumed_from,
        state_bytes=preflight.state_bytes,
        predicted=preflight.host_bytes_predicted,
        set_up=memory_of_process("VmRSS"),
    )
    reset_peak()
    while engine.steps_done < order.steps:
        take_step(engine, order)
    engine.wait()
    say(
        peak=memory_of_process("VmHWM"),
        of_files=memory_of_process("RssFile"),
        durable=engine.durable_step,
    )
    if order.dies:
        failpoints.armed = f"before_data_sync:{order.blocks // 2}"
        take_step(engine, order)
    engine.close()


def take_step(engine, order: Order) -> None:
    step = engine.steps_done
    say(step=step, loss=engine.step(batches(order, step)))


def batches(order: Order, step: int) -> list[dict]:
    import torch

    generator = torch.Generator().manual_seed(step)
    tokens = [
        torch.randint(0, order.vocabulary, (1, order.tokens), generator=generator)
        for _ in range(order.micro_batches)
    ]
    return [{"tokens": one, "targets": one} for one in tokens]


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory_of_process(name: str) -> int:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def say(**what) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(Order(**json.loads(sys.argv[1])))
