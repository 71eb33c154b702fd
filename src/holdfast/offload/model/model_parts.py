"""The description of a model for out-of-core training: blocks, resident rest, units and their layouts.

Describing a model changes and writes nothing, so everything that could be wrong with it is found before anything is
taken over. Called by ``offload``, and by whatever needs the sizes of its units.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...distributed import Ranks, stream_of
from ...errors import BadInput, ModelNotSupported, OptimizerNotSupported
from ...optim.host_optimizer import HELPER_BYTES, SLICE_HELPER_BYTES, HostOptimizer
from ...optim.mezo import MeZO
from ...optim.torch_threads import update_threads
from ...quantities import round_up
from ...schedule.work import EXPERTS_AHEAD, BlockWork, TileWork, Work
from ...state.capture import Captured, CapturedParameter, buffer_at, capture
from ...state.layout.overlaps import Key, key_names, overlaps
from ...state.plain_tensors import TO_NAME
from ...state.tensor_entries import fragment
from ..memory.block_states import BlockState
from ..memory.parameter_shards import memory_order
from ..setup.block_measurement import MeasuredBlocks
from .blocks import Blocks, Owned, find_blocks, has_own_forward, owned_parameters, with_embedding_and_head
from .embedding_gradients import columns_at_once

RESIDENT, REST = "resident", "rest"
"""Names of the unit with what lies outside of the blocks: with embedding and head, and without."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class ModelParts:
    """A model, its blocks and the rest as units of bytes, and its optimizer."""

    model: nn.Module
    blocks: Blocks
    units: list[BlockState]
    resident: BlockState
    optimizer: HostOptimizer
    captured: Captured
    rank: int = 0
    world_size: int = 1
    expert_slots: int = 0
    """Number of experts that are in memory at once; 0 if blocks have all of theirs."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dtype: str,
        chosen: Sequence[nn.Module] | nn.ModuleList | None,
        ranks: Ranks | None = None,
        stored: Callable[[CapturedParameter], torch.dtype | None] = lambda _: None,
        streams_all: bool = False,
        expert_slots: int | None = None,
    ) -> ModelParts:
        """Describe ``model``; with several ``ranks``, this rank's shard of it.

        With ``streams_all``, embedding and head are units like blocks. With ``expert_slots``, frozen experts are read
        one by one. ``stored`` returns the dtype in which the values of a parameter on ``meta`` are stored, if that is
        known. Raises ``ModelNotSupported``, ``OptimizerNotSupported`` or ``BadInput``.
        """
        if dtype not in DTYPES:
            raise BadInput(f"precision {dtype!r} is not one of {', '.join(DTYPES)}, auto")
        blocks = find_blocks(model, chosen)
        if streams_all:
            blocks = with_embedding_and_head(model, blocks, ties_streamed(optimizer))
        _check_modules(model, optimizer)
        _check_names(blocks)
        captured = capture(model, optimizer)
        known = (replace(p, stored=stored(p) if p.parameter.is_meta else None) for p in captured.parameters)
        captured = replace(captured, parameters=tuple(known))
        _check_parameters(captured)
        _check_memory(captured)
        by_block, resident = owned_parameters(model, captured, blocks)
        host, ranks = HostOptimizer(optimizer), ranks or Ranks()
        routed = routed_parameters(blocks, by_block) if expert_slots else [set()] * len(by_block)
        place: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.world_size, "prefix": ranks.prefix}
        units = [
            BlockState(name, owned, host, DTYPES[dtype], **place, may_split=True, routed=names)
            for name, owned, names in zip(blocks.unit_names, by_block, routed, strict=True)
        ]
        for unit in units:
            if not unit.members:
                raise ModelNotSupported(
                    f"{unit.name} has no parameters of its own, so there is nothing to stream."
                )
        rest = BlockState(
            REST if streams_all else RESIDENT,
            resident,
            host,
            DTYPES[dtype],
            captured.buffers,
            captured.absent,
            **place,
        )
        for unit in (*units, rest):
            _check_layouts(unit, host, ranks)
        return cls(
            model, blocks, units, rest, host, captured, ranks.rank, ranks.world_size, expert_slots or 0
        )

    def unsharded(self) -> ModelParts:
        """Return the description that one process by itself would have."""
        if self.world_size == 1:
            return self
        units = [
            BlockState(
                u.name,
                [m.owned for m in u.members],
                self.optimizer,
                u.dtype,
                u.buffers,
                may_split=u.may_split,
            )
            for u in self.all_units
        ]
        return replace(self, units=units[:-1], resident=units[-1], rank=0, world_size=1)

    @property
    def all_units(self) -> list[BlockState]:
        return [*self.units, self.resident]

    def work(
        self, measured: MeasuredBlocks | None, unified: bool, *, update_workers: int, guesses: bool
    ) -> Work:
        """Return the model's sizes, for the planner.

        Args:
            measured: Costs of a micro-batch. If None, block inputs and activations count as nothing.
            unified: True if the device computes in host memory.
            update_workers: Number of updates that run at once.
            guesses: True if updates of blocks leave their gradients unchanged and work on copies.
        """
        extra = self._extra_workspaces(measured) if measured else [0] * len(self.units)
        threads = update_threads(unified, update_workers)
        helper_bytes = max(HELPER_BYTES, threads * SLICE_HELPER_BYTES) if threads > 1 else 0
        return Work(
            blocks=tuple(
                BlockWork(
                    elements=sum(piece.elements for piece in unit.pieces),
                    param_bytes=unit.copy_bytes,
                    param_share_bytes=unit.share_copy_bytes,
                    param_gather_bytes=unit.gathered_bytes,
                    trained_param_bytes=unit.share_trained_copy_bytes,
                    state_bytes=unit.state_bytes,
                    frozen_file_bytes=unit.share_copy_bytes - unit.scratch_bytes,
                    is_split=unit.is_split,
                    cut=_tiles(unit),
                    grad_bytes=unit.grad_bytes,
                    grad_share_bytes=unit.share_grad_bytes,
                    grad_reduce_bytes=unit.reduced_bytes,
                    forward_flop=measured.block_flop if measured and self.blocks.is_repeated(number) else 0.0,
                    activation_bytes=measured.activation_bytes[number]
                    if measured and number < len(self.blocks.modules)
                    else 0,
                    extra_workspace_bytes=extra[number],
                )
                for number, unit in enumerate(self.units)
            ),
            input_bytes=round_up(measured.input_bytes) if measured else 0,
            resident_state_bytes=self.resident.state_bytes,
            resident_cut=_tiles(self.resident),
            resident_param_bytes=self.resident.copy_bytes,
            resident_trained_param_bytes=self.resident.trained_copy_bytes,
            resident_elements=sum(piece.elements for piece in self.resident.pieces),
            resident_grad_bytes=self.resident.grad_bytes,
            resident_grad_share_bytes=self.resident.share_grad_bytes,
            resident_gather_bytes=self.resident.gathered_bytes,
            resident_reduce_bytes=self.resident.reduced_bytes,
            ranks=self.world_size,
            tied_block=self.blocks.tied,
            workspace_bytes=measured.block_bytes + max(extra) if measured else 0,
            update_bytes=self._update_bytes(update_workers, guesses) + update_workers * helper_bytes,
            head_flop=measured.head_flop if measured else 0.0,
            **self._expert_memory(unified),
            unified=unified,
        )

    def _expert_memory(self, unified: bool) -> dict[str, int]:
        """Return the sizes of the experts in memory, as ``Work`` has them."""
        files = [unit.expert_file for unit in self.units if unit.routed]
        stored = max((file.expert_bytes for file in files), default=0)
        cast = max((_cast_expert_bytes(unit) for unit in self.units), default=0)
        slots = min(self.expert_slots, sum(file.num_experts for file in files))
        ahead = min(slots, 1 + EXPERTS_AHEAD) if cast or not unified else 0
        return {
            "expert_bytes": slots * max(stored, cast),
            "expert_staging_bytes": ahead * stored,
            "expert_setup_bytes": max((file.layout.file_bytes for file in files), default=0),
        }

    def _extra_workspaces(self, measured: MeasuredBlocks) -> list[int]:
        """Return the bytes that computing each unit takes beyond what a repeated block takes.

        The last unit has the loss. An embedding has its gradient, in parts if that is known.
        """
        embeddings = self.units[: self.blocks.embeddings] if self.optimizer.takes_gradients else []
        found = [0] * len(self.units)
        for number, unit in enumerate(embeddings):
            found[number] = _embedding_workspace(unit, self.blocks.modules[number])
        found[-1] = max(found[-1], measured.last_bytes)
        return [max(nbytes - measured.block_bytes, 0) for nbytes in found]

    def _update_bytes(self, workers: int, guesses: bool) -> int:
        """Return the temporary bytes of the ``workers`` largest updates, as many as run at once."""
        sizes = [
            self.optimizer.temporary_bytes(
                member.group, member.elements, guesses and unit is not self.resident, unit.is_split
            )
            for unit in self.all_units
            for member in unit.trained
        ]
        return sum(sorted(sizes)[-workers:])

    def index(self) -> dict[str, Any]:
        """Return the index that every manifest of the run refers to: the place of each tensor entry.

        Each rank has an index of its own.
        """
        atoms: dict[str, Any] = {}
        for file in (file for unit in self.all_units for file in unit.files):
            for entry in file.entries:
                shape, box = file.places[entry.key]
                found = atoms.setdefault(entry.key, replace(entry, shape=shape).to_json() | {"fragments": []})
                # each tile has a parameter's counters, which are the same: one fragment is enough
                if shape or not found["fragments"]:
                    found["fragments"].append(fragment(file.name, entry.key, box))
        if self.world_size > 1:  # no two ranks have one file, not even those that have nothing
            return {"version": 1, "prefix": stream_of(self.rank), "atoms": atoms}
        return {"version": 1, "atoms": atoms}


def _cast_expert_bytes(unit: BlockState) -> int:
    """Return the bytes of one expert in the dtype that it is computed in; 0 if it is stored in that dtype."""
    layout = unit.expert_file.layout
    pairs = [(member, layout[f"{member.name}/param"]) for member in unit.routed]
    if all(TO_NAME[member.copy_dtype] == place.dtype for member, place in pairs):
        return 0
    return sum(member.elements * member.copy_dtype.itemsize // member.shape[0] for member, _ in pairs)


def _embedding_workspace(unit: BlockState, module: torch.nn.Module) -> int:
    """Return the most bytes of an embedding's gradient that exist at once, besides the sum.

    A forward that is not that of ``nn.Embedding`` may use the weight in another way, and so have the whole gradient.
    """
    known = type(module).forward is nn.Embedding.forward and not has_own_forward(module)
    if not known or any(member.order is not None for member in unit.trained):
        return unit.trained_copy_bytes
    return sum(
        member.shape[0] * min(columns_at_once(member.shape[0]), member.shape[1]) * member.copy_dtype.itemsize
        for member in unit.trained
    )


def ties_streamed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a tied embedding can be streamed: not if each pass displaces the parameters."""
    return not isinstance(optimizer, MeZO)


def _tiles(unit: BlockState) -> tuple[TileWork, ...]:
    return tuple(
        TileWork(
            elements=tile.elements,
            state_bytes=tile.layout.file_bytes,
            trained_param_bytes=tile.copy_bytes,
            grad_bytes=stop - start,
            rest_bytes=tile.rest_bytes,
        )
        for tile, (start, stop) in zip(unit.tiles, unit.tile_grads, strict=True)
    )


def _check_memory(captured: Captured) -> None:
    """Raise ``ModelNotSupported`` if a trained parameter shares memory with another tensor.

    Out of core each of them would get memory of its own.
    """
    held: dict[Key, torch.Tensor] = {(p.name, "param"): p.parameter for p in captured.parameters}
    held |= {(name, "buffer"): buffer_at(place) for name, place in captured.buffers.items()}
    trained = {(p.name, "param") for p in captured.parameters if p.trained}
    for group in overlaps(held):
        if trained.intersection(group):
            raise ModelNotSupported(
                f"{key_names(group)} are one memory, and each would get its own out of core. Tie parameters as one"
                " object (head.weight = embedding.weight), or give each its own (.clone())."
            )


def _check_names(blocks: Blocks) -> None:
    for name in blocks.unit_names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}", name):
            raise ModelNotSupported(
                f"block {name!r} cannot name a file: that takes up to 200 letters (a-z), digits, '_', '-' and '.'. "
                "Rename the module that holds the blocks."
            )


def _check_modules(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ModelNotSupported(f"{name} makes sparse gradients, which are not summed. Use sparse=False.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerNotSupported(
            "the optimizer has differentiable=True; out-of-core updates have no graph."
        )


def _check_layouts(unit: BlockState, host: HostOptimizer, ranks: Ranks) -> None:
    """Raise ``ModelNotSupported`` if updating a non-contiguous parameter would differ from a plain loop."""
    for member in unit.members:
        if member.order is None or (
            ranks.alone and (not member.trained or host.keeps_order(member.group, member.shape))
        ):
            continue
        why = "several ranks cut parameters along their first dim"
        if ranks.alone:
            why = "this optimizer does not update each of its elements by itself"
        raise ModelNotSupported(
            f"parameter {member.name} is not contiguous (it is transposed or channels_last), and {why}. Make it so"
            " before offload(): parameter.data = parameter.data.contiguous()."
        )


def _check_parameters(captured: Captured) -> None:
    for parameter in captured.parameters:
        if parameter.as_stored and parameter.requires_grad:
            raise ModelNotSupported(
                f"parameter {parameter.name} is packed and requires grad; quantised weights are frozen. Call"
                " requires_grad_(False) on it, and train adapters."
            )
        if not (parameter.as_stored or parameter.parameter.is_floating_point()):
            raise ModelNotSupported(
                f"parameter {parameter.name} is {parameter.parameter.dtype}; only floating-point ones are trained."
            )
        if parameter.parameter.dtype == torch.float64:
            raise ModelNotSupported(
                f"parameter {parameter.name} is torch.float64; masters are kept in fp32, which would lose bits. "
                "Call model.float() first."
            )
        if parameter.parameter._backward_hooks or parameter.parameter._post_accumulate_grad_hooks:
            raise ModelNotSupported(
                f"parameter {parameter.name} has a hook on its gradient, which would not be called: gradients are "
                "summed outside of the parameter. Remove it, and change the gradient where it comes from instead."
            )
    if not any(parameter.trained for parameter in captured.parameters):
        raise BadInput(
            "no parameter both requires grad and is in the optimizer, so there is nothing to train."
        )


ONE_BY_ONE = "eager"
"""The implementation in transformers that takes one expert at a time; the others take the whole parameter."""


def routed_parameters(blocks: Blocks, by_block: Sequence[Sequence[Owned]]) -> list[set[str]]:
    """Return for each streamed unit the names of the parameters whose experts are read one by one.

    These are frozen, and their first dim counts the experts of the module that holds them (``num_experts``), as in the
    mixtures of transformers.

    Raises ``BadInput`` if there are none, ``ModelNotSupported`` if their code would take all experts at once.
    """
    repeated = range(blocks.embeddings, len(blocks.modules))
    found = [
        [one for one in owned if number in repeated and _is_routed(one)]
        for number, owned in enumerate(by_block)
    ]
    if not any(found):
        raise BadInput(
            "expert_slots is of frozen experts, and no block has any: parameters of three dims, of which the first"
            " counts the experts of their module (num_experts). Experts that are trained come with their block. Leave"
            " it out."
        )
    for owned in found:
        modules = {id(one.places[0][0]): one for one in owned}
        for one in modules.values():
            _refuse_whole(one)
        if len(modules) > 1:
            first, second, *_ = modules.values()
            raise ModelNotSupported(
                f"{first.captured.name} and {second.captured.name} are of two mixtures in one block, and expert_slots"
                " takes one. Leave it out."
            )
    return [{one.captured.name for one in owned} for owned in found]


def _is_routed(owned: Owned) -> bool:
    """Return whether a parameter is of the frozen experts of one module, which has a matrix of each of them."""
    module, _ = owned.places[0]
    if owned.captured.trained or owned.captured.as_stored or len(owned.places) > 1:
        return False
    counted = [p for p in module._parameters.values() if p is not None and p.dim() > 1 and _counts(module, p)]
    is_one = any(each is owned.captured.parameter for each in counted) and any(p.dim() == 3 for p in counted)
    return is_one and memory_order(owned.captured.parameter) is None


def _counts(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether the first dim of a parameter counts the experts of its module."""
    return parameter.shape[0] == getattr(module, "num_experts", None)


def _refuse_whole(owned: Owned) -> None:
    """Raise ``ModelNotSupported`` if the code of a module of transformers takes the whole parameter."""
    config = getattr(owned.places[0][0], "config", None)
    how = getattr(config, "_experts_implementation", None)
    if how not in (None, ONE_BY_ONE):
        raise ModelNotSupported(
            f"expert_slots: {owned.captured.name} is computed with by experts_implementation={how!r}, which takes all"
            f" experts at once. Call model.set_experts_implementation({ONE_BY_ONE!r}) before offload(), which takes one"
            " after another, with other last bits; or leave expert_slots out."
        )
