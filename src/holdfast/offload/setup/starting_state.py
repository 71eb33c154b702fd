"""The state that a fresh run begins with, if it is not the model's own: from elsewhere, or of a user's optimizer.

State from elsewhere is read tensor by tensor. Only what the source itself keeps is whole in memory: nothing for files
and commits; for a state that log records lead to, all of it, because ``sources`` has replayed them before.

An optimizer of the user's that has made steps already has state, of which each rank takes its own part. All ranks must
hold the same state, as after training with ``DistributedDataParallel``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
import xxhash

from ...distributed import Ranks
from ...errors import OptimizerNotSupported, RunMismatch
from ...optim.declared_state import Slots
from ...optim.host_optimizer import HostOptimizer
from ...state.capture import Captured, buffer_at
from ...state.layout.regions import Region
from ...state.plain_tensors import host_bytes
from ..engine_progress import UserState
from ..memory.block_states import BlockState
from ..memory.parameter_shards import ParameterEntry, ParameterShard
from ..model.model_parts import ModelParts
from .equal_on_ranks import agree, digest


class StartingState(Protocol):
    """A state from any writer, as ``holdfast.From`` opens it."""

    @property
    def path(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def progress(self) -> dict[str, Any]: ...
    @property
    def kept(self) -> Mapping[str, frozenset[str] | None]: ...
    @property
    def fresh(self) -> bool:
        """True for the source of a fresh run: what only a resumed run needs may be absent."""
        ...

    def match(self, captured: Captured, optimizer: torch.optim.Optimizer) -> list[str]: ...
    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]: ...
    def check(self, ranks: Ranks) -> None: ...
    def identity(self) -> list[Any]:
        """Return what identifies the state, as JSON. It differs for another state, and for the same state written
        again."""
        ...

    def parameter(self, name: str) -> torch.Tensor | None: ...
    def state(self, name: str, boxes: Mapping[str, Region]) -> dict[str, torch.Tensor]: ...
    def buffer(self, name: str) -> torch.Tensor | None: ...
    def set_hyper_parameters(self, groups: list[dict[str, Any]], names: list[list[str]]) -> bool: ...


class Opens(Protocol):
    def open(self) -> StartingState: ...


def prepare(source: Opens, parts: ModelParts, user: UserState) -> tuple[StartingState, list[str]]:
    """Open ``source``, and check that it fits this model and optimizer.

    Returns the opened state and, as sentences for a person, what it lacks. Raises ``RunMismatch``, with nothing
    changed.
    """
    beginning = source.open()
    user.check_source(beginning.progress)
    messages = beginning.match(parts.captured, user.optimizer)
    for unit in parts.all_units:
        for member in unit.trained:
            _refuse_others(beginning, member.name, unit.kept(member))
    return beginning, messages


def _refuse_others(beginning: StartingState, name: str, slots: Slots) -> None:
    kept = beginning.kept.get(name)
    here = slots.names
    if kept is not None and kept != here:
        raise RunMismatch(
            f"{beginning.path} has hyper-parameters with which this optimizer keeps {_listed(kept)} for {name}, and"
            f" with those that it was given {_listed(here)}. Build it with those of the source."
        )
    there = beginning.shapes(name)
    for slot, form in slots.tensors.items():
        if there.get(slot, tuple(form.shape)) != tuple(form.shape):
            raise RunMismatch(
                f"{beginning.path} has {slot} of {list(there[slot])} for {name}, and this optimizer keeps"
                f" {list(form.shape)}. Build it as that of the source was, with the same hyper-parameters."
            )


def _listed(slots: Collection[str]) -> str:
    return ", ".join(sorted(slots)) or "nothing"


def take_up(beginning: StartingState, told: list[str], captured: Captured, user: UserState) -> None:
    """Set schedule, data position, buffers and hyper-parameters to those of ``beginning``.

    Warns of what ``beginning`` does not have, together with the sentences in ``told``.
    """
    left = user.adopt(beginning.progress)
    for name, place in captured.buffers.items():
        value = beginning.buffer(name)
        if value is not None:
            buffer_at(place).copy_(value)
    if not beginning.set_hyper_parameters(user.optimizer.param_groups, user.group_parameters()):
        told.append("it does not say the hyper-parameters of all groups; the optimizer's stay")
    if not beginning.fresh:
        told += left
    for text in told:
        warnings.warn(f"beginning from {beginning.path}: {text}", stacklevel=6)


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


def agree_on_source(ranks: Ranks, beginning: StartingState) -> None:
    """Raise ``BadInput`` on all ranks unless all begin from the same source state.

    Collective: every rank must call this.
    """
    if not ranks.alone:
        mine = {"path": beginning.path, "step": beginning.step, "content": digest(beginning.identity())}
        agree(
            ranks, "states to begin from", mine,
            "One was made or moved meanwhile, or each host has another: name one that stays, RUN@STEP, on a file system"
            " that all share",
        )  # fmt: skip


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
