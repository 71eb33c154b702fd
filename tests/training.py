"""A model small enough to be trained in a test, its data, and what a run directory says of the outcome."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.state.plain_tensors import FROM_NAME
from holdfast.store.run_store import LocalStore

VOCABULARY, CONTEXT = 17, 8


def decoder(blocks: int = 6, dropout: float = 0.0, **sizes) -> Decoder:
    """The same initial values every time."""
    torch.manual_seed(0)
    sizes = {"width": 16, "heads": 2, "kv_heads": 1, "hidden": 24, **sizes}
    return Decoder(
        DecoderConfig(vocabulary=VOCABULARY, blocks=blocks, context=CONTEXT, dropout=dropout, **sizes)
    )


def batches(step: int, count: int, rows: int = 2) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of ``step``: a pure function of it."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (rows, CONTEXT)
    return [
        {name: torch.randint(0, VOCABULARY, shape, generator=generator) for name in ("tokens", "targets")}
        for _ in range(count)
    ]


def adamw(model: nn.Module, **options) -> torch.optim.Optimizer:
    """AdamW with two groups: matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state of a plain loop, by the names of atoms."""
    state = {}
    for name, parameter in model.named_parameters():
        state[f"{name}/param"] = parameter.detach().clone()
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"{name}/{slot}"] = value.clone()
    return state


def stored(root: str | Path) -> dict[str, torch.Tensor]:
    """Every atom of the newest commit of ``root``, which is whole, as a foreign tool reads its files."""
    reader = LocalStore.read(root, direct=False)
    manifest = reader.head()
    assert manifest is not None and reader.verify(manifest) == []
    state: dict[str, torch.Tensor] = {}
    for file in manifest.files.values():
        state |= load_file(Path(root) / file.path)
    state = {key: value for key, value in state.items() if not key.startswith("__pad__")}
    for key in [key for key in state if key.endswith("/param.high")]:
        name = key.removesuffix(".high")
        state[name] = joined(*(state.pop(f"{name}.{part}") for part in ("high", "low", "carry")))
    return state


def joined(high: torch.Tensor, low: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
    """An fp32 master from its parts, as docs/format.md says."""
    rounded = high.reshape(-1).view(torch.uint16).to(torch.int64)
    bits = torch.stack([carry >> shift & 1 for shift in range(7, -1, -1)], 1).reshape(-1)[: high.numel()]
    upper = (rounded - bits) & 0xFFFF
    upper = torch.where(high.reshape(-1).isnan(), rounded - 0x40 * (1 - bits.to(torch.int64)), upper)
    whole = upper << 16 | low.reshape(-1).to(torch.int64) << (8 if low.dtype == torch.uint8 else 0)
    return whole.to(torch.uint32).view(torch.float32).view(high.shape)


def read_atoms(root: str | Path) -> dict[str, torch.Tensor]:
    """The same, atom by atom through the store."""
    reader = LocalStore.read(root, direct=False)
    manifest = reader.head()
    assert manifest is not None
    found = {}
    for key, atom in reader.atoms(manifest).items():
        raw, dtype = reader.read_atom(manifest, atom), FROM_NAME[atom["dtype"]]
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        found[key] = flat.reshape(atom["shape"])
    return found


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of ``expected`` that are not bit for bit the same in ``found``."""
    return [
        name for name, value in expected.items() if name not in found or not same_bits(found[name], value)
    ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, type and every bit (NaN equals NaN, 0.0 differs from -0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, two = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, two)
