"""``holdfast train`` on several ranks, as torchrun starts them.

Ranks share the micro-batches of a step and stop at the same step. Only the first rank prints and keeps the record of
the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.console import Console

from ...config import Config
from ...distributed import Ranks
from ...errors import BadInput, ConfigError
from ..machine import launched
from ..output import console

T = TypeVar("T")

DEADLINE_SECONDS = 300.0
"""The seconds that a rank waits for another one, as in ``offload``."""


@contextmanager
def together() -> Iterator[Ranks]:
    """Yield the ranks that torchrun started, or a single one. Collective: every rank must call this."""
    if launched() == (0, 1):
        yield Ranks()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_SECONDS))  # as the engine does
    ranks = Ranks.here(DEADLINE_SECONDS, "begin to train")
    try:
        yield ranks
    finally:
        ranks.close()
        dist.destroy_process_group()


def console_of(ranks: Ranks) -> Console:
    """Return a console on standard output for the first rank, and one that prints nowhere for the others."""
    return console() if ranks.rank == 0 else Console(file=open(os.devnull, "w", encoding="utf-8"))


def share_of(config: Config, ranks: Ranks) -> int:
    """Return this rank's number of micro-batches in a step. Raises ``ConfigError`` if they do not divide evenly."""
    whole = config.train.micro_batches
    if whole % ranks.world_size:
        raise ConfigError(
            f"train.micro_batches = {whole} cannot be shared out evenly among {ranks.world_size} ranks: start as many"
            " as divide it, or set another number, of all ranks together"
        )
    return whole // ranks.world_size


def refuse_encoding_here(what: str) -> None:
    """Raise ``BadInput``, because rank 0 should have done ``what`` already."""
    raise BadInput(
        f"{what} was done by rank 0, whose copy is not what this rank has: all ranks need one file system for the run's"
        " directory and for the text"
    )


def first_alone(ranks: Ranks, what: Callable[[], T]) -> T:
    """Return the result of ``what`` on the first rank, however long it takes. Collective: every rank must call this.

    An error on the first rank is raised on all.
    """
    with ranks.agreeing():
        result = ranks.first_takes_its_time(what)
    return ranks.everyone(result)[0]  # type: ignore[return-value]
