"""`forerun chat`: talk with a model; a message is a line, or several (see chat_input.py).

Ctrl-C stops an answer, and what was written of it stays in the conversation. A message that cannot be answered
(too long by itself) is refused in one line, and the conversation goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from forerun.cli import loading
from forerun.cli.chat_commands import as_command, obey
from forerun.cli.chat_input import read_messages
from forerun.cli.conversation import Conversation
from forerun.cli.flags import Settings, with_settings
from forerun.cli.messages import in_chat
from forerun.cli.show import Screen
from forerun.cli.write import over_the_context
from forerun.core.errors import ForerunError, InvalidInput


@with_settings
def chat(
    settings: Settings,
    system: Annotated[str | None, typer.Option(help="A system message in front of the conversation.")] = None,
) -> None:
    """Talk with a model; /help lists the commands."""
    llm = loading.load_llm(settings)
    if not llm.tokenizer.has_chat_template:
        raise InvalidInput(f"{llm.name!r} has no chat template; use: forerun generate --raw")
    screen = Screen(wraps=True)
    if sys.stdin is not None and sys.stdin.isatty():
        screen.say(
            f"{loading.short_name(settings.model)}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."
        )
    if settings.sampling.max_tokens >= llm.engine.max_length:
        screen.say(over_the_context(llm, 0, settings.sampling))
    converse(Conversation(llm, settings, screen, system), read_messages(screen.say))


def converse(conversation: Conversation, messages: Iterable[str]) -> None:
    """Answer messages and run commands until /exit or the end of input."""
    for message in messages:
        try:
            command = as_command(message)
            if command is not None:
                if not obey(conversation, *command):
                    return
            elif message.strip():
                conversation.answer(message.strip())
        except ForerunError as error:
            conversation.screen.say(in_chat(" ".join(str(error).split())), style="red")
        except KeyboardInterrupt:  # pressed while nothing was being written: there is nothing to keep
            conversation.screen.say("stopped")
