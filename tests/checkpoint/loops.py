"""Training loops of the kinds that users write, tiny, with every number reproducible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.store.format.manifest import Manifest
from holdfast.store.log import journal
from holdfast.store.run_store import LocalStore

FEATURES = (
    "schedule", "groups", "clip", "scaler", "accumulate", "unused", "tied", "frozen", "batchnorm",
    "average", "ema", "two", "rows",
)  # fmt: skip


class Net(nn.Module):
    """Odd shapes, a scalar, and whatever ``feature`` asks for."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 7, bias=False)
        self.norm = nn.BatchNorm1d(13) if feature == "batchnorm" else nn.Identity()
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.2)
        if feature == "unused":
            self.spare = nn.Linear(3, 5)
        if feature == "tied":
            self.third = nn.Linear(13, 7, bias=False)
            self.third.weight = self.second.weight
        if feature == "rows":  # a step touches few rows of one, and calls one of the others
            self.words = nn.Embedding(600, 7)
            self.experts = nn.ModuleList(nn.Linear(13, 7, bias=False) for _ in range(2))
        if feature == "frozen":
            self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        if hasattr(self, "words"):
            x = x + self.words(torch.randint(0, 600, (len(x),)))
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        out = self.second(hidden) * self.scale
        if hasattr(self, "experts"):
            out = out + self.experts[int(spare)](hidden)
        if hasattr(self, "third"):
            out = out + self.third(hidden)
        if spare and hasattr(self, "spare"):
            out = out + self.spare(x[:, :3]).sum()
        return out


@dataclass
class Loop:
    """A model, what trains it, and the loop's body: ``iteration(i)`` does one iteration, ``step`` is called last."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    iteration: Callable[[int, Callable[[], None]], None]
    things: dict[str, Any] = field(default_factory=dict)
    """What the checkpointer is given besides."""
    losses: list[float] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """A copy of everything that replay must reproduce."""
        slots = [
            [
                copy.deepcopy(dict(optimizer.state.get(p, {})))
                for g in optimizer.param_groups
                for p in g["params"]
            ]
            for optimizer in self.optimizers
        ]
        groups = [
            [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "slots": slots,
            "groups": copy.deepcopy(groups),
            "things": {
                k: copy.deepcopy(v.state_dict()) for k, v in self.things.items() if k != "after_update"
            },
            "random": torch.get_rng_state(),
        }


def make(optimizer: Callable[..., torch.optim.Optimizer], feature: str = "", seed: int = 0) -> Loop:
    """A loop with one of the ``FEATURES``, or "fused scaler": a fused optimizer unscales by itself."""
    torch.manual_seed(seed)
    model = Net(feature)
    if feature == "average":
        model.register_buffer("average", model.first.weight.detach().clone())
    trained = [p for p in model.parameters() if p.requires_grad]
    if feature == "groups":
        optimizers = [
            optimizer([{"params": trained[:2], "weight_decay": 0.1}, {"params": trained[2:], "lr": 0.003}])
        ]
    elif feature == "two":
        optimizers = [optimizer(trained[:3]), torch.optim.SGD(trained[3:], lr=0.01, momentum=0.5)]
    else:
        optimizers = [optimizer(trained)]
    loop = Loop(model, optimizers, lambda i, step: None)
    schedulers = []
    if feature == "schedule":
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 20)]
        loop.things["scheduler"] = schedulers[0]
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if "scaler" in feature else None
    )
    if scaler is not None:
        loop.things["scaler"] = scaler

    def average() -> None:
        with torch.no_grad():
            model.average.lerp_(model.first.weight, 0.1)

    if feature == "average":
        loop.things["after_update"] = average
    if feature == "ema":
        decayed = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        loop.things |= {"after_update": lambda: decayed.update_parameters(model), "averages": decayed}

    def iteration(i: int, step: Callable[[], None]) -> None:
        for micro in range(4 if feature == "accumulate" else 1):
            loss = model(torch.randn(5, 7), spare=i % 3 == 0).pow(2).mean()
            loop.losses.append(float(loss.detach()))
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss * (float("inf") if i % 4 == 2 else 1.0)).backward()
            if micro < 3 and feature == "accumulate":
                step()  # in mid-accumulation it does nothing
        for number, each in enumerate(optimizers):
            if feature == "two" and number == 1 and i % 2:
                continue
            if feature == "scaler":
                scaler.unscale_(each)
            if feature in ("clip", "scaler"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if scaler is not None:
                scaler.step(each)
            else:
                each.step()
        if scaler is not None:
            scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        for each in optimizers:
            each.zero_grad()
        step()

    loop.iteration = iteration
    return loop


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, in whatever containers."""
    if isinstance(a, torch.Tensor):
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def cut_small(monkeypatch: Any, groups: int = 64) -> None:
    """A base is of several units, one of them copied in each step; a segment holds so many ``groups`` of records."""
    monkeypatch.setattr(snapshot_chunks, "UNIT_BYTES", 1000)
    monkeypatch.setattr("holdfast.checkpointer.BASE_BYTES_PER_STEP", 1)
    monkeypatch.setattr(journal, "GROUPS_PER_SEGMENT", groups)


def manifests(root: Path) -> list[Manifest]:
    """Of the bases of a run's line, newest first."""
    with LocalStore.read(root) as reader:
        return [reader.load(ref) for ref in reader.line()]
