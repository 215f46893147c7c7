"""`/v1/responses` by the real `openai` client: every text is the chat's, and every event is where the API has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

from tests.server.conftest import Running  # noqa: E402

SAYS = "one two three four one two three four one two"
ADD: dict[str, Any] = {"type": "function", "name": "add", "description": "Adds.", "strict": True, "parameters": {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1, 2]}}}}  # fmt: skip
SHORT = {"type": "object", "properties": {"sum": {"enum": [3, 4]}}, "required": ["sum"], "additionalProperties": False}
TEXT_EVENTS = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
               "response.output_text.delta", "response.output_text.done", "response.content_part.done",
               "response.output_item.done", "response.incomplete"]  # fmt: skip


@pytest.fixture
def client(served: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def kinds(events: list[Any]) -> list[str]:
    """The types of events in their order, those in a row once."""
    found = [event.type for event in events]
    return [kind for i, kind in enumerate(found) if not i or found[i - 1] != kind]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("speculative", ["off", {"drafter": "ngram", "budget": 4}])
@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}])
def test_the_text_is_the_chats(client: Any, law: dict[str, Any], speculative: Any) -> None:
    chat = client.chat.completions.create(
        model="smollm2", messages=[{"role": "system", "content": "Go on."}, {"role": "user", "content": SAYS}],
        max_tokens=16, **law, extra_body={"speculative": speculative},
    )  # fmt: skip
    seed = {name: value for name, value in law.items() if name == "seed"}
    asked: dict[str, Any] = {
        "model": "smollm2", "instructions": "Go on.", "input": SAYS, "max_output_tokens": 16,
        **{name: value for name, value in law.items() if name != "seed"},
        "extra_body": {"speculative": speculative, **seed},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    wanted = chat.choices[0].message.content
    assert wanted
    assert whole.output_text == wanted
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted
    assert events[-1].response.output_text == wanted
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.total_tokens == chat.usage.total_tokens
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_the_apis_order_and_are_numbered(client: Any, http: httpx.Client) -> None:
    asked = {"model": "smollm2", "input": SAYS, "max_output_tokens": 8, "temperature": 0}
    events = list(client.responses.create(**asked, stream=True))
    assert kinds(events) == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first, last = events[0].response, events[-1].response
    assert (first.status, last.status, last.incomplete_details.reason) == (
        "in_progress", "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert first.id == last.id
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    with http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as answer:
        lines = list(answer.iter_lines())
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert named == [event["type"] for event in data]


def test_the_clients_own_stream_adds_up(client: Any) -> None:
    """`responses.stream` checks identities and the order of events by itself."""
    with client.responses.stream(
        model="smollm2", input="Say 1.", temperature=0, max_output_tokens=60,
        extra_body={"structured_outputs": {"choice": ["yes it is", "no it is not"]}},
    ) as stream:  # fmt: skip
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == "".join(pieces)
    assert final.output_text in ("yes it is", "no it is not")


@pytest.mark.slow
def test_functions_are_called_and_what_they_return_is_read(client: Any) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "input": "What is 1 + 2?", "temperature": 0, "max_output_tokens": 60}
    for choice in ("required", {"type": "function", "name": "add"}):
        answer = client.responses.create(**asked, tools=[ADD], tool_choice=choice)
        (call,) = answer.output
        assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
        assert set(json.loads(call.arguments)) == {"a", "b"}
        events = list(client.responses.create(**asked, tools=[ADD], tool_choice=choice, stream=True))
        assert kinds(events) == [
            "response.created", "response.in_progress", "response.output_item.added",
            "response.function_call_arguments.delta", "response.function_call_arguments.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(deltas)) == json.loads(call.arguments)
    said = [{"role": "user", "content": "What is 1 + 2?"}, call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]  # fmt: skip
    answer = client.responses.create(**{**asked, "input": said, "max_output_tokens": 8}, tools=[ADD])
    tool = {"type": "function", "function": {key: value for key, value in ADD.items() if key != "type"}}
    called = {"id": call.call_id, "type": "function", "function": {"name": "add", "arguments": call.arguments}}
    chat = client.chat.completions.create(
        model="smollm2", temperature=0, max_tokens=8, tools=[tool],
        messages=[said[0], {"role": "assistant", "content": "", "tool_calls": [called]},
                  {"role": "tool", "tool_call_id": call.call_id, "content": "3"}],
    )  # fmt: skip
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_items_of_all_kinds_are_the_messages_of_a_chat(client: Any) -> None:
    items = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Yo", "annotations": []}]},
        {"role": "user", "content": "Again"},
    ]  # fmt: skip
    answer = client.responses.create(
        model="smollm2", instructions="Answer.", input=items, temperature=0, max_output_tokens=8
    )
    messages = [{"role": "system", "content": "Answer.\n\nBe short."}, {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "Again"}]  # fmt: skip
    chat = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=8)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_a_schema_holds_and_the_request_is_repeated(client: Any) -> None:
    form = {"type": "json_schema", "name": "sum", "schema": SHORT, "strict": True}
    answer = client.responses.create(
        model="smollm2", input="1 + 2 = ?", max_output_tokens=40, text={"format": form}, metadata={"a": "b"},
        temperature=0.5, store=False, extra_body={"seed": 3},
    )  # fmt: skip
    assert json.loads(answer.output_text)["sum"] in (3, 4)
    assert (answer.status, answer.metadata, answer.temperature) == ("completed", {"a": "b"}, 0.5)
    assert answer.text.format.to_dict() == form
    assert answer.model_extra["seed"] == 3


@pytest.mark.slow
def test_thinking_is_an_item_of_its_own(thinking: Running) -> None:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="x", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "smollm2", "input": "What is 1 + 2?", "temperature": 0, "max_output_tokens": 80,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SHORT}},
            "extra_body": {"max_thinking_tokens": 12},
        }  # fmt: skip
        whole = client.responses.create(**asked)
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        thought = whole.output[0].content[0].text
        assert thought
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens <= 13
        assert json.loads(whole.output_text)["sum"] in (3, 4)
        with client.responses.stream(**asked) as stream:
            events = list(stream)
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == thought
        assert events[-1].response.output_text == whole.output_text
        # what was thought is given back with the next turn
        said = [{"role": "user", "content": "What is 1 + 2?"}, *(item.to_dict() for item in whole.output),
                {"role": "user", "content": "And 2 + 2?"}]  # fmt: skip
        assert client.responses.create(**{**asked, "input": said}).status == "completed"
        none = client.responses.create(
            model="smollm2", input="Hi", temperature=0, max_output_tokens=8, reasoning={"effort": "none"}
        )
        assert [item.type for item in none.output] == ["message"]


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "web_search"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "allowed_tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role"),
        ({"input": [{"role": "user"}]}, "content"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temprature": 2}, "temperature"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(http: httpx.Client, field: dict[str, Any], names: str) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4, **field})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert names in message
    assert "\n" not in message


def test_too_much_is_refused_before_it_is_tokenised(http: httpx.Client) -> None:
    long = http.post("/v1/responses", json={"input": "so " * 60_000})
    many = http.post("/v1/responses", json={"input": [{"role": "user", "content": "x"}] * 2000})
    for answer in (long, many):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert http.post("/v1/responses", json={"input": "x" * 250_000}).status_code == 413
