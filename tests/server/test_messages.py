"""`/v1/messages` by the real `anthropic` client: every text is the chat's, and every event is where the API has it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("llguidance")

from forerun.server.backends.start import LOAD_LLM, Loader
from forerun.server.settings import ServerSettings
from tests.server.conftest import MODEL, Running, start_process

SAYS = "one two three four one two three four one two"
ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1, 2]}}}}  # fmt: skip
SHORT = {"type": "object", "properties": {"sum": {"enum": [3, 4]}}, "required": ["sum"], "additionalProperties": False}
ASKED: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": SAYS}], "max_tokens": 16}


anthropic: Any = None


@pytest.fixture(scope="module", autouse=True)
def _import_the_client() -> None:
    """Here and not above: it takes seconds, and whoever collects the tests need not wait for it."""
    global anthropic
    anthropic = pytest.importorskip("anthropic")


@pytest.fixture
def client(served: Running) -> Iterator[Any]:
    with client_of(served) as made:
        yield made


def client_of(served: Running) -> Any:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"model": "smollm2", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def kinds(events: list[Any]) -> list[str]:
    """The types of events in their order, those in a row once."""
    found = [event.type for event in events]
    return [kind for i, kind in enumerate(found) if not i or found[i - 1] != kind]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("speculative", ["off", {"drafter": "ngram", "budget": 4}])
@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 7}])
def test_the_text_is_the_chats(client: Any, http: httpx.Client, law: dict[str, Any], speculative: Any) -> None:
    messages = [{"role": "system", "content": "Go on."}, *ASKED["messages"]]
    wanted = chat(http, messages=messages, max_tokens=16, speculative=speculative, **law)
    text = wanted["choices"][0]["message"]["content"]
    own = {"extra_body": {"speculative": speculative, **law}}
    whole = client.messages.create(**ASKED, system="Go on.", **own)
    assert text
    assert [block.text for block in whole.content] == [text]
    with client.messages.stream(**ASKED, system=[{"type": "text", "text": "Go on."}], **own) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, None)
    for usage in (whole.usage, final.usage):
        assert usage.output_tokens == wanted["usage"]["completion_tokens"]
        assert usage.input_tokens + usage.cache_read_input_tokens == wanted["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(model="smollm2", messages=ASKED["messages"], system="Go on.")
    assert counted.input_tokens == wanted["usage"]["prompt_tokens"]


def test_an_answer_that_the_client_began_is_gone_on_with(client: Any, http: httpx.Client) -> None:
    whole = chat(http, messages=ASKED["messages"], max_tokens=16, temperature=0)["choices"][0]["message"]["content"]
    cut = whole.index(" ", len(whole) // 2)  # within a word the tokens of its halves would not be those of the whole
    begun, rest = whole[:cut], whole[cut:]
    messages = [*ASKED["messages"], {"role": "assistant", "content": begun}]
    found = client.messages.create(model="smollm2", messages=messages, max_tokens=16, extra_body={"temperature": 0})
    text = found.content[0].text
    assert text
    assert text[: len(rest)] == rest[: len(text)], "as the model would have gone on by itself"
    call = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="only text is gone on with"):
        client.messages.create(
            model="smollm2", messages=[*ASKED["messages"], {"role": "assistant", "content": [call]}], max_tokens=4
        )


def test_events_come_in_the_apis_order(http: httpx.Client, client: Any) -> None:
    with http.stream("POST", "/v1/messages", json={**ASKED, "temperature": 0, "stream": True}) as answer:
        lines = list(answer.iter_lines())
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert named == [event["type"] for event in data]
    assert named[:3] == ["message_start", "ping", "content_block_start"]
    assert named[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(named[3:-3]) == {"content_block_delta"}
    assert len(named) > 8
    assert data[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_stop_sequence_is_named(client: Any) -> None:
    body = {**ASKED, "max_tokens": 40, "temperature": 0}
    temperature = body.pop("temperature")
    text = client.messages.create(**body, extra_body={"temperature": temperature}).content[0].text
    stop = text[10:14]
    cut = client.messages.create(**body, stop_sequences=["@@", stop], extra_body={"temperature": temperature})
    assert cut.content[0].text == text[: text.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.slow
def test_tools_are_used_and_their_results_are_read(client: Any, http: httpx.Client) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2", "messages": [{"role": "user", "content": "What is 1 + 2?"}], "max_tokens": 60,
        "tools": [ADD], "extra_body": {"temperature": 0},
    }  # fmt: skip
    for choice in ({"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):
        answer = client.messages.create(**asked, tool_choice=choice)
        (used,) = answer.content
        assert (used.type, used.name, answer.stop_reason) == ("tool_use", "add", "tool_use")
        assert set(used.input) == {"a", "b"}
        with client.messages.stream(**asked, tool_choice=choice) as stream:
            raw = kinds([event for event in stream if event.type.startswith(("message", "content"))])
            final = stream.get_final_message()
        assert final.content[0].input == used.input
        assert final.stop_reason == "tool_use"
        assert raw == ["message_start", "content_block_start", "content_block_delta", "content_block_stop",
                       "message_delta", "message_stop"]  # fmt: skip
    said = [*asked["messages"], {"role": "assistant", "content": [
        {"type": "text", "text": "I add."}, used.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "3"},
                                     {"type": "text", "text": "So?"}]}]  # fmt: skip
    answer = client.messages.create(**{**asked, "messages": said, "max_tokens": 8})
    called = {"id": used.id, "type": "function", "function": {"name": "add", "arguments": json.dumps(used.input)}}
    function = {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}
    wanted = chat(
        http, temperature=0, max_tokens=8, tools=[{"type": "function", "function": function}],
        messages=[*asked["messages"], {"role": "assistant", "content": "I add.", "tool_calls": [called]},
                  {"role": "tool", "tool_call_id": used.id, "content": "3"}, {"role": "user", "content": "So?"}],
    )  # fmt: skip
    assert answer.content[0].text == wanted["choices"][0]["message"]["content"]
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == wanted["usage"]["prompt_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("speculative", ["off", "on"])
def test_thinking_is_a_block_of_its_own_within_its_budget(thinking: Running, speculative: str) -> None:
    with client_of(thinking) as client:
        asked: dict[str, Any] = {
            **ASKED, "max_tokens": 80, "thinking": {"type": "enabled", "budget_tokens": 12},
            "output_config": {"format": {"type": "json_schema", "schema": SHORT}},
            "extra_body": {"temperature": 0, "speculative": speculative},
        }  # fmt: skip
        whole = client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert json.loads(whole.content[1].text)["sum"] in (3, 4)
        assert 0 < whole.usage.output_tokens_details.thinking_tokens <= 13
        assert whole.stop_reason == "end_turn"
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
        again = [*ASKED["messages"], {"role": "assistant", "content": [block.to_dict() for block in whole.content]},
                 {"role": "user", "content": "And 2 + 2?"}]  # fmt: skip
        assert client.messages.create(**{**asked, "messages": again}).content[0].type == "thinking"
        off = client.messages.create(**ASKED, thinking={"type": "disabled"}, extra_body={"temperature": 0})
        assert [block.type for block in off.content] == ["text"]


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "think"),  # this model does not
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "display"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 2}]}, "web_search_20250305"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1"}]}]}, "tool_use"),
        ({"messages": [{"role": "system", "content": "x"}]}, "system"),
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "new"}}, "thread="),  # what the client's tool runner asks for unless it is told not to
        ({"mcp_servers": []}, "mcp_servers"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(http: httpx.Client, field: dict[str, Any], names: str) -> None:
    answer = http.post("/v1/messages", json={**ASKED, "max_tokens": 4, **field})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert names in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


def test_errors_are_of_the_apis_kinds(client: Any, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(**{**ASKED, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="did you mean"):
        client.messages.create(**ASKED, extra_body={"temprature": 1})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {"messages": [{"role": "user", "content": "x"}] * 2000}
        many = http.post(path, json=body if "count" in path else {**ASKED, **body})
        assert many.status_code == 400
        assert "context" in many.json()["error"]["message"]
        large = http.post(path, json={"messages": "x" * 250_000})
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        other = http.get(path)
        assert (other.status_code, other.json()["type"]) == (405, "error")


@pytest.mark.slow
def test_either_header_brings_the_key() -> None:
    settings = ServerSettings(model_names=("smollm2",), api_keys=("secret",))
    server, thread, url = start_process(Loader(LOAD_LLM, MODEL), settings)  # the engine of `llm` may have a thread
    try:
        asked = {**ASKED, "max_tokens": 1}
        for right in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=url, max_retries=0, **right) as client:
                assert client.messages.create(**asked).usage.output_tokens == 1
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError, match="not known"),
        ):
            client.messages.create(**asked)
        chat = {"messages": ASKED["messages"], "max_tokens": 1}
        assert (
            httpx.post(f"{url}/v1/chat/completions", json=chat, headers={"x-api-key": "secret"}, timeout=60).status_code
            == 401
        )
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_rounds_without_text_do_not_end_a_stream(served: Running, http: httpx.Client, path: str) -> None:
    """A token that is a part of a character adds no text."""
    tokenizer = served.llm.tokenizer
    part = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe2")
    own = {"input": SAYS, "max_output_tokens": 6} if path == "/v1/responses" else {**ASKED, "max_tokens": 6}
    forced = {"logit_bias": {str(part): 1e6}, "temperature": 0, "speculative": "off", "stream": True}
    with http.stream("POST", path, json={**own, **forced}) as answer:
        events = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
    assert events[-1] in ("message_stop", "response.incomplete")


def becomes(served: Running, running: int) -> bool:
    """Does the server come to write this number of texts?"""
    deadline = time.monotonic() + 20
    while (found := served.stats()["running"]) != running and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found == running)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_client_that_leaves_ends_its_text(served: Running, http: httpx.Client, path: str) -> None:
    own = {"input": SAYS} if path == "/v1/responses" else {"messages": ASKED["messages"], "max_tokens": 900}
    slow = {"ignore_eos": True, "speculative": "off", "stream": True}  # drafted, it may end before a busy client looks
    with http.stream("POST", path, json={**own, **slow}) as answer:
        for line in answer.iter_lines():
            if "delta" in line:
                assert becomes(served, 1), "figures may be old on a busy machine, but not for long"
                break
    assert becomes(served, 0)
    assert http.get("/metrics").text.count(f'route="{path}",status="200"')
