"""Structured output and tools through the server: the schema's order, refusals, failures that are said, tool texts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from forerun.core.params import for_schema  # noqa: E402
from tests.server.conftest import Running  # noqa: E402
from tests.structure.test_grammar import FAILS_LATER, HARD, LOOP  # noqa: E402

WORD = {"type": "string", "maxLength": 10}
ANSWER: dict[str, Any] = {
    "type": "object", "required": ["answer", "inner", "reasoning"], "additionalProperties": False,
    "$defs": {"Inner": {"type": "object", "properties": {"z": WORD, "a": WORD}, "required": ["a", "z"],
                        "additionalProperties": False}},
    "properties": {"reasoning": WORD, "inner": {"$ref": "#/$defs/Inner"}, "answer": {"enum": [1, 2]}},
}  # fmt: skip
ADD: dict[str, Any] = {"type": "function", "function": {
    "name": "add", "description": "Adds two numbers.", "parameters": {
    "type": "object", "required": ["b", "a"], "additionalProperties": False, "$defs": {"N": {"enum": [1, 2, 3]}},
    "properties": {"b": {"$ref": "#/$defs/N"}, "a": {"$ref": "#/$defs/N"}}}}}  # fmt: skip
SAYS = [{"role": "user", "content": "What is 1 + 2?"}]


def chat(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": SAYS, "temperature": 0, "max_tokens": 60, **body})


def prompt_of(http: httpx.Client, **body: Any) -> int:
    """How many tokens the prompt of a chat has."""
    answer = chat(http, **{"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens"]
    return found


@pytest.mark.parametrize("speculative", ["off", "on"])
def test_keys_come_in_the_order_of_the_schema(speculative: str, served: Running) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        asked = {"model": "smollm2", "messages": SAYS, "temperature": 0, "max_tokens": 80}
        more = {"extra_body": {"speculative": speculative}}
        answer = client.chat.completions.create(**asked, **more, response_format=for_schema(ANSWER)).choices[0]
        found = json.loads(answer.message.content)
        assert list(found) == ["reasoning", "inner", "answer"]
        assert list(found["inner"]) == ["z", "a"]
        assert answer.finish_reason == "stop"
        must = {"type": "function", "function": {"name": "add"}}
        called = client.chat.completions.create(**asked, **more, tools=[ADD], tool_choice=must).choices[0]
        ((call),) = called.message.tool_calls
        assert call.function.name == "add"
        assert list(json.loads(call.function.arguments)) == ["b", "a"]


IMPOSSIBLE: list[Any] = [
    {"type": "integer", "multipleOf": 99991, "minimum": 1}, {"$ref": "#"}, LOOP, False, {"not": {}},
]  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("schema", IMPOSSIBLE)
def test_what_cannot_be_compiled_is_refused(schema: Any, streams: bool, http: httpx.Client) -> None:
    answer = chat(http, response_format=for_schema(schema), stream=streams)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the JSON schema cannot be used: ")


def test_a_pattern_that_explodes_is_written_or_says_why_not(http: httpx.Client) -> None:
    """It was cut, and ended with `stop`."""
    choice = chat(http, response_format=for_schema({"type": "string", "pattern": HARD}), max_tokens=100).json()
    (choice,) = choice["choices"]
    assert choice["finish_reason"] in ("length", "error"), "a hundred tokens are too few for this pattern"
    assert len(choice["message"]["content"]) > 100


@pytest.mark.slow
def test_a_grammar_that_fails_later_is_an_error_of_its_text(served: Running, http: httpx.Client) -> None:
    failing, fine = for_schema(FAILS_LATER), for_schema(ANSWER)
    alone = chat(http, response_format=fine).json()["choices"][0]

    async def all_at_once() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            create = client.chat.completions.create
            asked = {"model": "smollm2", "messages": SAYS, "temperature": 0, "max_tokens": 60}
            return await asyncio.gather(
                create(**asked, response_format=failing, n=2), create(**asked, response_format=fine)
            )

    both, other = asyncio.run(all_at_once())
    for choice in both.choices:
        assert choice.finish_reason == "error"
        assert choice.error["message"].startswith("the answer cannot go on: ")
        assert choice.message.content.startswith('{"kind":')
        assert choice.message.content.rstrip().endswith('"x":')
    assert other.choices[0].message.content == alone["message"]["content"]
    assert other.choices[0].finish_reason == "stop"
    assert "error" not in alone
    lines = chat(http, response_format=failing, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]"
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["error"]) == ("error", {"message": both.choices[0].error["message"]})
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == both.choices[0].message.content


@pytest.mark.slow
def test_a_completion_and_a_tool_that_fail(http: httpx.Client) -> None:
    body = {"prompt": "x", "response_format": for_schema(FAILS_LATER), "max_tokens": 60, "temperature": 0}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "error"
    assert choice["error"]["message"].startswith("the answer cannot go on: ")
    endless = {"type": "function", "function": {"name": "no_end", "parameters": {"$ref": "#"}}}
    choice = chat(http, tools=[endless], tool_choice="required").json()["choices"][0]
    assert choice["finish_reason"] == "error"
    assert choice["error"]["message"].startswith("the answer cannot go on: no text matches the schema")
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('{"name":')
    wrong = {"type": "function", "function": {"name": "wrong", "parameters": {"not": {}}}}
    assert chat(http, tools=[wrong], tool_choice="required").status_code == 400


def test_whitespace_may_be_free(http: httpx.Client) -> None:
    wanted = for_schema(ANSWER)
    free, none, usual = (
        chat(http, response_format=wanted, **more).json()["choices"][0]["message"]["content"]
        for more in (
            {"structured_outputs": {"disable_any_whitespace": False}, "max_tokens": 120},
            {"structured_outputs": {"disable_any_whitespace": True}},
            {},
        )
    )
    assert "\n" in free
    assert none == json.dumps(json.loads(none), separators=(",", ":"), ensure_ascii=False)
    assert "\n" not in usual
    wrong = chat(http, response_format=wanted, structured_outputs={"disable_whitespace": True})
    assert wrong.status_code == 400
    assert "disable_any_whitespace" in wrong.json()["error"]["message"]


def test_tools_reach_a_model_whose_template_has_none(served: Running, http: httpx.Client) -> None:
    tokenizer = served.llm.tokenizer
    without, offered = prompt_of(http), prompt_of(http, tools=[ADD])
    text = tokenizer.chat_text(SAYS, tools=[{"type": "function", "function": ADD["function"]}])
    assert '{"name": "add", "description": "Adds two numbers."' in text
    assert "<tool_call>" in text
    assert offered == len(tokenizer.encode(text, add_special=False)) > without + 50
    assert prompt_of(http, tools=[ADD], tool_choice="none") == without, "none = nothing is offered"
    assert prompt_of(http, tools=[]) == without


def test_what_was_called_and_returned_reaches_it_too(served: Running, http: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    said = [
        *SAYS, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It is 3."}, {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    text = served.llm.tokenizer.chat_text(said)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
    assert 'user\n<tool_response name="add">\nIt is 3.\n</tool_response>' in text
    asked = prompt_of(http, messages=said)
    shorter = [said[0], {"role": "assistant", "content": ""}, said[3]]
    assert asked > prompt_of(http, messages=shorter) + 20
    wrong = {**call, "function": {"name": "add", "arguments": "{"}}
    refused = chat(http, messages=[*SAYS, {"role": "assistant", "content": None, "tool_calls": [wrong]}])
    assert refused.status_code == 400
    assert "no JSON" in refused.json()["error"]["message"]
