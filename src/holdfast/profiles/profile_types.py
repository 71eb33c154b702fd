"""The profiles of a machine and of a model, and the reading of their keys from TOML.

A wrong key or value is an error that names it. A machine has sizes in bytes and rates per second. Rates must be those
attained, not those printed on the box, because the planner trusts them. A model is equal transformer blocks between an
embedding and a head; its sizes determine the parameters, the floating-point operations and the activations between
blocks. A multiplication and an addition are two operations; attention counts every pair of tokens, masked or not.
Loaded by ``profile_files``, used by the planner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from ..config import flattened, hint_of
from ..errors import ConfigError
from ..quantities import parse_bytes
from ..token_chunks import WORDS_PER_TILE, rows_at_once, rows_per_chunk

Precision = Literal["bf16", "fp32"]

NOUNS = {
    "text": 'text in quotes, like "this"',
    "bytes": 'a size, like "80GB" or "24GiB"',
    "rate": 'bytes per second, like "12GB/s"',
    "number": "a number above 0, like 180e12",
    "seconds": "a number of seconds, 0 or more, like 0.004",
    "count": "a whole number, 0 or more",
    "flag": "true or false",
    "precision": '"bf16" or "fp32"',
}
"""A description of a valid value, by kind."""


def key(path: str, kind: str, doc: str, default: Any = MISSING) -> Any:
    """Declare a field that ``path`` of the file sets, ``"section.key"`` or ``"key"``.

    A key without a default is required.
    """
    return field(default=default, metadata={"path": path, "kind": kind, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """One device that computes, its host, and its SSDs, which are equal and used together."""

    description: str = key("description", "text", "what it is, for a person")
    device_memory_bytes: int = key(
        "device.memory", "bytes", "of the device, that training may take; 0 with shares_host", 0
    )
    device_flop_per_second: float = key("device.flops", "number", "attained by a block in the training dtype")
    precision: Literal["bf16", "fp32"] = key(
        "device.precision", "precision", "the training dtype: of these flops and of compute copies", "bf16"
    )
    device_shares_host: bool = key(
        "device.shares_host",
        "flag",
        "it computes in host memory, on the cores that step the optimizer: a CPU",
        False,
    )
    upload_bytes_per_second: int | None = key(
        "device.upload", "rate", "host to device, from pinned memory", None
    )
    download_bytes_per_second: int | None = key("device.download", "rate", "device to host", None)
    copy_bytes_per_second: int | None = key(
        "device.copies", "rate", "both ways at once, in all; without it they take turns", None
    )
    compute_factor: float = key(
        "device.factor", "number", "that computing takes in a run, of what a block takes by itself", 1.0
    )
    compute_threads: int = key("device.threads", "count", "that compute, if the host does; 0 is all cores", 0)
    host_memory_bytes: int = key("host.memory", "bytes", "of the host, that training may take")
    update_elements_per_second: float = key("host.update", "number", "parameters that the host's Adam steps")
    host_cores: int = key("host.cores", "count", "of the host; 0 is as many as compute, if it computes", 0)
    check_bytes_per_second: int | None = key(
        "host.checks",
        "rate",
        "that a core checksums, as all is that the SSD moves; without it for nothing",
        None,
    )
    ssd_count: int = key("ssd.count", "count", "SSDs; what is below is of each", 1)
    ssd_read_bytes_per_second: int = key("ssd.read", "rate", "of large reads alone, sustained")
    ssd_write_bytes_per_second: int = key("ssd.write", "rate", "of large writes alone, sustained")
    ssd_mixed_bytes_per_second: int | None = key(
        "ssd.mixed", "rate", "half reads and half writes, in all; without it they take turns", None
    )
    ssd_capacity_bytes: int = key("ssd.capacity", "bytes", "that the run may fill")
    ssd_sync_seconds: float = key("ssd.sync", "seconds", "until a small write is durable", 0.0)
    ssd_rated_bytes: int = key("ssd.rated", "bytes", "that it may be written in its life (TBW)", 600 * 10**12)

    def __post_init__(self) -> None:
        if self.ssd_count < 1:
            raise ValueError(f"ssd.count = {self.ssd_count}: there must be one")
        if self.device_shares_host:
            return
        for path, value in (
            ("device.memory", self.device_memory_bytes),
            ("device.upload", self.upload_bytes_per_second),
            ("device.download", self.download_bytes_per_second),
        ):
            if not value:
                raise ValueError(f"{path} must be given, unless device.shares_host = true")

    @property
    def spare_cores(self) -> int:
        """The number of cores that do not compute; 0 if unknown."""
        return max(self.host_cores - self.compute_threads, 0) if self.compute_threads else 0

    def with_more(self, *, host_bytes: int = 0, ssds: int = 0) -> MachineProfile:
        """Return the same machine with more host memory and more SSDs of the same kind."""
        return replace(
            self, host_memory_bytes=self.host_memory_bytes + host_bytes, ssd_count=self.ssd_count + ssds
        )


ACTIVATION_VALUES = 17
"""The activations of one block, per token and unit of width, that a backward pass needs with fused attention."""
LOGIT_BYTES = 16
"""The bytes per word of the vocabulary, and token of those whose softmax is computed at once.

They hold logits in the training dtype and in fp32, their probabilities and their gradients.
"""
HEAD_SUM_BYTES = 4
"""The bytes per parameter of a head whose loss is in chunks: the fp32 sum of gradients."""


class LinearLayer(NamedTuple):
    """A linear layer of a block: the elements of its input and of its output, for one token."""

    inputs: int
    outputs: int

    @property
    def elements(self) -> int:
        """The elements of the weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class RoutedExperts:
    """The frozen experts of one block that are read one by one, each where a token is routed to it."""

    count: int = 0
    nbytes: int = 0
    """Bytes of one expert."""
    slots: int = 0
    """Experts in memory at once."""

    def reads(self, micro_batches: int) -> tuple[int, int]:
        """Return the bytes that the forward and the backward pass of one block read at worst.

        Every micro-batch uses all experts. Those that do not stay until they are used again are read again; a backward
        pass uses them twice, in turn.
        """
        if not 0 < self.slots < self.count:
            return self.count * self.nbytes, self.count * self.nbytes
        lost = self.count - self.slots
        return micro_batches * self.count * self.nbytes, (2 * micro_batches * lost + self.slots) * self.nbytes


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A decoder, and one micro-batch of it."""

    description: str = key("description", "text", "what it is, for a person")
    blocks: int = key("blocks", "count", "equal ones")
    width: int = key("width", "count", "of the stream between them")
    heads: int = key("heads", "count", "of queries")
    kv_heads: int = key("kv_heads", "count", "of keys and values; 0 is as many as heads", 0)
    head_size: int = key("head_size", "count", "of one head; 0 is width / heads", 0)
    hidden: int = key("hidden", "count", "width of the MLP; 0 is 4 times the stream's", 0)
    experts: int = key(
        "experts", "count", "of each MLP, each as wide as hidden; 0 is one MLP for all tokens", 0
    )
    experts_per_token: int = key(
        "experts_per_token", "count", "of the experts of an MLP that a token uses", 0
    )
    gated: bool = key("gated", "flag", "the MLP has three matrices instead of two", False)
    biases: bool = key("biases", "flag", "matrices and norms have biases", False)
    fused: bool = key(
        "fused", "flag", "queries, keys and values are one linear layer, and so are gate and up", False
    )
    vocabulary: int = key("vocabulary", "count", "tokens")
    tied: bool = key("tied", "flag", "embedding and head are one matrix", False)
    positions: int = key("positions", "count", "learned position embeddings", 0)
    sequence: int = key("sequence", "count", "tokens of one sequence", 2048)
    micro_batch: int = key("micro_batch", "count", "sequences of one micro-batch", 1)
    frozen_block_bytes = frozen_resident_bytes = 0
    """All parameters are trained."""
    routed = RoutedExperts()
    """No experts are read one by one."""

    def __post_init__(self) -> None:
        for name in ("blocks", "width", "heads", "vocabulary", "sequence", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not bool(self.experts) <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token}: a token uses 1 to {self.experts} of the experts"
                if self.experts
                else f"experts_per_token = {self.experts_per_token} needs experts"
            )
        if not self.head_size and self.width % self.heads:
            raise ValueError(
                f"width = {self.width} does not divide into heads = {self.heads}; give head_size"
            )

    @cached_property
    def linear_layers(self) -> tuple[LinearLayer, ...]:
        """The linear layers of one block, in the order in which it computes. Experts are not among them."""
        into = [self._queries, self._keys, self._keys]
        attention = [sum(into)] if self.fused else into
        return (
            *(LinearLayer(self.width, outputs) for outputs in attention),
            LinearLayer(self._queries, self.width),
            *(() if self.experts else self._mlp_layers),
        )

    @cached_property
    def _mlp_layers(self) -> tuple[LinearLayer, ...]:
        """The linear layers of one MLP, or of one expert."""
        into = [self._hidden] * (2 if self.gated else 1)
        outputs = [sum(into)] if self.fused else into
        return (*(LinearLayer(self.width, each) for each in outputs), LinearLayer(self._hidden, self.width))

    @cached_property
    def expert_parameters(self) -> int:
        """The parameters of one expert; 0 if there are none."""
        return sum(layer.elements for layer in self._mlp_layers) if self.experts else 0

    @cached_property
    def linear_parameters(self) -> int:
        """The weights of the linear layers of one block, without biases."""
        return sum(layer.elements for layer in self.linear_layers)

    @cached_property
    def block_parameters(self) -> int:
        """The parameters of one block."""
        biases = self._queries + 2 * self._keys + self._hidden + 2 * self.width
        mixture = self.experts * (self.expert_parameters + self.width)  # with the router
        return self.linear_parameters + mixture + 2 * self.width + (biases + 2 * self.width) * self.biases

    @property
    def used_block_parameters(self) -> int:
        """The parameters of one block that one token uses."""
        return self.block_parameters - (self.experts - self.experts_per_token) * self.expert_parameters

    @property
    def trained_block_parameters(self) -> int:
        """The trained parameters of one block, which are all of them."""
        return self.block_parameters

    @property
    def resident_parameters(self) -> int:
        """The parameters of the embedding, the last norm and the head."""
        tables = self.vocabulary * (1 if self.tied else 2) + self.positions
        return (tables + 1 + self.biases) * self.width

    @property
    def table_parameters(self) -> int:
        """The parameters of the embedding, and of the head, which may be one matrix (``tied``)."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """The parameters of the whole model."""
        return self.blocks * self.block_parameters + self.resident_parameters

    @property
    def tokens(self) -> int:
        """The tokens of one micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def input_elements(self) -> int:
        """The elements that flow between two blocks for one micro-batch."""
        return self.tokens * self.width

    @property
    def forward_flop(self) -> float:
        """The operations of one forward pass of one block over one micro-batch."""
        attention = 4.0 * self.tokens * self.sequence * self.heads * self._head_size
        return 2.0 * self.used_block_parameters * self.tokens + attention

    @property
    def backward_flop(self) -> float:
        """The operations of one backward pass of one block over one micro-batch, with the recomputation."""
        return 3 * self.forward_flop

    def workspace_bytes(self, value_bytes: int, streams_head: bool) -> int:
        """Return an estimate of the activation bytes of one micro-batch in the last block, and in the head and loss.

        ``value_bytes`` are those of one activation. The last block's graph lives while the loss is computed, unless the
        head is streamed, as a unit of its own. The loss is computed in chunks of tokens, so its part does not grow with
        the tokens beyond one chunk.
        """
        activations = self.activation_bytes(value_bytes)
        if streams_head:
            return max(activations, self._streamed_head_bytes(value_bytes))
        return activations + self._head_bytes(value_bytes)

    def _streamed_head_bytes(self, value_bytes: int) -> int:
        """Return the same as ``_head_bytes`` for a streamed head, which has its gradient tile by tile."""
        rows, words = rows_per_chunk(self.vocabulary), min(self.vocabulary, WORDS_PER_TILE)
        if not self._has_tiles:
            return self._head_bytes(value_bytes)
        gradients = HEAD_SUM_BYTES + _rounded_bytes(value_bytes)
        tile = gradients * words * self.width + LOGIT_BYTES * rows * words
        return max(self.logits_bytes(value_bytes), tile)

    @property
    def _has_tiles(self) -> bool:
        """True if the gradient of a streamed head is computed tile by tile."""
        return self.tokens > rows_per_chunk(self.vocabulary) and self.vocabulary > WORDS_PER_TILE

    def _head_bytes(self, value_bytes: int) -> int:
        """Return an estimate of the activation bytes of one micro-batch in the head and the loss."""
        rows, parameters = rows_per_chunk(self.vocabulary), self.vocabulary * self.width
        logits = self.logits_bytes(value_bytes)
        if self.tokens <= rows:
            return logits
        return HEAD_SUM_BYTES * parameters + max(logits, _rounded_bytes(value_bytes) * parameters)

    def activation_bytes(self, value_bytes: int) -> int:
        """Return an estimate of the activation bytes of one micro-batch in one block."""
        return ACTIVATION_VALUES * value_bytes * self.tokens * self.width

    def logits_bytes(self, value_bytes: int) -> int:
        """Return the bytes of the logits that exist at once, with what the loss makes of them.

        In a chunk gradients come in place of the logits.
        """
        rows = rows_per_chunk(self.vocabulary)
        if self.tokens <= rows:
            return LOGIT_BYTES * self.tokens * self.vocabulary
        return (value_bytes * rows + LOGIT_BYTES * rows_at_once(self.vocabulary)) * self.vocabulary

    @property
    def head_flop(self) -> float:
        """The operations of head and loss for one micro-batch, forward and backward."""
        return 6.0 * self.vocabulary * self.width * self.tokens

    @property
    def streamed_head_flop(self) -> float:
        """The same where the head is a unit of its own, and computes its logits once more for its gradient."""
        return self.head_flop * 4 / 3 if self._has_tiles else self.head_flop

    @property
    def _head_size(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def _hidden(self) -> int:
        return self.hidden or 4 * self.width

    @property
    def _queries(self) -> int:
        return self.heads * self._head_size

    @property
    def _keys(self) -> int:
        return (self.kv_heads or self.heads) * self._head_size


def _rounded_bytes(value_bytes: int) -> int:
    """Return the bytes per parameter of a gradient's rounded copy, of which fp32 needs none."""
    return 0 if value_bytes == HEAD_SUM_BYTES else value_bytes


T = TypeVar("T")


def from_document(kind: type[T], document: Mapping[str, Any], what: str) -> T:
    """Return a profile from parsed TOML. Raises ``ConfigError``, which names ``what`` and the key."""
    declared = {path_of(f): f for f in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for path, value in flattened(document):
        if path not in declared:
            hint = hint_of(path, list(declared), f"known: {', '.join(declared)}")
            raise ConfigError(f"{what}: unknown key {path}; {hint}")
        values[declared[path].name] = _converted(declared[path], value, what)
    missing = [path for path, f in declared.items() if f.default is MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"{what}: {', '.join(missing)} must be given; docs/plan.md describes every key")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error


def path_of(declared: Field) -> str:
    """Return the path of a field in the file."""
    return declared.metadata["path"]


def _converted(declared: Field, value: Any, what: str) -> Any:
    kind = declared.metadata["kind"]
    try:
        return _CONVERT[kind](value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{what}: {path_of(declared)} = {value!r} is not {NOUNS[kind]}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or (size := parse_bytes(value)) < 0:
        raise ValueError
    return size


def _rate(value: Any) -> int:
    if not (rate := _bytes(value)):
        raise ValueError
    return rate


def _number(value: Any) -> float:
    if isinstance(value, (bool, str)) or not 0 < float(value) < math.inf:
        raise ValueError
    return float(value)


def _seconds(value: Any) -> float:
    if isinstance(value, (bool, str)) or not 0 <= float(value) < math.inf:
        raise ValueError
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _precision(value: Any) -> str:
    if value not in ("bf16", "fp32"):
        raise ValueError
    return value


_CONVERT = {
    "text": _text,
    "bytes": _bytes,
    "rate": _rate,
    "number": _number,
    "seconds": _seconds,
    "count": _count,
    "flag": _flag,
    "precision": _precision,
}
