"""One writer's shard of the training state, in which its records are replayed after a change of parallelism.

Called by ``Lineage``; ``copy_into`` also for states that replicas kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...state.capture import CapturedParameter
from ...state.layout.overlaps import OverlappingMemory, Shared
from ...state.layout.regions import AnyRegion
from ...state.live_state import Held, LiveState
from ...state.plain_tensors import TO_NAME
from ...state.tensor_entries import RESIDUAL, TensorEntry


class ShardState(LiveState):
    """One writer's shard of the training state, rebuilt on plain tensors.

    Replay must use the shapes the writer used: fused kernels round differently on other shapes. After a change of
    parallelism each old shard is replayed in its own shape first and then copied into the live, resharded state.
    """

    def __init__(self, state: LiveState, boxes: Mapping[str, AnyRegion], shared: Shared) -> None:
        """Make tensors for the parameters of ``state`` in ``boxes``, each with the shape of its region.

        ``shared`` says which tensors overlapped in the writer's memory; the same tensors overlap here.
        """
        held = {parameter.name for parameter in state.parameters}
        self.boxes = {name: box for name, box in boxes.items() if name in held}
        self.parameters = self.stored = tuple(  # in the writer's order
            _like(state.parameter(name), box) for name, box in self.boxes.items()
        )
        self._parameter = {parameter.name: parameter for parameter in self.parameters}
        self._share_parameters(shared)
        self._optimizer_of = state._optimizer_of
        self.optimizers = tuple(
            _copy_of(optimizer, [
                [self._parameter[name].parameter
                 for name in (state.name_of[id(p)] for p in group["params"]) if name in boxes]
                for group in optimizer.param_groups
            ])
            for optimizer in state.optimizers
        )  # fmt: skip
        self.name_of = {id(parameter.parameter): parameter.name for parameter in self.parameters}
        self._buffers, self._buffers_beside, self.elsewhere = {}, {}, state.elsewhere
        self.residuals, self.own_residuals = {}, False
        self.own, self.layouts, self.on_host, self.carried, self.rebound = (), {}, {}, set(), set()
        self.loaded_buffers: dict[str, torch.Tensor] = {}
        """The buffers that were loaded last, by key."""
        self.wholes = {name: state.wholes[name] for name in self.boxes}

    def _share_parameters(self, shared: Shared) -> None:
        here = {(name, "param"): captured.parameter.detach() for name, captured in self._parameter.items()}
        for group in shared:
            mine = [member for member in group if tuple(member[0]) in here]
            if len(mine) < 2:
                continue
            memory = OverlappingMemory.empty(mine, here)
            for (name, slot), offset, strides in mine:
                made = memory.view(offset, strides, here[name, slot])
                assert made is not None
                self._parameter[name].parameter.data = made

    def buffers(self, beside: bool = True) -> Held:
        """Return the buffers that were loaded last."""
        kept = [(key.removesuffix("/buffer"), value) for key, value in self.loaded_buffers.items()]
        atoms = [(TensorEntry(name, "buffer", tuple(v.shape), TO_NAME[v.dtype]), v) for name, v in kept]
        return {atom.key: (atom, value) for atom, value in atoms}

    def load(self, atoms: dict[str, torch.Tensor]) -> None:
        """Load as ``LiveState.load`` does, except that buffers are only kept."""
        buffers = {key: value for key, value in atoms.items() if key.endswith("/buffer")}
        self.loaded_buffers |= {key: value.clone() for key, value in buffers.items()}
        super().load({key: value for key, value in atoms.items() if key not in buffers})


def copy_into(source: LiveState, into: LiveState) -> None:
    """Copy the content of ``source`` into ``into``, where each parameter of ``source`` is a region of a parameter."""
    into.layouts |= source.layouts_now()
    into.on_host |= source.on_host_now()
    for parameter in source.parameters:
        box = source.boxes[parameter.name]
        whole = {}
        for key, (atom, tensor) in source.owned(parameter).items():
            if atom.shape == box.shape:
                into.load_part(atom.name, atom.slot, tensor, box)
            elif block := source.block_size(atom):
                into.load_part(atom.name, atom.slot, tensor, source.place_of(atom)[1], block)
            else:
                whole[key] = tensor
        into.load(whole)
        if parameter.parameter in source.residuals:
            into.load_part(parameter.name, RESIDUAL, source.residuals[parameter.parameter], box)
    into.load_values(source.values())


def _like(parameter: CapturedParameter, box: AnyRegion) -> CapturedParameter:
    """Return an empty parameter for the region ``box`` of ``parameter``."""
    of = parameter.parameter
    made = nn.Parameter(
        torch.empty(box.shape, dtype=of.dtype, device=of.device), requires_grad=of.requires_grad
    )
    return replace(parameter, parameter=made)


def _copy_of(optimizer: torch.optim.Optimizer, params: list[list[torch.Tensor]]) -> torch.optim.Optimizer:
    """Return an optimizer like ``optimizer`` for ``params`` by group, without its state and hooks."""
    made: Any = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.state = defaultdict(dict)
    made.param_groups = [
        {**group, "params": own} for group, own in zip(optimizer.param_groups, params, strict=True)
    ]
    return made
