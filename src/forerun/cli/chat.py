"""`forerun chat`: a conversation with a model, and its slash commands, which are never sent to the model.

Ctrl-C stops an answer, and what was written of it stays in the conversation. A message that cannot be answered
(too long by itself) is refused in one line, and the conversation goes on. When the next message no longer fits the
context, the oldest exchanges are dropped, and a line says so.

Messages come from an editor with history on a terminal, else from lines. A message is a line; a line that ends with a
backslash continues in the next. Three double quotes begin and end a message of several lines. Pasted text is one too.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import loading
from forerun.cli.flags import Settings, in_chat, with_settings
from forerun.cli.show import Screen, Written, counted, in_tokens, over_the_context, write_text
from forerun.core import registry
from forerun.core.errors import ForerunError, InvalidInput
from forerun.models.load.catalog import cache_folder

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from forerun.api.calls import Message
    from forerun.api.llm import LLM


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


_COMMAND = re.compile(r"/([\w?-]*)(?:\s+(.*))?", re.DOTALL)  # /usr/bin is a path, and is sent


def as_command(message: str) -> tuple[str, str] | None:
    """The name and the rest of a command; None for a message. A space in front makes a message of anything."""
    found = _COMMAND.fullmatch(message.rstrip())
    return None if found is None else (found[1], (found[2] or "").strip())


def obey(conversation: Conversation, name: str, rest: str) -> bool:
    """Run a command; False where it ends the chat."""
    command = _COMMANDS.get(name)
    if command is not None and command.run is None:
        return False
    if command is None or command.run is None:
        known = " ".join(f"/{known}" for known in _COMMANDS)
        conversation.screen.say(f"unknown command '/{name}'; known: {known}; a space in front sends it as text")
    else:
        command.run(conversation, rest)
    return True


def _help(conversation: Conversation, rest: str) -> None:
    width = max(len(f"/{name} {command.takes}".rstrip()) for name, command in _COMMANDS.items())
    for name, command in _COMMANDS.items():
        conversation.screen.say(f"{f'/{name} {command.takes}'.rstrip():<{width}}  {command.about}")
    conversation.screen.say('A line that ends with \\ goes on in the next; """ begins and ends several lines.')
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


def _file(rest: str, command: str) -> Path:
    if not rest:
        raise InvalidInput(f"/{command} needs a file: /{command} chat.json")
    return Path(rest).expanduser()


def _length(conversation: Conversation) -> str:
    return counted(sum(turn["role"] == "user" for turn in conversation.turns), "exchange")


@dataclass(frozen=True, slots=True)
class _Command:
    takes: str
    about: str
    run: Callable[[Conversation, str], None] | None  # None = it ends the chat


_COMMANDS: Mapping[str, _Command] = {
    "help": _Command("", "List the commands.", _help),
    "system": _Command("TEXT", "Set the system message; /system none removes it, /system alone shows it.", _system),
    "save": _Command("FILE", "Write the conversation to a file, as JSON.", _save),
    "load": _Command("FILE", "Go on with a saved conversation.", _load),
    "reset": _Command("", "Forget the conversation; the system message stays.", _reset),
    "undo": _Command("", "Take back the last message and its answer.", _undo),
    "drafter": _Command("NAME", "Draft with this one from now on; /drafter alone lists them.", _drafter),
    "temperature": _Command("NUMBER", "Vary the answers: 0 is greedy; /temperature alone shows it.", _temperature),
    "stats": _Command("", "Count what was answered, and how fast.", lambda chat, _: chat.screen.say(chat.statistics())),
    "exit": _Command("", "Leave.", None),
}


_FORMAT = "forerun-chat-1"


@dataclass(slots=True)
class Conversation:
    """Turns of user and assistant; the system message comes before them and is not one of them."""

    llm: LLM
    settings: Settings
    screen: Screen
    system: str | None = None
    drafter: str | None = None  # None = the engine's own
    turns: list[Message] = field(default_factory=list)
    done: list[Written] = field(default_factory=list)

    def answer(self, message: str) -> None:
        """Write the next turn; an answer that is stopped counts as far as it came."""
        before = self.turns
        self.turns = [*before, {"role": "user", "content": message}]
        try:
            self._make_room()
            written = write_text(
                self.llm,
                self.prompt(),
                self.settings.sampling,
                drafter=self.drafter,
                show=self.screen.write,
                visible=self.screen.is_terminal,
            )
        except BaseException:
            self.screen.flush()
            self.turns = before
            raise
        self.screen.close(written)
        if written.tokens:
            self.done.append(written)
        if written.text:
            self.turns.append({"role": "assistant", "content": written.text})
        else:
            self.turns = before  # a question without an answer would come before the next one

    def prompt(self) -> list[Message]:
        from forerun.api.calls import as_messages

        return as_messages(self.turns, self.system)

    def undo(self) -> bool:
        """Take back the last message and its answer; False where there is none."""
        asked = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if asked:
            self.turns = self.turns[: asked[-1]]
        return bool(asked)

    def statistics(self) -> str:
        done, rounds = self.done, sum(written.rounds for written in self.done)
        if not rounds:
            return "nothing was answered yet"
        tokens, prompts = sum(one.tokens for one in done), sum(one.prompt_tokens for one in done)
        later = sum(one.tokens - one.first_tokens for one in done)
        prompt_seconds, seconds = (sum(one.prompt_seconds for one in done), sum(one.text_seconds for one in done))
        context = len(self.llm.encode(self.prompt())) if self.turns else 0
        return (
            f"answers {len(done)}"
            f" · prompts {in_tokens(prompts, prompts / prompt_seconds if prompt_seconds else None)}"
            f" · text {in_tokens(tokens, later / seconds if later and seconds else None)}"
            f" · {tokens / rounds:.2f} tokens per round · context {context} of {self.llm.engine.max_length}"
        )

    def save(self, file: Path) -> None:
        """Write the conversation as JSON; any other existing file is kept."""
        if file.exists() and not (file.is_file() and _is_chat(file)):  # a device may never end
            raise InvalidInput(f"{str(file)!r} exists and is no saved conversation; choose another name")
        document = {"format": _FORMAT, "model": self.settings.model, "system": self.system, "messages": self.turns}
        try:
            file.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot write {str(file)!r}: {error.strerror}; choose another name") from None

    def load(self, file: Path) -> None:
        """Go on with a saved conversation, or with a JSON list of messages; on an error nothing changes."""
        found = _read(file)
        messages = found.get("messages") if isinstance(found, dict) else found
        turns = _checked(messages, file)
        system = found.get("system") if isinstance(found, dict) else None
        if turns and turns[0]["role"] == "system":
            system = turns.pop(0)["content"]
        if not isinstance(system, str | None) or any(turn["role"] == "system" for turn in turns):
            raise InvalidInput(f"{str(file)!r} has a system message that is not in front; put it there")
        if turns and turns[-1]["role"] == "user":
            turns.pop()  # it has no answer
        self.turns, self.system = list(turns), system

    def _make_room(self) -> None:
        """Drop the oldest exchanges until there is room to answer: what is asked for, or a quarter.

        Raises where the last message alone leaves none.
        """
        limit, turns = self.llm.engine.max_length, self.turns
        room = min(self.settings.sampling.max_tokens, limit // 4)
        while len(self.turns) > 1 and len(self.llm.encode(self.prompt())) + room > limit:
            self.turns = self.turns[2:]
        if (needed := len(self.llm.encode(self.prompt()))) >= limit:
            raise InvalidInput(
                f"the message takes {needed} tokens and the context has {limit}: send a shorter one, or a part of it"
            )
        dropped = (len(turns) - len(self.turns)) // 2
        if dropped:
            what = "exchange was" if dropped == 1 else f"{dropped} exchanges were"
            self.screen.say(f"the context of {limit} tokens is full: the oldest {what} dropped")


def _read(file: Path) -> Any:
    if file.exists() and not file.is_file() and not file.is_dir():  # a device or a pipe may never end
        raise InvalidInput(f"{str(file)!r} is no file; /load takes what /save wrote")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {str(file)!r}: {error.strerror}; check the path") from None
    except ValueError:
        raise InvalidInput(f"{str(file)!r} is not JSON; /load takes what /save wrote") from None


def _is_chat(file: Path) -> bool:
    try:
        found = _read(file)
    except InvalidInput:
        return False
    return isinstance(found, dict) and found.get("format") == _FORMAT


def _checked(messages: Any, file: Path) -> list[dict[str, str]]:
    fine = isinstance(messages, Sequence) and all(
        isinstance(turn, dict)
        and turn.get("role") in ("system", "user", "assistant")
        and isinstance(turn.get("content"), str)
        for turn in messages
    )
    if not fine:
        raise InvalidInput(f"{str(file)!r} holds no messages with role and content; /load takes what /save wrote")
    return [{"role": turn["role"], "content": turn["content"]} for turn in messages]


Read = Callable[[], str]  # one message; EOFError at the end of input, KeyboardInterrupt for Ctrl-C
_FIRST, _NEXT = "> ", ". "
_QUOTES = '"""'


def read_messages(say: Callable[[str], None]) -> Iterator[str]:
    """Messages until the end of input; at a prompt the second Ctrl-C in a row leaves, too."""
    read, pressed = _reader(), False
    while True:
        try:
            message = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if pressed:
                return
            pressed = True
            say("Ctrl-C once more leaves, as do Ctrl-D and /exit")
            continue
        pressed = False
        yield message


def is_open(text: str) -> bool:
    """Does a message of this text go on in the next line?"""
    begun = text.lstrip()
    if begun.startswith(_QUOTES):
        return not begun.rstrip().endswith(_QUOTES) or len(begun.rstrip()) < 2 * len(_QUOTES)
    return text.endswith("\\")


def next_line(text: str) -> str:
    """An open message with its next line begun; a backslash that said so is no part of it."""
    quoted = text.lstrip().startswith(_QUOTES)
    return (text if quoted else text.removesuffix("\\")) + "\n"


def unquoted(text: str) -> str:
    inner = text.strip()
    if not inner.startswith(_QUOTES):
        return text
    return inner.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


def _reader() -> Read:
    if sys.stdin is None or not sys.stdin.isatty():
        return lambda: join_lines(lambda prompt: _line())
    if not sys.stdout.isatty():
        return lambda: join_lines(_line_asked_on_stderr)
    if os.environ.get("TERM", "dumb") != "dumb":
        try:
            return _editor()
        except ImportError:  # prompt_toolkit is not installed
            pass
    return _with_readline()


def _editor() -> Read:
    """History, several lines, pastes in one piece. Raises ImportError where prompt_toolkit is not installed."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    history = _history_file()
    kept: History = InMemoryHistory() if history is None else FileHistory(history)
    session: PromptSession[str] = PromptSession(
        _FIRST,
        multiline=True,  # Enter is ours: it sends
        prompt_continuation=_NEXT,
        key_bindings=_keys(),
        history=kept,
        enable_history_search=True,
    )
    return lambda: unquoted(session.prompt())


def _keys() -> KeyBindings:
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            longer = next_line(buffer.text)
            buffer.set_document(Document(longer, len(longer)))
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")  # Alt-Enter
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()  # as a shell does: the line is dropped, nothing is sent
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def join_lines(line: Callable[[str], str]) -> str:
    """One message from lines that are asked for with a prompt; one that the end of input cuts short counts."""
    text = line(_FIRST)
    while is_open(text):
        text = next_line(text)
        try:
            text += line(_NEXT)
        except EOFError:
            break
    return unquoted(text)


def _line() -> str:
    line = "" if sys.stdin is None else sys.stdin.readline()  # None: it was closed
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _line_asked_on_stderr(prompt: str) -> str:
    """Prompt on stderr where stdout is a file: the prompt must not get into the answers."""
    print(prompt, end="", file=sys.stderr, flush=True)
    return _line()


def _with_readline() -> Read:
    """input() with what line editing the platform has; GNU readline can also take a paste as one piece."""
    try:
        import readline
    except ImportError:  # not on every platform
        pass
    else:
        readline.parse_and_bind("set enable-bracketed-paste on")

    def read() -> str:
        try:
            return join_lines(input)
        except (EOFError, KeyboardInterrupt):
            print()  # the cursor is still behind the prompt
            raise

    return read


def _history_file() -> Path | None:
    """The history file for the arrow keys, readable by this user only; None where nothing can be written."""
    file = cache_folder() / "chat-history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return None
    return file
