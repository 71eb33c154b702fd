"""Training in which some ranks run on another kind of processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from dist.training import OPTIMIZERS, whole_state, wrapped
from holdfast.checkpoint.nodes.local_disks import LocalDisks
from holdfast.checkpoint.replica import replica_process
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpointer import Checkpointer
from holdfast.errors import HoldfastError
from holdfast.state.layout.regions import local_of
from holdfast.store.commit.retention import Keep
from replica_run import Forked
from support.other_processor import other_processor


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    others: Sequence[int] = (),
    replica: str | None = None,
    **order: Any,
) -> None:
    """Train with the ranks ``others`` on another kind of processor."""
    if replica is not None:
        Forked.prepare()
        replica_process.start_process = Forked  # type: ignore[misc]
        order["replica"] = replica
    with other_processor() if rank in others else nullcontext():
        train(rank, world_size, rendezvous, say, **order)


def train(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    kind: str,
    root: str,
    steps: int,
    base_every: int = 1000,
    nodes: Sequence[int] | None = None,
    falls_back: bool = False,
    back: dict[str, int] | None = None,
    bad_at: int | None = None,
    **options: Any,
) -> None:
    """Train to ``steps``, the last of them in a record alone.

    Report a refused resume; with ``falls_back`` resume approximately after it. ``back`` maps a step, as text, to the
    step to go back to. The guard gets an infinite loss after step ``bad_at``.
    """
    snapshot_chunks.UNIT_BYTES = 100
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    model = wrapped(kind, world_size)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    torch.manual_seed(rank)
    if nodes is not None:
        root, options["nodes"] = f"{root}-{nodes[rank]}", LocalDisks(node=nodes[rank])

    def made() -> Checkpointer:
        return Checkpointer(
            root, model=model, optimizer=optimizer, base_every=base_every, keep=Keep(last=9), **options
        )

    def mine() -> list[list[float]]:
        return [local_of(p.detach()).flatten().tolist() for p in model.parameters()]

    checkpointer, before = made(), mine()
    try:
        say(resumed=checkpointer.resume())
    except HoldfastError as error:
        say(refused=type(error).__name__, step=getattr(error, "step", None), text=str(error))
        say(unchanged=mine() == before, finished=not falls_back)
        if not falls_back:
            return
        checkpointer = made()
        say(resumed=checkpointer.resume(exactness="approximate"), exactness=checkpointer.exactness)
    digests = {checkpointer.steps_done: whole_state(model, optimizer)}
    guard = checkpointer.guard() if bad_at is not None else None
    pending = dict(back or {})
    while checkpointer.steps_done < steps:
        loss = model(torch.randn(5, 7)).pow(2).mean()
        if guard is not None and guard.check(
            math.inf if checkpointer.steps_done == bad_at and not guard.rollbacks else loss
        ):
            say(went_to=checkpointer.steps_done, digest_there=whole_state(model, optimizer))
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
        step = checkpointer.steps_done
        digests[step] = whole_state(model, optimizer)
        if (to := pending.pop(str(step), None)) is not None:
            try:
                checkpointer.rollback(to)
            except HoldfastError as error:
                say(not_back=type(error).__name__, stays_at=checkpointer.steps_done)
                say(unchanged=whole_state(model, optimizer) == digests[step])
    checkpointer.wait()
    dist.barrier()  # the first rank serves the others until all know
    checkpointer.close(save=False)
    say(digests=digests, finished=True)
