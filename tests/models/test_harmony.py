"""Harmony, gpt-oss's chat format: conversations of the OpenAI API's shape through a template, ends, parsing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from forerun.core.errors import InvalidInput
from forerun.models.load.chat import render_chat
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.parsers import found_in, parser_of
from forerun.server.schemas import ChatRequest

# What gpt-oss's own template asks of messages: contents that can be looked into, thinking under that name, never beside
# content in a call, arguments that it writes as JSON, and tools with descriptions.
TEMPLATE = """\
{%- if tools %}{{ "<|start|>developer<|message|>" }}{% for tool in tools %}
{{- "// " + tool.function.description + " type " + tool.function.name + ";" }}{% endfor %}{{ "<|end|>" }}{% endif -%}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- if "content" in message and "<|channel|>final" in message.content %}{{ raise_exception("tags") }}{% endif %}
{%- if "tool_calls" in message %}{% set call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}{{ raise_exception("both") }}{% endif %}
{%- if message.thinking %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{% endif %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments | tojson }}{{ "<|call|>" }}
{%- else %}{{ "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{% endif %}
{%- elif message.role == "tool" %}
{{- "<|start|>functions.add to=assistant<|channel|>commentary<|message|>" + message.content | tojson + "<|end|>" }}
{%- else %}{{ "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
MARKS = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"]


def called(**message: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "é"}'}}
    return [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": None, "tool_calls": [call], **message},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]


def test_a_call_goes_back_as_it_was_written() -> None:
    text = render_chat(TEMPLATE, called(reasoning_content="Add them."), tools=[TOOL], add_generation_prompt=True)
    assert "// " + " type add;" in text, "a tool without a description"
    thought = "<|start|>assistant<|channel|>analysis<|message|>Add them.<|end|>"
    made = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": "é"}<|call|>'
    assert thought + made in text
    assert text.endswith('<|message|>"5"<|end|><|start|>assistant')


def test_thinking_gives_way_to_what_was_said_beside_a_call() -> None:
    text = render_chat(TEMPLATE, called(content="Let me see.", reasoning_content="Add them."), tools=[TOOL])
    assert "Add them." not in text


def test_an_answer_without_calls_is_an_answer() -> None:
    """Clients send an empty list, or null, in place of no calls."""
    for calls in ([], None):
        messages = [{"role": "assistant", "content": "Five.", "tool_calls": calls}, {"role": "user", "content": "Why?"}]
        assert "<|channel|>final<|message|>Five.<|end|>" in render_chat(TEMPLATE, messages)


def test_arguments_that_are_no_json_are_refused() -> None:
    messages = called()
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{a: 2"
    with pytest.raises(InvalidInput, match="arguments of a call of 'add' are no JSON"):
        render_chat(TEMPLATE, messages, tools=[TOOL])


def test_other_templates_get_messages_as_they_are() -> None:
    template = "{% if tools %}{% endif %}{% for m in messages %}"
    template += "{{ m.tool_calls[0].function.arguments if m.tool_calls }}{{ m.role }}{{ m.content }}{% endfor %}"
    assert '{"a": 2, "b": "é"}assistantNone' in render_chat(template, called(), tools=None)


def _tokenizer() -> Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(MARKS)
    return Tokenizer(backend, [backend.token_to_id("<|return|>")], chat_template=TEMPLATE + "{# <|return|> #}")


def test_a_call_ends_the_text_and_the_end_of_a_message_does_not() -> None:
    """GGUF files name one end alone."""
    tokenizer = _tokenizer()
    ends = {tokenizer.token(index) for index in tokenizer.eos_ids}
    assert ends == {"<|return|>", "<|call|>"}


def test_what_the_model_writes_behind_the_prompt_is_told_apart() -> None:
    tokenizer = _tokenizer()
    body = ChatRequest.model_validate({"model": "m", "messages": called()[:1], "tools": [TOOL]})
    prompt = tokenizer.encode(tokenizer.chat_text(called()[:1], tools=[TOOL]), add_special=False)
    written = "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    written += '<|constrain|>json<|message|>{"a": 2}'
    for text, said in ((written, None), ("<|channel|>final<|message|>Five.", "Five.")):
        ids = tokenizer.encode(text, add_special=False)
        parser = parser_of(body, tokenizer, prompt)
        assert parser is not None
        found = found_in(parser, tokenizer.decode(ids, skip_special=False))
        assert (found.text or None) == said
        if said is None:
            assert found.reasoning == "Add them."
            assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("add", {"a": 2})]
