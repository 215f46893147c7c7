"""Messages of the library in the words of the command line: `max_tokens=0` becomes `--max-tokens 0`.

The library names settings as Python does. Whoever typed a command knows them by their flags, so its error
messages name those, for every setting that the command has a flag for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from typer.core import TyperGroup

from forerun.cli.flags import HELP

# settings whose flag may be called otherwise: as vLLM calls it, or because it is a limit there
_CALLED = {"max_batch": "--max-num-seqs", "budget": "--max-budget", "suite": "--prompts"}
_SETTING = re.compile(r"(?<![\w.-])([a-z][a-z_]*)=('[^']*'|[^\s;:,)'\"]*[^\s;:,)'\".])")


def in_flags(message: str, command: Any) -> str:
    """The message, with the flags of `command` in place of the settings that they set."""
    return _with_flags(message, set(_flags(command)))


def in_chat(message: str) -> str:
    """The message in the words of a chat: its own commands, and flags for the next start."""
    said = _with_flags(message, {"--" + name.replace("_", "-") for name in HELP})
    said = re.sub(r"--(drafter|system|temperature)\b", r"/\1", said)
    return re.sub(r"\b(?:add|give|pass|use) (?=--)", "start the chat with ", said)


def _with_flags(message: str, known: Collection[str]) -> str:
    """The message, with these flags in place of the settings that they set."""

    def spelt(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'")
        flag = "--" + name.replace("_", "-")
        flag = flag if flag in known else _CALLED.get(name, f"{flag}s")  # one of several values
        if flag not in known:
            return found[0]
        return flag if value == "True" else f"{flag} {value}"

    return _SETTING.sub(spelt, message)


def _flags(command: Any) -> Iterator[str]:
    """The flags of a command, or of all commands of a group."""
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("--"))
    if isinstance(command, TyperGroup):
        for part in command.commands.values():
            yield from _flags(part)
