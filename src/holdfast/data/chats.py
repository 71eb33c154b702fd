"""Conversations in records: their messages and tools, checked, in the form that chat templates take.

A chat template renders whatever it is given, so a wrong role, content that is no text or arguments in quotes would be
learned as they are, without an error. All of that is refused here, with the place of the record. Called by
``documents``.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, NoReturn

from ..errors import BadInput

ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_READ = ("weight", "train", "trainable")
"""Keys of messages by which other programs leave a turn of the assistant out of the loss."""


class Chat(NamedTuple):
    """A conversation; ``tools`` are descriptions of functions as JSON schemas."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def chat_of(messages: Any, tools: Any, where: str) -> Chat:
    """Return the conversation of a record. Raises ``BadInput``, which begins with ``where``."""
    if not isinstance(messages, list) or not messages:
        raise BadInput(
            f'{where} has no conversation: "messages" must be a list of objects with "role" and "content"'
        )
    found = [_message(each, f"{where}, message {n},") for n, each in enumerate(messages, 1)]
    if not any(message["role"] == "assistant" for message in found):
        raise BadInput(f"{where} has no message of the assistant, so nothing is to be learned. Leave it out.")
    return Chat(found, _tools(tools, where))


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(where, 'is no object with "role" and "content"')
    role = value.get("role")
    if role not in ROLES:
        _refuse(where, f'has the "role" {json.dumps(role)}. Use {", ".join(ROLES[:-1])} or {ROLES[-1]}')
    for key in NOT_READ:
        if value.get(key) is not None:
            _refuse(
                where, f'has "{key}", which is not read: every turn of the assistant is learned. Leave it out'
            )
    message = {key: each for key, each in value.items() if each is not None}
    if "content" in message:
        message["content"] = _text(message["content"], where)
    elif not (role == "assistant" and message.get("tool_calls")):
        _refuse(where, 'has no "content"')
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], where)
    return message


def _text(content: Any, where: str) -> str:
    """Return the content of a message as one text; parts of text are joined."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        _refuse(where, 'has "content" that is no text; images and sound are not read')
    return "".join(part["text"] for part in parts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return calls of tools with their arguments as objects, which is what templates print as JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        _refuse(where, 'has "tool_calls" that are no list of objects')
    found = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(where, 'has a call in "tool_calls" without the "name" of its function')
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        if not isinstance(arguments, dict):
            _refuse(where, f'has a call of {function["name"]} whose "arguments" are no JSON object')
        function = {**function, "arguments": arguments}
        found.append({**call, "function": function} if "function" in call else function)
    return found


def _tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the descriptions of tools; tables often hold them as text."""
    found = _loaded(tools) if isinstance(tools, str) and tools else tools
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadInput(f'{where} has "tools" that are no list of JSON schemas')
    return found


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _refuse(where: str, what: str) -> NoReturn:
    raise BadInput(f"{where} {what}.")
