"""The state of Megatron's distributed optimizer that is stored as flat buffers, without a table of contents.

There are two such formats: ``dp_zero_gather_scatter``, one object for each model-parallel rank, and
``fully_sharded_bucket_space`` (now ``dp_reshardable``), one tensor for each bucket. The places of parameters follow
from how Megatron fills a buffer: with the rank's parameters from the last to the first, each at a multiple of
``ALIGNMENT`` elements, divided into buckets. They are computed and then proven: every rounded fp32 master must equal
the model's stored parameter bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


ALIGNMENT = 64
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FIRST = ("embedding.word_embeddings.", "embedding.position_embeddings.", "embedding.tokentype_embeddings.")
_LAST = ("decoder.final_layernorm.", "output_layer.")
_IN_LAYER = (
    "input_layernorm.", "self_attention.linear_proj.", "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_qkv.", "self_attention.q_layernorm.", "self_attention.k_layernorm.",
    "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.", "mlp.linear_fc2.",
)  # fmt: skip
"""Prefixes of a layer's parameters, in the order of its modules."""
_NORM = "self_attention.linear_qkv.layer_norm_"
"""The prefix of a norm that belongs to the projection with Transformer Engine, and is the first module without it."""
_UNKNOWN = (
    "virtual_pipeline_model_parallel_size", "num_experts", "mtp_num_layers", "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
)  # fmt: skip
"""Arguments that divide layers in another way or add buffers, which is unsupported."""


class LocalTensor(NamedTuple):
    """The part of a parameter that a model-parallel rank has: regions that follow one another along the first axis."""

    name: str
    boxes: tuple[Region, ...]

    @property
    def elements(self) -> int:
        return sum(box.elements for box in self.boxes)


class MeshPlace(NamedTuple):
    """The position of a local parameter: it begins at element ``start`` of a bucket."""

    local: LocalTensor
    bucket: int
    start: int


@dataclass(frozen=True)
class Mesh:
    """The model-parallel ranks that wrote a checkpoint, according to its command line."""

    tensor: int
    pipeline: int
    layers: int
    tied: bool
    local_modules: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Mesh:
        """Build the mesh from command line arguments. Raises ``BadInput`` for unsupported ones."""
        odd = [name for name in _UNKNOWN if arguments.get(name)]
        if odd:
            raise BadInput(f"it was made with --{odd[0].replace('_', '-')}, whose buffers are not known here")
        try:
            tensor, pipeline, layers = (
                int(arguments[name])
                for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers")
            )
        except (KeyError, TypeError, ValueError):
            raise BadInput("its command line does not say how it was divided") from None
        if min(tensor, pipeline, layers) < 1 or layers % pipeline:
            raise BadInput(f"{layers} layers in {pipeline} stages are not known here")
        tied = not arguments.get("untie_embeddings_and_output_weights", False)
        return cls(tensor, pipeline, layers, tied, arguments.get("transformer_impl") == "local")

    def parameters(self, rank: int, cuts: Mapping[str, Fragments]) -> list[LocalTensor]:
        """Return the parameters of a model-parallel rank in module order; ``cuts`` has the chunks of all."""
        stage, at = divmod(rank, self.tensor)
        first = [n for n in cuts if _index(n, _FIRST) is not None]
        last = [n for n in cuts if _index(n, _LAST) is not None]
        layers: dict[int, list[str]] = {}
        for name in cuts:
            if match := _LAYER.fullmatch(name):
                layers.setdefault(int(match[1]), []).append(name)
        known = {*first, *last, *(name for inner in layers.values() for name in inner)}
        if unknown := [name for name in cuts if name not in known]:
            raise BadInput(f"where {unknown[0]} is in its buffers is not known here")
        each = self.layers // self.pipeline
        found = sorted(first, key=_place_in(_FIRST)) if stage == 0 else []
        for number in range(stage * each, (stage + 1) * each):
            found += sorted(layers.get(number, ()), key=self._in_layer)
        if stage == self.pipeline - 1:
            found += sorted(last, key=_place_in(_LAST))
            if self.tied and stage:
                found.append("embedding.word_embeddings.weight")
        return [LocalTensor(name, self._boxes(name, cuts[name], at)) for name in found]

    def _in_layer(self, name: str) -> tuple[int, bool]:
        match = _LAYER.fullmatch(name)
        assert match is not None
        if self.local_modules and match[2].startswith(_NORM):
            return 0, match[2].endswith("bias")
        index = _index(match[2], _IN_LAYER)
        if index is None:
            raise BadInput(f"where {name} is in its buffers is not known here")
        return index, match[2].endswith("bias")

    def _boxes(self, name: str, pieces: Fragments, at: int) -> tuple[Region, ...]:
        """Return the regions of tensor-parallel rank ``at``: the whole, one chunk, or one chunk each of gate and up."""
        boxes = sorted({piece.box for piece in pieces})
        if len(boxes) == 1:
            return (boxes[0],)
        if len(boxes) == self.tensor:
            return (boxes[at],)
        if len(boxes) == 2 * self.tensor and "linear_fc1" in name:
            return boxes[at], boxes[self.tensor + at]
        raise BadInput(f"{name} is stored in {len(boxes)} chunks, which {self.tensor} ranks do not make")


def _index(name: str, among: tuple[str, ...]) -> int | None:
    """Return the index of the longest prefix of ``name``; None if none matches."""
    fit = [number for number, start in enumerate(among) if name.startswith(start)]
    return max(fit, key=lambda number: len(among[number]), default=None)


def _place_in(among: tuple[str, ...]) -> Any:
    return lambda name: (_index(name, among), name.endswith("bias"))


def places(parameters: Sequence[LocalTensor], buckets: Sequence[int]) -> Iterator[MeshPlace]:
    """Yield the places of a rank's parameters in buckets of the given sizes, in elements.

    Raises ``BadInput`` if they do not fill the buckets.

    >>> two = [LocalTensor(name, (Region((0,), (n,)),)) for name, n in (("a", 3), ("b", 5))]
    >>> [(place.local.name, place.start) for place in places(two, [67])]
    [('b', 0), ('a', 64)]
    """
    waiting = list(parameters)
    for bucket, size in enumerate(buckets):
        end = 0
        while waiting and _aligned(end) + waiting[-1].elements <= size:
            local = waiting.pop()
            yield MeshPlace(local, bucket, _aligned(end))
            end = _aligned(end) + local.elements
        if size not in (end, _aligned(end)):
            raise BadInput(f"{end} elements of parameters are in its bucket {bucket}, which has {size}")
    if waiting:
        raise BadInput(f"{len(waiting)} parameters are in none of its buckets")


def one_bucket(parameters: Sequence[LocalTensor]) -> int:
    """Return the elements of a buffer that was not divided into buckets."""
    end = 0
    for local in reversed(parameters):
        end = _aligned(end) + local.elements
    return end


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
