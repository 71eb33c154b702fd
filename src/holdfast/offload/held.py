"""Held: what the user's optimizer holds already when a fresh run begins with it, as one that has made steps does.

Each of several ranks takes the part of it that is its own, so that all have to hold the same, as they do where
``DistributedDataParallel`` has trained before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from ..errors import OptimizerNotSupported
from ..ranks import Ranks
from ..state.plain import host_bytes
from ..update.optimizer import HostOptimizer
from .alike import agree
from .parts import Parts
from .pieces import Piece
from .units import Member, Unit


def held_for(optimizer: HostOptimizer, member: Member) -> dict[str, Any]:
    """What is held for a parameter, by slot; nothing by an optimizer that has made no step."""
    state = optimizer.state_of(member.owned.captured.parameter)
    return {slot: value for slot, value in state.items() if not getattr(value, "is_meta", False)}


def part_of(unit: Unit, piece: Piece, held: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is ``held`` for a parameter what is ``piece``'s."""
    forms = unit.member_slots(piece.member).tensors
    return {
        slot: torch.as_tensor(value)[piece.box_in(forms[slot]).slices] if slot in forms else value
        for slot, value in held.items()
    }


def check_forms(parts: Parts) -> None:
    """Raise ``OptimizerNotSupported`` where what is held is not of the shape that the optimizer keeps here."""
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


def agree_on_held(ranks: Ranks, parts: Parts) -> None:
    """Raise ``BadInput`` on all ranks unless all hold the same. Called on all of them."""
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
    """Its dtype and shape, and a digest of its bytes."""
    tensor = torch.as_tensor(value)
    content = xxhash.xxh3_64_hexdigest(host_bytes(tensor).data)
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with xxh3:{content}"
