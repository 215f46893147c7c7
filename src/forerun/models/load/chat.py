"""Chat templates: the Jinja text that a checkpoint carries, rendered in a sandbox.

A template comes with the checkpoint and is not trusted, so it runs in Jinja's immutable sandbox, with the helpers
that transformers gives it and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from random import randrange
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.checks import shown
from forerun.errors import InvalidInput

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
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render_chat(source: str, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """The text of a conversation, as the template writes it."""
    if not messages:
        raise InvalidInput("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hi'}")
    try:
        text = _render(source, messages, variables)
        text.encode()  # half of a surrogate pair is no character
    except Exception as error:  # a template may fail in any way that an expression can
        reason = " ".join(str(error).split())[:300]
        raise InvalidInput(
            f"the model's chat template refuses these messages ({reason}); check their roles and contents"
        ) from None
    _refuse_dropped(source, messages, variables)
    return text


def _render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    return _compile(source).render({**variables, "messages": [dict(message) for message in messages]})


def _refuse_dropped(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
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
        text = _render(source, [asked.get(i, message) for i, message in enumerate(messages)], variables)
    except Exception:  # it looks into contents: no mark tells what it does with them
        return
    found = set(map(int, re.findall(rf"{nonce}-(\d+)-", text)))
    for i in asked:
        if i not in found:
            raise InvalidInput(
                f"role={shown(messages[i]['role'])} of message {i} is unknown to the model's chat template, which "
                "would leave the message out; use system, user or assistant"
            )
