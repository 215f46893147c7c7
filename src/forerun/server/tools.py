"""Tool calls in a model's text, in the forms that chat templates teach: tags with JSON inside, or JSON alone."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)  # Qwen, Hermes, SmolLM
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
