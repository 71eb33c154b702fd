"""One training run on as many devices as there are today: four ranks, then three, then one with its state on the SSD.

    torchrun --nproc-per-node=4 examples/elastic.py train --steps 1000      # kill it whenever you like
    torchrun --nproc-per-node=3 examples/elastic.py train --steps 1000      # goes on from the step that was reached
    python examples/elastic.py out-of-core --steps 1000                     # and so does one process, out of core
    python examples/elastic.py export && python examples/elastic.py sample

A small byte-level decoder learns its own source. Every step of the global batch is the same whoever computes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.models.exports import llama_config

SIZES = DecoderConfig(vocabulary=256, blocks=4, width=64, heads=4, kv_heads=2, context=64)
ROWS = 12  # of the global batch: divides by 4, 3 and 1
TEXT = torch.tensor(list(Path(__file__).read_bytes()))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(TEXT) - SIZES.context - 1, (ROWS,), generator=generator)
    rows = torch.stack([TEXT[start : start + SIZES.context + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def train(folder: Path, steps: int) -> None:
    """FSDP2 over all ranks, every step durable."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = fully_shard(Decoder(SIZES), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with holdfast.Checkpointer(folder / "run", model=model, optimizer=optimizer) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            tokens, targets = batch_of(step)
            loss = model(tokens[rank::world_size], targets[rank::world_size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            if rank == 0:
                told = {"step": step + 1, "loss": float(loss.detach()), "durable": checkpointer.durable_step}
                print(json.dumps({**told, "ranks": world_size}), flush=True)
    dist.destroy_process_group()


def out_of_core(folder: Path, steps: int) -> None:
    """One process, with its state on the SSD, from the step that the ranks reached. To begin, the records after their
    last base are replayed in host memory; from then on a few blocks at a time are there."""
    with holdfast.empty_parameters():
        model = Decoder(SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = holdfast.From(folder / "run")
    with holdfast.offload(model, optimizer, folder / "ssd", precision="fp32", source=source) as engine:
        for step in range(engine.steps_done, steps):
            tokens, targets = batch_of(step)
            loss = engine.step([{"tokens": tokens, "targets": targets}])
            print(
                json.dumps({"step": step + 1, "loss": loss, "durable": engine.durable_step, "ranks": 1}),
                flush=True,
            )


def export(folder: Path) -> None:
    """As a Llama of Hugging Face's library."""
    verb = [
        "convert",
        str(folder / "ssd"),
        str(folder / "llama"),
        "--to",
        "huggingface",
        "--rules",
        "decoder-to-llama",
    ]
    subprocess.run([sys.executable, "-m", "holdfast", *verb], check=True)
    (folder / "llama" / "config.json").write_text(json.dumps(llama_config(SIZES)))


def sample(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    prompt = torch.tensor([list(b"def ")])
    tokens = model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    print(bytes(tokens[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "out-of-core", "export", "sample"])
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic"))
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if args.what == "train":
        train(args.folder, args.steps)
    elif args.what == "out-of-core":
        out_of_core(args.folder, args.steps)
    elif args.what == "export":
        export(args.folder)
    else:
        sample(args.folder)
