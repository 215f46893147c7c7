"""Chat templates: the Jinja text that a checkpoint carries, rendered in a sandbox.

A template comes with the checkpoint and is not trusted, so it runs in Jinja's immutable sandbox, with the helpers
that transformers gives it and nothing else.
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
from forerun.models.load.tool_text import as_plain_messages, offer_of, with_offer

_TOOL_ROLE = re.compile(
    r"""(['"])tool\1"""
)  # a template that names the role writes what a tool returned itself
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


def render_chat(source: str, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """The text of a conversation, as the template writes it; tools that it does not know become text before."""
    if not messages:
        raise InvalidInput("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hi'}")
    try:
        template, writes_tools = _compile(source)
    except Exception as error:  # a template that cannot be compiled may fail in any way too
        raise _refused(error) from None
    tools = variables.get("tools")
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


def _render(template: Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    try:
        text = template.render({**variables, "messages": [dict(message) for message in messages]})
        text.encode()  # half of a surrogate pair is no character
    except Exception as error:  # a template may fail in any way that an expression can
        raise _refused(error) from None
    return text


def _refuse_dropped(
    template: Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> None:
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
