"""The editor of `forerun chat`: history, several lines, pastes in one piece. Needs prompt_toolkit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from forerun.cli.chat_input import is_open, next_line, unquoted


def make_editor(first: str, following: str, history: Path | None) -> Callable[[], str]:
    """A function that lets the user write one message."""
    kept: History = InMemoryHistory() if history is None else FileHistory(history)
    session: PromptSession[str] = PromptSession(
        first,
        multiline=True,  # Enter is ours: it sends
        prompt_continuation=following,
        key_bindings=_keys(),
        history=kept,
        enable_history_search=True,
    )
    return lambda: unquoted(session.prompt())


def _keys() -> KeyBindings:
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
