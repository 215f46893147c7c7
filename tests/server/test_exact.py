"""What requests may ask for, with and without speculation, by the real `openai` client: the answers must be equal.

The answer without drafts comes whole from the client that waits; those with drafts stream, from the async client.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from forerun import LLM  # noqa: E402
from tests.server.conftest import Running  # noqa: E402

DRAFTED: tuple[dict[str, Any], ...] = (
    {"drafter": "ngram", "budget": 6},
    {"drafter": "eagle3", "budget": {"nodes": 8, "depth": 4, "width": 2}},
)
REPEATS = "one two three four one two three four one two three"
PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": f"make_{what}", "parameters": PERSON}} for what in ("a", "b")]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled, two texts": {"temperature": 0.9, "seed": 7, "n": 2},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 4},
    "logprobs of a drawn text": {"temperature": 1.2, "seed": 3, "logprobs": True, "top_logprobs": 2},
    "truncated": {"temperature": 1.1, "seed": 5, "top_p": 0.8, "extra_body": {"top_k": 20, "min_p": 0.02}},
    "penalties": {"temperature": 0, "presence_penalty": 0.9, "frequency_penalty": 0.7},
    "repetition": {"temperature": 0, "extra_body": {"repetition_penalty": 1.3, "min_tokens": 10}},
    "bias": {"temperature": 0, "logit_bias": {"28": -100, "253": 4}},
    "stop": {"temperature": 0, "stop": ["four", "."]},
    "JSON": {"temperature": 0.8, "seed": 2, "response_format": {"type": "json_object"}},
    "schema": {"temperature": 0.8, "seed": 2, "max_tokens": 60, "response_format":
               {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    "tools, one must be called": {"temperature": 0.8, "seed": 4, "max_tokens": 60, "tools": TOOLS,
                                  "tool_choice": "required"},
    "tools, this one": {"temperature": 0, "max_tokens": 60, "tools": TOOLS,
                        "tool_choice": {"type": "function", "function": {"name": "make_b"}}},
    "tools, free": {"temperature": 0, "tools": TOOLS},
}  # fmt: skip


def asked(case: dict[str, Any], speculative: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "max_tokens": 14, "messages": [{"role": "user", "content": REPEATS}], **case}
    return {**body, "extra_body": {**case.get("extra_body", {}), "speculative": speculative}}


def whole(url: str, case: dict[str, Any], speculative: Any) -> list[dict[str, Any]]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(**asked(case, speculative))
    return [
        {
            "text": choice.message.content or "",
            "calls": [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()],
            "reason": choice.finish_reason,
            "logprobs": [] if choice.logprobs is None else choice.logprobs.content,
        }
        for choice in answer.choices
    ]


async def streamed(url: str, case: dict[str, Any], speculative: Any) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        async for chunk in await client.chat.completions.create(**asked(case, speculative), stream=True):
            for choice in chunk.choices:
                own = found.setdefault(choice.index, {"text": "", "calls": [], "reason": None, "logprobs": []})
                own["text"] += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():  # a name first, then its arguments piece by piece
                    if call.function.name is not None:
                        own["calls"].append((call.function.name, ""))
                    called, arguments = own["calls"][call.index]
                    own["calls"][call.index] = called, arguments + (call.function.arguments or "")
                own["reason"] = choice.finish_reason or own["reason"]
                own["logprobs"] += choice.logprobs.content if choice.logprobs else []
    return [found[i] for i in sorted(found)]


def tokens_of(entries: list[Any]) -> list[tuple[str, list[str]]]:
    return [(entry.token, [top.token for top in entry.top_logprobs]) for entry in entries]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", CASES)
def test_drafts_change_nothing(name: str, served: Running) -> None:
    if "schema" in name or "JSON" in name or "must" in name or "this" in name:
        pytest.importorskip("llguidance")
    case = CASES[name]
    plain = whole(served.url, case, "off")
    assert len(plain) == case.get("n", 1)
    for speculative in DRAFTED:
        before = served.metric("spec_decode_num_draft_tokens_total")
        drafted = asyncio.run(streamed(served.url, case, speculative))
        assert served.metric("spec_decode_num_draft_tokens_total") > before, "negative control: something was drafted"
        for one, other in zip(plain, drafted, strict=True):
            a, b = one["logprobs"], other["logprobs"]
            assert {**one, "logprobs": None} == {**other, "logprobs": None}
            assert tokens_of(a) == tokens_of(b)
            assert [e.logprob for e in a] == pytest.approx([e.logprob for e in b], abs=1e-4)


def test_a_tool_that_must_be_called_is_called(served: Running) -> None:
    pytest.importorskip("llguidance")
    (one,) = whole(served.url, CASES["tools, this one"], "on")
    ((name, arguments),) = one["calls"]
    assert (name, one["reason"], one["text"]) == ("make_b", "tool_calls", "")
    assert set(json.loads(arguments)) == {"name", "age"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "rm"}}, {"type": "x"}])
def test_a_tool_that_is_not_there_cannot_be_called(served: Running, choice: Any) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        tools = {} if choice == "required" else {"tools": TOOLS}
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(**asked({"tool_choice": choice, **tools}, "on"))


@pytest.mark.slow
def test_what_was_drafted_does_not_depend_on_the_load(llm: LLM, served: Running) -> None:
    """The same request, alone and beside others: the same bytes."""
    case = CASES["sampled, two texts"]

    async def many() -> list[Any]:
        return await asyncio.gather(*(streamed(served.url, case, DRAFTED[i % 2]) for i in range(5)))

    alone = asyncio.run(streamed(served.url, case, "off"))
    assert all(found == alone for found in asyncio.run(many()))
