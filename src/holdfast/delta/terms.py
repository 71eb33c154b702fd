"""Terms: what a replica's process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """``memory`` bounds the copies for a base, in bytes."""

    run: str
    place: str
    keep: tuple[int, int | None, float | None]
    direct: bool
    memory: int
    linger_seconds: float
    trainer: int
    failpoint: str
    rank: int = 0
    world_size: int = 1
