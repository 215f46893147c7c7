"""Reads the messages of `forerun chat`: an editor with history on a terminal, else lines.

A message is a line. A line that ends with a backslash goes on in the next; three double quotes begin a message of
several lines and end it; what is pasted into a terminal is one message, however many lines it has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.models.load.catalog import cache_folder

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

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
    """A message without the quotes around its lines."""
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
