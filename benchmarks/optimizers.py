"""What moments of few bits, and optimizers of whole matrices, cost in loss: a small decoder on Python's own source.

    python benchmarks/optimizers.py [--steps 500] [--seeds 2] [--arms NAME ...] [--keep] [--small]

Every arm begins with the same values and sees the same batches. What is compared is the loss on text that none was
trained on, with that of AdamW in fp32 of the same seed. ``nearest`` arms round to the nearest value instead of by
chance. Prints a table and one line of JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from common import finish, options_of, table
from torch import nn

from holdfast.data.corpus import Corpus
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.optim import AdamW8bit, AdamWBF16, Apollo, Grass, Joined, adamw, apollo_mini

LR, DECAY, ROWS = 2e-3, 0.1, 8


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    sizes = {"blocks": 4, "width": 128, "heads": 4, "kv_heads": 4, "context": 128}
    if options.small:
        options.steps, options.seeds, sizes = (
            2,
            1,
            {"blocks": 1, "width": 16, "heads": 1, "kv_heads": 1, "context": 16},
        )
    config = DecoderConfig(**sizes)
    corpus = Corpus("stdlib", context=config.context)
    losses: dict[str, list[float]] = {name: [] for name in options.arms}
    for seed in range(options.seeds):
        for name in options.arms:
            losses[name].append(trained(config, corpus, name, seed, options.steps))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    rows = [["arm", "loss", "more than fp32", "state bytes per parameter"]]
    for name, found in losses.items():
        more = [a - b for a, b in zip(found, losses.get("fp32", found), strict=True)]
        rows.append([
            name, f"{statistics.mean(found):.4f}", f"{min(more):+.4f} to {max(more):+.4f}",
            f"{state_bytes(config, name):.2f}",
        ])  # fmt: skip
    print()
    table(rows)
    finish(
        "optimizers",
        {"steps": options.steps, "tokens": ROWS * config.context, "losses": losses},
        options.keep,
    )


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon, APOLLO and Grass are for: those of the blocks."""
    return [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]


def others(model: nn.Module) -> list[nn.Parameter]:
    known = {id(p) for p in matrices(model)}
    return [p for p in model.parameters() if id(p) not in known]


def of_matrices(kind: Callable, **options: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        rest = torch.optim.AdamW(others(model), lr=LR, weight_decay=DECAY, fused=True)
        return Joined(kind(matrices(model), weight_decay=DECAY, **options), rest)

    return made


def all_of(kind: Callable, **options: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), lr=LR, weight_decay=DECAY, **options)


ARMS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fp32": all_of(torch.optim.AdamW, fused=True),
    "bf16": all_of(AdamWBF16),
    "bf16, nearest": all_of(AdamWBF16),
    "8 bit": all_of(AdamW8bit),
    "8 bit, nearest": all_of(AdamW8bit),
    "8 bit, masters of 24": all_of(AdamW8bit, master_bits=24),
    "muon": of_matrices(torch.optim.Muon, lr=1e-2),
    "apollo": of_matrices(Apollo, lr=1e-2, rank=32),
    "apollo-mini": of_matrices(apollo_mini, lr=1e-2),
    "grass": of_matrices(Grass, lr=2e-3, rank=32, update_gap=50),
}


def trained(config: DecoderConfig, corpus: Corpus, name: str, seed: int, steps: int) -> float:
    """The loss on held-out text after so many steps."""
    torch.manual_seed(seed)
    model = Decoder(config)
    optimizer = ARMS[name](model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * max(0.1, 1 - step / steps)
    )
    order = torch.Generator().manual_seed(seed)
    with rounds_to_nearest(name.endswith("nearest")):
        for _ in range(steps):
            model(
                **batch(corpus.training, torch.randint(len(corpus.training), (ROWS,), generator=order))
            ).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    held_out = torch.arange(0, len(corpus.validation), max(1, len(corpus.validation) // 256))[:256]
    with torch.no_grad():
        return statistics.mean(
            float(model(**batch(corpus.validation, rows))) for rows in held_out.split(ROWS)
        )


def batch(windows, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    found = [windows[row] for row in rows.tolist()]
    return {name: torch.stack([window[name] for window in found]) for name in ("tokens", "targets")}


@contextmanager
def rounds_to_nearest(wanted: bool) -> Iterator[None]:
    """Inside, if ``wanted``, what would be rounded by chance goes to the nearest value."""
    by_chance = adamw.chances
    if wanted:
        adamw.chances = lambda value, step, salt: torch.full(value.shape, 0x8000, dtype=torch.int32)
    try:
        yield
    finally:
        adamw.chances = by_chance


def state_bytes(config: DecoderConfig, name: str) -> float:
    """What an arm's optimizer keeps besides the parameters."""
    model = Decoder(config)
    optimizer = ARMS[name](model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(
        v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    )
    return held / sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
