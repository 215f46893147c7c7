"""Which tools a text must call, as `tool_choice` says; the calls in a text are found by `forerun.server.parsers`.

Where a text is free to call (`auto`) and a tool is strict, what begins as a call must be a call of a tool that was
offered, with arguments of its schema: `strict_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from forerun.server.errors import ApiError
from forerun.server.schemas import ChatRequest, FunctionSpec

_MARK = "<tool_call>"
_TAGS = "<arg_key>", "<function="
_VALUES = ("const", "enum", "default", "examples")  # keys of a JSON schema that hold no schemas
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}  # of a tool without `parameters`


def must_call(body: ChatRequest) -> list[FunctionSpec]:
    """The functions of which the text has to call one, as `tool_choice` says; none where it is free."""
    choice, known = body.tool_choice, [tool.function for tool in body.tools or ()]
    if choice is None or choice in ("none", "auto"):
        return []
    if not known:
        raise ApiError(400, "tool_choice needs tools to choose from", param="tool_choice")
    if choice == "required":
        return known
    inner = choice.get("function") if isinstance(choice, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    chosen = [tool for tool in known if tool.name == name]
    if not chosen:
        raise ApiError(400, f"tool_choice names no tool that was offered: {str(name)[:80]!r}", param="tool_choice")
    return chosen


def strict_calls(body: ChatRequest, template: str | None) -> dict[str, Any] | None:
    """The structural tags of calls, once one begins; None where no tool is strict, or another structure is asked for.

    Of the formats, Hermes' has a mark that is text and arguments that are JSON. Another is not held to its schema.
    """
    tools = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]
    if not any(tool.strict for tool in tools) or not _teaches_hermes(template or ""):
        return None
    asked = body.response_format is not None and body.response_format.type != "text"
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, body.structured_outputs)
    if asked or any(each is not None for each in guided):
        return None
    structures = [
        {
            "begin": f'{_MARK}\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "schema": _arguments_of(tool) if tool.strict else {"type": "object"},
            "end": f"}}\n{_MARK.replace('<', '</')}",
        }
        for tool in tools
    ]
    return {"type": "structural_tag", "structures": structures, "triggers": [_MARK]}


def _teaches_hermes(template: str) -> bool:
    """Are calls taught as JSON between the marks? GLM and Qwen-Coder put tags there; our own offer is Hermes'."""
    return "tools" not in template or (_MARK in template and not any(tag in template for tag in _TAGS))


def _arguments_of(tool: FunctionSpec) -> dict[str, Any]:
    return _NO_ARGUMENTS if tool.parameters is None else tool.parameters or {"type": "object"}


def schema_of_calls(tools: Sequence[FunctionSpec]) -> dict[str, Any]:
    """The JSON schema of a call of one of these functions: its name, then its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"], "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]  # fmt: skip
    arguments = [_arguments_of(tool) for tool in tools]
    return {"anyOf": calls, "$defs": {str(i): _moved(own, f"#/$defs/{i}") for i, own in enumerate(arguments)}}


def _moved(schema: Any, place: str) -> Any:
    """A schema that is a part of another one: its references are to itself there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: value if key in _VALUES else _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := own.get("$ref"), str) and reference.startswith("#"):
        own["$ref"] = place + reference[1:]
    return own
