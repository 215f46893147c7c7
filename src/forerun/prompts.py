"""What a prompt may be: text, token ids, or the messages of a chat; and several of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import InvalidInput

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts in a list, and whether several were meant; arrays and tensors of ids are fine."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts], False
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise InvalidInput(f"{prompts!r:.80} is no prompt: give text, token ids or a list of chat messages")
    if not prompts:
        raise InvalidInput("there is no prompt to write from; give at least one")
    several = isinstance(prompts[0], Sequence) or getattr(prompts[0], "ndim", 0) > 0
    return ([*prompts], True) if several else ([prompts], False)


def as_messages(messages: str | Sequence[Message], system: str | None = None) -> list[Message]:
    """Chat messages from a plain question or a list, with a system message in front if one is given."""
    turns: list[Message] = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    )
    if not turns:
        raise InvalidInput("there is no message to answer; give at least one")
    return [{"role": "system", "content": system}, *turns] if system else turns
