"""What a person sees of a text being written: drafted characters in green, and one closing line.

Colour is for terminals only (NO_COLOR is respected); into a pipe goes the text and nothing else. Model text
is written as it is, never through a renderer that would wrap lines, expand tabs or read brackets as markup.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forerun.engine.detokenize import Decodes, Detokenizer

if TYPE_CHECKING:
    from forerun.cli.flags import Settings
    from forerun.llm import LLM, Completion
    from forerun.prompts import Prompt
    from forerun.types import Event

Show = Callable[[str, bool], None]
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


class Shades:
    """Tells drafted characters from the target's own, although an event's text may lag its tokens.

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
    """Writes texts to stdout as they grow, and lines about them where they do not get in the way."""

    def __init__(self) -> None:
        out = Console(highlight=False, soft_wrap=True)
        self.is_terminal = out.is_terminal
        self.coloured = out.color_system is not None and not out.no_color
        self._lines = out if out.is_terminal else Console(stderr=True, highlight=False, soft_wrap=True)

    def write(self, text: str, drafted: bool = False) -> None:
        """Add to the text, at once."""
        if drafted and self.coloured:
            text = f"{_GREEN}{text}{_PLAIN}"
        sys.stdout.write(text)
        sys.stdout.flush()

    def say(self, line: str, style: str = "dim") -> None:
        """A line that is not part of the text."""
        self._lines.print(Text(line, style=style))

    def close(self, completion: Completion) -> None:
        """End the text's last line and say how it came about."""
        self.write("" if completion.text.endswith("\n") else "\n")
        line = Text(closing_line(completion), style="dim")
        if completion.exact:
            line.append(" · exact")
        else:
            line.append(" · ").append("NOT EXACT (lossy)", style="not dim bold red")
        if self.coloured and completion.accepted:
            line.append(" · ").append("green", style="green").append(" = drafted")
        self._lines.print(line)


def closing_line(completion: Completion) -> str:
    """How fast, how many tokens per round, and by whom."""
    return (
        f"{completion.tokens} tokens · {completion.tokens_per_second:.1f} tokens/s"
        f" · {completion.tokens_per_round:.2f} tokens per round"
        f" · drafter {completion.drafter} · verifier {completion.verifier}"
    )


def table_console() -> Console:
    """A console for tables: as wide as the terminal, and never wrapped where a program reads along."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


def write_text(llm: LLM, prompt: Prompt, settings: Settings, show: Show | None = None) -> Completion:
    """Have one text written, showing it as it grows: piece by piece, and whether the piece was drafted."""
    from forerun.llm import Completion

    shades = Shades(llm.tokenizer)
    for step in llm.stream(prompt, settings.sampling):
        if isinstance(step, Completion):
            return step
        if show is not None:
            for text, drafted in shades.split(step):
                show(text, drafted)
    raise AssertionError("a stream ends with its completion")


def as_document(completion: Completion, model: str) -> dict[str, Any]:
    """A completion as the one JSON document that `--json` prints."""
    return {
        "model": model,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "rounds": completion.rounds,
        "tokens_per_round": completion.tokens_per_round,
        "tokens_per_second": completion.tokens_per_second,
        "accepted_per_position": completion.accepted_per_position,
        "drafter": completion.drafter,
        "verifier": completion.verifier,
        "exact": completion.exact,
        "seed": completion.seed,
    }
