"""Together: ``holdfast train`` on several ranks, as torchrun starts them. They share out the micro-batches of a step,
stop at the same step, and only the first of them speaks and keeps the record of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.console import Console

from ..config import Config
from ..errors import BadInput, ConfigError
from ..ranks import Ranks
from .machine import launched
from .output import console

T = TypeVar("T")

DEADLINE_SECONDS = 300.0
"""How long a rank waits for another one, as in ``offload``."""


@contextmanager
def together() -> Iterator[Ranks]:
    """The ranks that torchrun has started this process among, one where it has not. Waits for all of them."""
    if launched() == (0, 1):
        yield Ranks()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_SECONDS))  # as the engine exchanges
    ranks = Ranks.here(DEADLINE_SECONDS, "begin to train")
    try:
        yield ranks
    finally:
        ranks.close()
        dist.destroy_process_group()


def console_of(ranks: Ranks) -> Console:
    """Standard output of the first rank; of the others nowhere."""
    return console() if ranks.rank == 0 else Console(file=open(os.devnull, "w", encoding="utf-8"))


def share_of(config: Config, ranks: Ranks) -> int:
    """How many of a step's micro-batches are this rank's. Raises ``ConfigError`` if they cannot be shared out."""
    whole = config.train.micro_batches
    if whole % ranks.world_size:
        raise ConfigError(
            f"train.micro_batches = {whole} cannot be shared out evenly among {ranks.world_size} ranks: start as many"
            " as divide it, or set another number, of all ranks together"
        )
    return whole // ranks.world_size


def refuse_encoding_here(what: str) -> None:
    """``what`` should have been found done by rank 0."""
    raise BadInput(
        f"{what} was done by rank 0, whose copy is not what this rank has: all ranks need one file system for the run's"
        " directory and for the text"
    )


def first_alone(ranks: Ranks, what: Callable[[], T]) -> T:
    """What ``what`` returns on the first rank, however long that takes. Called on all ranks, and so it raises."""
    with ranks.agreeing():
        result = ranks.first_takes_its_time(what)
    return ranks.everyone(result)[0]  # type: ignore[return-value]
