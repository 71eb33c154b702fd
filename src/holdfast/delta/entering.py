"""Entering: what all ranks see together before the first step: what of the state each holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..errors import ModelNotSupported
from ..ranks import Ranks
from ..state.cuts import copies, owners
from ..state.live import BUFFERS, LiveState
from ..state.stretches import Region, refuse_gaps


def look(
    ranks: Ranks,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    averages: nn.Module | Mapping[str, nn.Module] | None,
    residuals: dict[torch.Tensor, torch.Tensor],
    own_residuals: bool,
) -> LiveState:
    """The state as it is now, of which this rank stores its part. Called on all ranks."""
    beside = {"average": averages} if isinstance(averages, nn.Module) else averages
    state = seen_together(ranks, lambda: LiveState(model, optimizers, beside, residuals))
    state.own_residuals = own_residuals and not ranks.alone
    return state


def seen_together(ranks: Ranks, make: Callable[[], LiveState]) -> LiveState:
    """What ``make`` gives on this rank, which stores its part of it. Called on all ranks. Raises ``ModelNotSupported``
    where stretches of a parameter that the ranks hold leave gaps or overlap."""
    made: list[LiveState] = []

    def held() -> tuple[dict[str, tuple[Region, int]], set[str], list[list[str]]]:
        made.append(state := make())
        bundles = state.bundles()
        if not ranks.alone:
            _refuse_shared_buffers(bundles)
        boxes = state.boxes
        parameters = {
            p.name: (boxes[p.name], boxes[p.name].elements * p.parameter.element_size())
            for p in state.parameters
            if not state.lacks(p.name)
        }
        names = {name for p in state.parameters for name in p.names}
        names |= {atom.name for atom, _ in state.buffers().values()}
        return parameters, names, bundles

    parts = ranks.all_do(held)
    held_by = [parameters for parameters, *_ in parts]
    [state] = made

    def check() -> None:
        regions = [{name: region for name, (region, _) in parameters.items()} for parameters in held_by]
        refuse_gaps(regions, state.boxes)

    ranks.all_do(check)
    if not ranks.alone:
        stored = owners(held_by)
        bundles = dict.fromkeys(tuple(bundle) for *_, told in parts for bundle in told)  # a stage has its own
        _store_together(held_by, stored, list(bundles))
        state.store_only(stored[ranks.rank])
        state.copies = copies(held_by, stored)
        state.elsewhere = set().union(*(names for _, names, _ in parts))
    return state


def _refuse_shared_buffers(bundles: Sequence[Sequence[str]]) -> None:
    """Raise ``ModelNotSupported`` where a buffer, which every rank stores, lies over a parameter, which one stores."""
    for bundle in bundles:
        if BUFFERS in bundle and len(bundle) > 1:
            names = " and ".join(name for name in bundle if name != BUFFERS)
            raise ModelNotSupported(
                f"{names} and a buffer are one memory, of which several ranks would each store a part at another step."
                " Register the buffer with persistent=False, or as a copy: .clone()."
            )


def _store_together(
    held_by: Sequence[Mapping[str, tuple[Region, int]]],
    stored: list[set[str]],
    bundles: Sequence[Sequence[str]],
) -> None:
    """Let the rank that stores the first of the parameters that are one memory store the others: they are of one
    step."""
    for first, *others in bundles:
        for rank in [rank for rank, names in enumerate(stored) if first in names]:
            for name in others:
                region = held_by[rank].get(name, (None, 0))[0]
                for other in range(len(stored)):
                    if other != rank and held_by[other].get(name, (None, 0))[0] == region:
                        stored[other].discard(name)
                stored[rank] |= {name} & held_by[rank].keys()
