"""Writes one text for a command: streamed, timed, drafted characters in green, with one closing line.

Colour is for terminals only (NO_COLOR is respected); into a pipe goes the text and nothing else. Model text
is written as it is, never through a renderer that would expand tabs or read brackets as markup. `WordWrap` breaks lines
between words where that is asked for: a word is held back until it is whole. The progress line goes to stderr and is
erased. Prompt and text are timed apart, as llama.cpp does it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from forerun.api.calls import Prompt
    from forerun.api.completion import Completion
    from forerun.api.llm import LLM
    from forerun.core.params import SamplingParams
    from forerun.core.types import Event
    from forerun.engine.sequence import Decodes


_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


class Shades:
    """Separates drafted characters from the target's own, although an event's text may lag its tokens.

    Text is held back while it could still change, so an event's characters need not be those of its tokens.
    The same detokenizer, fed the same tokens, says at which character of the whole text each token ends.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        from forerun.engine.sequence import Detokenizer

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
        self._lines.print(Text(line, style=style))

    def close(self, written: Written) -> None:
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
    parts = [f"prompt {in_tokens(written.prompt_tokens, written.prompt_rate)}"]
    if written.tokens:
        parts.append(f"text {in_tokens(written.tokens, written.text_rate)}")
        parts.append(f"{written.tokens / written.rounds:.2f} tokens per round")
    if written.completion is None:
        return " · ".join(["stopped", *parts])
    return " · ".join([*parts, f"drafter {written.completion.drafter}", f"verifier {written.completion.verifier}"])


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_tokens(count: int, rate: float | None) -> str:
    tokens = counted(count, "token")
    return tokens if rate is None else f"{tokens}, {rate:.1f} tokens/s"


def table_console() -> Console:
    """A console for tables: as wide as the terminal, and never wrapped into a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


_TAB = 8


class WordWrap:
    """The state of one text: what is held back, and where on its line the text is."""

    def __init__(self) -> None:
        self._word: list[tuple[str, bool]] = []
        self._line = ""  # of the text itself, to find fences
        self._column = 0
        self._is_code = self._is_cut = False  # cut: the beginning of a word that no line can hold is shown

    def push(self, text: str, drafted: bool, width: int) -> Iterator[tuple[str, bool]]:
        """What can be shown now on a line of so many cells, in pieces: (text, was it drafted?)."""
        shown = list[tuple[str, bool]]()
        for letter in text:
            if letter.isspace():
                shown += [*self._placed(width), *self._space(letter, drafted, width)]
            elif cell_len(letter) > 1:
                shown += self._placed(width)
                self._word.append((letter, drafted))
                shown += self._placed(width)
            else:
                self._word.append((letter, drafted))
                if len(self._word) >= width:
                    shown += self._placed(width)
                    self._is_cut = True
        return _pieces(shown)

    def flush(self, width: int) -> Iterator[tuple[str, bool]]:
        """The rest, at the end of the text; the next one starts on a new line."""
        shown = self._placed(width)
        self._line, self._column, self._is_code = "", 0, False
        return _pieces(shown)

    def _space(self, letter: str, drafted: bool, width: int) -> list[tuple[str, bool]]:
        if letter == "\n":
            self._is_code ^= self._line.lstrip().startswith("```")
            self._line, self._column = "", 0
            return [(letter, drafted)]
        self._line += letter
        if letter == " " and self._column >= width and not self._is_code:
            return []  # the line is broken here
        self._column += _TAB - self._column % _TAB if letter == "\t" else 1
        return [(letter, drafted)]

    def _placed(self, width: int) -> list[tuple[str, bool]]:
        """The word that was held back, on a new line where this one has no room for it."""
        word, self._word = self._word, []
        letters = "".join(letter for letter, _ in word)
        self._line += letters
        needed, stays = (cell_len(letters), self._is_code or self._is_cut or self._line.lstrip().startswith("```"))
        if self._column and needed and self._column + needed > width and not stays:
            self._column = 0
            word.insert(0, ("\n", False))
        self._column, self._is_cut = self._column + needed, False
        if self._column > width:  # the terminal has broken it
            self._column = (self._column - 1) % width + 1
        return word


def _pieces(shown: list[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    for drafted, letters in groupby(shown, lambda pair: pair[1]):
        yield "".join(letter for letter, _ in letters), drafted


_DELAY = 0.5  # seconds: what is done by then needs no progress line
_PAUSE = 0.2  # seconds between two updates
_ERASE = "\r\x1b[K"


class ProgressLine:
    """Shows what `describe` says, again and again, until it is stopped."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Erase the line; nothing is written after this returns."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def _show(self) -> None:
        shown, pause = False, _DELAY
        while not self._stopped.wait(pause):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(_ERASE + self._describe()[: columns - 1])
            sys.stderr.flush()
            shown, pause = True, _PAUSE
        if shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


Show = Callable[[str, bool], None]  # a piece of text, and whether it was drafted


@dataclass(slots=True)
class Written:
    """What was written and what it took, counted round by round: a text that was stopped has these too."""

    prompt_tokens: int
    text: str = ""
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    prompt_seconds: float = 0.0  # until the first tokens were there
    text_seconds: float = 0.0  # from then on
    first_tokens: int = 0  # what came with the first round
    completion: Completion | None = None  # None = it was stopped

    def take(self, event: Event, seconds: float) -> None:
        """Count one round that ended so many seconds after the start."""
        if not self.rounds:
            self.prompt_seconds, self.first_tokens = seconds, len(event.tokens)
        self.text_seconds = seconds - self.prompt_seconds
        self.text += event.text
        self.tokens += len(event.tokens)
        self.accepted += event.accepted
        self.rounds += 1

    @property
    def prompt_rate(self) -> float | None:
        """Tokens of the prompt per second; None before anything was written."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else None

    @property
    def text_rate(self) -> float | None:
        """Tokens per second after the first round; None where there was no other."""
        after = self.tokens - self.first_tokens
        return after / self.text_seconds if after and self.text_seconds else None


def write_text(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    *,
    drafter: str | None = None,
    show: Show | None = None,
    visible: bool = False,
    prediction: str | None = None,
) -> Written:
    """Generate one text, streaming it; Ctrl-C stops it, and what was written until then is kept.

    `visible`: the text itself appears on the terminal, so that only the wait for its beginning needs a progress line.
    """
    written, shades, started = Written(len(llm.encode(prompt))), Shades(llm.tokenizer), perf_counter()
    stream = llm.stream(prompt, params, drafter=drafter, prediction=prediction)
    with ProgressLine(lambda: _progress(llm, written, params.max_tokens)) as line:
        try:
            for event in stream:
                written.take(event, perf_counter() - started)
                if visible:
                    line.stop()
                if show is not None:
                    for text, drafted in shades.split(event):
                        show(text, drafted)
            written.completion = stream.completion
        except KeyboardInterrupt:
            stream.close()  # the request ends now, and not when the stream is garbage-collected
    return written


def room_for(llm: LLM, prompt_tokens: int, params: SamplingParams) -> int:
    """How many tokens of what is asked for fit behind a prompt in the context."""
    if llm.engine.target.source_rules is not None:  # the encoder reads it; a start token is in the context
        prompt_tokens = 1
    return max(0, min(params.max_tokens, llm.engine.max_length - prompt_tokens))


def over_the_context(llm: LLM, prompt_tokens: int, params: SamplingParams) -> str:
    left = room_for(llm, prompt_tokens, params)
    prompt = f"behind a prompt of {prompt_tokens} tokens" if prompt_tokens else "for prompt and text together"
    prompt = prompt if llm.engine.target.source_rules is None else "of output"
    limit = f"the context of {llm.engine.max_length} tokens has room for {left} {prompt}"
    return f"--max-tokens {params.max_tokens} is more than fits: {limit}"


def _progress(llm: LLM, written: Written, limit: int) -> str:
    if written.rounds:
        return f"{written.tokens} of at most {limit} tokens written"

    done, total = llm.engine.scheduler.prefill_progress()
    return f"reading the prompt: {done} of {total} tokens" if total else "reading the prompt"


def as_document(written: Written, model: str, room: int) -> dict[str, Any]:
    """A finished text as the one JSON document that `--json` prints."""
    completion = written.completion
    assert completion is not None, "a text that was stopped has no document"
    return {
        "model": model,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "max_tokens": room,
        "finish_reason": completion.finish_reason,
        "rounds": completion.rounds,
        "tokens_per_round": completion.tokens_per_round,
        "tokens_per_second": completion.tokens_per_second,
        "prompt_seconds": written.prompt_seconds,
        "prompt_tokens_per_second": written.prompt_rate,
        "text_seconds": written.text_seconds,
        "text_tokens_per_second": written.text_rate,
        "accepted_per_position": completion.accepted_per_position,
        "drafter": completion.drafter,
        "verifier": completion.verifier,
        "exact": completion.exact,
        "seed": completion.seed,
    }
