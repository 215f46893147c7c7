"""Log-probabilities in the shapes of the OpenAI API: one for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.completion import Spells, spelt
from forerun.messages import TokenLogprob

LOWEST = -9999.0  # JSON has no -inf


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


def _entry(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": max(one.logprob, LOWEST), "bytes": list(one.bytes)}
