"""Fine-tuning a Hugging Face folder on a text file, out of core: finetune_base.py and six lines.

python examples/finetune.py FOLDER TEXT RUN --steps 100       # kill it whenever you like; the same goes on
holdfast convert RUN OUT --to huggingface --model FOLDER      # as finetune_base.py writes it, up to bf16
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

import holdfast

MICRO_BATCHES, ROWS = 4, 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("folder", "text", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    return parser.parse_args()


def windows(args: argparse.Namespace) -> torch.Tensor:
    """The text, int64[windows, tokens]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder, local_files_only=True)
    ids = torch.tensor(tokenizer(args.text.read_text(), verbose=False)["input_ids"])
    return ids[: len(ids) // args.tokens * args.tokens].view(-1, args.tokens)


def micro_batches(rows: torch.Tensor, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(0, len(rows), (MICRO_BATCHES, ROWS), generator=generator)
    return [{"input_ids": rows[each], "labels": rows[each]} for each in chosen]


def main(args: argparse.Namespace) -> None:
    rows = windows(args)
    model, weights = holdfast.pretrained(args.folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = holdfast.offload(model, optimizer, args.out, source=weights)
    for step in range(engine.steps_done, args.steps):
        loss = engine.step(micro_batches(rows, step))
        print(f"step {step + 1}  loss {loss:.4f}")
    engine.close()


if __name__ == "__main__":
    main(arguments())
