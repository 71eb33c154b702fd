"""What the ranks of a world do that train out of core in several ways, one after the other, and a plain loop that
adds gradients up as they do: each rank's own micro-batches first, then the ranks in their order."""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from dist.offloading import made
from holdfast.offload.setup import step_planning
from holdfast.optim import MeZO
from holdfast.schedule.work import BlockPlacement
from named_optimizers import OPTIMIZERS
from plain_loops import by_tokens, ragged
from support.grouped import grouped
from training import adamw, batches, state_of, warm_up

choose = step_planning.choose
LOWER = torch.bfloat16
"""What a loop computes in under ``autocast``."""
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""What it computes in with copies of its masters."""


class Spoiled:
    """Makes the gradients of ``module``'s output infinite while it is ``on``. The loss stays what it is."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.on = False
        module.register_forward_hook(self.hook)

    def hook(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if self.on and output.requires_grad:
            output.register_hook(lambda grad: grad * math.inf)


@dataclass
class Task:
    """A model, what it is trained on, and what some rank's step is disturbed by. Numbers are of ranks and steps."""

    model: torch.nn.Module
    batches: Callable[[int, int], list[dict[str, torch.Tensor]]] = batches
    factors: Sequence[Sequence[Any]] = ()
    """A rank, a step and what its losses are multiplied by there."""
    kill: Sequence[int] = ()
    """A rank and a step before which it is killed."""
    spoiled: Sequence[Sequence[int]] = ()
    """A rank and a step in which gradients of block 2, and of what is before it, are not finite."""
    source: Any = None
    """What a fresh run begins from."""
    spoiler: Spoiled | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.spoiled:
            self.spoiler = Spoiled(self.model.blocks[2].mlp.down)

    def disturb(self, rank: int, step: int) -> None:
        if self.factors:
            self.model.factor = next((f for *place, f in self.factors if place == [rank, step]), 1.0)
        if self.spoiler is not None:
            self.spoiler.on = [rank, step] in [[*place] for place in self.spoiled]


def task(kind: str, dropout: float = 0.0, uneven: bool = False, **more: Any) -> Task:
    """With ``uneven`` micro-batches, of which the second of all has no target."""
    return Task(made(kind, dropout), ragged if uneven else batches, **more)


def optimizer_of(name: str, model: torch.nn.Module, plain: bool = False) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "of adapters":
        return torch.optim.AdamW(trained, lr=1e-2, fused=plain or None)
    if name == "mezo":
        return MeZO(trained)
    return adamw(model, fused=plain or None) if name == "adamw" else OPTIMIZERS[name](model)


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    runs: dict[str, dict[str, Any]],
    tasks: Callable[..., Task] = task,
) -> None:
    """All of ``runs``, one after the other; by name what ``train`` takes, and after it what it says."""
    if world_size > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    for name, run in runs.items():
        say(**{name: train(rank, world_size, tasks=tasks, **run)})
    say(finished=True)


def train(
    rank: int,
    world_size: int,
    tasks: Callable[..., Task],
    root: str,
    steps: int,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    autocast: bool = False,
    counted: bool = False,
    begun: int = 0,
    unlike: dict[str, str] | None = None,
    spilled: bool = False,
    scale: tuple[float, int] | None = None,
    options: dict[str, Any] | None = None,
    **what: Any,
) -> dict[str, Any]:
    """Go on to ``steps``; what each step said, and with ``counted`` what the last one has ``written``. ``scale`` is
    that of losses, and how soon it grows. The optimizer has made ``begun`` steps, what it holds is ``unlike`` others by
    rank. Gradients that wait are ``spilled`` to the SSD, as where memory is short."""
    own = tasks(**what)
    given = {"dtype": "fp32", **(options or {})}
    if scale is not None:
        given["loss_scale"] = holdfast.LossScale(scale=scale[0], growth_interval=scale[1])
    if own.source is not None:
        given["source"] = own.source
    chosen = optimizer_of(optimizer, own.model, plain=begun > 0)
    scheduler = warm_up(chosen)
    begin(own, own.model, chosen, begun)
    disagree(own.model, chosen, (unlike or {}).get(str(rank), "nothing"))
    step_planning.choose = partial(choose_to_spill, choose) if spilled else choose
    said: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "skipped": [], "left_out": []}
    with holdfast.offload(own.model, chosen, root, **grouped(scheduler=scheduler, **given)) as engine:
        said["resumed"] = engine.resumed_from
        for step in range(engine.steps_done, steps):
            own.disturb(rank, step)
            if [rank, step] == [*own.kill]:
                os.kill(os.getpid(), signal.SIGKILL)
            if counted:  # and else the next step begins while this one is written
                engine.wait()
            before = engine.traffic()
            mine = own.batches(step, world_size * micro_batches)[rank * micro_batches :][:micro_batches]
            with torch.autocast("cpu", dtype=LOWER) if autocast else nullcontext():
                said["losses"].append(engine.step(mine))
            said["norms"].append(engine.last["grad_norm"])
            said["scales"].append(engine.last.get("loss_scale"))
            said["skipped"].append(engine.last["skipped"])
            said["left_out"].append(engine.last["left_out"])
        engine.wait()
        moved = {key: nbytes - before.get(key, 0) for key, nbytes in engine.traffic().items()}
        said["written"] = sum(nbytes for (lane, _), nbytes in moved.items() if lane == "ssd_write")
        said["spills"] = any(op.key.kind == "store_grads" for ops in engine.operations.values() for op in ops)
        values = engine.state_dict()
    said["digest"] = float(sum(value.double().sum() for value in values.values()))
    given_back = dict(own.model.named_parameters())
    said["given_back"] = all(
        p.is_meta or torch.equal(p.detach(), values[name]) for name, p in given_back.items()
    )
    return said


def choose_to_spill(choose: Callable[..., BlockPlacement], *args: Any, **options: Any) -> BlockPlacement:
    placement = choose(*args, **options)
    return replace(placement, gradients=(False,) * len(placement.gradients))


def begin(own: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train ``model`` in memory, as every rank does by itself."""
    for step in range(steps):
        model(**own.batches(1000 + step, 1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


def disagree(model: torch.nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    """Let the optimizer hold something else than it did."""
    if how == "an element":
        optimizer.state[model.blocks[1].mlp.down.weight]["exp_avg_sq"].view(-1)[7] += 1.0
    elif how == "all of it":
        optimizer.state.clear()


# The plain loop


@dataclass
class Told:
    """What a plain loop has had, step by step, and its state at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    left_out: list[list[str] | None] = field(default_factory=list)
    overflown: list[list[int]] = field(default_factory=list)
    """Ranks whose own gradients are not finite."""
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)


Pieces = dict[str, list[tuple[slice, ...]]]
"""By parameter, the regions of it that ranks have."""


def plain(
    phases: Sequence[tuple[int, int, int]],
    tasks: Callable[..., Task] = task,
    optimizer: str = "adamw",
    autocast: bool = False,
    scale: tuple[float, int] | None = None,
    pieces: Pieces | None = None,
    begun: int = 0,
    options: dict[str, Any] | None = None,
    **what: Any,
) -> Told:
    """Ordinary PyTorch, through ``phases``: of each its last step, the ranks, and the micro-batches of a rank. fp32
    masters are stepped by gradients that are summed in fp32."""
    options, told = options or {}, Told()
    own = tasks(**what)
    master = copy.deepcopy(own.model)
    chosen = optimizer_of(optimizer, master, plain=True)
    scheduler = warm_up(chosen)
    begin(own, master, chosen, begun)
    half = options.get("dtype") == "fp16"
    first, interval = scale or (1.0, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=interval, enabled=half)
    masters = {name: p for name, p in master.named_parameters() if p.requires_grad}
    with holdfast.keyed_rng(own.model) as keys:
        for last, ranks, count in phases:
            for step in range(len(told.losses), last):
                for p, kept in zip(own.model.parameters(), master.parameters(), strict=True):
                    p.data = kept.detach().to(NARROW.get(options.get("dtype"), torch.float32), copy=True)
                under = torch.autocast("cpu", dtype=LOWER) if autocast else nullcontext()
                sums, loss, overflown = summed(own, keys, step, ranks, count, scaler.scale, under, options)
                for name, p in masters.items():
                    p.grad = sums.get(name)
                scaler.unscale_(chosen)
                told.scales.append(scaler.get_scale())
                norm, left_out = clip(masters, own.model, pieces or {}, options)
                told.norms.append(norm)
                told.left_out.append(left_out)
                told.overflown.append(overflown)
                bad = not math.isfinite(loss)
                bad |= (half or "clip_norm" in options) and left_out is None and not math.isfinite(norm)
                told.skipped.append(bad)
                if half:
                    scaler.step(chosen)
                    scaler.update()
                elif not bad:
                    chosen.step()
                scheduler.step()
                chosen.zero_grad()
                told.losses.append(loss)
                told.states.append(
                    {
                        key: value
                        for key, value in state_of(master, chosen).items()
                        if key.endswith("/param")
                        or key.rpartition("/")[0] in masters  # no seeds of frozen ones
                    }
                )
    return told


def summed(
    own: Task,
    keys: Any,
    step: int,
    ranks: int,
    count: int,
    enlarge: Callable[[Any], Any],
    under: AbstractContextManager[Any],
    options: dict[str, Any],
) -> tuple[dict[str, torch.Tensor], float, list[int]]:
    """The gradients of all ranks' ``count`` micro-batches, the loss over them, and the ranks that overflowed."""
    every, sums, total, overflown = own.batches(step, ranks * count), {}, 0.0, []
    shares = by_tokens(every) if options.get("normalize") == "tokens" else [None] * len(every)
    for rank in range(ranks):
        own.disturb(rank, step)
        found: dict[str, list[torch.Tensor]] = {}
        for m in range(rank * count, (rank + 1) * count):
            share = shares[m]
            if share == 0.0:  # it has no target, and its loss is a mean of nothing
                continue
            keys.at(step, m)
            with under:
                out = own.model(**every[m])
            loss = out if isinstance(out, torch.Tensor) else out.loss
            enlarge(loss / len(every) if share is None else loss * share).backward()
            total += loss.item() * (1.0 if share is None else share)
            for name, p in own.model.named_parameters():
                if p.grad is not None:
                    found.setdefault(name, []).append(p.grad.float())
                p.grad = None
        for name, grads in found.items():
            mine = added(grads[::-1] if turned(name, options, own.model) else grads)
            sums[name] = sums[name] + mine if name in sums else mine
            if not mine.isfinite().all() and rank not in overflown:
                overflown.append(rank)
    return sums, total / len(every) if shares[0] is None else total, overflown


def added(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return total


def turned(name: str, options: dict[str, Any], model: torch.nn.Module) -> bool:
    """Does a snake come to the parameter ``name`` with the last micro-batch first? The epilogue goes with the last
    block."""
    if options.get("order") != "snake":
        return False
    if name.startswith("blocks."):
        return int(name.split(".")[1]) % 2 == 1
    return not name.startswith("embed") and len(model.blocks) % 2 == 0


def clip(
    masters: dict[str, torch.nn.Parameter], model: torch.nn.Module, pieces: Pieces, options: dict[str, Any]
) -> tuple[float, list[str] | None]:
    """Clip as ``options`` say; the norm of all, and the parts that were left out as theirs is not finite."""
    bound, norms = options.get("clip_norm"), {}
    for name, p in masters.items():
        if p.grad is not None:
            found = [torch.linalg.vector_norm(p.grad[part]) for part in pieces.get(name, [...])]
            norms[name] = found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found))
    total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
    if options.get("clipping") != "per_block":
        if bound is not None:
            scale_to(total, bound, [masters[name] for name in norms])
        return float(total), None
    left_out, elements = [], sum(p.numel() for p in masters.values())
    for part, names in parts_of(masters, len(model.blocks)).items():
        norm = torch.linalg.vector_norm(torch.stack([norms[name] for name in names if name in norms]))
        share = sum(masters[name].numel() for name in names) / elements
        if norm.isfinite():
            scale_to(norm, bound * math.sqrt(share), [masters[name] for name in names if name in norms])
            continue
        left_out.append(part)
        for name in names:
            masters[name].grad = None
    return float(total), sorted(left_out) or None


def scale_to(norm: torch.Tensor, bound: float, parameters: Sequence[torch.nn.Parameter]) -> None:
    scale = torch.clamp(bound / (norm + 1e-6), max=1.0)
    for p in parameters:
        p.grad.mul_(scale)


def parts_of(masters: dict[str, torch.nn.Parameter], blocks: int) -> dict[str, list[str]]:
    """The trained parameters of each block, and of what is no block."""
    parts: dict[str, list[str]] = {f"blocks.{block}": [] for block in range(blocks)} | {"resident": []}
    for name in masters:
        block = ".".join(name.split(".")[:2])
        parts[block if block in parts else "resident"].append(name)
    return {part: names for part, names in parts.items() if names}
