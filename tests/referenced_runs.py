"""Runs of LoRA on a tiny folder of several shards, from which they may read their frozen weights."""

from __future__ import annotations

import peft
import torch

import holdfast
import tiny_folders
from holdfast.store.run_store import LocalStore
from tiny_folders import VOCABULARY, write_folder


def wide_llama():
    return tiny_folders.llama(hidden_size=32, intermediate_size=4096)


def folder_of(path, make=wide_llama, **options):
    """A folder of three shards; a block lies in two of them."""
    return write_folder(path, make, max_shard_size="1MB", **options)


def opened(folder, run, *, reference=True, **options):
    model, weights = holdfast.pretrained(folder, reference=reference)
    return offloaded(model, run, weights, **options)


def offloaded(model, run, source, **options):
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, adapters).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options = {"precision": "bf16", "sample": micro_batches(0)[0], "micro_batches": 2} | options
    return holdfast.offload(model, optimizer, run, source=source, **options)


def micro_batches(step):
    tokens = torch.randint(0, VOCABULARY, (2, 2, 10), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": each, "labels": each} for each in tokens]


def train(folder, run, steps, **options):
    """The losses of ``steps`` by number, all parameters, and the engine."""
    with opened(folder, run, **options) as engine:
        losses = [engine.step(micro_batches(step)) for step in steps]
        values = {name: value.clone() for name, value in engine.state_dict().items()}
        return losses, values, engine


def referenced(run):
    manifest = LocalStore.read(run, direct=False).head()
    assert manifest is not None
    return manifest.referenced
