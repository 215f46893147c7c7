"""Log-probabilities in the shapes of the OpenAI API: one for chats, an older one for completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from forerun.api.completion import Spells, spelt
from forerun.core.request import TokenLogprob
from forerun.server.sse import encode

LOWEST = -9999.0  # JSON has no -inf
SLICE = 8  # tokens whose log-probabilities are written at once: with 64 others each, 3 to 5 ms


def for_chat(entries: Sequence[TokenLogprob], tokenizer: Spells) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {**_entry(each), "top_logprobs": [_entry(one) for one in each.top]}
        for each in spelt(entries, tokenizer)
    ]
    return {"content": content, "refusal": None}


def for_completion(entries: Sequence[TokenLogprob], tokenizer: Spells, offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where the first token starts in the text."""
    entries = spelt(entries, tokenizer)
    offsets, at = [], offset
    for each in entries:
        offsets.append(at)
        at += len(each.text)
    return {
        "tokens": [each.text for each in entries],
        "token_logprobs": [max(each.logprob, LOWEST) for each in entries],
        "top_logprobs": [{one.text: max(one.logprob, LOWEST) for one in each.top} for each in entries],
        "text_offset": offsets,
    }


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
    texts = {name: f"[{','.join(columns[name])}]" if name in columns else "null" for name in shape}
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


def _entry(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": max(one.logprob, LOWEST), "bytes": list(one.bytes)}
