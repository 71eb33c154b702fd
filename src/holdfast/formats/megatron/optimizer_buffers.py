"""The state of Megatron's distributed optimizer that is stored as flat buffers.

There are two such formats: ``dp_zero_gather_scatter``, one object for each model-parallel rank, and
``fully_sharded_bucket_space`` (now ``dp_reshardable``), one tensor for each bucket. The places of parameters in buffers
are computed (``megatron_layout``) and then proven: every rounded fp32 master must equal the model's stored parameter
bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import BadInput, Damaged
from ...state.encoding import decode
from ...state.layout.fragments import Fragments, joined
from ...state.layout.regions import Region
from ...state.layout.sharding import unflattened
from ...state.tensor_entries import TensorEntry
from ..entry_keys import ShapeAndType
from ..load import read_flat, tensor_of
from ..source import Source, SourceTensor
from ..torch_archive.archives import Archive, piece_of
from ..torch_archive.pickles import DTYPES, Tensor
from .megatron_layout import LocalTensor, Mesh, one_bucket, places

if TYPE_CHECKING:
    pass


_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.gbuf_idx_0"
    r"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>[^.]+)"
)
_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.param_state/shard_0_1"
)
_SIZES = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.per_bucket_numel_unpadded/shard_0_1"
)
CHUNK = 1 << 22
"""The number of elements that are compared at once."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model in its own shape, and its place; ``copies`` must be equal."""

    kind: ShapeAndType
    pieces: Fragments
    copies: tuple[Fragments, ...] = ()


@dataclass
class Buffers:
    """The buffers of all model-parallel ranks.

    ``buckets`` is by rank, slot and number; if ``joined``, each rank has one bucket that all its buckets were joined
    to. ``held`` has every tensor under a unique name.
    """

    held: dict[str, ModelTensor] = field(default_factory=dict)
    buckets: dict[int, dict[str, dict[int, ModelTensor]]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    unpadded: dict[int, list[int]] = field(default_factory=dict)
    """Bucket sizes by rank without the padding at their ends, which older versions store too."""
    joined: bool = False
    unsupported: str = ""
    """The first tensor that is unsupported: of a second buffer, or of one of several optimizers."""

    def add_tensor(self, key: str, flat: ModelTensor) -> None:
        """Add a bucket of ``fully_sharded_bucket_space``."""
        self.held[key] = flat
        match = _BUCKET.fullmatch(key)
        if match is None:
            self.unsupported = self.unsupported or key
            return
        self.dtypes.add(DTYPES.get(match["dtype"], match["dtype"]))
        self._slots(int(match["rank"])).setdefault(match["slot"], {})[int(match["bucket"])] = flat

    def add_sizes(self, key: str, value: Any) -> None:
        """Add the bucket sizes that a rank stored, given by buffer and dtype."""
        if (match := _SIZES.fullmatch(key)) is not None:
            by_type = decode(value)[0].values()
            self.unpadded[int(match["rank"])] = [size for sizes in by_type for size in sizes]

    def add_object(self, key: str, archive: Archive, source: Source) -> bool:
        """Add a rank's gathered object of ``dp_zero_gather_scatter``; return False if ``key`` is no such object."""
        match = _STATE.fullmatch(key)
        if match is None:
            return False
        self.joined = True
        for state in archive.content:
            for number, by_dtype in state.items():
                for dtype, tensors in by_dtype.items() if isinstance(by_dtype, dict) else ():
                    self._add_gathered(key, int(match["rank"]), (number, dtype), tensors, archive, source)
        return True

    def _add_gathered(
        self,
        key: str,
        rank: int,
        which: tuple[int, Any],
        tensors: Mapping[str, Any],
        archive: Archive,
        source: Source,
    ) -> None:
        for slot, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                continue
            part = archive.part_in(source, tensor.storage)
            pieces = Fragments.of([piece_of(tensor, part)], len(tensor.shape))
            name = f"{key}.{which[0]}.{slot}"
            flat = self.held[name] = ModelTensor(ShapeAndType(tensor.shape, tensor.storage.dtype), pieces)
            if which[0] != 0 or key.startswith("chained_"):
                self.unsupported = self.unsupported or name
            self.dtypes.add(which[1][0])
            self._slots(rank).setdefault(slot, {})[0] = flat

    def _slots(self, rank: int) -> dict[str, dict[int, ModelTensor]]:
        return self.buckets.setdefault(rank, {})

    def states(
        self, source: Source, weights: Mapping[str, ModelTensor], arguments: Mapping[str, Any]
    ) -> dict[str, dict[str, ModelTensor]]:
        """Return the optimizer state of ``weights``, by name and slot.

        Raises ``BadInput`` if the places are unknown, ``Damaged`` if the masters are not those of the model.
        """
        if self.unsupported or len(self.dtypes) != 1:
            raise BadInput(
                f"{self.unsupported or sorted(self.dtypes)}: of several buffers it is not known what is in them"
            )
        weights = {name: whole for name, whole in weights.items() if whole.kind.dtype in self.dtypes}
        found = self._found(Mesh.of(arguments), weights)
        made: dict[str, dict[str, ModelTensor]] = {}
        for (name, slot, dtype), by_box in found.items():
            shape, (first, *others) = weights[name].kind.shape, zip(*by_box.values(), strict=True)
            copies = tuple(joined(pieces, len(shape)) for pieces in others)
            whole = ModelTensor(ShapeAndType(shape, dtype), joined(first, len(shape)), copies)
            made.setdefault(name, {})[slot] = whole
        for name, slots in made.items():
            _prove(source, name, slots, weights[name])
        return made

    def _found(
        self, mesh: Mesh, weights: Mapping[str, ModelTensor]
    ) -> dict[tuple[str, str, str], dict[Region, list[Fragments]]]:
        """Return the places of all copies: by name, slot and dtype, then by region of the parameter."""
        if sorted(self.buckets) != list(range(mesh.tensor * mesh.pipeline)):
            raise BadInput(
                f"there are buffers of the ranks {sorted(self.buckets)}, and {mesh.tensor} x {mesh.pipeline} ranks"
            )
        found: dict[tuple[str, str, str], dict[Region, list[Fragments]]] = {}
        cuts = {name: whole.pieces for name, whole in weights.items()}
        for rank in sorted(self.buckets):
            parameters = mesh.parameters(rank, cuts)
            for slot, buckets in self.buckets[rank].items():
                for local, box, pieces in self._placed(parameters, buckets, self.unpadded.get(rank)):
                    which = local.name, slot, buckets[0].kind.dtype
                    found.setdefault(which, {}).setdefault(box, []).append(pieces)
        return found

    def _placed(
        self, parameters: list[LocalTensor], buckets: Mapping[int, ModelTensor], unpadded: list[int] | None
    ) -> Iterator[tuple[LocalTensor, Region, Fragments]]:
        """Yield the fragments of each region, in the coordinates of its parameter."""
        if sorted(buckets) != list(range(len(buckets))) or any(b.pieces.rank != 1 for b in buckets.values()):
            raise BadInput(f"there are buckets {sorted(buckets)}, and not one after the other")
        sizes = [buckets[number].kind.shape[0] for number in range(len(buckets))]
        if unpadded is not None:
            if len(unpadded) != len(sizes) or any(a > b for a, b in zip(unpadded, sizes, strict=True)):
                raise BadInput(
                    f"its buckets have {sizes} elements, and are said to have {unpadded} without padding"
                )
            sizes = unpadded
        if self.joined and one_bucket(parameters) != sizes[0]:
            raise BadInput(
                f"its parameters make a buffer of {one_bucket(parameters)} elements, and it has {sizes[0]}: it was in"
                " several buckets, of which the sizes are not stored"
            )
        for local, bucket, start in places(parameters, sizes):
            for box in local.boxes:
                pieces = unflattened(buckets[bucket].pieces, box.shape, 0, box.elements, start)
                yield local, box, pieces.moved(box.start)
                start += box.elements


def _prove(source: Source, name: str, slots: Mapping[str, ModelTensor], weight: ModelTensor) -> None:
    """Raise ``Damaged`` unless the rounded master equals the parameter."""
    if "param" not in slots:
        raise BadInput(f"there is no fp32 master of {name}")
    one, other = (
        SourceTensor(TensorEntry(name, "param", *each.kind), each.pieces) for each in (slots["param"], weight)
    )
    import torch

    source.check_cover(one)
    for start in range(0, one.atom.elements, CHUNK):
        stop = min(start + CHUNK, one.atom.elements)
        high, low = (
            tensor_of(read_flat(source, each, start, stop), each.atom.dtype) for each in (one, other)
        )
        if not torch.equal(high.to(low.dtype).view(torch.uint8), low.view(torch.uint8)):
            raise Damaged(
                f"{source.path}: {name} is not its fp32 master, rounded, where Megatron's order of modules has that:"
                " the modules are in another order, or files are of two checkpoints. If it is the first, save it with"
                " --dist-ckpt-optim-fully-reshardable.",
                path=source.path,
                atoms=(name,),
            )
