"""What ranks do that go back to an earlier step without a restart, by a call or by a guard."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist.training import full, left_here, whole_state, wrapped
from holdfast.checkpoint.nodes.local_disks import LocalDisks
from holdfast.checkpoint.recovery import lineage, run_recovery
from holdfast.checkpoint.replica import replica_process
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpointer import Checkpointer
from holdfast.errors import HoldfastError
from holdfast.store.commit.retention import Keep
from holdfast.store.log.chain import read_journal
from holdfast.store.run_store import LocalStore
from replica_run import Forked


def accumulate(model: Any, kind: str) -> None:
    """Compute gradients that are not exchanged, as in the middle of an accumulation."""
    with model.no_sync() if kind == "ddp" else nullcontext():
        if kind == "fsdp":
            model.set_requires_gradient_sync(False)
        model(torch.randn(5, 7)).pow(2).mean().backward()
        if kind == "fsdp":
            model.set_requires_gradient_sync(True)


@contextmanager
def counted_headers() -> Iterator[list[str]]:
    """The logs whose headers this rank reads in a recovery, by stream."""
    read: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (lineage, run_recovery):
            patch.setattr(
                module,
                "read_journal",
                lambda store, stream, *rest: read.append(stream) or read_journal(store, stream, *rest),
            )
        yield read


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    kind: str,
    root: str,
    steps: int,
    back: dict[str, int] | None = None,
    bad_at: list[int] | None = None,
    refused: dict[str, int] | None = None,
    every: int = 1,
    nodes: list[int] | None = None,
    copy_every: int | None = None,
    fails_on: int | None = None,
    forgets_base: int | None = None,
    replica: str | None = None,
    dies: list[int] | None = None,
) -> None:
    """Train to ``steps``.

    ``back`` has a step at which all go back, by its text. At ``bad_at`` (a rank and a step) the guard is told of a bad
    loss there, after the forward pass. ``refused`` has the step that each rank asks for, which is refused on all. The
    rank ``fails_on`` has an error as it gives up a base under way; ``forgets_base`` knows of no base that is whole.
    ``dies`` is a rank, and the step before whose end it is killed once all have gone back.
    """
    snapshot_chunks.UNIT_BYTES = 100
    if replica is not None:
        Forked.prepare()
        replica_process.start_process = Forked  # type: ignore[misc]
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    model = wrapped(kind, world_size, 13, False, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    torch.manual_seed(100 + rank)
    digests: dict[int, Any] = {}
    model(torch.zeros(5, 7)).sum().backward()  # DDP forms its buckets anew after the first
    model.zero_grad()
    how: dict[str, Any] = {"base_every": 3} if every == 1 else {"every": every}
    how["keep"] = Keep(last=9)  # however fast bases are published, the steps that are gone back to stay
    if replica is not None:
        how["replica"] = replica
    if nodes is not None:
        root, how["nodes"] = f"{root}-{nodes[rank]}", LocalDisks(node=nodes[rank])
    if forgets_base is not None:
        how["deadline_seconds"] = 20
    if forgets_base == rank:
        LocalStore.newest_base = property(lambda self: None)  # type: ignore[assignment]
    with Checkpointer(root, model=model, optimizer=optimizer, scheduler=schedule, **how) as checkpointer:
        with counted_headers() as read:
            say(resumed=checkpointer.resume(), read=read)
        digests[checkpointer.steps_done] = whole_state(model, optimizer, None)
        guard = checkpointer.guard(copy_every=copy_every) if bad_at else None
        if fails_on == rank:
            checkpointer._backend.pace.bases.give_up = full
        pending, threads = dict(back or {}), []
        if refused is not None:
            try:
                checkpointer.rollback(refused[str(rank)])
            except HoldfastError as error:
                say(refused=f"{type(error).__name__}: {error}")
        while checkpointer.steps_done < steps:
            step = checkpointer.steps_done + 1
            loss = model(torch.randn(5, 7)).pow(2).mean()
            if guard is not None and bad_at is not None:
                is_bad = bad_at == [rank, step] and guard.rollbacks == 0
                if guard.check(math.inf if is_bad else loss):
                    say(went_to=checkpointer.steps_done)
                    continue
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if dies == [rank, step] and not pending:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.step()
            digests[step] = whole_state(model, optimizer, None)
            if str(step) in pending:
                accumulate(model, kind)
                checkpointer.rollback(pending.pop(str(step)))
                digests = {s: d for s, d in digests.items() if s <= checkpointer.steps_done}
                same = digests[checkpointer.steps_done] == whole_state(model, optimizer, None)
                threads.append(left_here())
                say(same=same, threads=threads)
        say(digests=digests, threads=[*threads, left_here()])
    say(finished=True)
