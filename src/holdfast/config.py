"""The configuration of a run: one TOML file, every key optional, every value checked before anything is written.

A key is declared once, as a dataclass field with its default, its unit and its meaning. The checks, the
``--print-config`` output and the error for a mistyped key all come from that declaration. Sizes are text such as
``"20GiB"``, rates are bytes per second, fractions lie between 0 and 1.

A declaration also tells whether a key may change in a continued run. A key marked ``fixed`` is part of what the run
*is* and keeps its value: with another one, the result would be neither the old run nor a new one. A key marked
``stated`` affects the arithmetic of the steps to come, or moves the run's files, and changes only by ``--set``. Any
other key may change.
"""

# ruff: noqa: RUF009  (the calls in the defaults make dataclass fields)
from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .errors import ConfigError
from .quantities import parse_bytes

Fraction = float | Literal["auto"]
"""A share between 0 and 1, or "auto": the planner's choice for this machine within the budget."""
Count = int | Literal["auto"]
"""A whole number, or "auto": chosen for this machine when a run begins, and kept by the run."""
Rate = float | Literal["auto"]
"""A number, or "auto": the usual value for the optimizer."""
Rank = int | Literal["none"]
"""The rank of adapters; with "none" there are none."""
Dtype = Literal["auto", "bf16", "fp16", "fp32"]
"""The compute dtype, or "auto": bf16, but fp32 on a machine that is faster in it."""
PROJECTING = ("apollo", "apollo-mini", "grass")
"""Optimizers that project gradients of matrices to a lower rank."""
USUAL_RATES = {"adafactor": 1e-2, "apollo": 1e-3, "apollo-mini": 1e-3, "grass": 1e-3, "mezo": 1e-6}
"""The highest learning rates for "auto"; for other optimizers it is ``USUAL_RATE``."""
USUAL_RATE = 3e-4


def _key(default: Any, doc: str, *, fixed: bool = False, stated: bool = False) -> Any:
    return field(default=default, metadata={"doc": doc, "fixed": fixed, "stated": stated})


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{key} = {literal(value)}: {wanted}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    dir: str = _key("runs/default", "where the run lives: commits, events, this configuration")
    seed: int = _key(0, "of initial weights, dropout, sample order and the generated text", fixed=True)

    def __post_init__(self) -> None:
        _require(self.dir != "", "run.dir", self.dir, "name a directory")
        _require(0 <= self.seed < 2**63, "run.seed", self.seed, "must lie between 0 and 2**63 - 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    text: str = _key(
        "stdlib", "Python's own library, or a file, a folder, a glob; JSON and packed files, too"
    )
    validation_fraction: float = _key(0.02, "of the text, never trained on; 0 is none", fixed=True)
    validation: str = _key("", 'held-out text, as data.text; "" is validation_fraction of that')
    packing: Literal["off", "on", "lengths"] = _key(
        "off",
        'or "on": several samples in a row; "lengths": sorted',
        stated=True,
    )

    def __post_init__(self) -> None:
        _require(self.text != "", "data.text", self.text, 'name a file, a folder, a glob or "stdlib"')
        fraction = self.validation_fraction
        _require(0 <= fraction <= 0.5, "data.validation_fraction", fraction, "must lie between 0 and 0.5")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = _key("", 'folder of a Hugging Face model; "" is a decoder of these sizes', fixed=True)
    blocks: int = _key(8, "transformer layers", fixed=True)
    width: int = _key(256, "of the residual stream", fixed=True)
    heads: int = _key(8, "of attention; divides width into an even head size", fixed=True)
    kv_heads: int = _key(4, "of keys and values; divides heads", fixed=True)
    context: int = _key(256, "tokens per sample; bytes of text without a path", fixed=True)
    dropout: float = _key(0.0, "probability, on what each layer adds to the stream", stated=True)

    def __post_init__(self) -> None:
        for key in ("blocks", "width", "heads", "kv_heads", "context"):
            _require(getattr(self, key) >= 1, f"model.{key}", getattr(self, key), "must be at least 1")
        even = self.width % (2 * self.heads) == 0
        _require(even, "model.width", self.width, f"must be a multiple of 2 * model.heads = {2 * self.heads}")
        divides = self.heads % self.kv_heads == 0
        _require(divides, "model.kv_heads", self.kv_heads, f"must divide model.heads = {self.heads}")
        _require(0 <= self.dropout < 1, "model.dropout", self.dropout, "must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = _key(100, "optimizer steps in all; raise it to continue a finished run")
    micro_batches: Count = _key(
        4,
        'per step, of all ranks; gradients are averaged; "auto" chooses once',
        stated=True,
    )
    micro_batch_size: int = _key(4, "samples per micro-batch", stated=True)
    optimizer: Literal[
        "adamw",
        "adamw-bf16",
        "adamw-8bit",
        "adamw-8bit-24",
        "adafactor",
        "muon",
        "apollo",
        "apollo-mini",
        "grass",
        "mezo",
    ] = _key("adamw", "or one of docs/optimizers.md, most with less state", fixed=True)
    mlp_tokens: int = _key(0, "that an MLP computes at once, to save memory; 0 is all", fixed=True)
    rank: int = _key(64, "of apollo's and grass's projections; a quarter of the width is usual", fixed=True)
    learning_rate: Rate = _key(
        "auto", 'at its highest, after the warm-up; "auto" is usual for the optimizer', stated=True
    )
    warmup_steps: int = _key(10, "then cosine to a tenth", stated=True)
    weight_decay: float = _key(0.1, "on matrices; none on norms and embeddings", stated=True)
    clip_norm: float = _key(1.0, "global gradient norm; 0 is off", stated=True)
    clipping: Literal["auto", "defer", "speculate", "per_block"] = _key(
        "auto",
        'wait for the norm or guess it, the faster; "per_block"',
        stated=True,
    )
    dtype: Dtype = _key(
        "auto", "to compute in: bf16, or fp32 if faster here; fp16 has a loss scale", stated=True
    )
    validate_every: int = _key(0, "steps between validations; 0 is before and after alone")
    patience: int = _key(0, "validations without a lowest loss, then the run ends; 0 is never")
    keep_best: bool = _key(False, "the weights with the lowest loss, in RUN/best")

    def __post_init__(self) -> None:
        count = self.micro_batches
        _require(count == "auto" or count >= 1, "train.micro_batches", count, 'must be at least 1, or "auto"')
        for key in ("steps", "micro_batch_size", "rank"):
            _require(getattr(self, key) >= 1, f"train.{key}", getattr(self, key), "must be at least 1")
        for key in ("warmup_steps", "weight_decay", "clip_norm", "mlp_tokens", "validate_every", "patience"):
            _require(getattr(self, key) >= 0, f"train.{key}", getattr(self, key), "must not be negative")
        for key in ("patience", "keep_best"):
            value = getattr(self, key)
            _require(
                self.validate_every > 0 or not value, f"train.{key}", value, "needs train.validate_every"
            )
        rate = self.learning_rate
        _require(rate == "auto" or rate > 0, "train.learning_rate", rate, "must be above 0")
        if self.optimizer == "mezo":
            for key, usual in (
                ("clip_norm", (0, TrainConfig.clip_norm)),
                ("clipping", (TrainConfig.clipping,)),
            ):
                value = getattr(self, key)
                _require(value in usual, f"train.{key}", value, "mezo has no gradient to clip; leave it out")

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of a step. Only for a configuration in which "auto" has been replaced by it."""
        assert self.micro_batches != "auto"
        return self.micro_batches

    @property
    def highest_rate(self) -> float:
        """The learning rate after the warm-up."""
        usual = USUAL_RATES.get(self.optimizer, USUAL_RATE)
        return usual if self.learning_rate == "auto" else self.learning_rate


FRACTIONS = (
    "params_on_host", "optimizer_on_host", "activations_on_host", "delayed_fraction", "recomputed_fraction",
)  # fmt: skip
"""Keys of ``offload`` that are planned unless they are given."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    schedule: Literal["vertical", "horizontal"] = _key(
        "vertical", "all micro-batches per block, or one by one"
    )
    order: Literal["plain", "snake"] = _key(
        "plain", 'sums gradients as an ordinary loop does; or "snake"', stated=True
    )
    params_on_host: Fraction = _key("auto", 'share in host memory, the rest on the SSD; "auto" is planned')
    optimizer_on_host: Fraction = _key("auto", "likewise, of the optimizer state")
    activations_on_host: Fraction = _key("auto", "likewise, of the block inputs")
    delayed_fraction: Fraction = _key("auto", "of the blocks, updated beside the next forward pass; likewise")
    recomputed_fraction: Fraction = _key(
        "auto", "of the blocks, computed again in the backward pass to save memory; likewise"
    )
    embedding_and_head: Literal["auto", "resident", "streamed"] = _key(
        "auto", 'or "streamed", as blocks are; "auto" streams what would not fit'
    )
    expert_slots: int = _key(
        0, "frozen experts in memory at once, each read where used; 0 is all", stated=True
    )
    host_budget: str = _key(
        "auto", 'bytes, like "64GiB"; "auto" is what the machine has free, but for a tenth'
    )
    device_budget: str = _key("auto", "bytes")
    device: str = _key("auto", '"cpu", "cuda" or "cuda:1"; "auto" is CUDA where there is one', stated=True)
    ssd: str = _key("", 'directory of the state; "" is the run directory')
    drives: tuple[str, ...] = _key(
        (), "directories on further SSDs, over which the state's files are spread", stated=True
    )

    def __post_init__(self) -> None:
        for key in FRACTIONS:
            value = getattr(self, key)
            fits = value == "auto" or 0 <= value <= 1
            _require(fits, f"offload.{key}", value, 'must lie between 0 and 1, or be "auto"')
        for key in ("host_budget", "device_budget"):
            _check_size(f"offload.{key}", getattr(self, key), nothing="auto")
        _require(self.expert_slots >= 0, "offload.expert_slots", self.expert_slots, "must not be negative")

    @property
    def host_budget_bytes(self) -> int | None:
        return None if self.host_budget == "auto" else parse_bytes(self.host_budget)

    @property
    def device_budget_bytes(self) -> int | None:
        return None if self.device_budget == "auto" else parse_bytes(self.device_budget)


@dataclass(frozen=True, kw_only=True)
class IOConfig:
    direct: bool = _key(True, "O_DIRECT, past the page cache; buffered with a warning where refused")
    threads: int = _key(4, "for reads and writes")
    read_limit: str = _key("", 'bytes/s, like "500MB"; "" is none')
    write_limit: str = _key("", "bytes/s")

    def __post_init__(self) -> None:
        _require(1 <= self.threads <= 256, "io.threads", self.threads, "must lie between 1 and 256")
        for key in ("read_limit", "write_limit"):
            _check_size(f"io.{key}", getattr(self, key), nothing="")

    @property
    def read_limit_bytes_per_second(self) -> int | None:
        return None if self.read_limit == "" else parse_bytes(self.read_limit)

    @property
    def write_limit_bytes_per_second(self) -> int | None:
        return None if self.write_limit == "" else parse_bytes(self.write_limit)


@dataclass(frozen=True, kw_only=True)
class DurabilityConfig:
    every: int = _key(1, "a commit every so many steps; 0 is off")
    retain: int = _key(2, "newest whole steps kept")

    def __post_init__(self) -> None:
        _require(self.every >= 0, "durability.every", self.every, "must not be negative")
        _require(self.retain >= 1, "durability.retain", self.retain, "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The section ``[lora]``: adapters of PEFT on a frozen model of ``model.path``."""

    rank: Rank = _key("none", 'of adapters, which alone are trained; "none" trains the model', fixed=True)
    alpha: Rate = _key("auto", 'adapters are scaled by alpha / rank; "auto" is twice the rank', fixed=True)
    targets: tuple[str, ...] = _key(
        ("all-linear",), 'layers by the ends of their names, like "q_proj"', fixed=True
    )
    rank_pattern: tuple[str, ...] = _key(
        (), 'ranks of some targets, like "down_proj=32"; "auto" alpha follows', fixed=True
    )
    dropout: float = _key(0.0, "probability, on what an adapter reads", stated=True)
    dora: bool = _key(False, "a trained magnitude for each output of a layer", fixed=True)
    rslora: bool = _key(False, "scale by alpha / sqrt(rank)", fixed=True)
    modules_to_save: tuple[str, ...] = _key(
        (), "modules trained whole, by the ends of their names", fixed=True
    )
    bias: Literal["none", "all", "lora_only"] = _key(
        "none", "biases that are trained, lora_only: of adapted layers", fixed=True
    )

    def __post_init__(self) -> None:
        rank, alpha = self.rank, self.alpha
        _require(rank == "none" or rank >= 1, "lora.rank", rank, 'must be at least 1, or "none"')
        _require(alpha == "auto" or alpha > 0, "lora.alpha", alpha, "must be above 0")
        _require(bool(self.targets), "lora.targets", self.targets, "name layers")
        alone = "all-linear" not in self.targets or len(self.targets) == 1
        _require(alone, "lora.targets", self.targets, '"all-linear" stands alone')
        for each in self.rank_pattern:
            end, _, number = each.rpartition("=")
            is_rank = bool(end) and number.isdecimal() and int(number) >= 1
            _require(is_rank, "lora.rank_pattern", self.rank_pattern, 'write each as "end of a name=rank"')
        _require(
            len(self.ranks) == len(self.rank_pattern),
            "lora.rank_pattern",
            self.rank_pattern,
            "a name stands once",
        )
        _require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "must be at least 0 and below 1")
        if rank == "none":
            for key in fields(AdapterConfig):
                value = getattr(self, key.name)
                _require(value == key.default, f"lora.{key.name}", value, "needs adapters: give lora.rank")

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks of ``rank_pattern``, by the ends of the layers' names."""
        pairs = (each.rpartition("=") for each in self.rank_pattern)
        return {end.strip(): int(rank) for end, _, rank in pairs}

    @property
    def are_wanted(self) -> bool:
        """True if the run trains adapters."""
        return self.rank != "none"


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """The section ``[quantization]``: how bitsandbytes packs the frozen weights under adapters."""

    bits: Literal["none", 4, 8] = _key("none", "of a frozen weight under adapters: 4, 8 (int8)", fixed=True)
    type: Literal["nf4", "fp4"] = _key("nf4", "of 4-bit values", fixed=True)
    double: bool = _key(True, "quantise the scales of 4-bit values, too", fixed=True)

    def __post_init__(self) -> None:
        if self.bits != 4:
            for name, usual in (("type", "nf4"), ("double", True)):
                value = getattr(self, name)
                _require(value == usual, f"quantization.{name}", value, "is for quantization.bits = 4")

    @property
    def is_wanted(self) -> bool:
        """True if the run quantises the model's weights."""
        return self.bits != "none"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The section ``[log]``: programs that show curves, fed beside the run's own events."""

    tensorboard: bool = _key(False, "write the run's curves for TensorBoard, in RUN/tensorboard")
    wandb: str = _key("", 'project of Weights & Biases, written offline in RUN/wandb; "" is off')


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. ``Config()`` is the default run; sections are built by keyword.

    >>> Config(train=TrainConfig(steps=7)).train.steps
    7
    """

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    io: IOConfig = field(default_factory=IOConfig)
    durability: DurabilityConfig = field(default_factory=DurabilityConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.lora.are_wanted and not self.model.path:
            rank = literal(self.lora.rank)
            raise ConfigError(
                f"lora.rank = {rank}: adapters are for a trained model. Name its folder: --model FOLDER."
            )
        if self.lora.are_wanted and self.train.optimizer in PROJECTING:
            raise ConfigError(
                f"train.optimizer = {literal(self.train.optimizer)} projects the gradients of large matrices, and"
                f' those of adapters have lora.rank = {self.lora.rank} rows or columns already. Take "adamw".'
            )
        if self.quantization.is_wanted and not self.lora.are_wanted:
            raise ConfigError(
                f"quantization.bits = {self.quantization.bits}: quantised weights cannot be trained. Train adapters on"
                " them, with --set lora.rank=16, or leave [quantization] out."
            )


def load_config(path: Path | None = None, sets: Sequence[str] = ()) -> Config:
    """Return the configuration of file ``path``, overridden by each ``"section.key=value"`` of ``sets``.

    Raises ``ConfigError``, which names the key (and the nearest known one), the value and what is allowed.
    """
    values = {} if path is None else dict(flattened(_read_toml(path)))
    for text in sets:
        _, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text}: write it as --set section.key=value, such as train.steps=200")
        values[key_of(text)] = _parse_value(value.strip())
    return from_values(values)


OTHER_KEYS = {"data.validation": "; a share of data.text is data.validation_fraction"}
"""A hint for a value of another type, by key."""
PLACES = ("run.dir", "model.path", "offload.ssd", "offload.drives")
"""Keys of paths, in which ``~`` is the home directory; ``data.text`` is expanded where it is used."""


def _at_home(value: Any) -> Any:
    return tuple(map(_at_home, value)) if isinstance(value, tuple) else os.path.expanduser(value)


def key_of(text: str) -> str:
    """Return ``"section.key"`` of ``"section.key=value"``."""
    return text.partition("=")[0].strip()


def from_values(values: Mapping[str, object]) -> Config:
    """Return a configuration from ``{"section.key": value}``; missing keys have their defaults.

    Raises ``ConfigError``.
    """
    known = _known()
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        if key not in known:
            hint = hint_of(key, list(known), "`holdfast train --print-config` prints all keys")
            raise ConfigError(f"unknown configuration key {key}; {hint}")
        section, name = key.split(".")
        found = _convert(key, known[key], value)
        sections.setdefault(section, {})[name] = _at_home(found) if key in PLACES else found
    return Config(**{section: _SECTIONS[section](**chosen) for section, chosen in sections.items()})


def to_values(config: Config) -> dict[str, Any]:
    """Return ``{"section.key": value}`` of every key, in the order of declaration."""
    return {
        f"{section}.{key.name}": getattr(getattr(config, section), key.name)
        for section, kind in _SECTIONS.items()
        for key in fields(kind)
    }


def to_toml(config: Config) -> str:
    """Return ``config`` as a file that ``load_config`` reads back equal, each key with its meaning."""
    lines = [*_ABOUT_CHANGES, ""]
    for section, kind in _SECTIONS.items():
        lines.append(f"[{section}]")
        for key in fields(kind):
            text = f"{key.name} = {literal(getattr(getattr(config, section), key.name))}"
            mark = " [fixed]" if key.metadata["fixed"] else " [stated]" if key.metadata["stated"] else ""
            lines.append(f"{text:<30} # {key.metadata['doc']}{mark}")
        lines.append("")
    return "\n".join(lines)


def changed_keys(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return ``{"section.key": (old value, new value)}`` where two configurations differ."""
    before, after = to_values(old), to_values(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def is_marked(key: str, mark: Literal["fixed", "stated"]) -> bool:
    """Return whether ``"section.key"`` is declared with ``mark``."""
    section, name = key.split(".")
    return next(key.metadata[mark] for key in fields(_SECTIONS[section]) if key.name == name)


def literal(value: object) -> str:
    """Return ``value`` as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(literal, value))}]"  # without spaces: one word on a command line
    if not isinstance(value, str):
        return repr(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'


# -- helpers ----------------------------------------------------------------------------------------

_SECTIONS: dict[str, Any] = get_type_hints(Config)
_ABOUT_CHANGES = (
    "# A run keeps what is marked [fixed]. What is marked [stated] changes in a run only by --set on the",
    "# command line. The rest may change whenever a run is continued.",
)


def _known() -> dict[str, Any]:
    return {
        f"{section}.{name}": hint
        for section, kind in _SECTIONS.items()
        for name, hint in get_type_hints(kind).items()
    }


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # broken TOML, or not UTF-8
        raise ConfigError(f"configuration {path} is not TOML: {error}") from error


def flattened(document: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the values of parsed TOML by ``"section.key"``, or ``"key"`` outside of sections."""
    for section, content in document.items():
        if isinstance(content, dict):
            for name, value in content.items():
                yield f"{section}.{name}", value
        else:
            yield section, content


def _parse_value(text: str) -> object:
    """Return ``text`` as a TOML value, or as plain text if it is none: paths need no quotes on a command line."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def hint_of(key: str, known: list[str], otherwise: str) -> str:
    """Return the question whether the nearest ``known`` key was meant; ``otherwise`` if none is near."""
    same_name = [candidate for candidate in known if candidate.split(".")[-1] == key.split(".")[-1]]
    nearest = same_name or get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else otherwise


def _convert(key: str, hint: Any, value: object) -> object:
    """Return ``value`` in the declared type (TOML's 1 may be a float). Raises ``ConfigError`` if it does not fit."""
    if get_origin(hint) is Literal:
        _require(value in get_args(hint), key, value, "must be " + " or ".join(map(literal, get_args(hint))))
    elif hint == Fraction:
        return value if value == "auto" else _convert(key, float, value)
    elif hint == Rank:
        _require(type(value) is int or value == "none", key, value, 'must be a whole number, or "none"')
    elif hint == Count:
        _require(type(value) is int or value == "auto", key, value, 'must be a whole number, or "auto"')
    elif hint is float:
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        _require(math.isfinite(number), key, value, "must be a number")
        return float(number)
    elif get_origin(hint) is tuple:
        items = value
        if isinstance(value, str):  # from a command line, where the shell has removed the quotes
            items = [item.strip() for item in value.strip("[]").split(",")]
        texts = isinstance(items, (list, tuple)) and all(isinstance(item, str) and item for item in items)
        _require(texts, key, value, 'must be a list of texts, like ["this", "that"]')
        return tuple(items)  # type: ignore[arg-type]
    elif hint is str and type(value) is int:
        return str(value)  # a size without a unit
    else:
        nouns = {int: "a whole number", bool: "true or false", str: 'text in quotes, like "this"'}
        _require(type(value) is hint, key, value, f"must be {nouns[hint]}{OTHER_KEYS.get(key, '')}")
    return value


def _check_size(key: str, value: str, *, nothing: str) -> None:
    if value == nothing:
        return
    try:
        positive = parse_bytes(value) > 0
    except ValueError as error:
        raise ConfigError(f"{key} = {literal(value)}: {error}, or {literal(nothing)}") from error
    _require(positive, key, value, f"must be above 0, or {literal(nothing)}")
