"""What known clients send by themselves: vLLM's load test, litellm, LangChain, and helpers of the `openai` package."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running

PARTS = [{"role": "user", "content": [{"type": "text", "text": "Name three colours."}]}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
VLLM_COMPLETION = {
    "model": "smollm2", "prompt": "Once", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, **USAGE,
    "ignore_eos": True, "temperature": 0.0, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "frequency_penalty": 0.0,
    "use_beam_search": False, "best_of": 1,
}  # fmt: skip
VLLM_CHAT = {
    "model": "smollm2",
    "messages": PARTS,
    "max_completion_tokens": 8,
    **USAGE,
    "ignore_eos": True,
    "temperature": 0,
}
LITELLM = {
    "model": "smollm2", "messages": PARTS, "max_tokens": 8, "temperature": 0, "user": "me", "metadata": {"k": "v"},
    "parallel_tool_calls": True, "tool_choice": "auto", "n": 1, "presence_penalty": 0, "stop": None, "seed": None,
    "response_format": {"type": "text"}, "service_tier": "auto", "logit_bias": {}, "top_logprobs": None,
    "functions": None, **USAGE,
}  # fmt: skip
LANGCHAIN = {
    "model": "smollm2", "n": 1, "temperature": 0, "max_completion_tokens": 8, "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "messages": [
        {"role": "system", "content": "Short answers."}, {"role": "user", "content": "Add 1 and 2.", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "strict": False, "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}}}}],
}  # fmt: skip
KNOWN = {"vLLM completion": VLLM_COMPLETION, "vLLM chat": VLLM_CHAT, "litellm": LITELLM, "LangChain": LANGCHAIN}


@pytest.mark.parametrize("name", KNOWN)
def test_what_clients_send_by_themselves_is_taken(http: httpx.Client, name: str) -> None:
    body: dict[str, Any] = KNOWN[name]
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    answer = http.post(path, json=body, headers={"x-request-id": "bench-0"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "bench-0"
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert all(chunk["choices"] for chunk in chunks[:-1]), "vLLM reads usage from a chunk without choices"
    assert chunks[-1]["choices"] == []
    assert 1 <= chunks[-1]["usage"]["completion_tokens"] <= 8
    assert answer.text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    "field",
    [{"use_beam_search": True}, {"length_penalty": 2}, {"prompt_logprobs": 21}, {"functions": [{}]},
     {"modalities": ["text", "audio"]}],
)  # fmt: skip
def test_what_would_change_the_text_is_refused(http: httpx.Client, field: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **field})
    assert answer.status_code == 400
    assert f"{next(iter(field))}=" in answer.json()["error"]["message"]


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a b a b", "a b a b"], "max_tokens": 6, "ignore_eos": True, "stream": True}
    answer = http.post("/v1/completions", json={**body, "stream_options": options})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    written = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert written == sorted(written)
    assert 0 < written[0] < written[-1] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {8}, "two prompts of four tokens"


def test_models_parsed_by_the_openai_package(served: Running) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        name: str = pydantic.Field(max_length=6)
        age: int = pydantic.Field(le=99)

    asked = {"model": "smollm2", "messages": [{"role": "user", "content": "A person."}], "temperature": 0}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        parsed = client.chat.completions.parse(**asked, max_tokens=60, response_format=Person)
        assert isinstance(parsed.choices[0].message.parsed, Person)
        with client.chat.completions.stream(**asked, max_tokens=12) as events:
            kinds = [event.type for event in events]
            assert "content.delta" in kinds
            text = events.get_final_completion().choices[0].message.content
        assert text == client.chat.completions.create(**asked, max_tokens=12).choices[0].message.content
        assert client.models.list().data[0].id == "smollm2"
        assert client.models.retrieve("alias").id == "alias"
