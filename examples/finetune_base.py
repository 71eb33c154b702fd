"""Fine-tuning a Hugging Face folder on a text file, all of it in memory.

python examples/finetune_base.py FOLDER TEXT OUT --steps 100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

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
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        loss = 0.0
        for batch in micro_batches(rows, step):
            part = model(**batch).loss / MICRO_BATCHES
            part.backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}  loss {loss:.4f}")
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main(arguments())
