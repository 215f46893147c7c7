"""Chat templates: the Jinja text that a checkpoint carries, rendered in a sandbox.

A template comes with the checkpoint and is not trusted, so it runs in Jinja's immutable sandbox, with the helpers
that transformers gives it and nothing else. For a template that knows no tools, offered tools, calls and results become
plain messages; the answer format that they teach is one of those that `forerun.server.reading` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from random import randrange
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.core.checks import shown
from forerun.core.errors import InvalidInput, brief
from forerun.core.thinking import HARMONY, marks_of

_TOOL_ROLE = re.compile(r"""(['"])tool\1""")  # a template that names the role writes what a tool returned itself
_USUAL = ("system", "user", "assistant")  # the roles that every template knows


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[Template, bool]:
    """The template, and whether it writes tools."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source), "tools" in find_undeclared_variables(environment.parse(source))


def render_chat(
    source: str, messages: Sequence[Mapping[str, Any]], /, continue_final_message: bool = False, **variables: Any
) -> str:
    """The text of a conversation, as the template writes it; tools that it does not know become text before.

    With `continue_final_message` it ends where the last message's content does, so that the model writes on there."""
    if not messages:
        raise InvalidInput("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hi'}")
    if not continue_final_message:
        return _render_whole(source, messages, variables)
    last = messages[-1]
    if not isinstance(last.get("content"), str) or last.get("tool_calls") or last.get("role") == "tool":
        raise InvalidInput("continue_final_message needs a last message of text alone, such as the start of an answer")
    mark = f"{randrange(10**20):020}"
    marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
    text, found, _ = _render_whole(source, marked, {**variables, "add_generation_prompt": False}).rpartition(mark)
    if not found:
        raise InvalidInput("the model's chat template leaves out the last message, so it cannot be continued")
    return text


def _render_whole(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    try:
        template, writes_tools = _compile(source)
    except Exception as error:  # a template that cannot be compiled may fail in any way too
        raise _refused(error) from None
    tools = variables.get("tools")
    if marks_of(source) is HARMONY:
        messages = [_for_harmony(message) for message in messages]
        described = [{**tool, "function": {"description": "", **_inner(tool)}} for tool in tools or ()]
        variables = {**variables, "tools": described or None}  # the template wants a description of each
    if not writes_tools and not _TOOL_ROLE.search(source):
        messages = as_plain_messages(messages)
    if writes_tools or not tools:
        text = _render(template, messages, variables)
        _refuse_dropped(template, messages, variables)
        return text
    offer = offer_of(tools)
    for role in ("system", "user"):  # some templates refuse or drop a system message
        with suppress(InvalidInput):
            offered = with_offer(messages, offer, role)
            text = _render(template, offered, variables)
            if offer in text:
                _refuse_dropped(template, offered, variables)
                return text
    _render(template, messages, variables)  # what it has against the messages themselves
    raise InvalidInput("the model's chat template has no place for tools; describe them in a message")


def _for_harmony(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the OpenAI API's shape as gpt-oss's template reads it.

    The template looks into contents, reads `thinking`, and writes arguments as JSON itself."""
    found = dict(message)
    if found.get("content", "") is None:
        found["content"] = ""
    calls = found.get("tool_calls")
    if not calls:
        found.pop("tool_calls", None)  # the template asks whether the key is there
    elif isinstance(calls, list):
        found["tool_calls"] = [_with_objects(call) for call in calls]
    thought = found.get("reasoning_content")
    if isinstance(thought, str) and thought and not (calls and found.get("content")):  # it takes one of the two
        found.setdefault("thinking", thought)
    return found


def _with_objects(call: Any) -> Any:
    """A call whose arguments are JSON in a text, with what the text says."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError:
        said = f"the arguments of a call of {shown(function.get('name'))} are no JSON; give an object"
        raise InvalidInput(said) from None


def _render(template: Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    try:
        text = template.render({**variables, "messages": [dict(message) for message in messages]})
        text.encode()  # half of a surrogate pair is no character
    except Exception as error:  # a template may fail in any way that an expression can
        raise _refused(error) from None
    return text


def _refuse_dropped(template: Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
    """Refuse a message of a role that the template leaves out: rendered with a mark, the mark is not in the text."""
    nonce = f"{randrange(10**20):020}"  # digits: filters leave them as they are
    asked = {
        i: {**message, "content": f"{message['content']} {nonce}-{i}-"}
        for i, message in enumerate(messages)
        if message.get("role", "user") not in _USUAL and isinstance(message.get("content"), str)
    }
    if not asked:
        return
    try:
        text = _render(template, [asked.get(i, message) for i, message in enumerate(messages)], variables)
    except InvalidInput:  # it looks into contents: no mark tells what it does with them
        return
    found = set(map(int, re.findall(rf"{nonce}-(\d+)-", text)))
    for i in asked:
        if i not in found:
            raise InvalidInput(
                f"role={shown(messages[i]['role'])} of message {i} is unknown to the model's chat template, which "
                "would leave the message out; use system, user or assistant"
            )


def _refused(error: Exception) -> InvalidInput:
    return InvalidInput(
        f"the model's chat template refuses these messages ({brief(error, 300)}); check their roles and contents"
    )


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
            raise InvalidInput(f"the arguments of a call of {shown(name)} are no JSON; give an object") from None
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
