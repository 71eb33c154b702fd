"""The chat template of a tokenizer: conversations as ids, and which of them the assistant writes.

The text of a conversation is what ``apply_chat_template`` gives, encoded at once. Targets are found as ranges of
characters, and a token is a target if any of its characters lies in such a range.

1. A template with ``{% generation %}`` marks the ranges itself.
2. Of any other, the range of a turn begins where the conversation up to there ends, with the generation prompt, and it
   ends where the conversation with that turn ends. Both must be beginnings of the whole text. Where a template writes a
   turn otherwise when more follows, the turn must be its content and what the template puts behind it. Of a template
   that writes the same with and without the generation prompt, the last turn must also be there when a user's turn
   follows: some templates put the beginning of an answer behind any conversation.
3. White space behind the mark that ends such a turn is no target: nobody generates it.

Anything else is ``BadInput``, with the place of the record: a mask that might be wrong is never used. Called by
``Tokenizer``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from ..errors import BadInput
from ..quantities import first_line

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
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
        text, ranges = self._text_and_ranges(messages, tools, where)
        found = self._own(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        targets = _marked(found["offset_mapping"], ranges)
        if not any(targets):
            raise BadInput(
                f"{where} has no token of the assistant, as the chat template in {self._folder} writes it"
            )
        return found["input_ids"], targets

    def _text_and_ranges(self, messages: Messages, tools: Any, where: str) -> tuple[str, list[Range]]:
        """Return the text and its ranges.

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
                return text, ranges
        return self._ranges_of(_with_text_arguments(messages), tools, where)

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


def _functions(messages: Messages) -> list[dict[str, Any]]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return [call.get("function", call) for call in calls]


def _with_text_arguments(messages: Messages) -> Messages:
    """Return ``messages`` with the arguments of calls as JSON in a text."""
    found: Messages = json.loads(json.dumps(messages))
    for function in _functions(found):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found
