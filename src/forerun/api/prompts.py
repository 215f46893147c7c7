"""Prompts: check and convert text, token ids or chat messages, one or several.

The content of a message is text, or OpenAI's list of parts, of which a text model can read those of text.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.core.checks import shown
from forerun.core.errors import InvalidInput

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
Conversation = str | Sequence[Message]
_TEXT_PARTS = ("text", "input_text", "output_text")


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts in a list, and whether several were meant; arrays and tensors of ids are fine."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts], False
    _refuse_bytes(prompts)
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise InvalidInput(f"{shown(prompts)} is no prompt: give text, token ids or a list of chat messages")
    if not prompts:
        raise InvalidInput("the list of prompts is empty; give at least one")
    several = isinstance(prompts[0], Sequence) or getattr(prompts[0], "ndim", 0) > 0
    return ([*prompts], True) if several else ([prompts], False)


def as_conversations(messages: Any, system: Any = None) -> tuple[list[list[Message]], bool]:
    """The conversations in a list, and whether several were meant; a plain string is one user message."""
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes | bytearray) and messages:
        several = any(isinstance(part, Sequence) for part in messages)
        if several:
            return [as_messages(part, system) for part in messages], True
    return [as_messages(messages, system)], False


def as_messages(messages: Any, system: Any = None) -> list[Message]:
    """Chat messages from a plain question or a list, with a system message in front if one is given."""
    _refuse_bytes(messages)
    if not isinstance(messages, Sequence):
        raise InvalidInput(f"{shown(messages)} is no conversation: give text or a list of chat messages")
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    if not turns:
        raise InvalidInput("the list of messages is empty; give at least one")
    if system is not None and not isinstance(system, str):
        raise InvalidInput(f"system={shown(system)} is no system message: give text")
    return [_as_message(turn) for turn in ([{"role": "system", "content": system}] if system else []) + turns]


def as_variables(chat_template_kwargs: Any) -> dict[str, Any]:
    """Variables of a chat template, by their names."""
    given = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInput(
            f"chat_template_kwargs={shown(given)} are no variables: give a dict such as {{'enable_thinking': False}}"
        )
    return {**given}


def as_token_list(prompt: Any) -> tuple[int, ...]:
    """Token ids from integers of any library."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, list | tuple) and set(map(type, ids)) == {int}:  # nearly always, and ten times faster
        return tuple(ids)
    try:
        if any(isinstance(part, bool) for part in ids):
            raise TypeError("a truth value is no token id")
        return tuple(operator.index(part) for part in ids)
    except TypeError:
        raise InvalidInput(f"{shown(prompt)} is no prompt: give text, token ids or chat messages") from None


def check_text(text: str) -> str:
    """Text that can be encoded: half of a surrogate pair is no character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise InvalidInput(
            f"the prompt holds {code} at character {error.start}, half of a surrogate pair and no character: "
            "decode its source as UTF-8 or UTF-16"
        ) from None
    return text


def is_chat(prompt: Any) -> bool:
    """Are these the messages of a chat?"""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(part, Mapping) for part in prompt)


def _as_message(message: Any) -> Message:
    """A message whose content is text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidInput(f"{shown(message)} is no chat message: give {{'role': 'user', 'content': 'Hi'}} or the like")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}  # templates add it to other text
    if isinstance(content, str):
        text = content
    elif isinstance(content, Sequence) and not isinstance(content, bytes | bytearray):
        text = "\n".join(_text_of(part) for part in content)
    else:
        raise InvalidInput(f"content={shown(content)} of a chat message is neither text nor a list of parts")
    return {**message, "content": check_text(text)}


def _text_of(part: Any) -> str:
    """The text of one part of a message's content, as the OpenAI API has them."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidInput(
        f"a content part of type {shown(kind)} cannot be read: give {{'type': 'text', 'text': ...}}, "
        "this model takes only text"
    )


def _refuse_bytes(value: Any) -> None:
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput("the prompt is bytes; decode it to text first, such as prompt.decode('utf-8')")
