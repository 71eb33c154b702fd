"""Options: those of a ``Checkpointer`` that cannot be, refused before anything is written."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import BadInput
from ..plan.cadence import Limits
from ..state.cuts import is_distributed
from ..state.live import LiveState
from ..store.retention import Keep
from .codecs import Codec
from .pace import POLICIES
from .ranks import Ranks


def optimizers_of(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The one, or the several, that were given."""
    optimizers = (given,) if isinstance(given, torch.optim.Optimizer) else tuple(given)
    if not optimizers or not all(isinstance(item, torch.optim.Optimizer) for item in optimizers):
        raise BadInput("optimizer is not an optimizer of torch, nor several of them")
    return optimizers


def refuse_bad(base_every: int | None, when_behind: str, keep: Any, codec: Any) -> None:
    if base_every is not None and base_every < 1:
        raise BadInput(f"base_every = {base_every} must be at least 1 step; leave it out to have it chosen")
    if when_behind not in POLICIES:
        raise BadInput(f"when_behind = {when_behind!r} is not one of {', '.join(POLICIES)}")
    if not isinstance(keep, Keep):
        raise BadInput(f"keep = {keep!r} is no holdfast.Keep, such as Keep(last=2, every=1000)")
    if not isinstance(codec, Codec):
        raise BadInput(
            f"codec = {codec!r} is not a codec: holdfast.Exact(), holdfast.TopK(0.01), holdfast.Int8()"
        )


def refuse_of_several(ranks: Ranks, when_behind: str, storage: Any) -> None:
    """What is for one process."""
    if when_behind != "block" and not ranks.alone:
        raise BadInput(
            f'when_behind="{when_behind}" is for one process: what one of several ranks skips none can have'
        )
    if storage is not None and not ranks.alone:
        raise BadInput("storage= is for one process: no rank knows what the others are about to write")


def refuse_clipping(state: LiveState, clip_norm: float | None) -> None:
    """Where there is no norm to clip by: gradients of which some are shards and others are not have none in torch."""
    if clip_norm is None:
        return
    if not clip_norm > 0:
        raise BadInput(f"clip_norm = {clip_norm} must be more than 0")
    kinds = {is_distributed(p.parameter) for p in state.parameters if p.trained}
    if len(kinds) > 1:
        raise BadInput(
            f"clip_norm = {clip_norm}: some parameters are sharded and others are not, and torch has no norm of both."
            " Clip in the script."
        )


def limits_of(
    recovery_seconds: float, storage: int | None, memory: int, bandwidth_share: float, keep: Keep
) -> Limits:
    """What the cadence keeps to. A write holds as many records as the slots allow, whatever the cadence."""
    try:
        return Limits(
            recovery_seconds=recovery_seconds, storage_bytes=storage, host_bytes=memory,
            bandwidth_share=bandwidth_share, retain=keep.last, pending_steps=2,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(str(error)) from error
