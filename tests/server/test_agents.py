"""Thinking, tools and structure through the server, by the real `openai` client."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from tests.server.conftest import Running  # noqa: E402

SAYS = [{"role": "user", "content": "What is 1 + 2?"}]
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1, 2]}}}}}  # fmt: skip
SHORT = {"type": "object", "properties": {"sum": {"enum": [3, 4]}}, "required": ["sum"], "additionalProperties": False}


# what else vLLM's own parameters hold
DEFAULTS = {
    "regex": None, "disable_fallback": False, "disable_any_whitespace": True, "disable_additional_properties": False,
    "whitespace_pattern": None, "structural_tag": None,
}  # fmt: skip


def client_of(served: Running) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)


@pytest.mark.slow
@pytest.mark.parametrize("speculative", ["off", "on"])
def test_thinking_is_told_apart_ends_in_time_and_comes_before_the_schema(thinking: Running, speculative: str) -> None:
    with client_of(thinking) as client:
        asked: dict[str, Any] = {
            "model": "smollm2", "messages": SAYS, "temperature": 0, "max_tokens": 80,
            "extra_body": {"max_thinking_tokens": 12, "speculative": speculative},
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SHORT}},
        }  # fmt: skip
        whole = client.chat.completions.create(**asked)
        answer = whole.choices[0]
        assert json.loads(answer.message.content)["sum"] in (3, 4)
        thought = answer.message.model_extra["reasoning_content"]
        assert 0 < len(thinking.llm.tokenizer.encode(thought, add_special=False)) <= 13
        assert "think>" not in thought + answer.message.content
        assert whole.usage.completion_tokens_details.reasoning_tokens == len(
            thinking.llm.tokenizer.encode(thought, add_special=False)
        )
        *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        assert last.usage == whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})
        deltas = [chunk.choices[0].delta for chunk in chunks]
        parts = ["".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas),
                 "".join(delta.content or "" for delta in deltas)]  # fmt: skip
        assert parts == [thought, answer.message.content]


@pytest.mark.slow
def test_effort_limits_thinking(thinking: Running) -> None:
    with client_of(thinking) as client:
        asked: dict[str, Any] = {"model": "smollm2", "messages": SAYS, "temperature": 0, "max_tokens": 40}
        none = client.chat.completions.create(**asked, reasoning_effort="none").choices[0].message
        assert (none.model_extra or {}).get("reasoning_content") is None
        assert none.content
        low = client.chat.completions.create(**asked, reasoning_effort="low").choices[0].message
        assert low.model_extra["reasoning_content"], "40 tokens are less than its budget"


def test_a_model_that_does_not_think_says_so(http: httpx.Client) -> None:
    body = {"messages": SAYS, "max_tokens": 2}
    answer = http.post("/v1/chat/completions", json={**body, "max_thinking_tokens": 5})
    assert answer.status_code == 400
    assert "models that think" in answer.json()["error"]["message"]
    taken = http.post("/v1/chat/completions", json={**body, "reasoning_effort": "low"})
    assert taken.status_code == 200
    assert taken.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert http.post("/v1/chat/completions", json={**body, "reasoning_effort": "much"}).status_code == 400
    assert http.post("/v1/chat/completions", json={**body, "max_thinking_tokens": -1}).status_code == 400


@pytest.mark.slow
def test_calls_are_streamed(served: Running) -> None:
    with client_of(served) as client:
        asked: dict[str, Any] = {
            "model": "smollm2", "messages": SAYS, "temperature": 0, "max_tokens": 60, "tools": [ADD],
            "tool_choice": "required",
        }  # fmt: skip
        whole = client.chat.completions.create(**asked).choices[0]
        (call,) = whole.message.tool_calls
        assert whole.finish_reason == "tool_calls"
        assert json.loads(call.function.arguments).keys() == {"a", "b"}
        chunks = list(client.chat.completions.create(**asked, stream=True))
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert parts[0].function.name == "add"
        assert parts[0].id.startswith("call_")
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        assert len(parts) > 2, "arguments come as they are written"
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_text_beside_tools_is_streamed_as_it_comes(served: Running) -> None:
    with client_of(served) as client:
        asked: dict[str, Any] = {"model": "smollm2", "messages": SAYS, "temperature": 0, "max_tokens": 24}
        chunks = list(client.chat.completions.create(**asked, tools=[ADD], tool_choice="auto", stream=True))
        whole = client.chat.completions.create(**asked, tools=[ADD], tool_choice="auto").choices[0].message
        if whole.content is not None and not whole.tool_calls:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.content
            # one call of the engine may write several plain tokens
            assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 1


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}[0-9]"}}, "[a-c]{3}[0-9]"),
        ({"guided_choice": ["three", "four"]}, "three|four"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "x" [0-9] [0-9]'}}, "x[0-9]{2}"),
        ({"guided_json": SHORT, "guided_decoding_backend": "auto"}, r'\{"sum": ?[34]\}'),
        ({"structured_outputs": {"json": SHORT, **DEFAULTS}}, r'\{"sum": ?[34]\}'),
    ],
)
def test_structures(http: httpx.Client, body: dict[str, Any], pattern: str) -> None:
    asked = {"messages": SAYS, "temperature": 0, "max_tokens": 30}
    for speculative in ("off", "on"):
        answer = http.post("/v1/chat/completions", json={**asked, **body, "speculative": speculative})
        assert answer.status_code == 200, answer.text
        assert re.fullmatch(pattern, answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "(a"}, {"guided_choice": []}, {"guided_grammar": "start: x"}, {"guided_json": "{"},
        {"response_format": {"type": "structural_tag"}}, {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"json": SHORT, "disable_additional_properties": True}},
    ],
)  # fmt: skip
def test_a_structure_that_cannot_be_is_a_400(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": SAYS, "max_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    assert "\n" not in answer.json()["error"]["message"]


def test_some_of_the_tools_may_be_allowed(served: Running, http: httpx.Client) -> None:
    """The `allowed_tools` of both APIs of OpenAI's: the text is that of a request that offers these alone."""
    add: dict[str, Any] = ADD["function"]
    subtract = {"type": "function", "function": {**add, "name": "subtract"}}
    allowed = [{"type": "function", "function": {"name": "add"}}]
    choice: dict[str, Any] = {"mode": "required", "tools": allowed}
    asked: dict[str, Any] = {"messages": SAYS, "temperature": 0, "max_tokens": 60, "model": "smollm2"}
    with client_of(served) as client:
        some = client.chat.completions.create(
            **asked, tools=[subtract, ADD], tool_choice={"type": "allowed_tools", "allowed_tools": choice}
        )
        alone = client.chat.completions.create(**asked, tools=[ADD], tool_choice="required")
        calls = [answer.choices[0].message.tool_calls[0].function for answer in (some, alone)]
        assert calls[0] == calls[1]
        assert calls[0].name == "add"
        flat = [{"type": "function", **tool} for tool in ({**add, "name": "subtract"}, add)]
        answer = client.responses.create(
            model="smollm2", input=SAYS[0]["content"], temperature=0, max_output_tokens=60, tools=flat,
            tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
        )  # fmt: skip
        assert [(item.name, item.arguments) for item in answer.output] == [("add", calls[0].arguments)]
    unknown = [{"type": "function", "function": {"name": "no"}}]
    for change in (
        {"mode": "none"},
        {"tools": unknown},
        {"tools": [7]},
        {"tools": "add"},
        {"tools": [{"function": 3}]},
    ):
        wrong = {**choice, **change}
        body = {**asked, "tools": [ADD], "tool_choice": {"type": "allowed_tools", "allowed_tools": wrong}}
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400, wrong
        assert "\n" not in refused.json()["error"]["message"]
