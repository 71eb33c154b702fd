"""The configuration of a replica's process, passed to it when it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaConfig:
    """The configuration of a replica's process. ``memory`` bounds the copies for a snapshot, in bytes."""

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
