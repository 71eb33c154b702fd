"""The description of a distributed tensor (``DTensor``) in a pickle: its whole shape, and the region that a rank held.

``pickles`` leaves such a tensor as a ``PickledObject``. Here its mesh and its placements become regions, by the rules
by which torch divides a tensor, and nothing of torch is imported. What the description says in two places must agree:
the shape of the local tensor with that of its region, the writer's rank with its place on the mesh. Called by the
readers of files that hold one rank's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...errors import BadInput
from ...state.layout.regions import Region
from .pickles import MOST_ELEMENTS, PickledObject, Tensor, quantised_parts

MOST_RANKS = 1 << 24
"""A limit that no number of ranks reaches."""
MOST_AXES = 16
"""The limit for the axes of a mesh."""


@dataclass(frozen=True)
class LocalTensor:
    """The part of a tensor of ``shape`` that one file holds: ``tensor`` is its region ``held``.

    ``rank`` is the rank that wrote it, where the file tells. ``ranks`` are all ranks of its mesh, and ``last`` is the
    highest of them; -1 for a tensor that is not distributed.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    held: Region
    rank: int | None = None
    ranks: frozenset[int] = frozenset()
    last: int = -1

    @classmethod
    def whole(cls, tensor: Tensor) -> LocalTensor:
        """Return ``tensor`` as one that is not distributed."""
        return cls(tensor, tensor.shape, Region.whole(tensor.shape))

    @property
    def is_whole(self) -> bool:
        return self.held == Region.whole(self.shape)


Meshes = dict[int, "_Mesh"]
"""The meshes of one pickle that were read already, by the identity of their descriptions."""


def local_tensor(value: PickledObject, key: str, meshes: Meshes) -> LocalTensor:
    """Return what the description ``value`` of the distributed tensor ``key`` says.

    ``meshes`` is filled with those of the pickle. Raises ``ValueError`` if the description contradicts itself,
    ``BadInput`` for a placement without a region.
    """
    tensor, spec = value.get("_local_tensor"), value.get("_spec")
    if quantised_parts(tensor):
        raise BadInput(
            f"{key} is a rank's part of optimizer state that torchao quantised, which is read from runs and folders of"
            " torch.distributed.checkpoint. Load the file in the script, and save it by one of these."
        )
    if not isinstance(tensor, Tensor) or not isinstance(spec, PickledObject):
        raise ValueError(f"{key} is a distributed tensor without a local one")
    shape = _ints(value.get("shape"), MOST_ELEMENTS)
    if prod(shape) >= MOST_ELEMENTS or value.get("dtype") != tensor.storage.dtype:
        raise ValueError(f"{key} is {list(shape)} of {value.get('dtype')}, held as {tensor.storage.dtype}")
    about = spec.get("tensor_meta")
    if isinstance(about, PickledObject) and _ints(about.args[0], MOST_ELEMENTS) != shape:
        raise ValueError(f"{key} is said to be {list(about.args[0])} and {list(shape)}")
    described = spec.get("mesh")
    if id(described) not in meshes:
        meshes[id(described)] = _Mesh(described)
    mesh = meshes[id(described)]
    placements = [_Placement.of(each, key, len(shape)) for each in spec.get("placements")]
    if len(placements) != len(mesh.sizes):
        raise ValueError(f"{key} has {len(placements)} placements on a mesh of {len(mesh.sizes)} axes")
    start, stop = [], []
    for dim, size in enumerate(shape):
        span = 0, size
        for axis in _order(placements, spec.get("shard_order"), dim, mesh.sizes, key):
            span = _chunk(span, mesh.sizes[axis], mesh.place[axis])
        start.append(span[0])
        stop.append(span[1])
    held = Region(tuple(start), tuple(stop))
    if held.shape != tensor.shape:
        raise ValueError(
            f"{key} {list(shape)} at {list(mesh.place)} of the mesh {list(mesh.sizes)} is {list(held.shape)} by its"
            f" placements, and {list(tensor.shape)} is stored"
        )
    return LocalTensor(tensor, shape, held, mesh.rank, mesh.ranks, mesh.last)


class _Mesh:
    """A mesh of ranks: the lengths of its axes, its ranks, and the rank and the place on it of the writer."""

    def __init__(self, mesh: Any) -> None:
        if not isinstance(mesh, PickledObject):
            raise ValueError("a distributed tensor without a mesh")
        axes = _axes(mesh)
        self.sizes = tuple(prod(sizes) for sizes, _ in axes)
        self.place = _ints(mesh.get("_coordinate_on_dim"), MOST_RANKS)
        if len(axes) > MOST_AXES or len(self.place) != len(axes) or prod(self.sizes) > MOST_RANKS:
            raise ValueError(f"the place {self.place} on a mesh of {self.sizes}")
        if any(not place < size for place, size in zip(self.place, self.sizes, strict=True)):
            raise ValueError(f"the place {self.place} is outside of the mesh {self.sizes}")
        ranks = mesh.get("_flatten_rank_map", mesh.get("_flatten_mesh_list"))
        listed = _ints(ranks, MOST_RANKS)
        self.ranks, self.last = frozenset(listed), max(listed, default=-1)
        if len(listed) < prod(self.sizes) or len(self.ranks) != len(listed):
            raise ValueError(f"a mesh {self.sizes} of the ranks {listed[:8]}")
        self.rank: int | None = mesh.get("_rank")
        if len(listed) == prod(self.sizes):
            here = listed[_index(axes, self.place)]
            if self.rank not in (None, here):
                raise ValueError(
                    f"rank {self.rank} at the place {self.place}, where the mesh has rank {here}"
                )
            self.rank = here
        if self.rank is not None and (type(self.rank) is not int or self.rank not in self.ranks):
            raise ValueError(f"rank {self.rank} is not of its mesh")


def _axes(mesh: PickledObject) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the sizes and strides of each axis of a mesh, in whichever form versions of torch keep them."""
    layout = mesh.get("_layout")
    if layout is None:
        whole = mesh.get("mesh")
        if not isinstance(whole, Tensor):
            raise ValueError("a mesh without a layout")
        strides = tuple(prod(whole.shape[axis + 1 :]) for axis in range(len(whole.shape)))
        return [((n,), (stride,)) for n, stride in zip(whole.shape, strides, strict=True)]
    axes = layout.get("axes")
    if axes is None:
        shape, strides = layout.get("shape"), layout.get("stride")
        pairs = [(shape, strides)] if type(shape) is int else zip(shape, strides, strict=True)
    else:
        pairs = ((axis.get("shape"), axis.get("stride")) for axis in axes)
    found = []
    for shape, strides in pairs:
        sizes, steps = (_ints([each] if type(each) is int else each, MOST_RANKS) for each in (shape, strides))
        if len(sizes) != len(steps):
            raise ValueError(f"an axis of {sizes} with the strides {steps}")
        found.append((sizes, steps))
    return found


def _index(axes: list[tuple[tuple[int, ...], tuple[int, ...]]], place: Sequence[int]) -> int:
    """Return the index among the ranks of a mesh of the rank at ``place``."""
    index = 0
    for (sizes, strides), number in zip(axes, place, strict=True):
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            number, rest = divmod(number, size)
            index += rest * stride
    return index


@dataclass(frozen=True)
class _Placement:
    """The division of the dim ``dim`` over one axis of a mesh; None if its ranks hold alike.

    ``split_factor`` is the number of parts into which later axes divided the dim before this one did.
    """

    dim: int | None = None
    split_factor: int = 1

    @classmethod
    def of(cls, value: Any, key: str, num_dims: int) -> _Placement:
        kind = value.name.rpartition(".")[2] if isinstance(value, PickledObject) else type(value).__name__
        if kind == "Replicate":
            return cls()
        if kind not in ("Shard", "_StridedShard"):
            raise BadInput(
                f"{key} has the placement {kind}, by which no rank holds values of it. Save it after"
                " tensor.redistribute(placements=[Replicate(), ...])."
            )
        dim, factor = _ints([value.get("dim"), value.get("split_factor", 1)], MOST_RANKS)
        if dim >= num_dims or factor < 1:
            raise ValueError(f"{key} has {num_dims} dims and is divided along dim {dim}")
        return cls(dim, factor)


def _order(
    placements: Sequence[_Placement], recorded: Any, dim: int, sizes: Sequence[int], key: str
) -> Iterator[int]:
    """Return the axes that divide ``dim``, the one that divided it first in front.

    Raises ``BadInput`` if a strided placement does not tell which that is.
    """
    own = [axis for axis, placement in enumerate(placements) if placement.dim == dim]
    if recorded is not None and all(placement.split_factor == 1 for placement in placements):
        listed = [_ints(each.args[1], MOST_AXES) for each in recorded if each.args[0] == dim]
        found = [axis for axes in listed for axis in axes]
        if sorted(found) != own:
            raise ValueError(f"{key} is divided along dim {dim} by the axes {own}, in the order {found}")
        return iter(found)
    found = []
    for axis in reversed(own):
        before = [prod(sizes[each] for each in found[:place]) for place in range(len(found) + 1)]
        if placements[axis].split_factor not in before:
            raise BadInput(
                f"{key} is cut into several regions on one rank, by a strided placement that the other axes of its mesh"
                " do not explain. Save it after tensor.redistribute(placements=[Shard(0), ...])."
            )
        found.insert(before.index(placements[axis].split_factor), axis)
    return iter(found)


def _chunk(span: tuple[int, int], count: int, number: int) -> tuple[int, int]:
    """Return the part ``number`` of ``count`` into which torch.chunk divides ``span``."""
    start, stop = span
    width = -(-(stop - start) // count)
    first = min(start + number * width, stop)
    return first, min(first + width, stop)


def _ints(values: Any, most: int) -> tuple[int, ...]:
    found = tuple(values)
    if any(type(value) is not int or not 0 <= value < most for value in found):
        raise ValueError(f"{found[:8]} are no sizes")
    return found
