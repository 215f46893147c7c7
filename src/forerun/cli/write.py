"""Generate one text for a command: streamed, timed, and stopped by Ctrl-C.

Prompt and text are timed apart, as llama.cpp does it: the prompt takes until the first tokens are there, and the
text's rate is that of the tokens after them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from forerun.cli.progress import ProgressLine
from forerun.cli.show import Shades

if TYPE_CHECKING:
    from forerun.api.llm import LLM, Completion
    from forerun.api.prompts import Prompt
    from forerun.core.params import SamplingParams
    from forerun.core.types import Event

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
    """The warning where --max-tokens is more than fits."""
    left = room_for(llm, prompt_tokens, params)
    prompt = f"behind a prompt of {prompt_tokens} tokens" if prompt_tokens else "for prompt and text together"
    prompt = prompt if llm.engine.target.source_rules is None else "of output"
    limit = f"the context of {llm.engine.max_length} tokens has room for {left} {prompt}"
    return f"--max-tokens {params.max_tokens} is more than fits: {limit}"


def _progress(llm: LLM, written: Written, limit: int) -> str:
    if written.rounds:
        return f"{written.tokens} of at most {limit} tokens written"

    done, total = llm.engine.prefill_progress()
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
