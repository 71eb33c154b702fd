"""FSDP1: which elements of which parameter a rank holds under ``FullyShardedDataParallel(use_orig_params=True)``.

A *handle* of FSDP1 has joined some parameters to a flat one, of which each rank has an equal share, padding included;
what the share has of a parameter is a tensor of one dim. FSDP1's own books say what that is. They are private, so
nothing of them is believed that is not as it is computed here, and what is not is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, ModelNotSupported
from .boxes import Box
from .stretches import Region, Stretch

INSIDE = "_fsdp_wrapped_module"
"""What the wrapper calls the module inside."""
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID)
THIS = "FullyShardedDataParallel (FSDP1)"


@dataclass(frozen=True, eq=False)
class Flattened:
    """A parameter of the shape ``whole``, of which this process holds ``region``, from the element ``offset`` of its
    share of the flat one ``of`` on. Its gradients are averaged over as many ``ranks``."""

    whole: tuple[int, ...]
    region: Region
    of: Any
    offset: int
    ranks: int

    def is_in_place(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is what this process holds of it, and not gathered: then it is another tensor."""
        if tuple(parameter.shape) != self.region.shape:
            return False
        share = getattr(self.of, "_local_shard", self.of)
        there = share.data_ptr() + self.offset * share.element_size()
        return not parameter.numel() or (parameter.data_ptr() == there and parameter.dtype == share.dtype)

    def refuse_gathered(self, name: str, parameter: torch.Tensor) -> None:
        """Raise ``BadInput`` where ``parameter`` is not what this process holds of it."""
        if not self.is_in_place(parameter):
            raise BadInput(
                f"{name} is not this rank's part of it at the moment: {THIS} has gathered it, or it was given other"
                " memory. Call the Checkpointer after backward, and outside of summon_full_params()."
            )


def flattened_of(model: nn.Module) -> dict[int, Flattened]:
    """By the id of each parameter of ``model`` that FSDP1 has flattened. Raises ``ModelNotSupported`` for what cannot
    be told."""
    found: dict[int, Flattened] = {}
    for path, module in model.named_modules():
        if INSIDE in module._modules:
            where = path or "the model"
            try:
                found.update(_of_wrapper(where, module))
            except BadInput:
                raise
            except (AttributeError, TypeError, ValueError, LookupError) as error:
                raise _refused(
                    where,
                    f"torch {torch.__version__} keeps its books otherwise than is known here"
                    f" ({type(error).__name__}: {error})",
                ) from error
    for where, parameter in _flattened_parameters(model):
        if id(parameter) not in found:
            raise _refused(
                where,
                "which part of it this rank has is told by the wrapper, which is not in the model that was given",
                "Give the wrapped model, not what is inside of it.",
            )
    return found


def refuse_apart(held: Sequence[Mapping[str, int]]) -> None:
    """Raise ``ModelNotSupported`` where more ranks have a parameter than average its gradients, given for each rank
    over how many it does: those apart from the others become unlike them, and would be taken for copies."""
    having = Counter(name for parameters in held for name in parameters)
    for name, number in (each for parameters in held for each in parameters.items()):
        if having[name] > number:
            raise ModelNotSupported(
                f"{name} is of {THIS} on {having[name]} ranks, and its gradients are averaged over {number} of them, so"
                " these have other values than the rest. Wrap the model over all ranks; of HYBRID_SHARD give each"
                " replica two ranks or more, or take NO_SHARD."
            )


def refuse_flattened(model: nn.Module) -> None:
    """Raise ``ModelNotSupported`` where only whole parameters are taken, and FSDP1 has any. A module inside of the
    wrapper shows it by its parameters alone."""
    wrappers = (path or "the model" for path, module in model.named_modules() if INSIDE in module._modules)
    for where in chain((where for where, _ in _flattened_parameters(model)), wrappers):
        raise ModelNotSupported(
            f"{where} is of {THIS}, whose ranks hold parts of flattened parameters, and only whole ones are taken here."
            " Use fully_shard (FSDP2), or give the model itself, without the wrapper; a Checkpointer takes FSDP1 as its"
            " model= alone, with use_orig_params=True."
        )


def _flattened_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and getattr(parameter, "_fsdp_flattened", False):
                yield f"{path}.{name}" if path else name, parameter


def _of_wrapper(where: str, wrapper: Any) -> Iterator[tuple[int, Flattened]]:
    handle = wrapper._handle
    if handle is None:  # it has no parameters of its own
        return
    _refuse_options(where, wrapper, handle)
    flat = handle.flat_param
    if handle._training_state.name != "IDLE" or handle._skipped_use_sharded_views:
        raise _refused(
            where, "its parameters are gathered at the moment", "Call this after backward, or before forward."
        )
    books = [flat._params, flat._param_infos, flat._shapes, flat._numels, flat._fqns]
    books += [flat._shard_param_infos] * handle.uses_sharded_strategy
    _need(len(set(map(len, books))) == 1, "each parameter in each")
    _need(all(info.module is not None for info in flat._param_infos), "a module of each parameter")
    shares = handle.world_size if handle.uses_sharded_strategy else 1
    is_hybrid = (
        handle._sharding_strategy.name in HYBRID
    )  # as it is: of groups of one rank torch makes another
    ranks = handle.process_group.size() * (wrapper._inter_node_pg.size() if is_hybrid else 1)
    _need(flat.data.numel() == -(-sum(flat._numels_with_padding) // shares), "how large a share is")
    ids = {id(parameter) for parameter in flat._params}
    _need(all(id(parameter) in ids for parameter in flat._shared_params), "that tied parameters are one")
    rows = zip(flat._params, flat._param_infos, flat._shapes, _positions(flat), strict=True)
    for number, (parameter, info, shape, position) in enumerate(rows):
        _need(info.module._parameters.get(info.param_name) is parameter, f"where {info.param_name} is")
        whole, elements = tuple(shape), prod(shape)
        if not elements:
            raise _refused(f"{where}.{flat._fqns[number]}", "it has no elements")
        _need(flat._numels[number] == elements, f"the size of {info.param_name}")
        region: Region = Box.whole(whole)
        offset = position
        if handle.uses_sharded_strategy:
            first, stop, offset = _share_of(handle, number, position, elements)
            region = Stretch(whole, first, stop)
        made = Flattened(whole, region, flat, offset, ranks)
        _need(made.is_in_place(parameter.detach()), f"where {info.param_name} lies")
        yield id(parameter), made


def _refuse_options(where: str, wrapper: Any, handle: Any) -> None:
    flat = handle.flat_param
    if not handle._use_orig_params:
        raise _refused(
            where,
            "its parameters are one flat tensor, and the optimizer's state is of that",
            "Build it with FullyShardedDataParallel(..., use_orig_params=True), or use fully_shard (FSDP2). To go on"
            " from a run of it, save with torch.distributed.checkpoint, by itself or through holdfast.adapters.dcp,"
            " and resume(source=).",
        )
    if handle._sharding_strategy.name not in STRATEGIES:
        raise _refused(where, f"its sharding strategy is {handle._sharding_strategy.name}")
    if handle._offload_params:
        raise _refused(where, "its parameters are offloaded (CPUOffload)", "Leave out cpu_offload=.")
    if handle._keep_low_precision_grads:
        raise _refused(where, "it keeps gradients of another type than their parameters",
                       "Leave out keep_low_precision_grads=.")  # fmt: skip
    if wrapper.mixed_precision.buffer_dtype is not None:
        raise _refused(where, "its first forward pass gives buffers another type",
                       "Leave out buffer_dtype= of MixedPrecision.")  # fmt: skip
    if any(extension is not None for extension in flat._param_extensions):
        raise _refused(where, "its parameters are distributed tensors themselves", "Use fully_shard (FSDP2).")
    odd = next((n for n, c in zip(flat._fqns, flat._contiguities, strict=True) if not c), None)
    if odd is not None:
        raise _refused(f"{where}.{odd}", "it was not contiguous when it was flattened",
                       "Make it so before it is wrapped: parameter.data = parameter.data.contiguous().")  # fmt: skip


def _positions(flat: Any) -> list[int]:
    """Of each parameter, where it begins in the flat one."""
    numels, padding = flat._numels_with_padding, flat._is_padding_mask
    starts = list(accumulate(numels, initial=0))[:-1]
    return [start for start, is_padding in zip(starts, padding, strict=True) if not is_padding]


def _share_of(handle: Any, number: int, position: int, elements: int) -> tuple[int, int, int]:
    """Of a parameter at ``position`` what lies in this rank's share, and where in that. FSDP1 has to say the same."""
    size, info = handle.flat_param.data.numel(), handle.flat_param._shard_param_infos[number]
    first, stop = (min(max(rank * size - position, 0), elements) for rank in (handle.rank, handle.rank + 1))
    if not info.in_shard:
        _need(first == stop, f"that a rank has something of {handle.flat_param._fqns[number]}")
        return 0, 0, 0
    offset = position + first - handle.rank * size
    told = info.intra_param_start_idx, info.intra_param_end_idx + 1, info.offset_in_shard
    _need(told == (first, stop, offset), f"what this rank has of {handle.flat_param._fqns[number]}")
    return first, stop, offset


def _need(is_so: bool, what: str) -> None:
    """Raise ``ValueError`` unless it ``is_so``."""
    if not is_so:
        raise ValueError(f"it does not say {what}")


def _refused(where: str, why: str, instead: str = "Use fully_shard (FSDP2).") -> ModelNotSupported:
    return ModelNotSupported(f"{where} is of {THIS}, and {why}. {instead}")
