"""The tokenizer of a model's folder: ids of text and of conversations, and text of ids, as in its training.

It is read from the folder alone, and nothing is downloaded. A digest of its files tells whether kept ids are still its
own.

The text of a conversation is what ``apply_chat_template`` gives, encoded at once. Which of it the assistant writes is
found as ranges of characters, and a token is a target if any of its characters lies in such a range.

1. A template with ``{% generation %}`` marks the ranges itself.
2. Of any other, the range of a turn begins where the conversation up to there ends, with the generation prompt, and it
   ends where the conversation with that turn ends. Both must be beginnings of the whole text. Where a template writes a
   turn otherwise when more follows, the turn must be its content and what the template puts behind it. Of a template
   that writes the same with and without the generation prompt, the last turn must also be there when a user's turn
   follows: some templates put the beginning of an answer behind any conversation.
3. White space behind the mark that ends such a turn is no target: nobody generates it.

Anything else is ``BadInput``, with the place of the record: a mask that might be wrong is never used. Called by the
recipe of ``holdfast train``.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from ..errors import BadInput
from ..offload.exit_hook import deferred
from ..quantities import first_line
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


MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages in which templates find what the assistant thinks before it answers."""
Messages = list[dict[str, Any]]
Range = tuple[int, int]
"""The first character, and the one after the last."""


class ChatTemplate:
    """The chat template of ``tokenizer``, which was read from ``folder``."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        """Raises ``BadInput`` if the tokenizer has no template, or cannot tell the characters of its tokens."""
        self._own, self._folder = tokenizer, folder
        if not tokenizer.chat_template:
            raise BadInput(
                f"the tokenizer in {folder} has no chat template, as those of base models. Put the chat_template.jinja"
                " of the format that you want beside it, or write the text out as prompt and completion."
            )
        if not tokenizer.is_fast:
            raise BadInput(
                f"the tokenizer in {folder} cannot tell which characters its tokens are of, so the turns of the"
                " assistant are not found. Save a fast one there (tokenizer.json)."
            )
        self._marks = tuple(each.content for each in tokenizer.added_tokens_decoder.values() if each.content)
        self.digest = xxhash.xxh3_128_hexdigest(json.dumps(tokenizer.chat_template, sort_keys=True).encode())

    def encode(self, messages: Messages, tools: Any, where: str) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and for each whether it is a target.

        Raises ``BadInput``, which begins with ``where``, if the targets are not certain.
        """
        messages, text, ranges = self._text_and_ranges(messages, tools, where)
        self._refuse_left_out(text, messages, tools, where)
        found = self._own(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        targets = _marked(found["offset_mapping"], ranges)
        if not any(targets):
            raise BadInput(
                f"{where} has no token of the assistant, as the chat template in {self._folder} writes it"
            )
        return found["input_ids"], targets

    def _text_and_ranges(
        self, messages: Messages, tools: Any, where: str
    ) -> tuple[Messages, str, list[Range]]:
        """Return the messages as the template takes them, their text and its ranges.

        Some templates print the arguments of a call as they are, and so take them as text; those are rendered again.
        """
        arguments = [function["arguments"] for function in _functions(messages)]
        try:
            text, ranges = self._ranges_of(messages, tools, where)
        except BadInput:
            if not arguments:
                raise
        else:
            if not any(str(each) != json.dumps(each) and str(each) in text for each in arguments):
                return messages, text, ranges
        messages = _with_text_arguments(messages)
        return messages, *self._ranges_of(messages, tools, where)

    def _ranges_of(self, messages: Messages, tools: Any, where: str) -> tuple[str, list[Range]]:
        if MARKED.search(self._template(tools, where)):
            return self._rendered(messages, tools, where, marked=True)
        text, _ = self._rendered(messages, tools, where)
        ranges: list[Range] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._start(text, messages, number, tools, where)
                end = self._end(text, start, messages, number, tools, where)
                if ranges and start < ranges[-1][1]:
                    self._refuse_turn(where, number, "its beginning lies in the turn before")
                ranges.append((start, end))
        return text, [self._without_space(text, start, end) for start, end in ranges]

    def _start(self, text: str, messages: Messages, number: int, tools: Any, where: str) -> int:
        """Return where turn ``number`` begins, behind the generation prompt."""
        if number == 0:
            self._refuse_turn(where, number, "nothing comes before it")
        before, _ = self._rendered(messages[:number], tools, where, prompt=True)
        if not text.startswith(before):
            self._refuse_turn(where, number, "what comes before it is written otherwise when it follows")
        if before == self._rendered(messages[:number], tools, where)[0]:
            content = messages[number].get("content", "").strip()
            if not content or not text[len(before) :].lstrip().startswith(content):
                self._refuse_turn(where, number, "the template has no generation prompt")
            if number == len(messages) - 1:
                more, _ = self._rendered([*messages, {"role": "user", "content": "."}], tools, where)
                if (
                    text[len(before) :] not in more
                ):  # not a beginning: instructions may move to the last user's turn
                    self._refuse_turn(
                        where, number, "something stands behind it that is gone when more follows"
                    )
        return len(before)

    def _end(self, text: str, start: int, messages: Messages, number: int, tools: Any, where: str) -> int:
        """Return where turn ``number`` ends, which begins at ``start``."""
        alone, _ = self._rendered(messages[: number + 1], tools, where)
        if len(alone) > start and text.startswith(alone):
            return len(alone)
        content = messages[number].get("content", "").strip()
        place = alone.rfind(content) if content else -1
        closed = alone[place:] if place >= 0 else ""
        if closed and text.startswith(closed, start):
            return start + len(closed)
        self._refuse_turn(where, number, "it is written otherwise when more follows")

    def _without_space(self, text: str, start: int, end: int) -> Range:
        kept = text[start:end].rstrip()
        return (start, start + len(kept)) if self._marks and kept.endswith(self._marks) else (start, end)

    def _rendered(
        self, messages: Messages, tools: Any, where: str, *, prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Range]]:
        """Return the text of a conversation, and the ranges that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: tuple[Any, Any] = render_jinja_template(  # type: ignore[assignment]
                conversations=[messages],
                tools=tools,
                chat_template=self._template(tools, where),
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self._own.special_tokens_map,
            )
        except BadInput:
            raise
        except Exception as error:  # a template is code of its own
            raise BadInput(
                f"{where}: the chat template in {self._folder} does not take it: {first_line(error)}"
            ) from error
        [text], ranges = found
        return text, ranges[0] if marked else []

    def _template(self, tools: Any, where: str) -> str:
        try:
            return self._own.get_chat_template(None, tools)
        except ValueError as error:  # it has several, and none for this
            raise BadInput(
                f"{where}: the tokenizer in {self._folder} has no chat template for it: {error}"
            ) from error

    def _refuse_left_out(self, text: str, messages: Messages, tools: Any, where: str) -> None:
        """Raise ``BadInput`` if the template writes no tools, no calls of them or no thoughts, and the line has some.

        The assistant would learn to say nothing in their place. Only what it writes nowhere is found.
        """
        without = [("tools", messages, None)] if tools else []
        own = [message for message in messages if message["role"] == "assistant"]
        for keys in (("tool_calls",), THOUGHTS):
            if found := [key for key in keys if any(_says(message.get(key)) for message in own)]:
                bare = [_without(m, keys) if m["role"] == "assistant" else m for m in messages]
                without.append((found[0], bare, tools))
        for name, fewer, given in without:
            if self._writes(text, fewer, given, where):
                raise BadInput(
                    f'{where}: the chat template in {self._folder} does not write the "{name}". Give one that does'
                    " (chat_template.jinja), or take them out of the line."
                )

    def _writes(self, text: str, messages: Messages, tools: Any, where: str) -> bool:
        """Return whether the template writes ``text`` for a conversation, which it may not take."""
        try:
            return self._rendered(messages, tools, where)[0] == text
        except BadInput:
            return False

    def _refuse_turn(self, where: str, number: int, why: str) -> NoReturn:
        raise BadInput(
            f"{where}, message {number + 1}: the chat template in {self._folder} does not show what of its text is the"
            f" assistant's, since {why}. Mark it there with {{% generation %}}, or leave the line out."
        )


def _marked(offsets: list[Range], ranges: list[Range]) -> list[bool]:
    """Return for each token whether it belongs to a range.

    Tokens of white space may have no characters of their own: they count where they lie within a range, or at its end.
    """
    found = [False] * len(offsets)
    token = 0
    for start, end in ranges:
        if start == end:
            continue
        inside = []
        while token < len(offsets) and offsets[token][0] < end:
            if offsets[token][1] > start:
                inside.append(token)
            token += 1
        if token < len(offsets) and offsets[token] == (end, end):
            inside.append(token)
            token += 1
        for each in range(inside[0], inside[-1] + 1) if inside else ():
            found[each] = True
        if inside:
            token = inside[-1]  # it may reach into the next range
    return found


def _says(value: Any) -> bool:
    """Return whether a template could write ``value``: the thoughts, or the calls, of a message."""
    return bool(value.strip()) if isinstance(value, str) else isinstance(value, list) and bool(value)


def _without(message: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {"content": ""} | {key: value for key, value in message.items() if key not in keys}


def _functions(messages: Messages) -> list[dict[str, Any]]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return [call.get("function", call) for call in calls]


def _with_text_arguments(messages: Messages) -> Messages:
    """Return ``messages`` with the arguments of calls as JSON in a text."""
    found: Messages = json.loads(json.dumps(messages))
    for function in _functions(found):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found
