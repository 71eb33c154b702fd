"""ZeRO-3: each parameter is divided by itself.

Of ``n`` elements on ``ranks`` ranks, rank ``d`` has ``k = ceil(n / ranks)`` from ``d * k`` on, as far as they exist,
followed by padding. In a file the parts of a sub-group of parameters are adjacent. Only the shapes are recorded.
"""

from __future__ import annotations

from math import prod

from ...errors import BadInput, Damaged
from ...state.layout.zero_shares import cut
from ..fragment_reads import ReadFiles
from ..torch_archive.pickles import Tensor
from .deepspeed_folder import need
from .local_tensors import LocalParameter, Rank, Shape, split_state


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
        flats = need(rank.state, "fp32_flat_groups", rank.path)
        if len(flats) != len(shapes):
            raise Damaged(
                f"{rank.path} has {len(flats)} sub-groups of parameters, the model states {len(shapes)}",
                path=str(rank.path),
            )
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
            low, high = cut(prod(shape), index, len(ranks))
            for slot, tensor in {"param": master, **flats}.items():
                pieces = rank.stretch(contents, tensor, shape, (low, high), at)
                found[name].add(slot, tensor.storage.dtype, pieces, rank.path)
            found[name].add_values(values, rank.path)
            at += -(-prod(shape) // len(ranks))
    return found
