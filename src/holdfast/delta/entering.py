"""Entering: what all ranks see together before the first step: what of the state each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..ranks import Ranks
from ..state.cuts import copies, owners
from ..state.live import LiveState
from ..state.stretches import Region, refuse_gaps


def look(
    ranks: Ranks,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    averages: nn.Module | Mapping[str, nn.Module] | None,
    residuals: dict[torch.Tensor, torch.Tensor],
    subspaces: dict[torch.Tensor, torch.Tensor],
    own_residuals: bool,
) -> LiveState:
    """The state as it is now, of which this rank stores its part. Called on all ranks."""
    beside = {"average": averages} if isinstance(averages, nn.Module) else averages
    made: list[LiveState] = []

    def held() -> tuple[dict[str, tuple[Region, int]], set[str]]:
        made.append(state := LiveState(model, optimizers, beside, residuals, subspaces))
        boxes = state.boxes
        parameters = {
            p.name: (boxes[p.name], boxes[p.name].elements * p.parameter.element_size())
            for p in state.parameters
            if not state.lacks(p.name)
        }
        names = {name for p in state.parameters for name in p.names}
        return parameters, names | {atom.name for atom, _ in state.buffers().values()}

    parts = ranks.all_do(held)
    regions = [{name: region for name, (region, _) in parameters.items()} for parameters, _ in parts]
    ranks.all_do(lambda: refuse_gaps(regions, made[0].boxes))
    [state] = made
    if not ranks.alone:
        held_by = [parameters for parameters, _ in parts]
        stored = owners(held_by)
        state.store_only(stored[ranks.rank])
        state.copies = copies(held_by, stored)
        state.elsewhere = set().union(*(names for _, names in parts))
        state.own_residuals = own_residuals
    return state
