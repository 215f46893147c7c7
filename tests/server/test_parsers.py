"""Transcripts of each format: thinking, text and calls, whole and in pieces of any size, always alike."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from forerun.core.thinking import HARMONY, Start, marks_of
from forerun.server.parsers import HarmonyParser, Parser, PlainParser, ThinkingParser, ToolParser, found_in, joined

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"}}},
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}  # fmt: skip
PARIS, SUM = {"city": "Paris", "days": 3}, {"a": 1, "b": 2}
BOTH = [("get_weather", PARIS), ("add", SUM)]
THINK = marks_of("</think>")
assert THINK is not None

TRANSCRIPTS: dict[str, tuple[str, str | None, list[tuple[str, Any]]]] = {
    "hermes": (
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "Let me look.", BOTH),
    "hermes, the arguments first": (
        '<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>', None, BOTH[1:]),
    "hermes, arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', None, BOTH[1:]),
    "hermes, not closed": ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}', None, BOTH[1:]),
    "llama 3": ('{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', None, BOTH[:1]),
    "llama 3, two behind a mark": (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "add", "parameters": {"a": 1, "b": 2}}', None, BOTH),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "VvvODy9mT"}]', None, BOTH),
    "mistral, newer": (
        'I will.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]add'
        '[CALL_ID]Xy1[ARGS]{"a": 1, "b": 2}',
        "I will.", BOTH),
    "glm": (
        "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
        "<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>", "Sure.", BOTH),
    "glm, a text that looks like a number": (
        "<tool_call>get_weather<arg_key>zip</arg_key><arg_value>01234</arg_value></tool_call>", None,
        [("get_weather", {"zip": "01234"})]),
    "glm, null": (
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value> null</arg_value></tool_call>", None,
        [("get_weather", {"days": None})]),
    "glm, nothing given": ("<tool_call>add</tool_call>", None, [("add", {})]),
    "qwen coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>", None, BOTH[:1]),
    "deepseek V3.2": (
        'Looking.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>", "Looking.", BOTH),
    "deepseek V3.2, a text that looks like a number": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="zip" string="true">01234</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>", None, [("get_weather", {"zip": "01234"})]),
    "deepseek": (
        "Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n'
        "```json\n"
        '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "Looking.", BOTH),
    "deepseek, newer": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
        "<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', None, BOTH),
    "braces in texts": (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "}{\\"]\\\\"}}</tool_call>', None,
        [("get_weather", {"city": '}{"]\\'})]),
}  # fmt: skip
HARMONIES: dict[str, tuple[str, str | None, list[tuple[str, Any]], str | None]] = {
    "thinks and answers": (
        "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
        "Four.", [], "Two and two."),
    "calls": (
        "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>', None,
        BOTH[:1], "I need it."),
    "calls by the role": (
        "<|channel|>commentary<|message|>A moment.<|end|><|start|>assistant to=functions.add<|channel|>commentary "
        'json<|message|>{"a": 1, "b": 2}<|call|>', "A moment.", BOTH[1:], None),
    "calls what is not there": (
        "<|channel|>commentary to=functions.rm<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>No.",
        "No.", [], "{}"),
    "answers at once": ("<|channel|>final<|message|>Yes.<|return|>", "Yes.", [], None),
    "two calls": (
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris", "days": 3}<|end|><|start|>assistant'
        '<|channel|>commentary to=functions.add<|message|>{"a": 1, "b": 2}<|call|>', None, BOTH, None),
}  # fmt: skip


def check(make: Any, text: str, said: str | None, calls: list[tuple[str, Any]], thought: str | None = None) -> None:
    """The whole text, and the same text letter by letter and in pieces of any size."""
    found = found_in(make(), text)
    assert found.text == said
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert found.reasoning == thought
    dice = random.Random(text)
    for sizes in ([1] * len(text), [dice.randint(1, 9) for _ in text]):
        parser: Parser = make()
        pieces, at = [], 0
        for size in sizes:
            pieces += parser.feed(text[at : at + size])
            at += size
        pieces += parser.end()
        names = [piece.text for piece in pieces if piece.kind == "call"]
        sent = [(name, json.loads(joined("arguments", pieces, i))) for i, name in enumerate(names)]
        assert sent == calls
        assert [piece.call for piece in pieces if piece.kind == "call"] == [*range(len(calls))]
        assert joined("content", pieces).strip() == (said or "").strip()
        assert (joined("reasoning", pieces) or None) == thought


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_calls(name: str) -> None:
    text, said, calls = TRANSCRIPTS[name]
    check(lambda: ToolParser(TOOLS), text, said, calls)
    check(
        lambda: ThinkingParser(THINK, "open", ToolParser(TOOLS)),
        f"\nWhich one?\n</think>\n\n{text}",
        said,
        calls,
        "Which one?",
    )
    check(lambda: ThinkingParser(THINK, "may", ToolParser(TOOLS)), text, said, calls)


@pytest.mark.parametrize("name", HARMONIES)
def test_channels(name: str) -> None:
    text, said, calls, thought = HARMONIES[name]
    check(lambda: HarmonyParser("open", TOOLS, PlainParser()), text, said if said or calls else "", calls, thought)
    assert HARMONY.start_of("x<|start|>assistant") == "open"


@pytest.mark.parametrize(
    ("start", "text", "said", "thought"),
    [
        ("open", "I think.\n</think>\n\nYes.", "Yes.", "I think."),
        ("open", "I think so a < b", "", "I think so a < b"),
        ("open", "</think>Yes.", "Yes.", None),
        ("may", "<think>\nA.\n\nB.\n</think>\n\nYes. </think>", "Yes. </think>", "A.\n\nB."),
        ("may", "  <think>A</think>Yes.", "Yes.", "A"),
        ("may", "No thinking <think>.", "No thinking <think>.", None),
        ("may", " <b>bold</b>", " <b>bold</b>", None),
        ("may", "<thi", "<thi", None),
        ("none", "<think>x</think>", "<think>x</think>", None),
    ],
)
def test_thinking(start: Start, text: str, said: str, thought: str | None) -> None:
    check(lambda: ThinkingParser(THINK, start, PlainParser()), text, said, [], thought)


@pytest.mark.parametrize(
    "text",
    [
        "no call", "{broken", '{"name": "rm"}', '<tool_call>{"name": 5}</tool_call>', "[]", "a <tool", "1 < 2 [TOOL",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call> done', '{"a": 1}', "[1, 2]",
        "<tool_call>rm</tool_call>",
        '<tool_call>[{"arguments": {}, "name": "add"}, {"arguments": {}, "name": "rm"}]</tool_call>',
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    check(lambda: ToolParser(TOOLS), text, text, [])


def test_text_is_not_held_back_until_its_end() -> None:
    parser = ToolParser(TOOLS)
    assert [piece.text for piece in parser.feed("Hello there")] == ["Hello there"]
    assert not parser.feed(" <tool"), "it may be a mark"
    assert joined("content", parser.feed("box> x")) == " <toolbox> x"
    sent = parser.feed('<tool_call>{"name": "add", "arguments": {"a": 1')
    assert [piece.kind for piece in sent] == ["call", "arguments"], "arguments are sent as they come"
    assert joined("arguments", [*sent, *parser.feed(', "b": 2}}</tool_call>')]) == '{"a": 1, "b": 2}'


def test_one_call_at_most() -> None:
    for text, said, calls in TRANSCRIPTS.values():
        found = found_in(ToolParser(TOOLS, parallel=False), text)
        assert [call.name for call in found.calls] == [name for name, _ in calls[:1]]
        assert found.text == said


def test_a_call_that_broke_off_is_text() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    assert found_in(ToolParser(TOOLS), text) == (text, [], None)
