"""`forerun chat`: a conversation, typed or piped in, one message a line.

The context is finite: when the next message no longer fits, the oldest exchanges are dropped, and said to be.
A message that cannot be answered (too long by itself) is refused in one line, and the conversation goes on.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import loading
from forerun.cli.flags import Settings, with_settings
from forerun.cli.show import Screen, write_text
from forerun.errors import ForerunError, InvalidInput

if TYPE_CHECKING:
    from forerun.llm import LLM, Completion
    from forerun.prompts import Message

_COMMANDS = "/reset forgets the conversation, /stats counts it, /exit or Ctrl-D leaves"


@with_settings
def chat(
    settings: Settings,
    system: Annotated[str | None, typer.Option(help="A system message in front of the conversation.")] = None,
) -> None:
    """Talk with a model; /reset, /stats and /exit are understood."""
    llm = loading.load_llm(settings)
    if not llm.tokenizer.has_chat_template:
        raise InvalidInput(f"{llm.name!r} has no chat template; use: forerun generate --raw")
    screen = Screen()
    if sys.stdin.isatty():
        screen.say(f"{settings.model}. {_COMMANDS}.")
    Conversation(llm, settings, system, screen).run(messages_typed())


def messages_typed() -> Iterator[str]:
    """The lines of standard input, with a prompt and line editing where a person types them."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):  # not on every platform
        importlib.import_module("readline")  # importing it is what gives input() its line editing
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


@dataclass(slots=True)
class Conversation:
    """The turns so far, and what answering them took."""

    llm: LLM
    settings: Settings
    system: str | None
    screen: Screen
    turns: list[Message] = field(default_factory=list)
    done: list[Completion] = field(default_factory=list)

    def run(self, messages: Iterator[str]) -> None:
        """Answer messages and obey commands until one of them, or the end of input, says stop."""
        commands: dict[str, Callable[[], None]] = {"/reset": self.reset, "/stats": self.stats}
        for message in map(str.strip, messages):
            if message == "/exit":
                return
            if message in commands:
                commands[message]()
            elif message.startswith("/") and message[1:].isalpha():
                self.screen.say(f"no command {message!r}: {_COMMANDS}")
            elif message:
                self._answer_or_say_why(message)

    def reset(self) -> None:
        self.turns.clear()
        self.screen.say("the conversation starts anew")

    def stats(self) -> None:
        tokens, rounds = sum(c.tokens for c in self.done), sum(c.rounds for c in self.done)
        seconds = sum(c.seconds for c in self.done)
        if not rounds or not seconds:
            self.screen.say("nothing was answered yet")
            return
        context = len(self.llm.encode(self._prompt())) if self.turns else 0
        self.screen.say(
            f"answers {len(self.done)} · {tokens} tokens · {tokens / seconds:.1f} tokens/s"
            f" · {tokens / rounds:.2f} tokens per round · context {context} of {self.llm.engine.max_length}"
        )

    def answer(self, message: str) -> None:
        """Write the next turn; an interrupt ends the turn, not the conversation."""
        self.turns.append({"role": "user", "content": message})
        self._make_room()
        written: list[str] = []  # kept here too, so that an interrupted answer is not lost

        def show(text: str, drafted: bool) -> None:
            written.append(text)
            self.screen.write(text, drafted)

        try:
            completion = write_text(self.llm, self._prompt(), self.settings, show)
        except KeyboardInterrupt:
            self.screen.write("\n")
            self.screen.say("interrupted")
        else:
            self.done.append(completion)
            self.screen.close(completion)
        if written:
            self.turns.append({"role": "assistant", "content": "".join(written)})
        else:
            self.turns.pop()  # a question without an answer would stand before the next one

    def _answer_or_say_why(self, message: str) -> None:
        before = [*self.turns]
        try:
            self.answer(message)
        except ForerunError as error:
            self.turns = before
            print("forerun:", error, file=sys.stderr)

    def _prompt(self) -> list[Message]:
        from forerun.prompts import as_messages

        return as_messages(self.turns, self.system)

    def _make_room(self) -> None:
        """Drop the oldest exchanges until there is room to answer: what is asked for, or a quarter."""
        limit, turns = self.llm.engine.max_length, self.turns
        room = min(self.settings.sampling.max_tokens, limit // 4)
        while len(self.turns) > 1 and len(self.llm.encode(self._prompt())) + room > limit:
            self.turns = self.turns[2:]
        dropped = (len(turns) - len(self.turns)) // 2
        if dropped and len(self.llm.encode(self._prompt())) < limit:  # else the message is refused
            what = "exchange was" if dropped == 1 else f"{dropped} exchanges were"
            self.screen.say(f"the context of {limit} tokens is full: the oldest {what} dropped")
