"""Structure: what an answer is held to, as plain values: made of `response_format` and `structured_outputs`. No torch.

`forerun.verify.grammar` compiles it and makes it part of the law. `Structure.kind` is where other kinds will join.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.checks import as_flag, as_name, refuse, unknown
from forerun.errors import InvalidInput

# between the parts of a JSON text: one space at most, behind a comma or a colon | none | any amount of it
Whitespace = Literal["compact", "none", "any"]
_FORMATS = "text", "json_object", "json_schema"
_OUTPUTS = ("disable_any_whitespace",)


@dataclass(frozen=True, slots=True)
class Structure:
    """What every answer must match."""

    kind: Literal["json_schema"]
    text: str  # a JSON schema, its keys in the order in which they were given
    whitespace: Whitespace = "compact"


def structure_of(response_format: Any, structured_outputs: Any) -> Structure | None:
    """What these two ask for, in the OpenAI API's and vLLM's shape; None = a free text."""
    whitespace = _whitespace(structured_outputs)
    if response_format is None:
        return None
    limit = "a mapping such as {'type': 'json_schema', 'json_schema': {'name': 'answer', 'schema': {...}}}"
    if not isinstance(response_format, Mapping):
        raise refuse("response_format", response_format, limit)
    kind = as_name("response_format.type", response_format.get("type"), _FORMATS)
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        named = response_format.get("json_schema")
        if not isinstance(named, Mapping) or "schema" not in named:
            raise InvalidInput("response_format of type json_schema needs a json_schema with a schema")
        schema = named["schema"]
    return Structure("json_schema", _as_json("json_schema", schema), whitespace)


def for_schema(schema: Any) -> dict[str, Any]:
    """The `response_format` of answers that match a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def plain(name: str, value: Any) -> Any:
    """A value of JSON in Python's own types, which another process can be sent."""
    return None if value is None else json.loads(_as_json(name, value))


def _as_json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse(name, value, f"what JSON can hold ({type(error).__name__})") from None
    return text


def _whitespace(structured_outputs: Any) -> Whitespace:
    if structured_outputs is None:
        return "compact"
    if not isinstance(structured_outputs, Mapping):
        raise refuse("structured_outputs", structured_outputs, "a mapping: {'disable_any_whitespace': False}")
    if strange := [name for name in structured_outputs if name not in _OUTPUTS]:
        raise InvalidInput(unknown("field of structured_outputs", strange[0], _OUTPUTS))
    disabled = structured_outputs.get("disable_any_whitespace")
    if disabled is None:
        return "compact"
    return "none" if as_flag("disable_any_whitespace", disabled) else "any"
