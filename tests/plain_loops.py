"""Ordinary training loops, and the engine compared with them bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

import torch
from torch import nn

import holdfast
from holdfast import LossScale
from support.grouped import grouped
from training import adamw, batches, decoder, differing, state_of, stored, warm_up

STEPS = 6
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
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOVING = LossScale(scale=2.0**20, growth_interval=2)
"""So large that the first steps overflow, and growing so soon that others do."""


def model_with_a_frozen_parameter(dropout=0.0, blocks=4, wide=False):
    """Each matrix of a ``wide`` one may be cut into tiles."""
    sizes = {"width": 64, "hidden": 128, "kv_heads": 2} if wide else {}
    model = decoder(blocks=blocks, dropout=dropout, **sizes)
    model.blocks[min(2, blocks - 1)].mlp.up.weight.requires_grad_(False)
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


class Spoiled:
    """Makes the gradients of ``module``'s output infinite in the steps of ``when``. The loss stays what it is."""

    def __init__(self, module, when):
        self.when, self.step = when, 0
        module.register_forward_hook(self.hook)

    def hook(self, module, args, output):
        if output.requires_grad and self.step in self.when:
            output.register_hook(lambda grad: grad * inf)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the numbers of a run depend on."""

    count: int = 2
    """The number of micro-batches of a step."""
    clip_norm: float | None = None
    per_block: bool = False
    """Each block is clipped by itself, and left out where its norm is not finite."""
    dropout: float = 0.0
    blocks: int = 4
    wide: bool = False
    snake: bool = False
    precision: str = "fp32"
    tokens: bool = False
    """A target counts the same in whatever micro-batch it is."""
    spoiled: frozenset[int] = frozenset()
    """Steps whose gradients are infinite."""
    steps: int = STEPS

    @property
    def options(self) -> dict[str, Any]:
        """Of the engine."""
        return {
            "dtype": self.precision,
            "loss_scale": MOVING if self.precision == "fp16" else None,
            "clip_norm": self.clip_norm,
            "normalize": "tokens" if self.tokens else "micro_batches",
            "order": "snake" if self.snake else "plain",
            **({"clipping": "per_block"} if self.per_block else {}),
        }

    def model(self) -> nn.Module:
        return model_with_a_frozen_parameter(self.dropout, self.blocks, self.wide)

    def data(self, step: int) -> list[dict[str, torch.Tensor]]:
        return (ragged if self.tokens else batches)(step, self.count)

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """What a run holds of it in fp32: all, or in another precision what is trained."""
        frozen = {
            name for name, p in model.named_parameters() if not p.requires_grad and self.precision != "fp32"
        }
        return {
            key: v for key, v in state_of(model, optimizer).items() if key.rpartition("/")[0] not in frozen
        }

    def spoiled_module(self, model: nn.Module) -> nn.Module:
        """In a block after which others have finite gradients."""
        return model.blocks[min(2, self.blocks - 1)].mlp.down

    def clipped_sometimes(self) -> Task:
        """The same with a norm that some steps exceed, and others do not."""
        norms = [norm for norm in plain_loop(replace(self, clip_norm=inf)).norms if isfinite(norm)]
        return replace(self, clip_norm=(min(norms) + max(norms)) / 2)


class Outcome(NamedTuple):
    """Of a loop, by step."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    skipped: list[bool]
    left_out: list[list[str]]
    """Parts whose gradients were not finite, where each is clipped by itself."""
    states: list[dict[str, torch.Tensor]]
    evaluated: list[float]
    """The loss of an evaluation after the second step."""


def parts_of(model):
    """The trained parameters of each block, and of what is no block."""
    parts = [list(block.parameters()) for block in model.blocks]
    inside = {id(p) for part in parts for p in part}
    parts.append([p for p in model.parameters() if id(p) not in inside])
    return [[p for p in part if p.requires_grad] for part in parts]


def clip_parts(model, clip_norm):
    """The norm of all gradients, each part of which was clipped by itself, and the parts without a finite norm, which
    have none any more."""
    norm, parts = (
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
        parts_of(model),
    )
    total, left_out = sum(p.numel() for part in parts for p in part), []
    for number, part in enumerate(parts):
        bound = clip_norm * sqrt(sum(p.numel() for p in part) / total)
        if not nn.utils.clip_grad_norm_(part, bound).isfinite():
            left_out.append(f"blocks.{number}" if number < len(model.blocks) else "resident")
            for p in part:
                p.grad = None
    return norm, left_out


def turned(name: str, last: int, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``gradients`` of parameter ``name`` in the order in which a snake adds them: odd blocks the other way."""
    if name.startswith("blocks."):
        block = int(name.split(".")[1])
    else:  # the prologue goes with block 0, the epilogue with the last block
        block = 0 if name.startswith("embed") else last
    return gradients[:: -1 if block % 2 else 1]


@cache
def plain_loop(task: Task) -> Outcome:
    """Ordinary PyTorch: a model in the precision computes, fp32 masters are stepped with gradients summed in fp32."""
    model, master = task.model(), task.model()
    optimizer, found = adamw(master, fused=True), Outcome([], [], [], [], [], [], [])
    scheduler, spoiled = warm_up(optimizer), Spoiled(task.spoiled_module(model), task.spoiled)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=MOVING.scale,
        growth_interval=MOVING.growth_interval,
        enabled=task.precision == "fp16",
    )

    def take():
        for p, own in zip(model.parameters(), master.parameters(), strict=True):
            p.data = own.detach().to(DTYPES[task.precision])

    with holdfast.keyed_rng(model) as keys:
        for spoiled.step in range(task.steps):
            take()
            made, total, data = [], 0.0, task.data(spoiled.step)
            shares = by_tokens(data) if task.tokens else [1.0] * task.count
            for m, (batch, share) in enumerate(zip(data, shares, strict=True)):
                if not share:  # without targets the loss is a mean of nothing
                    continue
                keys.at(spoiled.step, m)
                loss = model(**batch)
                scaler.scale(loss * share if task.tokens else loss / task.count).backward()
                total += loss.item() * share
                made.append([p.grad for p in model.parameters()])
                model.zero_grad()
            for (name, p), *gradients in zip(master.named_parameters(), *made, strict=True):
                for gradient in turned(name, task.blocks - 1, gradients) if task.snake else gradients:
                    if gradient is not None:
                        p.grad = gradient.float() if p.grad is None else p.grad + gradient
            found.scales.append(scaler.get_scale())
            scaler.unscale_(optimizer)
            norm, left_out = torch.tensor(0.0), []
            if task.per_block:
                norm, left_out = clip_parts(master, task.clip_norm)
            elif task.clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(master.parameters(), task.clip_norm)
            before = task.state(master, optimizer)
            if task.per_block or norm.isfinite():
                scaler.step(optimizer)
            scaler.update()
            optimizer._opt_called = True  # a step that is skipped counts
            scheduler.step()
            optimizer.zero_grad()
            found.norms.append(norm.item())
            found.left_out.append(left_out)
            found.losses.append(total if task.tokens else total / task.count)
            found.states.append(task.state(master, optimizer))
            unchanged = not task.per_block and not differing(before, found.states[-1])
            found.skipped.append(unchanged or scaler.get_scale() < found.scales[-1])
            if spoiled.step == 1:
                take()
                model.eval()
                with torch.no_grad():
                    found.evaluated.append(sum(model(**batch).item() for batch in batches(9, 2)) / 2)
                model.train()
    return found


def check(directory, task: Task, *parts, leave=lambda engine: None, **options):
    """The engine has the losses, norms, scales, parameters and optimizer state of the loop.

    Each of ``parts`` is the step to which an engine goes and what its options are beside ``options``; it is left by
    ``leave``, and the next one goes on from the newest commit.
    """
    expected = plain_loop(task)
    for stop, others in parts or [(task.steps, {})]:
        model = task.model()
        optimizer = adamw(model)
        engine = holdfast.offload(
            model,
            optimizer,
            directory,
            scheduler=warm_up(optimizer),
            **grouped(**task.options | options | others),
        )
        with engine:
            spoiled = Spoiled(task.spoiled_module(model), task.spoiled)
            for step in range(engine.steps_done, stop):
                spoiled.step = step
                assert engine.step(task.data(step)) == expected.losses[step], step
                if task.clip_norm is not None:
                    norms = engine.last["grad_norm"], expected.norms[step]
                    assert norms[0] == norms[1] or not any(map(isfinite, norms)), (step, norms)
                assert (engine.last["skipped"] is not None) == expected.skipped[step], (
                    step,
                    engine.last["skipped"],
                )
                assert engine.last["left_out"] == (expected.left_out[step] or None), step
                assert task.precision != "fp16" or engine.last["loss_scale"] == expected.scales[step], step
                if step == 1:
                    assert engine.evaluate(batches(9, 2)) == expected.evaluated[0]
            if stop < task.steps:
                leave(engine)
    assert differing(stored(directory), expected.states[-1]) == []
    given_back = task.state(model, torch.optim.SGD(model.parameters()))
    assert differing(expected.states[-1], given_back) == []


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
