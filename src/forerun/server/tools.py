"""Which tools a text must call, as `tool_choice` says; the calls in a text are found by `forerun.server.parsers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.server.errors import ApiError
from forerun.server.schemas import ChatRequest, FunctionSpec

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
    arguments = [_NO_ARGUMENTS if tool.parameters is None else tool.parameters or {"type": "object"} for tool in tools]
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
