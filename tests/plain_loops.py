"""Ordinary training loops, and the engine compared with them bit for bit."""

from __future__ import annotations

from functools import cache

import torch

import holdfast
from support.grouped import grouped
from training import adamw, batches, decoder, differing, state_of, stored, warm_up

STEPS = 8
PLACEMENTS = {
    "ssd": {"activations_on_host": 0.0},
    "host": {"params_on_host": 1.0, "optimizer_on_host": 1.0},
    "mixed": {"params_on_host": 0.5, "optimizer_on_host": 0.34, "activations_on_host": 0.4},
}


SETTINGS = {
    "vertical": PLACEMENTS["mixed"],
    "horizontal": {"schedule": "horizontal", **PLACEMENTS["ssd"]},
    "host": {**PLACEMENTS["host"], "clipping": "per_block", "clip_norm": 0.05},
    "kept": {"recomputed_fraction": 0.5, "delayed_fraction": 0.5, "order": "snake", "clip_norm": 0.5},
}
"""Of an engine on a device of its own, each with other copies."""


def model_with_a_frozen_parameter(dropout=0.0):
    model = decoder(dropout=dropout)
    model.blocks[2].mlp.up.weight.requires_grad_(False)
    return model


def ragged(step, count):
    """Micro-batches of several lengths, some targets of which do not count. The second has none that does."""
    made = []
    for m, batch in enumerate(batches(step, count)):
        batch = {name: value[:, : value.shape[1] - m].clone() for name, value in batch.items()}
        batch["targets"][0, : 1 + (step + m) % 3] = -100
        made.append(batch)
    made[1]["targets"].fill_(-100)
    return made


def by_tokens(micro_batches):
    """Of each micro-batch: the part of all targets that it has."""
    counts = [int((batch["targets"] != -100).sum()) for batch in micro_batches]
    return [count / sum(counts) for count in counts]


@cache
def plain_loop(num_micro_batches, clip_norm, dropout=0.0, steps=STEPS):
    """Losses and norms of ``steps`` steps of ordinary PyTorch, and the state after each."""
    model = model_with_a_frozen_parameter(dropout)
    optimizer = adamw(model, fused=True)
    scheduler, losses, norms, states = warm_up(optimizer), [], [], []
    with holdfast.keyed_rng(model) as keys:
        for step in range(steps):
            total = 0.0
            for m, batch in enumerate(batches(step, num_micro_batches)):
                keys.at(step, m)
                loss = model(**batch)
                (loss / num_micro_batches).backward()
                total += loss.item()
            if clip_norm is not None:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total / num_micro_batches)
            states.append(state_of(model, optimizer))
    return losses, norms, states


def check(directory, steps, num_micro_batches, clip_norm, dropout=0.0, **options):
    """``steps`` steps of the engine have the losses, norms, parameters and optimizer state of the loop."""
    model = model_with_a_frozen_parameter(dropout)
    optimizer = adamw(model)
    losses, norms, states = plain_loop(num_micro_batches, clip_norm, dropout, max(steps, STEPS))
    with holdfast.offload(
        model,
        optimizer,
        directory,
        **grouped(scheduler=warm_up(optimizer), dtype="fp32", clip_norm=clip_norm, **options),
    ) as engine:
        for step in range(steps):
            assert engine.step(batches(step, num_micro_batches)) == losses[step]
            assert clip_norm is None or engine.last["grad_norm"] == norms[step]
    assert differing(stored(directory), states[steps - 1]) == []
    given_back = {f"{name}/param": parameter for name, parameter in model.named_parameters()}
    assert differing(states[steps - 1], given_back) == []


def train(directory, kind="played", **options):
    """Three steps and an evaluation between them, on a device of that kind."""
    model = decoder(blocks=3)
    with holdfast.offload(
        model,
        adamw(model),
        directory,
        **grouped(dtype="fp32", device=kind, sample=batches(0, 1)[0], micro_batches=2, **options),
    ) as engine:
        engine.step(batches(0, 2))
        engine.evaluate(batches(9, 2))
        engine.step(batches(1, 2))
        engine.step(batches(2, 2))
        engine.wait()
