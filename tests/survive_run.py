"""A training loop with a checkpointer, as a process that is killed runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from checkpoint.loops import make
from fork_server import Kill, Outcome, kill_in_turn
from holdfast.checkpoint.compression.codecs import Exact
from holdfast.checkpoint.compression.lossy import Int8, TopK
from holdfast.checkpointer import Checkpointer
from holdfast.store.commit.retention import Keep
from support.switching import copy_often, switch_often

OPTIMIZER = partial(torch.optim.AdamW, lr=0.01)
FEATURE = "batchnorm"
CODECS = {"topk": partial(TopK, 0.2), "int8": partial(Int8, 16), "compressed": partial(Exact, compress=True)}


def digest(state: Any) -> str:
    """Of every bit of a loop's state."""
    if isinstance(state, torch.Tensor):
        return xxhash.xxh3_64_hexdigest(
            state.detach().cpu().contiguous().numpy().tobytes() + str(state.dtype).encode()
        )
    if isinstance(state, dict):
        return xxhash.xxh3_64_hexdigest(repr([(key, digest(value)) for key, value in state.items()]).encode())
    if isinstance(state, (list, tuple)):
        return xxhash.xxh3_64_hexdigest(repr([digest(value) for value in state]).encode())
    return repr(state)


def shorten(
    root: str, verb: str, *, said: Callable[..., None], to: int | None = None, keep: tuple[Any, ...] = (1,)
) -> None:
    """``holdfast compact`` or ``prune`` of a run that nobody writes."""
    from holdfast.checkpoint.recovery.compaction import compact
    from holdfast.store.commit.pruning import prune

    if verb == "compact":
        compact(Path(root), to)
    else:
        prune(Path(root), Keep(*keep))
    said(finished=True)


def kill_and_end(
    run: Callable[..., Outcome],
    whole: Outcome,
    folder: Path,
    kills: Sequence[Kill],
    goes_back: bool = False,
) -> Path:
    """Let processes be killed in turn, and compare the end of the last one with the ``whole`` run.

    Returns the directory of the last one. The arguments are those of ``kill_in_turn``.
    """

    def check_end(root: Path, outcome: Outcome) -> None:
        assert outcome.finished, outcome.error
        assert outcome.losses == whole.losses[len(whole.losses) - len(outcome.losses) :]
        assert outcome.digest == whole.digest

    root, acknowledged = kill_in_turn(run, folder, kills, check_end, goes_back)
    last = run(root=root)
    assert goes_back or last.resumed >= acknowledged, last
    check_end(root, last)
    return root


def train(
    root: str,
    steps: int,
    *,
    feature: str = FEATURE,
    said: Callable[..., None] = lambda **_: None,
    acknowledge: Callable[[int], None] = lambda step: None,
    unit_bytes: int = 1000,
    codec: str | None = None,
    exactness: Literal["state", "continuation"] = "state",
    keep_last: int = 2,
    groups_per_segment: int = 3,
    switching: bool = False,
    copies_in: str | None = None,
    patient: bool = False,
    **options: Any,
) -> None:
    """Resume and train to ``steps``, with a codec of ``CODECS``. Says the step resumed from, every durable step, and
    the digest at the end. With ``switching``, ``every="auto"`` changes its choice again and again; with ``copies_in``
    it chooses copies in memory, for which that directory stands, and they are acknowledged too. Who is ``patient``
    waits in every second step for what is on its way."""
    from holdfast import checkpointer as module
    from holdfast.checkpoint.snapshot import snapshot_chunks
    from holdfast.measure import drive_rates
    from holdfast.store.log import journal, striping

    snapshot_chunks.UNIT_BYTES, module.BASE_BYTES_PER_STEP, journal.GROUPS_PER_SEGMENT = (
        unit_bytes,
        1,
        groups_per_segment,
    )
    if switching:
        switch_often()
    if copies_in is not None:
        copy_often(copies_in)
    if "drives" in options:  # as if they were different disks, which nobody measures
        drive_rates.rate_of, drive_rates.device_of = lambda directory, limits: 1e9, hash
        striping.STRIPE_BYTES = 4096
    loop = make(OPTIMIZER, feature)
    with Checkpointer(
        root,
        model=loop.model,
        optimizer=loop.optimizers,
        codec=None if codec is None else CODECS[codec](),
        keep=Keep(keep_last),
        **loop.things,
        **options,
    ) as checkpointer:
        done = checkpointer.resume(exactness=exactness)
        said(resumed=done)
        newest = -1
        for i in range(done, steps):
            loop.iteration(i, checkpointer.step)
            if patient and i % 2:
                checkpointer._backend.drain()
            if checkpointer.replica_step > newest:
                newest = checkpointer.replica_step
                acknowledge(newest)
        checkpointer.wait()
        acknowledge(checkpointer.durable_step)
    said(finished=True, losses=loop.losses, digest=digest(loop.state()))
