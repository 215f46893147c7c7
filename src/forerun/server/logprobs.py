"""Log-probabilities in the shapes of the OpenAI API: one for chats, an older one for completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from forerun.messages import TokenLogprob
from forerun.server.sse import encode

LOWEST = -9999.0  # JSON has no -inf
SLICE = 8  # tokens whose log-probabilities are written at once: with 64 others each, 3 to 5 ms


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


async def as_json(entries: Sequence[TokenLogprob], tokenizer: Spells, of_chat: bool) -> str:
    """Either shape as JSON. Of a long text it is made in slices, between which others are served."""
    shape = for_chat((), tokenizer) if of_chat else for_completion((), tokenizer)
    columns: dict[str, list[str]] = {name: [] for name, value in shape.items() if value is not None}
    offset = 0
    for start in range(0, len(entries), SLICE):
        some = entries[start : start + SLICE]
        found = for_chat(some, tokenizer) if of_chat else for_completion(some, tokenizer, offset)
        offset += sum(map(len, found.get("tokens", ())))
        for name, pieces in columns.items():
            pieces.append(encode(found[name])[1:-1])
        await asyncio.sleep(0)
    spelt = {name: f"[{','.join(columns[name])}]" if name in columns else "null" for name in shape}
    return "{" + ",".join(f'"{name}":{text}' for name, text in spelt.items()) + "}"


def _entry(token: int, value: float, tokenizer: Spells) -> dict[str, Any]:
    text = tokenizer.decode([token], skip_special=False)
    return {"token": text, "logprob": max(value, LOWEST), "bytes": list(tokenizer.token_bytes(token))}
