"""Existing optimizer state, with which a fresh run begins if the user's optimizer has made steps already.

Each rank takes its own part of the state. All ranks must hold the same state, as after training with
``DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from ...distributed import Ranks
from ...errors import OptimizerNotSupported
from ...optim.host_optimizer import HostOptimizer
from ...state.plain_tensors import host_bytes
from ..memory.block_states import BlockState
from ..memory.parameter_shards import ParameterEntry, ParameterShard
from ..model.model_parts import ModelParts
from .equal_on_ranks import agree


def held_for(optimizer: HostOptimizer, member: ParameterEntry) -> dict[str, Any]:
    """Return the state that the optimizer holds for a parameter, by state name; empty before its first step."""
    state = optimizer.state_of(member.owned.captured.parameter)
    return {slot: value for slot, value in state.items() if not getattr(value, "is_meta", False)}


def part_of(unit: BlockState, piece: ParameterShard, held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a parameter's state ``held`` that belongs to ``piece``."""
    forms = unit.member_slots(piece.member).tensors
    return {
        slot: torch.as_tensor(value)[piece.box_in(forms[slot]).slices] if slot in forms else value
        for slot, value in held.items()
    }


def check_forms(parts: ModelParts) -> None:
    """Raise ``OptimizerNotSupported`` if existing state has another shape than the optimizer keeps here."""
    for unit in parts.all_units:
        for member in unit.trained:
            forms = unit.member_slots(member).tensors
            for slot, value in held_for(parts.optimizer, member).items():
                there = list(torch.as_tensor(value).shape)
                if slot in forms and there != (here := list(forms[slot].shape)):
                    raise OptimizerNotSupported(
                        f"the optimizer holds {slot} of {there} for {member.name}, and with the hyper-parameters that"
                        f" it has now it keeps {here}. Give offload() one that has made no step, or those"
                        " hyper-parameters with which it made them."
                    )


def agree_on_held(ranks: Ranks, parts: ModelParts) -> None:
    """Raise ``BadInput`` on all ranks unless all optimizers hold the same state.

    Collective: every rank must call this.
    """
    if ranks.alone:
        return
    mine = {
        f"{member.name}/{slot}": _described(value)
        for unit in parts.all_units
        for member in unit.trained
        for slot, value in held_for(parts.optimizer, member).items()
    }
    agree(
        ranks, "optimizer state", mine,
        "Give holdfast.offload an optimizer with the same state on all, or one that has made no step; nothing was"
        " written",
    )  # fmt: skip


def _described(value: Any) -> str:
    """Return the dtype and shape of a value, and a digest of its bytes."""
    tensor = torch.as_tensor(value)
    content = xxhash.xxh3_64_hexdigest(host_bytes(tensor).data)
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with xxh3:{content}"
