"""The recipe of ``holdfast train``: a model, its text, and how samples are stacked and shown.

A recipe is the reference decoder on bytes, or the model in a Hugging Face folder on the tokens of its tokenizer. The
model of a folder is trained itself, or adapters on it, as the sections ``[lora]`` and ``[quantization]`` say
(``FolderBase``): the frozen model under adapters may be quantised by bitsandbytes here, or lie quantised in its folder.
Nothing is written before all has been compared with the model.
"""

from __future__ import annotations

import codecs
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ...config import Config, ModelConfig, literal
from ...data.corpus import Corpus, Windowed
from ...data.loader import Stack
from ...data.packing import packed_batch, takes_positions
from ...data.tokens import Tokens, encoded
from ...errors import BadInput, ConfigError
from ...models.decoder import Decoder, DecoderConfig
from ...models.keeping import ADAPTER, ADAPTER_CONFIG, CONFIG, MODEL, checked, keep, kept_folder
from ...models.lora_adapters import adapter_config, refuse_adapter_folder, set_magnitudes, with_adapters
from ...models.pretrained import Weights, empty_model, refuse_other_formats
from ...models.quantise_folder import is_made_of, quantise_folder, refuse_lack_of_bitsandbytes
from ...models.tokenizer import Tokenizer
from ...offload.model.blocks import empty_parameters
from ...offload.model.quantised_layers import are_unpacked_here
from ...store.disk import Disk, write_durably
from ...store.path_checks import check_place, refuse_foreign_checkpoint
from ..machine import launched
from .kept_config import state_directory

OF_DECODER = ("blocks", "width", "heads", "kv_heads", "dropout")
"""Keys of ``[model]`` that a folder defines itself."""
PROMPT = "def __init__(self"
SAMPLE_TOKENS = 240
SAMPLE_SECONDS = 20.0
"""The seconds after which a sample ends: each token reads the whole model from the SSD."""
PROMPT_TOKENS = 12
"""The tokens of held-out text in a prompt, where the model has its own tokenizer."""


def recipe_of(config: Config, say: Callable[[str], None]) -> Recipe:
    """Return the recipe of a configuration. Raises ``BadInput``.

    ``say`` is called with a message before a text is encoded.
    """
    return FolderRecipe(config, say) if config.model.path else ByteRecipe(config)


class ByteRecipe:
    """The reference decoder; a byte is a token.

    ``model`` has its parameters on ``meta``; ``source`` has their values, or None if a fresh run initializes them.
    ``prompt`` begins a sample, and ``prompt_ids`` are its tokens. ``choices`` is the number of different tokens;
    ``stack`` makes a micro-batch of samples.
    """

    source: Weights | None = None
    normalize: Literal["micro_batches", "tokens"] = "micro_batches"
    choices = 256
    prompt, prompt_ids = PROMPT, list(PROMPT.encode())

    def __init__(self, config: Config) -> None:
        data, rows, context = config.data, config.train.micro_batch_size, config.model.context
        self.corpus: Windowed = Corpus(
            data.text, context=context, validation_fraction=_held_out_fraction(config)
        )
        if data.validation:
            held_out = Corpus(data.validation, context=context, validation_fraction=0.0)
            _warn_of_shared_files(self.corpus, held_out)
            self.corpus.validation = held_out.training
        with empty_parameters():
            decoder = Decoder(decoder_config(config))
        self.model: nn.Module = decoder
        self._embedding = decoder.embed.weight
        self.stack: Stack = default_collate
        zeros = torch.zeros(rows, context, dtype=torch.int64)
        self.sample = {"tokens": zeros, "targets": zeros}

    def embeddings(self) -> set[int]:
        """Return the identities of the parameters that hold a vector for each token."""
        return {id(self._embedding)}

    def text_of(self, ids: Iterator[int]) -> Iterator[str]:
        """Yield bytes as UTF-8 text, with replacements for invalid ones."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for each in ids:
            yield decoder.decode(bytes([each]))
        yield decoder.decode(b"", final=True)

    def keep(self) -> None:
        """Do nothing: the configuration holds all that is needed."""


class FolderRecipe:
    """The model in ``model.path``, and its tokenizer. A continued run does not need that folder any more."""

    source: Weights | None
    normalize: Literal["micro_batches", "tokens"] = "tokens"

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        _refuse_sizes(config.model)
        self._run, self._folder = Path(config.run.dir), Path(config.model.path)
        self._state = state_directory(self._run, config)
        kept = kept_folder(self._run)
        if kept is None:
            refuse_adapter_folder(self._folder)
        tokenizer = self.tokenizer = Tokenizer(kept or self._folder)
        if kept is None:
            refuse_other_formats(checked(self._folder))
        base = FolderBase(config, kept or checked(self._folder), self._state / BASE)
        self.model: nn.Module = base.model
        self.choices = _embedding_of(self.model).weight.shape[0]
        _refuse_unfit(config, self.model, tokenizer, self.choices)
        check_place(self._run)
        refuse_foreign_checkpoint(self._run)
        text = self._encoded(config, config.data.text, "tokens", _held_out_fraction(config), say)
        if config.data.validation:
            held_out = self._encoded(config, config.data.validation, "held-out-tokens", 0.0, say)
            _refuse_another_kind(config, text, held_out)
            _warn_of_shared_files(text, held_out)
            text.validation = held_out.training
        self.corpus: Windowed = text
        self.stack: Stack = text.stack
        self.model, self.source = base.trained(begins=kept is None, say=say)
        self._adapter_config = base.adapter_config()
        self.sample = self._sample(config, text)
        self.prompt_ids = self._first_prompt()
        self.prompt = tokenizer.decode(self.prompt_ids)

    def _encoded(
        self, config: Config, named: str, folder: str, fraction: float, say: Callable[[str], None]
    ) -> Tokens:
        return encoded(
            named, self.tokenizer, self._run / folder, context=config.model.context, validation_fraction=fraction,
            before_encoding=lambda: say(f"encoding the text {named}"),
        )  # fmt: skip

    def _sample(self, config: Config, text: Tokens) -> dict[str, Tensor]:
        """Return a micro-batch as large as any, with the inputs that steps have."""
        zeros = torch.zeros(config.train.micro_batch_size, config.model.context, dtype=torch.int64)
        if config.data.packing == "on" and text.pairs and takes_positions(self.model):
            rows = [
                [{"input_ids": half, "labels": half} for half in row.tensor_split(2) if len(half)]
                for row in zeros
            ]
            return packed_batch(rows, text.pad)
        return self.stack([{"input_ids": row, "labels": row} for row in zeros])

    def _first_prompt(self) -> list[int]:
        text = self.corpus.validation if len(self.corpus.validation) else self.corpus.training
        ids, labels = text[0]["input_ids"].tolist(), text[0]["labels"].tolist()
        prompt = next((place for place, label in enumerate(labels) if label >= 0), 0)
        return ids[: prompt or PROMPT_TOKENS]

    def embeddings(self) -> set[int]:
        return {id(parameter) for parameter in _embedding_of(self.model).parameters()}

    def text_of(self, ids: Iterator[int]) -> Iterator[str]:
        """Yield text once it is final: the meaning of the last ids may depend on the next."""
        found, written = list(self.prompt_ids), len(self.prompt)
        for each in ids:
            found.append(each)
            text = self.tokenizer.decode(found)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[written:]
                written = len(text)
        yield self.tokenizer.decode(found)[written:]

    def keep(self) -> None:
        """Store what a resume needs in the run's directory. Called when the run has its first commit."""
        source = kept_folder(self._run) or self._folder
        for directory in {self._run, self._state}:  # also beside the state, which is what `convert` reads
            if kept_folder(directory) is None:
                if self._adapter_config:
                    disk = Disk(directory / ADAPTER)
                    disk.makedirs("")
                    write_durably(disk, ADAPTER_CONFIG, self._adapter_config, why="configuration of adapters")
                keep(source, directory / MODEL)


Recipe = ByteRecipe | FolderRecipe
"""The model, its text and its samples."""


def _held_out_fraction(config: Config) -> float:
    """Return the share of the text that is held out: none where another text is."""
    return 0.0 if config.data.validation else config.data.validation_fraction


def _warn_of_shared_files(text: Windowed, held_out: Windowed) -> None:
    """Warn if a file of the held-out text is one of the text that is trained on."""
    trained = {path.resolve() for path in text.paths}
    if shared := [path for path in held_out.paths if path.resolve() in trained]:
        warnings.warn(
            f"data.validation holds {shared[0]}, which is also in data.text: it is trained on, so its loss is lower"
            " than that of other text",
            stacklevel=2,
        )


def _refuse_another_kind(config: Config, text: Tokens, held_out: Tokens) -> None:
    if text.pairs != held_out.pairs:
        raise BadInput(
            f"data.text = {literal(config.data.text)} and data.validation = {literal(config.data.validation)}: one is"
            " text, the other has samples (messages, or prompt and completion), and their losses do not compare. Give"
            " two of one kind."
        )


def decoder_config(config: Config) -> DecoderConfig:
    model = config.model
    return DecoderConfig(
        blocks=model.blocks,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        context=model.context,
        dropout=model.dropout,
    )


def _refuse_sizes(model: ModelConfig) -> None:
    usual = {each.name: each.default for each in fields(ModelConfig)}
    for name in OF_DECODER:
        if getattr(model, name) != usual[name]:
            raise ConfigError(
                f"model.{name} = {literal(getattr(model, name))} is of the reference decoder, and the model in"
                f" {model.path} says its own in config.json. Leave one of the two out."
            )


def _embedding_of(model: Any) -> Any:
    return model.get_input_embeddings()


def _refuse_unfit(config: Config, model: nn.Module, tokenizer: Tokenizer, vocabulary: int) -> None:
    path = config.model.path
    if len(tokenizer) > vocabulary:
        raise BadInput(
            f"the tokenizer in {path} has {len(tokenizer):,} tokens, and the model has vectors for {vocabulary:,}. Is"
            " it another model's?"
        )
    longest: Any = getattr(model.config, "max_position_embeddings", None)
    if isinstance(longest, int) and config.model.context > longest:
        raise ConfigError(
            f"model.context = {config.model.context}: the model in {path} has {longest} positions"
            " (max_position_embeddings). Lower it."
        )


BASE = "base"
"""The directory beside the state for the model that this run has quantised."""


class FolderBase:
    """The model in a folder, to be trained whole or under adapters."""

    def __init__(self, config: Config, described: Path, base: Path) -> None:
        """Build the model on ``meta``, and refuse settings that do not fit it.

        Args:
            config: The configuration.
            described: The folder with the configuration of the model: that of ``model.path``, or the run's copy of it.
            base: The directory for a model that is quantised here.

        Raises:
            ConfigError: A setting of [lora] or [quantization] does not fit the model.
            ModelNotSupported: The model cannot be trained, or not whole.
        """
        self._config, self._base, self._folder = config, base, Path(config.model.path)
        self._packed = _is_quantised(described)
        if self._packed and config.lora.are_wanted:
            described = checked(self._folder)  # the headers of its files have the shapes of packed weights
        self.model: nn.Module = empty_model(described, quantised=config.lora.are_wanted)
        self._refuse_unfit()
        self._weights = Weights(self._folder, self.model)  # read by a run without a commit
        self._adapted: Any = None
        if config.lora.are_wanted:
            packs = config.quantization.is_wanted
            self._adapted = with_adapters(self.model, config.lora, self._folder, packs=packs)

    def trained(self, *, begins: bool, say: Callable[[str], None]) -> tuple[nn.Module, Weights]:
        """Return the model that is trained, and the weights that it begins with.

        Args:
            begins: Whether the run has no commit yet.
            say: Called with a line before something that takes long.
        """
        config, folder = self._config, self._folder
        if config.quantization.is_wanted:
            # a begun run keeps its base: its commits refer to it, and the folder may be gone
            if not (self._base / CONFIG).is_file() or (
                begins and not is_made_of(self._base, checked(folder), config.quantization)
            ):
                say(f"quantising {folder} to {config.quantization.bits} bits")
                quantise_folder(checked(folder), self._base, config.quantization)
            packed = empty_model(self._base, quantised=True)
            self._weights = Weights(self._base, packed, reference=launched()[1] == 1)
            self._adapted = with_adapters(packed, config.lora, folder)
        elif config.lora.dora and begins:
            set_magnitudes(self._adapted, self._weights)
        return self.model if self._adapted is None else self._adapted, self._weights

    def adapter_config(self) -> bytes:
        """Return the ``adapter_config.json`` of the adapters; empty if there are none."""
        return b"" if self._adapted is None else adapter_config(self._adapted, self._folder)

    def _refuse_unfit(self) -> None:
        lora, quantization = self._config.lora, self._config.quantization
        if quantization.is_wanted and self._packed:
            raise ConfigError(
                f"quantization.bits = {quantization.bits}: the weights in {self._folder} are quantised already. Leave"
                " [quantization] out."
            )
        if lora.dora and (quantization.is_wanted or not are_unpacked_here(self.model)):
            raise ConfigError(
                "lora.dora = true: its magnitudes begin with the norms of the weights, which bitsandbytes has packed or"
                " will pack. Train LoRA on such a base, or DoRA on the folder that it was made from."
            )
        if quantization.is_wanted:
            refuse_lack_of_bitsandbytes(quantization)


def _is_quantised(folder: Path) -> bool:
    """Return whether the weights in ``folder`` are quantised, as far as its configuration can be read."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False  # which building the model reports
    return isinstance(config, dict) and bool(config.get("quantization_config"))
