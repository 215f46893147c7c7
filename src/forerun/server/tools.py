"""Tool calls: which must be made, and those in a model's text, in the forms that chat templates teach.

That is tags with JSON inside, or JSON alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.server.errors import ApiError
from forerun.server.schemas import ChatRequest, FunctionSpec

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)  # Qwen, Hermes, SmolLM
_VALUES = ("const", "enum", "default", "examples")  # keys of a JSON schema that hold no schemas
_LISTED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)  # Mistral


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


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
        raise ApiError(
            400, f"tool_choice names no tool that was offered: {str(name)[:80]!r}", param="tool_choice"
        )
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
    arguments = [tool.parameters or {"type": "object"} for tool in tools]
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


def find_calls(text: str, known: set[str]) -> tuple[str | None, list[ToolCall]]:
    """The text without its calls (None where nothing is left), and the calls of functions that were offered."""
    found: Any = []
    rest = text
    if _TAGGED.search(text):
        found, rest = [_load(body) for body in _TAGGED.findall(text)], _TAGGED.sub("", text)
    elif match := _LISTED.search(text):
        found, rest = _load(match[1]), text[: match.start()]
    elif text.lstrip().startswith(("{", "[")):
        found, rest = _load(text.strip()), ""
    flat = [each for part in _listed(found) for each in _listed(part)]
    calls = [call for each in flat if (call := _as_call(each, known)) is not None]
    if not calls or len(calls) < len(flat):
        return text, []  # not calls after all, or of functions that nobody offered
    return rest.strip() or None, calls


def _listed(part: Any) -> list[Any]:
    return part if isinstance(part, list) else [part]


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_call(value: Any, known: set[str]) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    body = inner if isinstance(inner, dict) else value
    name, arguments = body.get("name"), body.get("arguments", body.get("parameters", {}))
    if not isinstance(name, str) or name not in known:
        return None
    if isinstance(arguments, str):
        return ToolCall(name, arguments) if _load(arguments) is not None else None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
