"""A folder taken up out of core in a process of its own: ``folder_run.py FOLDER RUN``. Prints the bytes of memory that
the process had at its peak before it opened the folder, and in all."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

import holdfast


def peak():
    """Since the process began: ``ru_maxrss`` would be that of its parent."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main(folder, run):
    torch.set_num_threads(1)
    small = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
        )
    )
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    small(input_ids=tokens, labels=tokens).loss.backward()  # what libraries take when they are used first
    before = peak()
    model, weights = holdfast.pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with holdfast.offload(model, optimizer, run, source=weights, precision="bf16") as engine:
        engine.step([{"input_ids": tokens, "labels": tokens}])
    print(before, peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
