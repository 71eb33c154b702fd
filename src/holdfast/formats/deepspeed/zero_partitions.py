"""The parameters in the partitions of ZeRO: flat groups in stages 1 and 2, single parameters in stage 3.

Stages 1 and 2: each parameter group is one flat tensor, divided into one partition for each rank. Parameter ``i``
begins at ``sum(n[j] + a[j] for j < i)``, with ``n`` elements and ``a`` elements of padding after it
(``param_alignment_paddings``, 0.19.8). A file has its rank's partition, with or without the padding at the end, and the
recorded places of parameter fragments; recorded and computed places must agree.

Stage 3: of ``n`` elements on ``ranks`` ranks, rank ``d`` has ``k = ceil(n / ranks)`` from ``d * k`` on, as far as they
exist, followed by padding. In a file the parts of a sub-group of parameters are adjacent. Only the shapes are recorded.
Called by ``NativeCheckpoint``.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...errors import BadInput, Damaged
from ...state.layout.sharding import zero_order, zero_range, zero_starts
from ..source import ReadFiles
from ..torch_archive.pickles import PickledObject, Tensor
from .deepspeed_contents import need
from .local_tensors import LocalParameter, Rank, Shape, Value, split_state


def flat_groups(
    contents: ReadFiles, shapes: list[dict[str, Shape]], ranks: list[Rank]
) -> dict[str, LocalParameter]:
    """Return the parameters of all groups from the files of ``ranks``, in rank order. Raises ``Damaged``."""
    found: dict[str, LocalParameter] = {}
    for rank in ranks:
        _refuse_other_count(rank, "single_partition_of_fp32_groups", "groups", len(shapes))
    for group, named in enumerate(shapes):
        found |= _group(contents, group, named, ranks)
    return found


def _refuse_other_count(rank: Rank, key: str, what: str, count: int) -> None:
    found = len(need(rank.state, key, rank.path))
    if found != count:
        raise Damaged(
            f"{rank.path} has {found} {what} of parameters, the model states {count}", path=str(rank.path)
        )


def _group(
    contents: ReadFiles, group: int, named: dict[str, Shape], ranks: list[Rank]
) -> dict[str, LocalParameter]:
    starts = _starts(group, named, ranks)
    size = _partition(group, ranks)
    found = {name: LocalParameter(shape, group) for name, shape in named.items()}
    for number, rank in enumerate(ranks):
        flats, values = _tensors(rank, contents, group, size)
        _check_recorded(rank, group, named, starts, (number * size, (number + 1) * size), len(ranks))
        for name, start in starts.items():
            low, high = _common(start, prod(named[name]), number * size, (number + 1) * size)
            found[name].add_values(values, rank.path)
            for slot, tensor in flats.items():
                within, at = (low - start, high - start), low - number * size
                pieces = rank.stretch(contents, tensor, named[name], within, at) if low < high else []
                found[name].add(slot, tensor.storage.dtype, pieces, rank.path)
    return found


def _common(start: int, count: int, begin: int, end: int) -> tuple[int, int]:
    """Return the intersection of ``count`` elements from ``start`` on with a partition."""
    return max(start, begin), min(start + count, end)


def _starts(group: int, named: dict[str, Shape], ranks: list[Rank]) -> dict[str, int]:
    """Return the first element of each parameter in the flat tensor. Raises ``Damaged`` if ranks disagree."""
    paddings = [_of_group(rank, "param_alignment_paddings", group, [0] * len(named)) for rank in ranks]
    if len(paddings[0]) != len(named) or any(other != paddings[0] for other in paddings):
        other = next((r for r, p in zip(ranks, paddings, strict=True) if p != paddings[0]), ranks[0])
        raise Damaged(
            f"{other.path}: param_alignment_paddings of group {group} differ from those of other ranks, or are not of"
            f" {len(named)} parameters: two checkpoints are mixed",
            path=str(other.path),
        )
    starts, at = {}, 0
    for (name, shape), padding in zip(named.items(), paddings[0], strict=True):
        starts[name] = at
        at += prod(shape) + padding
    return starts


def _partition(group: int, ranks: list[Rank]) -> int:
    """Return the elements of each rank's partition, padding included. Raises ``Damaged`` if ranks disagree."""
    stored = [_flat(rank, group).shape[0] for rank in ranks]
    padded = [n + _of_group(rank, "group_paddings", group, 0) for n, rank in zip(stored, ranks, strict=True)]
    for rank in ranks:
        if (count := _of_group(rank, "partition_count", group, len(ranks))) != len(ranks):
            raise BadInput(
                f"{rank.path}: group {group} is cut into {count} partitions, and {len(ranks)} ranks saved. Groups of"
                " experts, which have ranks of their own, are not read."
            )
    for sizes in (padded, stored):
        if len(set(sizes)) == 1:
            return sizes[0]
    other = next(rank for rank, size in zip(ranks, padded, strict=True) if size != padded[0])
    raise Damaged(
        f"{other.path}: its partition of group {group} is of another size than that of {ranks[0].path.name}:"
        f" {padded}. Two checkpoints are mixed.",
        path=str(other.path),
    )


def _tensors(
    rank: Rank, contents: ReadFiles, group: int, size: int
) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """Return the tensors that a rank holds for its partition, and the values for all of it."""
    base = need(rank.state, "base_optimizer_state", rank.path)
    states = base.get("state", {}) if isinstance(base, dict) else dict(enumerate(base))
    master = _flat(rank, group)
    lean = size - _of_group(rank, "group_paddings", group, 0)
    flats, values = split_state(rank, contents, states.get(group, {}), (size, lean, master.shape[0]))
    return {"param": master, **flats}, values


def _flat(rank: Rank, group: int) -> Tensor:
    tensor = rank.state["single_partition_of_fp32_groups"][group]
    if not isinstance(tensor, Tensor) or len(tensor.shape) != 1:
        raise Damaged(f"{rank.path}: the partition of group {group} is no flat tensor", path=str(rank.path))
    return tensor


def _of_group(rank: Rank, key: str, group: int, default: Any) -> Any:
    """Return the entry of ``key`` for a group; older versions lack some of them."""
    value = rank.state.get(key)
    return value[group] if isinstance(value, list) and group < len(value) else default


def _check_recorded(
    rank: Rank,
    group: int,
    named: dict[str, Shape],
    starts: dict[str, int],
    partition: tuple[int, int],
    world: int,
) -> None:
    """Raise ``Damaged`` unless fragments lie where the file says.

    With ``round_robin_gradients``, parameters are dealt to the ranks in turn. Then 0.19.8 records the places that they
    would have in their own order, and relies on these in ``safe_get_full_fp32_param`` and its converter; both are
    accepted.
    """
    mapping = _of_group(rank, "param_slice_mappings", group, None)
    if mapping is None:
        return
    if not all(isinstance(address, PickledObject) for address in mapping.values()):
        raise Damaged(f"{rank.path}: param_slice_mappings has no addresses", path=str(rank.path))
    recorded = {name: (address.get("start"), address.get("numel")) for name, address in mapping.items()}
    expected = _addresses(named, starts, partition)
    if recorded in (expected, _addresses(named, _undealt(named, world), partition)):
        return
    name = next(n for n in named if recorded.get(n) != expected.get(n))
    raise Damaged(
        f"{rank.path}: its fragment of {name} is {recorded.get(name)} (start, elements), and by the shapes of the"
        f" parameters this rank has {expected.get(name)}. It is the file of another rank, or of another checkpoint.",
        path=str(rank.path),
    )


def _addresses(
    named: dict[str, Shape], starts: dict[str, int], partition: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    found = {}
    for name, start in starts.items():
        low, high = _common(start, prod(named[name]), *partition)
        if low < high:
            found[name] = (low - partition[0], high - low)
    return found


def _undealt(named: dict[str, Shape], world: int) -> dict[str, int]:
    """Return where parameters would begin in their own order, if ``named`` is the order dealt to ``world`` ranks."""
    own = zero_order(len(named), world)
    names = [name for _, name in sorted(zip(own, named, strict=True))]
    starts, _ = zero_starts([prod(named[name]) for name in names], 1)
    return dict(zip(names, starts, strict=True))


def single_parameters(
    contents: ReadFiles, shapes: list[dict[str, Shape]], ranks: list[Rank]
) -> dict[str, LocalParameter]:
    """Return the parameters of all sub-groups from the files of ``ranks``, in rank order. Raises ``Damaged``."""
    found: dict[str, LocalParameter] = {}
    for rank in ranks:
        if rank.state.get("ds_zero_partition_groups"):
            raise BadInput(f"{rank.path}: groups of experts, which have ranks of their own, are not read")
        count = need(rank.state, "partition_count", rank.path)
        if count != len(ranks):
            raise Damaged(
                f"{rank.path} is one of {count} partitions, and there are {len(ranks)}", path=str(rank.path)
            )
        _refuse_other_count(rank, "fp32_flat_groups", "sub-groups", len(shapes))
    for number, named in enumerate(shapes):
        found |= _sub_group(contents, number, named, ranks)
    return found


def group_of(rank: Rank, sub_group: int) -> int:
    """Return the optimizer's group of a sub-group. Raises ``Damaged`` if there is none."""
    groups = need(need(rank.state, "optimizer_state_dict", rank.path), "param_groups", rank.path)
    for number, group in enumerate(groups):
        if sub_group in group.get("params", ()):
            return number
    raise Damaged(
        f"{rank.path}: sub-group {sub_group} is in no parameter group of the optimizer", path=str(rank.path)
    )


def _sub_group(
    contents: ReadFiles, number: int, named: dict[str, Shape], ranks: list[Rank]
) -> dict[str, LocalParameter]:
    group = group_of(ranks[0], number)
    found = {name: LocalParameter(shape, group) for name, shape in named.items()}
    total = sum(-(-prod(shape) // len(ranks)) for shape in named.values())
    for index, rank in enumerate(ranks):
        master = rank.state["fp32_flat_groups"][number]
        if not isinstance(master, Tensor) or master.shape != (total,):
            what = list(master.shape) if isinstance(master, Tensor) else "no tensor"
            raise Damaged(
                f"{rank.path}: sub-group {number} is {what}, and by the shapes of its parameters each of {len(ranks)}"
                f" ranks has {total} elements. Tensors that were offloaded to NVMe are not in the file.",
                path=str(rank.path),
            )
        states = need(rank.state, "optimizer_state_dict", rank.path).get("state", {})
        flats, values = split_state(rank, contents, states.get(number, {}), (total,))
        at = 0
        for name, shape in named.items():
            low, high = zero_range(prod(shape), index, len(ranks))
            for slot, tensor in {"param": master, **flats}.items():
                pieces = rank.stretch(contents, tensor, shape, (low, high), at)
                found[name].add(slot, tensor.storage.dtype, pieces, rank.path)
            found[name].add_values(values, rank.path)
            at += -(-prod(shape) // len(ranks))
    return found
