"""What the OpenAPI schema says of fields is what the server does with them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.request import Request
from forerun.server.doors.messages import MessagesRequest
from forerun.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest

CHAT = ChatRequest.model_json_schema()["properties"]
RANGED = [name for name, facts in CHAT.items() if "minimum" in facts and name != "n"]
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def takes(name: str, value: float) -> bool:
    try:
        if name == "priority":  # of a request, not of its law
            Request((1,), priority=int(value))
            return True
        SamplingParams.from_dict({name: value} | ({} if "max" in name else {"max_tokens": 10**20}))
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize("name", RANGED)
def test_ranges_in_the_schema_are_the_real_ones(name: str) -> None:
    facts, whole = CHAT[name], any(each.get("type") == "integer" for each in CHAT[name]["anyOf"])
    step = 1 if whole else 1e-6
    low = facts["minimum"] + (1e-3 if "exclusiveMinimum" in facts else 0)
    assert takes(name, low)
    assert not takes(name, (facts["minimum"] if "exclusiveMinimum" in facts else low - step))
    if "maximum" in facts:
        assert takes(name, facts["maximum"])
        assert not takes(name, facts["maximum"] + max(step, facts["maximum"] * 1e-6 if not whole else 1))
    else:
        assert takes(name, 10**6)


def test_some_fields_have_ranges() -> None:
    assert {"temperature", "top_p", "max_tokens", "top_logprobs"} <= set(RANGED)


@pytest.mark.parametrize("name", [*RANGED, "n", "seed", "best_of"])
def test_a_truth_value_is_no_number(name: str) -> None:
    with pytest.raises(ValidationError, match="truth value"):
        ChatRequest.model_validate({**HELLO, name: True})
    ChatRequest.model_validate({**HELLO, name: 1})


@pytest.mark.parametrize("prompt", [[True, False], [[True], [1]], [1, "a"]])
def test_a_truth_value_is_no_token(prompt: list[Any]) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": prompt})
    with pytest.raises(ValidationError):
        DetokenizeRequest.model_validate({"tokens": prompt})


def test_token_ids_are_prompts() -> None:
    for prompt in ([1, 2], [[1], [2]], "a", ["a", "b"]):
        assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt


def test_tools_that_are_allowed_are_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tools[2], tools[0], tools[2]]}}
    asked = ChatRequest.model_validate({**HELLO, "tools": tools, "tool_choice": choice})
    assert [tool.function.name for tool in asked.tools or ()] == ["c", "a"]
    assert asked.tool_choice == "required"


@pytest.mark.parametrize(
    ("thinking", "effort", "most"),
    [
        ({"type": "disabled"}, "none", None),
        ({"type": "enabled", "budget_tokens": 2048}, "low", 2048),
        ({"type": "adaptive"}, "low", None),
        (None, "low", None),
    ],
)
def test_thinking_of_the_messages_api_as_a_chat(thinking: Any, effort: str, most: int | None) -> None:
    body = {**HELLO, "max_tokens": 1, "thinking": thinking, "output_config": {"effort": "low"}}
    chat = MessagesRequest.model_validate(body).as_chat()
    assert (chat.reasoning_effort, chat.max_thinking_tokens) == (effort, most)
