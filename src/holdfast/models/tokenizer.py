"""The tokenizer of a model's folder: ids of text and text of ids, as the model was trained with them.

It is read from the folder alone, and nothing is downloaded. A digest of its files tells whether kept ids are still its
own. Called by the recipe of ``holdfast train``.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from ..errors import BadInput
from ..offload.exit_hook import deferred
from ..quantities import first_line
from .chat_template import ChatTemplate
from .pretrained import checked, transformers_for

FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""The files of which a tokenizer may consist."""


class Tokenizer:
    """The tokenizer in ``folder``.

    ``begin`` holds the ids that it adds before any text, ``end`` the id that ends texts.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer. Raises ``BadInput`` if there is none, or transformers is not installed."""
        path = checked(folder)
        transformers = transformers_for(f"the tokenizer in {path}")
        try:
            with deferred():  # an interrupted import would report a package as not installed
                self._own: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (ValueError, OSError, ImportError, KeyError, TypeError) as error:
            raise BadInput(
                f"{path} has no tokenizer that can be loaded ({first_line(error)}). Put its files"
                " (tokenizer.json, tokenizer_config.json) beside the weights."
            ) from error
        last = self._own.eos_token_id
        self.begin = self._before_text(last)
        self.end = [] if last is None else [last]
        if last is None:
            warnings.warn(
                f"the tokenizer in {path} has no token that ends a text, so documents follow one another unmarked",
                stacklevel=2,
            )
        pad = self._own.pad_token_id
        self.pad = pad if pad is not None else (self.end or [0])[0]
        self.digest = _digest(path)
        self._path = path

    def __len__(self) -> int:
        return len(self._own)

    def _before_text(self, last: int | None) -> list[int]:
        """Return the ids that the tokenizer puts before a text.

        They are those before a letter, which separates the mark of the beginning from that of the end where both are
        equal. If the letter is not found, they are the ids around an empty text without the mark of the end.
        """
        found, bare = (self._own("a", add_special_tokens=marks)["input_ids"] for marks in (True, False))
        for place in range(len(found) if bare else 0):
            if found[place : place + len(bare)] == bare:
                return found[:place]
        return [each for each in self._own("")["input_ids"] if each != last]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of ``texts``, without ids around them."""
        return self._own(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def encode_with_ends(self, texts: list[str]) -> list[tuple[list[int], list[int]]] | None:
        """Return the ids of ``texts`` and, for each id, the number of characters up to its end.

        Returns None where the tokenizer does not know these numbers.
        """
        if not self._own.is_fast:
            return None
        if not texts:
            return []
        found = self._own(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = [[end for _, end in offsets] for offsets in found["offset_mapping"]]
        return list(zip(found["input_ids"], ends, strict=True))

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises ``BadInput`` if there is none."""
        return ChatTemplate(self._own, self._path)

    @property
    def template_digest(self) -> str:
        """The identity of the chat template. Raises ``BadInput`` if there is none."""
        return self.template.digest

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: Any, where: str
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation and, for each, whether the assistant writes it.

        Raises ``BadInput``, which begins with ``where``.
        """
        return self.template.encode(messages, tools, where)

    def decode(self, ids: list[int]) -> str:
        return self._own.decode(ids, skip_special_tokens=True)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    for name in FILES:
        if (path / name).is_file():
            data = (path / name).read_bytes()
            digest.update(b"%s\0%d\0" % (name.encode(), len(data)))
            digest.update(data)
    return digest.hexdigest()
