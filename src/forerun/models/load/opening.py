"""What stands before an answer: the tokens that a chat template writes there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from forerun.core.errors import InvalidInput
from forerun.models.base import Target

if TYPE_CHECKING:
    from forerun.models.load.tokenizer import Tokenizer

_CHAT = ({"role": "user", "content": "Hi"},)


def opening_of(target: Target, tokenizer: object) -> tuple[int, ...]:
    """What the template writes before an answer, else the token that texts begin with; () = not known.

    On a CPU it is not asked for: drafters read the target's habits behind it, and passes for that take a minute there.
    """
    if not target.can.captures or target.source_rules is not None:
        return ()
    from forerun.models.load.tokenizer import Tokenizer

    return tokens_before_an_answer(tokenizer) if isinstance(tokenizer, Tokenizer) else ()


def tokens_before_an_answer(tokenizer: Tokenizer) -> tuple[int, ...]:
    with suppress(InvalidInput):  # there is no template, or it refuses so short a chat
        asked = tokenizer.chat_ids(_CHAT, add_generation_prompt=False)
        if opening := tokenizer.chat_ids(_CHAT)[len(asked) :]:
            return tuple(opening)
    return () if tokenizer.bos_id is None else (tokenizer.bos_id,)
