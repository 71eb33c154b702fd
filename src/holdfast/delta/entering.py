"""Entering: what all ranks see together before the first step: what of the state each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import nn

from ..errors import ModelNotSupported
from ..ranks import Ranks
from ..state.cuts import copies, owners
from ..state.live import LiveState
from ..state.stretches import Region, Stretch


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
    ranks.all_do(lambda: _refuse_gaps([parameters for parameters, _ in parts], made[0]))
    [state] = made
    if not ranks.alone:
        held_by = [parameters for parameters, _ in parts]
        stored = owners(held_by)
        state.store_only(stored[ranks.rank])
        state.copies = copies(held_by, stored)
        state.elsewhere = set().union(*(names for _, names in parts))
        state.own_residuals = own_residuals
    return state


def _refuse_gaps(held: Sequence[Mapping[str, tuple[Region, int]]], state: LiveState) -> None:
    """Raise ``ModelNotSupported`` unless the stretches that all ranks hold of a parameter are all of it, each element
    once, or in each of several copies."""
    for name, here in state.boxes.items():
        if not isinstance(here, Stretch):
            continue
        regions = {parameters[name][0] for parameters in held if name in parameters}
        stretches = sorted(region for region in regions if isinstance(region, Stretch))
        ends = [0, *(stretch.stop for stretch in stretches)]
        whole = {stretch.whole for stretch in stretches} == {here.whole} and ends[-1] == prod(here.whole)
        if len(stretches) < len(regions) or not whole or ends[:-1] != [each.first for each in stretches]:
            told = ", ".join(f"{each.first} to {each.stop} of {list(each.whole)}" for each in stretches)
            raise ModelNotSupported(
                f"the ranks hold the elements {told} of {name}, {list(here.whole)} here, and together that is not each"
                " of it once. Wrap the model alike on all ranks, over all of them."
            )
