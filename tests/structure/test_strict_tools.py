"""Strict tools that a text is free to call: once a call begins, it is one that was offered, and of its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from forerun.core.params import Prefix, SamplingParams
from forerun.core.types import Request
from forerun.server.reading import ReaderFacts, RequestReader, strict_calls
from forerun.server.schemas import ChatRequest
from forerun.verify.grammar.compiled import Grammars
from tests.structure.test_thinking import tokenizer

SCHEMA = {"type": "object", "required": ["a"], "additionalProperties": False, "properties": {"a": {"enum": [1, 2]}}}
ADD = {"name": "add", "strict": True, "parameters": SCHEMA}
LOOSE = {"name": "say", "parameters": {"type": "object", "properties": {"x": {"enum": [1]}}}}
HERMES = (
    "{% if tools %}<tool_call>{{ tools }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
)


def asked(*tools: dict[str, Any], **more: Any) -> ChatRequest:
    offered = [{"type": "function", "function": tool} for tool in tools]
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": offered, **more})


def test_a_call_that_begins_is_held_to_its_schema_and_the_rest_is_free() -> None:
    own, form = tokenizer("plain"), strict_calls(asked(ADD, LOOSE), HERMES)
    params = SamplingParams.from_dict({"response_format": form})
    held = Grammars(own, own.vocab_size, own.eos_ids).compile(Request((1,), params)).params.processors[-1]

    def allowed(text: str) -> str:
        prefix = Prefix([1, *own.encode(text, False)], 1)
        kept = (held(prefix, torch.zeros(own.vocab_size)) == 0).nonzero()[:, 0].tolist()
        return "".join(sorted(own.decode([token]) for token in kept))

    assert len(allowed("any {text} <")) > 90
    assert allowed("any <tool_call>") == "\n"
    assert allowed('<tool_call>\n{"name": "') == "as"
    assert allowed('<tool_call>\n{"name": "add", "arguments": {"a": ') == "12"
    assert allowed('<tool_call>\n{"name": "add", "arguments": {"a": 1') == "}"
    assert allowed('<tool_call>\n{"name": "say", "arguments": {"x": 1') != "}", "it is not strict: any object"
    assert len(allowed('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> more')) > 90


@pytest.mark.parametrize(
    ("body", "template"),
    [
        (asked({**ADD, "strict": False}), HERMES),
        (asked(ADD, tool_choice="none"), HERMES),
        (asked(ADD, response_format={"type": "json_object"}), HERMES),
        (asked(ADD, guided_regex="a+"), HERMES),
        (asked(ADD, structured_outputs={"regex": "a"}), HERMES),
        (asked(ADD), "{{ tools }}<tool_call><arg_key>"),
        (asked(ADD), "{{ tools }}<tool_call><function="),
        (asked(ADD), "{{ tools }}[TOOL_CALLS]"),
    ],
)
def test_nothing_is_held_where_nothing_is_strict_or_the_format_is_another(body: ChatRequest, template: str) -> None:
    assert strict_calls(body, template) is None


def test_a_request_gets_the_tags_unless_it_must_call() -> None:
    own = tokenizer("plain").parts()._replace(chat_template=HERMES).tokenizer()
    reader = RequestReader(own, ReaderFacts(own.vocab_size, False, ("m",), 4, False))
    for choice, kind in ((None, "structural_tag"), ("auto", "structural_tag"), ("required", "json_schema")):
        body = asked(ADD, **({} if choice is None else {"tool_choice": choice}))
        _, (job,) = reader.read("chat", json.dumps(body.model_dump(exclude_none=True)).encode(), 4000)
        assert job.options["response_format"]["type"] == kind
