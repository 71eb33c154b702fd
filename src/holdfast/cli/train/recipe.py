"""The recipe of ``holdfast train``: a model, its text, and how samples are stacked and shown.

A recipe is the reference decoder on bytes, or the model in a Hugging Face folder on the tokens of its tokenizer.
"""

from __future__ import annotations

import codecs
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
from ...models.keeping import ADAPTER, ADAPTER_CONFIG, MODEL, checked, keep, kept_folder
from ...models.lora_adapters import refuse_adapter_folder
from ...models.pretrained import Weights, refuse_other_formats
from ...models.tokenizer import Tokenizer
from ...offload.model.blocks import empty_parameters
from ...store.disk import Disk, write_durably
from ...store.path_checks import check_place, refuse_foreign_checkpoint
from .folder_base import BASE, FolderBase
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
            self.corpus.validation = Corpus(
                data.validation, context=context, validation_fraction=0.0
            ).training
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
