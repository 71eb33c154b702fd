"""Joint scan of the state by all ranks before the first step: it assigns to each rank what it stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..distributed import Ranks
from ..errors import ModelNotSupported
from ..state.layout.flat_ranges import AnyRegion, refuse_gaps
from ..state.layout.ownership import copies, owners
from ..state.live_state import BUFFERS, LiveState


def look(
    ranks: Ranks,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    averages: nn.Module | Mapping[str, nn.Module] | None,
    residuals: dict[torch.Tensor, torch.Tensor],
    own_residuals: bool,
) -> LiveState:
    """Return the training state as it is now, with this rank's stored part marked.

    Args:
        averages: Modules with averaged parameters, by name or alone.
        residuals: The residuals of error feedback, by parameter.
        own_residuals: Whether residuals belong to this rank alone where there are several.

    Collective: every rank must call this.
    """
    beside = {"average": averages} if isinstance(averages, nn.Module) else averages
    state = seen_together(ranks, lambda: LiveState(model, optimizers, beside, residuals))
    state.own_residuals = own_residuals and not ranks.alone
    return state


def seen_together(ranks: Ranks, make: Callable[[], LiveState]) -> LiveState:
    """Return the state that ``make`` builds on this rank, with this rank's stored part marked.

    Collective: every rank must call this. Raises ``ModelNotSupported`` where the regions of a parameter on all ranks
    leave gaps or overlap.
    """
    made: list[LiveState] = []

    def held() -> tuple[dict[str, tuple[AnyRegion, int]], set[str], list[list[str]]]:
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
    """Raise ``ModelNotSupported`` where a buffer, stored by every rank, shares memory with a parameter, stored by one
    rank.
    """
    for bundle in bundles:
        if BUFFERS in bundle and len(bundle) > 1:
            names = " and ".join(name for name in bundle if name != BUFFERS)
            raise ModelNotSupported(
                f"{names} and a buffer are one memory, of which several ranks would each store a part at another step."
                " Register the buffer with persistent=False, or as a copy: .clone()."
            )


def _store_together(
    held_by: Sequence[Mapping[str, tuple[AnyRegion, int]]],
    stored: list[set[str]],
    bundles: Sequence[Sequence[str]],
) -> None:
    """Assign parameters that share memory to the rank that stores the first of them.

    So all of them are of one step.
    """
    for first, *others in bundles:
        for rank in [rank for rank, names in enumerate(stored) if first in names]:
            for name in others:
                region = held_by[rank].get(name, (None, 0))[0]
                for other in range(len(stored)):
                    if other != rank and held_by[other].get(name, (None, 0))[0] == region:
                        stored[other].discard(name)
                stored[rank] |= {name} & held_by[rank].keys()
