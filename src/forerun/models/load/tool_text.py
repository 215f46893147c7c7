"""Tools for chat templates that know none: what is offered, what was called and what came back, as plain messages.

The answer format that is taught here is one of those that `forerun.server.tools` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.core.checks import shown
from forerun.core.errors import InvalidInput

Message = Mapping[str, Any]
_OFFER = """\
You can call these functions, each described by a line of JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON between these tags, and with nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
What the function returned then comes between <tool_response> tags. Where no function helps, answer in plain words."""


def offer_of(tools: Sequence[Any]) -> str:
    """What tells a model which functions there are, and how to call them."""
    lines = [json.dumps(_inner(tool), ensure_ascii=False) for tool in tools]
    return _OFFER.format(tools="\n".join(lines))


def with_offer(messages: Sequence[Message], offer: str, role: str) -> list[Message]:
    """The messages with the offer in the first one, behind its text, where that has this role; or else before it."""
    first, *rest = messages
    if first.get("role") != role:
        return [{"role": role, "content": offer}, *messages]
    return [{**first, "content": f"{first.get('content')}\n\n{offer}"}, *rest]


def as_plain_messages(messages: Sequence[Message]) -> list[Message]:
    """The same conversation in text alone: calls are a part of the answer, and the user says what they returned."""
    names: dict[str, str] = {}  # of the functions that were called, by the call's id
    plain: list[Message] = []
    returned: list[str] = []  # by the calls of one answer: one message, because many templates want turns
    for message in messages:
        if message.get("role") == "tool":
            returned.append(_response(message, names))
            continue
        if returned:
            plain.append({"role": "user", "content": "\n".join(returned)})
            returned = []
        if calls := message.get("tool_calls"):
            texts = [_call(call, names) for call in (calls if isinstance(calls, list | tuple) else [calls])]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            said = message.get("content")
            message = {**kept, "content": "\n".join([*([said] if said else []), *texts])}
        plain.append(message)
    return [*plain, {"role": "user", "content": "\n".join(returned)}] if returned else plain


def _call(call: Any, names: dict[str, str]) -> str:
    function = _inner(call)
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str):
        raise InvalidInput(f"tool_calls holds {shown(call)}, which names no function; give its name")
    if (key := _id(call, "id")) is not None:
        names[key] = name
    if isinstance(arguments, str):  # JSON in a text, as the OpenAI API has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidInput(
                f"the arguments of a call of {shown(name)} are no JSON; give an object"
            ) from None
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _response(message: Message, names: Mapping[str, str]) -> str:
    name = names.get(_id(message, "tool_call_id") or "", message.get("name"))
    tag = "<tool_response>" if name is None else f"<tool_response name={json.dumps(name)}>"
    return f"{tag}\n{message.get('content')}\n</tool_response>"


def _id(holder: Mapping[str, Any], key: str) -> str | None:
    """By which an answer names the call that it belongs to; None where it names none."""
    found = holder.get(key)
    if not (found is None or isinstance(found, str)):
        raise InvalidInput(f"{key} must be text, not {shown(found)}")
    return found


def _inner(tool: Any) -> Mapping[str, Any]:
    """What is inside of {"type": "function", "function": {...}}."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping):
        raise InvalidInput(f"{shown(tool)} is no tool: give {{'type': 'function', 'function': {{...}}}}")
    return inner
