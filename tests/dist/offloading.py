"""What the ranks of an out-of-core run do, and a plain loop that adds gradients up as they do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast import failpoints
from holdfast.errors import BadInput
from holdfast.formats.run_directory import CommitSource
from holdfast.measure import drive_rates
from holdfast.offload import api, recomputation
from holdfast.offload.setup import preflight, run_planning
from holdfast.offload.step_maker import ClippingChoice
from holdfast.schedule.operations import traffic
from holdfast.store import run_store
from support.grouped import grouped
from training import VOCABULARY, adamw, batches, decoder, state_of, warm_up

WIDE = {"width": 64, "hidden": 128, "kv_heads": 2}
"""Of a decoder with matrices that are cut."""


class Thin(torch.nn.Module):
    """Each block is one matrix, too small to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = torch.nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Cursor:
    """A loader whose place is each rank's own."""

    def state_dict(self) -> dict[str, Any]:
        return {"batches": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def made(kind: str, dropout: float = 0.0) -> torch.nn.Module:
    """A decoder, of a block of which one parameter is frozen; or one that is ``thin``."""
    if kind == "thin":
        torch.manual_seed(0)
        return Thin()
    model = decoder(blocks=4, dropout=dropout, **(WIDE if kind == "wide" else {}))
    model.blocks[2].mlp.up.weight.requires_grad_(False)
    if kind == "tied":
        model.head.weight = model.embed.weight
    model.factor = 1.0
    model.register_forward_hook(_scale)
    if kind == "buffered":  # every rank counts otherwise
        model.blocks[1].register_buffer("seen", torch.zeros(3))
        model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        model.register_forward_hook(_count)
    return model


def _scale(model: torch.nn.Module, _: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * model.factor


def _count(model: torch.nn.Module, *_: Any) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model.count += 1 + 100 * rank
    model.blocks[1].seen += rank + 1


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    root: str,
    steps: int,
    micro_batches: int = 1,
    kind: str = "narrow",
    kind_of: dict[str, str] | None = None,
    dropout: float = 0.0,
    settle: bool = False,
    other_values: bool = False,
    kill: Sequence[int] = (),
    hang: Sequence[int] = (),
    kill_after: Sequence[float] = (),
    failpoint: Sequence[Any] = (),
    fewer_at: Sequence[int] = (),
    leave_at: Sequence[int] = (),
    refuse_at: Sequence[int] = (),
    faster_at: Sequence[int] = (),
    edit_at: Sequence[int] = (),
    wrong: dict[str, Any] | None = None,
    sources: Sequence[str] = (),
    counted: bool = False,
    cursor: bool = False,
    slow_seconds: float = 0.0,
    sampled: bool = False,
    rates: dict[str, float] | None = None,
    blind: Sequence[int] = (),
    full: Sequence[str] = (),
    early: bool = False,
    ways: dict[str, str] | None = None,
    fast: dict[str, str] | None = None,
    little: Sequence[int] = (),
    options: dict[str, Any] | None = None,
) -> None:
    """``kill``, ``hang``, ``fewer_at``, ``leave_at``, ``refuse_at`` (a step with no list of micro-batches
    before the step), ``faster_at`` (another learning rate) and ``edit_at`` (a parameter) are a rank and a step,
    ``kill_after`` a rank and seconds; ``wrong`` are options by rank, and ``sources`` what each begins from; with
    ``counted`` it says what of that it read. A commit takes ``slow_seconds`` to be verified. With ``sampled`` memory is
    predicted. With
    ``settle`` nothing is under way between two steps. ``rates`` are what drives take, by their names, as the first
    rank finds; the ranks that are ``blind`` see nothing that it shows them; drives that are ``full`` have no room.
    An ``early`` failpoint is armed before the run is opened. ``ways`` are by rank the way of clipping that it would
    choose from the second step on. Ranks with ``little`` memory have none free. Each finds another dtype ``fast``."""
    if world_size > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    if kill_after and kill_after[0] == rank:
        timer = threading.Timer(kill_after[1], os.kill, [os.getpid(), signal.SIGKILL])
        timer.daemon = True
        timer.start()
    model = made((kind_of or {}).get(str(rank), kind), dropout)
    if other_values and rank:
        for parameter in model.parameters():
            parameter.data.add_(1.0)
    optimizer, losses, norms, moved = adamw(model), [], [], []
    given = {"dtype": "fp32", **(options or {}), **(wrong or {}).get(str(rank), {})}
    if slow_seconds:
        api.newest_commit = partial(slowly, api.newest_commit, slow_seconds)
    if sources:
        given["source"] = holdfast.From(sources[rank])
    looked = counting() if counted else {}
    if cursor:
        given["loader"] = Cursor()
    if rates is not None:
        drive_rates.rate_of = lambda directory, limits: measured(rank, directory.name, rates, say)
    if rank in blind:
        run_store.os = SimpleNamespace(path=SimpleNamespace(exists=lambda path: False))
    if full:
        preflight.Disk = lambda path: SimpleNamespace(
            free_bytes=lambda: 0 if Path(path).name in full else 1 << 40
        )
    if ways is not None:
        ClippingChoice.over = lambda self, *_: setattr(self, "mode", ways[str(rank)])
    if fast is not None:
        run_planning.fast_dtype = lambda device: fast[str(rank)]
    if rank in little:
        recomputation.free_host_bytes = lambda: 0
    if early and failpoint[0] == rank:
        failpoints.armed = failpoint[1]
    planned: list[str] = []
    if "host_budget" in given:
        given |= {"budget": holdfast.Budget(host=given.pop("host_budget"))}
    if sampled or "budget" in given:
        given |= {"sample": batches(0, 1)[0], "micro_batches": micro_batches, "say": planned.append}
    with holdfast.offload(model, optimizer, root, **grouped(scheduler=warm_up(optimizer), **given)) as engine:
        say(resumed=engine.resumed_from, planned=planned, **looked)
        if failpoint and failpoint[0] == rank:
            failpoints.armed = failpoint[1]
        refusals: list[str] = []
        for step in range(engine.steps_done, steps):
            if [rank, step] == [*kill]:
                os.kill(os.getpid(), signal.SIGKILL)
            if [rank, step] == [*hang]:
                time.sleep(7)
            if [rank, step] == [*leave_at]:
                raise ValueError("an error of the script")
            if refuse_at and step == refuse_at[1]:
                right = batches(step, 1)
                refusals.append(refused(engine, right[0] if rank == refuse_at[0] else right))
            if faster_at and step == faster_at[1]:
                lr = optimizer.param_groups[1]["lr"]
                optimizer.param_groups[1]["lr"] = 2 * lr if rank == faster_at[0] else lr
                refusals.append(refused(engine, batches(step, 1)))
                optimizer.param_groups[1]["lr"] = lr
            if edit_at and step == edit_at[1]:
                if rank == edit_at[0]:
                    torch.nn.init.zeros_(model.head.weight)
                refusals.append(refused(engine, batches(step, 1)))
            count = micro_batches - ([rank, step] == [*fewer_at])
            mine = batches(step, world_size * micro_batches)[rank * micro_batches :][:count]
            before = engine.traffic()
            losses.append(engine.step(mine))
            norms.append(engine.last["grad_norm"])
            if settle:
                engine.wait()
            now = engine.traffic()
            moved.append({" ".join(key): now[key] - before.get(key, 0) for key in now})
            say(
                losses=losses,
                norms=norms,
                moved=moved,
                refused=refusals,
                durable=engine.durable_step,
            )
        say(clipping=sorted({shape.clipping for _, shape in engine.operations}))
        say(recomputed=[shape.recomputed_fraction for _, shape in engine.operations])
        listed = [ops for (name, _), ops in engine.operations.items() if name == "vertical"]
        if listed:
            say(listed={" ".join(key): nbytes for key, nbytes in traffic(listed[0]).items()})
        say(
            buffers={
                name: value.tolist()
                for name, value in model.named_buffers()
                if name in ("count", "blocks.1.seen")
            }
        )
        say(evaluated=engine.evaluate(batches(99, 2 * world_size)[2 * rank : 2 * rank + 2]))
        values = engine.state_dict()
        say(digest=float(sum(value.double().sum() for value in values.values())))
    given_back = {name: value.detach() for name, value in model.named_parameters()}
    say(given_back=all(torch.equal(given_back[name], values[name]) for name in given_back))
    say(finished=True)


def measured(rank: int, name: str, rates: dict[str, float], say: Callable[..., None]) -> float:
    """What a drive takes; others as much as the run's own."""
    assert rank == 0, "the first measures for all"
    say(**{f"measured {name}": True})
    return rates.get(name, 1e9)


def counting() -> dict[str, Any]:
    """From now on, which parts of commits are checked, and how many bytes of them are read."""
    looked: dict[str, Any] = {"checked": [], "read": 0}
    check, read = CommitSource.check, CommitSource.read

    def checking(self: CommitSource, part: int) -> None:
        looked["checked"].append(part)
        check(self, part)

    def reading(self: CommitSource, part: int, offset: int, into: memoryview) -> None:
        looked["read"] += len(into)
        read(self, part, offset, into)

    CommitSource.check, CommitSource.read = checking, reading
    return looked


def slowly(function: Callable[..., Any], seconds: float, *args: Any) -> Any:
    time.sleep(seconds)
    return function(*args)


def refused(engine: Any, micro_batches: Any) -> str:
    """What a step says that cannot be done."""
    try:
        engine.step(micro_batches)
    except BadInput as error:
        return str(error)
    return "nothing"


def plain(
    phases: Sequence[tuple[int, int, int]],
    kind: str = "narrow",
    clip_norm: float | None = None,
    dropout: float = 0.0,
    pieces: dict[str, list[tuple[slice, ...]]] | None = None,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and the state after ``phases``: of each its last step, its ranks, and the micro-batches of one."""
    model = made(kind, dropout)
    optimizer = adamw(model, fused=True)
    scheduler, losses, norms, step = warm_up(optimizer), [], [], 0
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with holdfast.keyed_rng(model) as keys:
        for last, ranks, count in phases:
            while step < last:
                total, sums = 0.0, None
                for rank in range(ranks):
                    for m, batch in enumerate(batches(step, ranks * count)[rank * count :][:count]):
                        keys.at(step, rank * count + m)
                        loss = model(**batch)
                        (loss / (ranks * count)).backward()
                        total += loss.item()
                    own = {name: p.grad for name, p in parameters.items()}
                    sums = own if sums is None else {name: sums[name] + own[name] for name in own}
                    optimizer.zero_grad()
                for name, p in parameters.items():
                    p.grad = sums[name]
                if clip_norm is not None:
                    norms.append(clipped(parameters, clip_norm, pieces or {}))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(total / (ranks * count))
                step += 1
    return losses, norms, state_of(model, optimizer)


def clipped(
    parameters: dict[str, torch.nn.Parameter], bound: float, pieces: dict[str, list[tuple[slice, ...]]]
) -> float:
    """``clip_grad_norm_``, where the norm of a tensor that is cut is that of the norms of its pieces."""
    norms: list[torch.Tensor] = []
    for name, p in parameters.items():
        found = [torch.linalg.vector_norm(p.grad[part]) for part in pieces.get(name, [...])]
        norms.append(found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found)))
    total = torch.linalg.vector_norm(torch.stack(norms))
    scale = torch.clamp(bound / (total + 1e-6), max=1.0)
    for p in parameters.values():
        p.grad.mul_(scale)
    return float(total)
