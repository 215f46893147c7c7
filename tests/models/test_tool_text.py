"""Tools in templates that know none: the offer, calls and what they returned reach the model as text, or an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.core.errors import InvalidInput
from forerun.models.load.chat import render_chat
from forerun.server.parsers import ToolParser, found_in

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}}}  # fmt: skip
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + PLAIN
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"
KNOWS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)
USER: dict[str, Any] = {"role": "user", "content": "2 + 3?"}
CALLED: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {"a": 4, "b": "é"}}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
    {"role": "tool", "tool_call_id": "c2", "content": "6"},
    {"role": "user", "content": "And?"},
]  # fmt: skip


def test_what_is_offered_is_in_the_system_message() -> None:
    text = render_chat(PLAIN, [USER], tools=[TOOL])
    assert text.startswith("[system]You can call")
    assert json.dumps(TOOL["function"]) in text.splitlines(), "in the order in which it was given"
    assert text.index("[system]") < text.index("[user]2 + 3?")
    own = render_chat(PLAIN, [{"role": "system", "content": "Be brief."}, USER], tools=[TOOL])
    assert own.startswith("[system]Be brief.\n\nYou can call")
    assert own.count("[system]") == 1


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_where_a_template_has_no_system_message_the_user_says_it(template: str) -> None:
    text = render_chat(template, [USER], tools=[TOOL])
    assert text.startswith("[user]2 + 3?\n\nYou can call")
    assert json.dumps(TOOL["function"]) in text


def test_a_template_that_would_drop_them_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no place for tools"):
        render_chat("{{ messages | length }}", [USER], tools=[TOOL])
    with pytest.raises(InvalidInput, match="roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", [USER], tools=[TOOL])


@pytest.mark.parametrize("tools", [None, [], ()])
def test_without_tools_nothing_is_said_of_them(tools: Any) -> None:
    assert render_chat(PLAIN, [USER], tools=tools) == render_chat(PLAIN, [USER]) == "[user]2 + 3?\n"


def test_calls_and_results_are_text() -> None:
    text = render_chat(PLAIN, CALLED)
    answer = text.split("[assistant]")[1].split("[user]")[0]
    said, calls, _ = found_in(ToolParser({"add": {}}), answer)
    assert said is None
    assert [json.loads(call.arguments) for call in calls] == [{"a": 2, "b": 3}, {"a": 4, "b": "é"}]
    results = text.split("[user]")[2]
    assert results == (
        '<tool_response name="add">\n5\n</tool_response>\n<tool_response name="add">\n6\n</tool_response>\n'
    )
    assert text.endswith("[user]And?\n")
    assert "[tool]" not in text
    ended = render_chat(PLAIN, CALLED[:3])
    assert ended.endswith('[user]<tool_response name="add">\n5\n</tool_response>\n')
    nameless = render_chat(PLAIN, [USER, {"role": "tool", "content": "x"}])
    assert nameless.endswith("[user]<tool_response>\nx\n</tool_response>\n")
    both = render_chat(PLAIN, [{**CALLED[1], "content": "Let me see."}])
    assert both.startswith("[assistant]Let me see.\n<tool_call>")


def test_what_is_taught_is_what_is_read() -> None:
    text = render_chat(PLAIN, [USER], tools=[TOOL])
    example = text[text.index("<tool_call>") : text.index("</tool_call>") + len("</tool_call>")]
    said, (call,), _ = found_in(ToolParser({"the function's name": {}}), example)
    assert (call.name, said) == ("the function's name", None)


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    text = render_chat(KNOWS, CALLED, tools=[TOOL])
    assert text.startswith(json.dumps([TOOL]))
    assert "tool_call_id" not in text
    assert "tool" in text.replace("tool_call", "")
    assert "<tool_response" not in text


@pytest.mark.parametrize(
    "calls",
    [
        "x",
        [None],
        [{"function": {"arguments": "{}"}}],
        [{"function": {"name": "add", "arguments": "{"}}],
        [{"function": "add"}],
    ],
)
def test_calls_that_are_none_are_refused(calls: Any) -> None:
    with pytest.raises(InvalidInput) as found:
        render_chat(PLAIN, [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("strange", [[], {}, 1, [[1]], True])
def test_ids_that_are_no_text_are_refused(strange: Any) -> None:
    """Lists and objects cannot be looked up: they gave a 500."""
    call = {"id": strange, "function": {"name": "add", "arguments": "{}"}}
    for messages in (
        [USER, {"role": "assistant", "content": "", "tool_calls": [call]}],
        [*CALLED[:2], {"role": "tool", "tool_call_id": strange, "content": "5"}],
    ):
        with pytest.raises(InvalidInput, match="must be text, not"):
            render_chat(PLAIN, messages)
