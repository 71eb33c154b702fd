"""Options: those of a ``Checkpointer`` that cannot be, refused before anything is written."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import BadInput
from ..plan.cadence import Limits
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
            f"codec = {codec!r} is not a codec: holdfast.Exact(), holdfast.TopK(0.01), holdfast.Int8(),"
            " holdfast.PowerSGD()"
        )


def refuse_bad_resume(step: int | None, before: int | None, exactness: str) -> None:
    if step is not None and before is not None:
        raise BadInput("resume takes step= or before=, not both")
    if exactness not in ("state", "continuation"):
        raise BadInput(f"exactness = {exactness!r} is not one of state, continuation")


def refuse_of_several(ranks: Ranks, when_behind: str) -> None:
    """What is for one process."""
    if when_behind == "skip" and not ranks.alone:
        raise BadInput(
            'when_behind="skip" is for one process. Give "commit": after steps that one of several ranks could not'
            " record, all make a base at once."
        )


def refuse_clipping(state: LiveState, clip_norm: float | None) -> None:
    """Where there is no norm to clip by: torch has none of gradients that are cut over several meshes, or of which some
    are cut and others are not, and of a pipeline no rank has all."""
    if clip_norm is None:
        return
    if not clip_norm > 0:
        raise BadInput(f"clip_norm = {clip_norm} must be more than 0")
    cuts = {getattr(p.parameter, "device_mesh", None) for p in state.parameters if p.trained}
    if len(cuts) > 1:
        raise BadInput(
            f"clip_norm = {clip_norm}: some parameters are sharded, others are not or over other ranks, and torch has"
            " no norm of all. Clip in the script."
        )
    here = {name for p in state.parameters for name in p.names} | {
        a.name for a, _ in state.buffers().values()
    }
    away = sorted(set(state.elsewhere) - here)
    if away:
        raise BadInput(
            f"clip_norm = {clip_norm}: this rank does not hold {away[0]}, so it has no norm of all. Clip in the script."
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
