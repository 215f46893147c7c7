"""Chat templates: the Jinja text that a checkpoint carries, rendered in a sandbox.

A template comes with the checkpoint and is not trusted, so it runs in Jinja's immutable sandbox, with the helpers
that transformers gives it and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.errors import InvalidInput


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


def render_chat(source: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The text of a conversation, as the template writes it."""
    if not messages:
        raise InvalidInput("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hi'}")
    try:
        return _compile(source).render(messages=[dict(message) for message in messages], **variables)
    except Exception as error:  # a template may fail in any way that an expression can
        reason = " ".join(str(error).split())[:300]
        raise InvalidInput(
            f"the model's chat template refuses these messages ({reason}); check their roles and contents"
        ) from None
