"""Run one `generate` call: stream its sequences, stop them by the caller's criteria, and keep the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from forerun.api.completion import Completion, ended_of
from forerun.api.dropin.hooks import Hook, tokens_until_stop
from forerun.core.checks import shown
from forerun.core.errors import InvalidInput
from forerun.core.types import Request
from forerun.engine.detokenize import Decodes
from forerun.engine.driver import Driver, Handle
from forerun.engine.engine import Engine
from forerun.engine.sequence import SequenceState


def check_streamer(streamer: Any, texts: int) -> Any:
    """transformers' streamers take one sequence."""
    if streamer is None:
        return None
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise InvalidInput(f"streamer={shown(streamer)} has no put and end; give one of transformers' streamers")
    if texts > 1:
        raise InvalidInput(f"streamer takes one sequence, not {texts}; drop it or pass one prompt")
    return streamer


def run(
    engine: Engine,
    requests: Sequence[Request],
    prompts: Sequence[list[int]],
    streamer: Any,
    criteria: Sequence[Hook],
    tokenizer: Decodes | None,
) -> list[Completion]:
    """All sequences, in order. `prompts` are the rows as they came, pads included. Nothing stays in the engine."""
    driver, handles = Driver(engine), dict[int, Handle]()
    texts = [_Text(prompt) for prompt in prompts]
    try:
        for place, request in enumerate(requests):
            handles[place] = driver.submit(request)
        for place, event in driver.events(handles):
            fresh = texts[place].take(event.tokens, criteria)
            if texts[place].stopped:
                driver.abort(handles[place])
            if streamer is not None and fresh:
                streamer.put(torch.tensor(fresh))
    finally:
        for handle in handles.values():
            driver.abort(handle)
    if errors := [handle.seq.error for handle in handles.values() if handle.seq.error is not None]:
        raise errors[0]
    if streamer is not None:
        streamer.end()
    return [text.completion(handles[place].seq, engine, tokenizer) for place, text in enumerate(texts)]


class _Text:
    """One sequence being written."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.written = prompt, list[int]()
        self.stopped = False  # by a criterion of the caller

    def take(self, tokens: Sequence[int], criteria: Sequence[Hook]) -> list[int]:
        """Add the tokens of a round, up to the one at which a criterion stops; those that were added."""
        if self.stopped:
            return []
        count = tokens_until_stop(criteria, [*self.prompt, *self.written], tokens) if criteria else None
        self.stopped = count is not None
        fresh = list(tokens[:count])
        self.written += fresh
        return fresh

    def completion(self, seq: SequenceState, engine: Engine, tokenizer: Decodes | None) -> Completion:
        done = ended_of(seq, engine.verifiers.get(seq.verifier).exact).completion()
        text = "" if tokenizer is None else tokenizer.decode(self.written)
        ended = "stop" if self.stopped else done.finish_reason
        return replace(done, text=text, token_ids=self.written, finish_reason=ended)
