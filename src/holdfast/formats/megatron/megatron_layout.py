"""The places of parameters in the buffers of Megatron's distributed optimizer.

Two formats store the optimizer state as flat buffers of a model-parallel rank, without a table of contents. The places
follow from how Megatron fills a buffer: with the rank's parameters from the last to the first, each at a multiple of
``ALIGNMENT`` elements, divided into buckets. Callers must verify the result against the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import BadInput
from ...state.layout.fragments import Fragments
from ...state.layout.regions import Region

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
