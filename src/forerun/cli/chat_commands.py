"""Slash commands of `forerun chat` (/help, /save, ...); they are never sent to the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.cli.conversation import Conversation
from forerun.core import registry
from forerun.core.errors import InvalidInput

_COMMAND = re.compile(r"/([\w?-]*)(?:\s+(.*))?", re.DOTALL)  # /usr/bin is a path, and is sent


def as_command(message: str) -> tuple[str, str] | None:
    """The name and the rest of a command; None for a message. A space in front makes a message of anything."""
    found = _COMMAND.fullmatch(message.rstrip())
    return None if found is None else (found[1], (found[2] or "").strip())


def obey(conversation: Conversation, name: str, rest: str) -> bool:
    """Run a command; False where it ends the chat."""
    if name == "exit":
        return False
    command = _COMMANDS.get(name)
    if command is None:
        known = " ".join(f"/{known}" for known in _COMMANDS)
        conversation.screen.say(
            f"unknown command '/{name}'; known: {known}; a space in front sends it as text"
        )
    else:
        command.run(conversation, rest)
    return True


def _help(conversation: Conversation, rest: str) -> None:
    width = max(len(f"/{name} {command.takes}".rstrip()) for name, command in _COMMANDS.items())
    for name, command in _COMMANDS.items():
        conversation.screen.say(f"{f'/{name} {command.takes}'.rstrip():<{width}}  {command.about}")
    conversation.screen.say(
        'A line that ends with \\ goes on in the next; """ begins and ends several lines.'
    )
    conversation.screen.say("Ctrl-C stops an answer; twice at an empty prompt, or Ctrl-D, leaves.")


def _system(conversation: Conversation, rest: str) -> None:
    if rest:
        conversation.system = None if rest == "none" else rest
    said = "there is no system message" if conversation.system is None else conversation.system
    conversation.screen.say(said if conversation.system is None else f"system message: {said}")


def _save(conversation: Conversation, rest: str) -> None:
    file = _file(rest, "save")
    conversation.save(file)
    conversation.screen.say(f"saved to {file}: {_length(conversation)}")


def _load(conversation: Conversation, rest: str) -> None:
    file = _file(rest, "load")
    conversation.load(file)
    conversation.screen.say(f"loaded {file}: {_length(conversation)}")


def _reset(conversation: Conversation, rest: str) -> None:
    conversation.turns = []
    conversation.screen.say("the conversation starts anew")


def _undo(conversation: Conversation, rest: str) -> None:
    gone = conversation.undo()
    conversation.screen.say(
        f"the last exchange is taken back: {_length(conversation)}" if gone else "there is nothing to undo"
    )


def _drafter(conversation: Conversation, rest: str) -> None:
    engine = conversation.llm.engine
    if rest:
        name = None if rest == "auto" else rest
        if name is not None:
            engine.drafters.get(name)  # raises, in one line, where it is unknown or misses a head or model
        conversation.drafter = name
    current = conversation.drafter or engine.default_drafter
    others = "" if rest else f"; there are auto, {', '.join(registry.drafters.names())}"
    conversation.screen.say(f"drafter {current}{others}")


def _temperature(conversation: Conversation, rest: str) -> None:
    settings = conversation.settings
    if rest:
        try:
            wanted = float(rest)
        except ValueError:
            raise InvalidInput(f"{rest!r} is no temperature; write /temperature 0.7") from None
        conversation.settings = replace(settings, sampling=replace(settings.sampling, temperature=wanted))
    value = conversation.settings.sampling.temperature
    conversation.screen.say(f"temperature {value:g}{'' if value else ', which is greedy'}")


def _stats(conversation: Conversation, rest: str) -> None:
    conversation.screen.say(conversation.statistics())


def _file(rest: str, command: str) -> Path:
    if not rest:
        raise InvalidInput(f"/{command} needs a file: /{command} chat.json")
    return Path(rest).expanduser()


def _length(conversation: Conversation) -> str:
    count = sum(turn["role"] == "user" for turn in conversation.turns)
    return "1 exchange" if count == 1 else f"{count} exchanges"


@dataclass(frozen=True, slots=True)
class _Command:
    takes: str
    about: str
    run: Callable[[Conversation, str], None]


def _never(conversation: Conversation, rest: str) -> None:
    raise AssertionError("/exit ends the chat before this")


_COMMANDS: Mapping[str, _Command] = {
    "help": _Command("", "List the commands.", _help),
    "system": _Command(
        "TEXT", "Set the system message; /system none removes it, /system alone shows it.", _system
    ),
    "save": _Command("FILE", "Write the conversation to a file, as JSON.", _save),
    "load": _Command("FILE", "Go on with a saved conversation.", _load),
    "reset": _Command("", "Forget the conversation; the system message stays.", _reset),
    "undo": _Command("", "Take back the last message and its answer.", _undo),
    "drafter": _Command("NAME", "Draft with this one from now on; /drafter alone lists them.", _drafter),
    "temperature": _Command(
        "NUMBER", "Vary the answers: 0 is greedy; /temperature alone shows it.", _temperature
    ),
    "stats": _Command("", "Count what was answered, and how fast.", _stats),
    "exit": _Command("", "Leave.", _never),
}
