"""Terminal output of a text being written: drafted characters in green, and one closing line.

Colour is for terminals only (NO_COLOR is respected); into a pipe goes the text and nothing else. Model text
is written as it is, never through a renderer that would expand tabs or read brackets as markup; where it is asked for,
lines are broken between words.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from forerun.cli.wrap import WordWrap
from forerun.engine.detokenize import Decodes, Detokenizer

if TYPE_CHECKING:
    from forerun.cli.write import Written
    from forerun.core.types import Event

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


class Shades:
    """Separates drafted characters from the target's own, although an event's text may lag its tokens.

    Text is held back while it could still change, so an event's characters need not be those of its tokens.
    The same detokenizer, fed the same tokens, says at which character of the whole text each token ends.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._ends: deque[tuple[int, bool]] = deque()  # where a token's text ends, and whether it was drafted
        self._shown = 0

    def split(self, event: Event) -> Iterator[tuple[str, bool]]:
        """The event's text in pieces, in order and complete: (text, was it drafted?)."""
        for i, token in enumerate(event.tokens):
            self._detokenizer.push(token)
            self._ends.append((len(self._detokenizer.text), i < event.accepted))
        left = event.text
        while left:
            while self._ends and self._ends[0][0] <= self._shown:
                self._ends.popleft()
            end, drafted = self._ends[0] if self._ends else (self._shown + len(left), False)
            piece, left = left[: end - self._shown], left[end - self._shown :]
            self._shown += len(piece)
            yield piece, drafted


class Screen:
    """Writes texts to stdout as they grow, and lines about them there on a terminal, else to stderr."""

    def __init__(self, wraps: bool = False) -> None:
        out = _console(stderr=False)
        self.is_terminal = out.is_terminal
        self.coloured = out.color_system is not None and not out.no_color
        self._lines = out if out.is_terminal else _console(stderr=True)
        self._wrap = WordWrap() if wraps and out.is_terminal else None

    def write(self, text: str, drafted: bool = False) -> None:
        """Write more of the text, unbuffered; where lines are wrapped, as far as its words are whole."""
        if self._wrap is None:
            self._put(text, drafted)
            return
        for piece in self._wrap.push(text, drafted, _columns()):
            self._put(*piece)

    def flush(self) -> None:
        """Write what was held back of a text that ends here."""
        if self._wrap is not None:
            for piece in self._wrap.flush(_columns()):
                self._put(*piece)

    def _put(self, text: str, drafted: bool) -> None:
        if drafted and self.coloured:
            text = f"{_GREEN}{text}{_PLAIN}"
        sys.stdout.write(text)
        sys.stdout.flush()

    def say(self, line: str, style: str = "dim") -> None:
        """A line that is not part of the text."""
        self._lines.print(Text(line, style=style))

    def close(self, written: Written) -> None:
        """End the text's last line and print the closing line."""
        self.flush()
        self._put("" if not written.text or written.text.endswith("\n") else "\n", drafted=False)
        line = Text(closing_line(written), style="dim")
        completion = written.completion
        if completion is not None and completion.exact:
            line.append(" · exact")
        elif completion is not None:
            line.append(" · ").append("NOT EXACT (lossy)", style="not dim bold red")
        if self.coloured and written.accepted:
            line.append(" · ").append("green", style="green").append(" = drafted")
        self._lines.print(line)


def _console(stderr: bool) -> Console:
    """A console that wraps lines between words on a terminal, and nowhere else."""
    console = Console(stderr=stderr, highlight=False)
    console.soft_wrap = not console.is_terminal
    return console


def _columns() -> int:
    """Of the terminal itself: COLUMNS may say otherwise, and a line would be broken twice."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def closing_line(written: Written) -> str:
    """How many tokens and how fast, prompt and text apart; tokens per round, drafter, verifier."""
    parts = [f"prompt {in_tokens(written.prompt_tokens, written.prompt_rate)}"]
    if written.tokens:
        parts.append(f"text {in_tokens(written.tokens, written.text_rate)}")
        parts.append(f"{written.tokens / written.rounds:.2f} tokens per round")
    if written.completion is None:
        return " · ".join(["stopped", *parts])
    return " · ".join(
        [*parts, f"drafter {written.completion.drafter}", f"verifier {written.completion.verifier}"]
    )


def in_tokens(count: int, rate: float | None) -> str:
    """A number of tokens, and how many of them in a second where that is known."""
    tokens = f"{count} token" if count == 1 else f"{count} tokens"
    return tokens if rate is None else f"{tokens}, {rate:.1f} tokens/s"


def table_console() -> Console:
    """A console for tables: as wide as the terminal, and never wrapped into a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
