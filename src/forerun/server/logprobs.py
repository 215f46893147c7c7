"""Log-probabilities in the shapes of the OpenAI API: one for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from forerun.messages import TokenLogprob

LOWEST = -9999.0  # JSON has no -inf


class Spells(Protocol):
    """How ids are spelt as text."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str: ...

    def token_bytes(self, index: int) -> bytes: ...


def for_chat(entries: Sequence[TokenLogprob], tokenizer: Spells) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = []
    for each in entries:
        tops = [_entry(token, value, tokenizer) for token, value in each.top]
        content.append({**_entry(each.token, each.logprob, tokenizer), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def for_completion(entries: Sequence[TokenLogprob], tokenizer: Spells, offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where the first token starts in the text."""
    tokens = [tokenizer.decode([each.token], skip_special=False) for each in entries]
    offsets, at = [], offset
    for token in tokens:
        offsets.append(at)
        at += len(token)
    tops = [
        {tokenizer.decode([token], skip_special=False): max(value, LOWEST) for token, value in each.top}
        for each in entries
    ]
    values = [max(each.logprob, LOWEST) for each in entries]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _entry(token: int, value: float, tokenizer: Spells) -> dict[str, Any]:
    text = tokenizer.decode([token], skip_special=False)
    return {"token": text, "logprob": max(value, LOWEST), "bytes": list(tokenizer.token_bytes(token))}
