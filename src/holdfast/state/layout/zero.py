"""The elements of each parameter that a rank holds in the flat partitions of a live DeepSpeed engine.

Stages 1 and 2 join the parameters of a group into one flat tensor, of which each rank has an equal part. Stage 3
divides each parameter by itself and joins a rank's parts of some of them. In both cases a rank has an fp32 tensor that
its optimizer updates, the *master*, beside the one that the model computes with. DeepSpeed's own data say where in the
master each parameter is. They are private, so everything in them is compared with what is computed here, and a
difference is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...errors import BadInput, ModelNotSupported
from .regions import FlatRange
from .sharding import zero_order, zero_range, zero_share, zero_starts

ALIGNED = 16
"""The alignment of parameters in bytes, under ``parameter_alignment``."""
FLAT_GROUPS = {
    "DeepSpeedZeroOptimizer": (
        "bit16_groups", "bit16_groups_flat", "parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups"
    ),
    "BF16_Optimizer": (
        "bf16_groups", "bf16_groups_flat", "bf16_partitioned_groups", "fp32_groups_flat_partition"
    ),
}  # fmt: skip
"""The attribute names of each class for a group's parameters, the joined tensor, the ranks' parts and the master."""
BY_PARAMETER = "DeepSpeedZeroOptimizer_Stage3"


class PartitionMember(NamedTuple):
    """The ``stretch`` of a ``parameter`` that this rank holds, at ``offset`` of a partition."""

    parameter: nn.Parameter
    stretch: FlatRange
    offset: int


@dataclass(frozen=True, eq=False)
class Partition:
    """The flat tensor that this rank has of its ``members``.

    ``master`` is updated, ``working`` is computed with (and may be the same memory). ``group`` is the index of the
    optimizer group; None for parameters that are not trained.
    """

    master: torch.Tensor
    working: torch.Tensor
    group: int | None
    members: tuple[PartitionMember, ...]


def partitions_of(optimizer: Any, module: nn.Module, version: str) -> list[Partition]:
    """Return this rank's partitions of the parameters of ``module``, as DeepSpeed's ``optimizer`` divided them.

    ``version`` is DeepSpeed's. Parameters that are whole on each rank are in none.
    Raises ``ModelNotSupported`` where the division is unclear.
    """
    kind = type(optimizer).__name__
    try:
        if kind == BY_PARAMETER:
            return [*_sub_groups(optimizer), *_untrained(optimizer, module)]
        return list(_flat_groups(optimizer, *FLAT_GROUPS[kind]))
    except BadInput:
        raise
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise ModelNotSupported(
            f"DeepSpeed {version} keeps the books of its {kind} otherwise than is known here"
            f" ({type(error).__name__}: {error}). Save with engine.save_checkpoint: that folder is a source, also for"
            " the universal folder that `holdfast convert --to deepspeed` writes for load_universal."
        ) from error


def _flat_groups(optimizer: Any, *books: str) -> Iterator[Partition]:
    """Yield the partitions of stages 1 and 2."""
    base = optimizer.optimizer
    each = [getattr(optimizer, book) for book in books]
    _need({len(book) for book in each} == {len(base.param_groups)}, "all of each group")
    for number, (parameters, joined, shares, master) in enumerate(zip(*each, strict=True)):
        own = base.param_groups[number]["params"]
        _need(len(own) == 1 and own[0] is master, f"what of group {number} the optimizer updates")
        rank, ranks = _place_in(optimizer.real_dp_process_group[number])
        order = list(range(len(parameters)))
        if getattr(optimizer, "round_robin_gradients", False):
            order = zero_order(len(parameters), ranks)
        alignment = _alignment_of(optimizer, joined)
        in_order = [parameters[place] for place in order]
        starts, total = zero_starts([p.numel() for p in in_order], alignment)
        size = zero_share(total, ranks)
        _need(joined.numel() == size * ranks and len(shares) == ranks, f"how large group {number} is")
        _need(_is_flat(master) and master.numel() == size, f"how large a share of group {number} is")
        _need(all(_lies_at(share, joined, at * size) for at, share in enumerate(shares)), "where shares lie")
        _need(all(share.numel() == size for share in shares), "how large shares are")
        members = []
        for parameter, start in zip(in_order, starts, strict=True):
            _need(_lies_at(parameter.data, joined, start), f"where a parameter {list(parameter.shape)} lies")
            members.append(_member(parameter, tuple(parameter.shape), start - rank * size, size))
        undealt = [] if alignment > 1 else _undealt(parameters, rank * size, size)
        _check_told(members, master, undealt)
        yield Partition(master, shares[rank], number, tuple(members))


def _alignment_of(optimizer: Any, joined: torch.Tensor) -> int:
    """Return the alignment of parameters in elements."""
    if not getattr(optimizer, "parameter_alignment", False):
        return 1
    return ALIGNED // gcd(ALIGNED, joined.element_size())


def _member(parameter: nn.Parameter, whole: tuple[int, ...], start: int, size: int) -> PartitionMember:
    """Return the part that a share of ``size`` elements has of a parameter.

    The parameter begins at ``start`` of the share; a negative ``start`` is before the share.
    """
    elements = prod(whole)
    first, stop = (min(max(at - start, 0), elements) for at in (0, size))
    return PartitionMember(parameter, FlatRange(whole, first, stop), start + first if first < stop else 0)


def _undealt(parameters: Sequence[nn.Parameter], share: int, size: int) -> list[PartitionMember]:
    """Return the members as they would be in their own order.

    DeepSpeed 0.19.8 describes them so where they are dealt out and not aligned.
    """
    starts, _ = zero_starts([p.numel() for p in parameters], 1)
    return [
        _member(p, tuple(p.shape), start - share, size) for p, start in zip(parameters, starts, strict=True)
    ]


def _check_told(
    members: Sequence[PartitionMember], master: torch.Tensor, undealt: Sequence[PartitionMember]
) -> None:
    """Raise ``ValueError`` unless DeepSpeed's data agree with all of ``members``, or with all of ``undealt``."""
    told = {}
    for member in members:
        mapping: Any = member.parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            address, fragment = mapping.hp_fragment_address, mapping.hp_fragment
            _need(_lies_at(fragment, master, address.start), "where a fragment lies")
            _need(fragment.numel() == address.numel, "how large a fragment is")
            told[id(member.parameter)] = address.start, address.numel

    def expected(of: Sequence[PartitionMember]) -> dict[int, tuple[int, int]]:
        return {id(m.parameter): (m.offset, m.stretch.elements) for m in of if m.stretch.elements}

    _need(told in (expected(members), expected(undealt)), "which part of each parameter this rank has")


def _sub_groups(optimizer: Any) -> Iterator[Partition]:
    """Yield the partitions of trained parameters in stage 3."""
    books = (
        optimizer.fp16_groups, optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat
    )  # fmt: skip
    for number, (parameters, working, master) in enumerate(zip(*books, strict=True)):
        members, at = [], 0
        for parameter in parameters:
            member, each = _part(optimizer, parameter, at)
            _need(
                _lies_at(parameter.ds_tensor, working, at), f"where a part of {list(member.stretch.whole)} is"
            )
            place = list(optimizer.grad_position[optimizer.get_param_id(parameter)])
            _need(place == [number, at, each], "where in its sub-group a parameter is")
            members.append(member)
            at += each
        _need(
            _is_flat(master) and master.numel() == working.numel() == at, f"how large sub-group {number} is"
        )
        group = optimizer.sub_group_to_group_id[number]
        yield Partition(master, working, group, tuple(members))


def _untrained(optimizer: Any, module: nn.Module) -> Iterator[Partition]:
    """Yield the partitions of the other parameters in stage 3, each by itself."""
    trained = {id(parameter) for parameters in optimizer.fp16_groups for parameter in parameters}
    for parameter in module.parameters():
        if id(parameter) not in trained:
            member, _ = _part(optimizer, parameter, 0)
            held: Any = parameter.ds_tensor  # type: ignore[attr-defined]
            yield Partition(held, held, None, (member,))


def _part(optimizer: Any, parameter: Any, at: int) -> tuple[PartitionMember, int]:
    """Return this rank's part of a parameter, at ``at`` of a partition, and the elements it takes there.

    The elements include padding.
    """
    whole, held = tuple(parameter.ds_shape), parameter.ds_tensor
    rank, ranks = _place_in(getattr(parameter, "ds_process_group", optimizer.dp_process_group))
    elements = prod(whole)
    _need(parameter.ds_numel == elements, f"how many elements a parameter {list(whole)} has")
    _need(held.status.name == "AVAILABLE" and parameter.ds_secondary_tensor is None, "that it is here, once")
    first, stop = zero_range(elements, rank, ranks)
    each = -(-elements // ranks)
    _need(held.dim() == 1 and held.numel() == held.ds_numel == each, f"how {list(whole)} is cut")
    _need(held.dtype == parameter.dtype, "that it is of the type that it computes in")
    return PartitionMember(parameter, FlatRange(whole, first, stop), at), each


def _place_in(group: Any) -> tuple[int, int]:
    """Return this rank and the number of ranks in a group.

    Raises ``ModelNotSupported`` unless the group has all ranks.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks != dist.get_world_size():
        raise ModelNotSupported(
            f"parameters are divided over {ranks} of {dist.get_world_size()} ranks: tensor, pipeline or expert"
            " parallelism beside ZeRO, of which the engine's objects do not tell how tensors are cut. Save with"
            " engine.save_checkpoint, whose folder says it, and begin from that."
        )
    return rank, ranks


def _is_flat(master: torch.Tensor) -> bool:
    return master.dim() == 1 and master.is_contiguous() and master.dtype == torch.float32


def _lies_at(held: torch.Tensor, flat: torch.Tensor, at: int) -> bool:
    """Return whether ``held``, in C order, is in the memory of ``flat`` from the element ``at`` on."""
    if not held.numel():
        return True
    there = flat.data_ptr() + at * flat.element_size()
    return held.dtype == flat.dtype and held.is_contiguous() and held.data_ptr() == there


def _need(is_so: bool, what: str) -> None:
    """Raise ``ValueError`` unless it ``is_so``."""
    if not is_so:
        raise ValueError(f"they do not say {what}")
