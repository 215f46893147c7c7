"""Write the texts of one `generate` call: stream them, stop them by the caller's criteria, and keep the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from forerun.checks import shown
from forerun.completion import Completion, completion_of
from forerun.dropin.hooks import Hook, tokens_until_stop
from forerun.engine.detokenize import Decodes
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.types import Request


def check_streamer(streamer: Any, texts: int) -> Any:
    """transformers' streamers take one text."""
    if streamer is None:
        return None
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise InvalidInput(
            f"streamer={shown(streamer)} has no put and end; give one of transformers' streamers"
        )
    if texts > 1:
        raise InvalidInput(f"streamer takes one text, not {texts}; drop it or pass one prompt")
    return streamer


def run(
    engine: Engine,
    requests: Sequence[Request],
    prompts: Sequence[list[int]],
    streamer: Any,
    criteria: Sequence[Hook],
    tokenizer: Decodes | None,
) -> list[Completion]:
    """All texts, in order. `prompts` are the rows as they came, pads included. Nothing stays in the engine."""
    texts: dict[int, _Text] = {}
    try:
        for request, prompt in zip(requests, prompts, strict=True):
            seq_id = engine.submit(request)
            seq = engine.find(seq_id)
            texts[seq_id] = _Text(seq, prompt)
        while engine.busy:
            started = perf_counter()
            events = engine.step()
            spent = perf_counter() - started
            for event in events:
                fresh = texts[event.seq_id].take(event.tokens, criteria, spent)
                if texts[event.seq_id].stopped:
                    engine.abort(event.seq_id)
                if streamer is not None and fresh:
                    streamer.put(torch.tensor(fresh))
    finally:
        for seq_id in texts:
            engine.abort(seq_id)
    if streamer is not None:
        streamer.end()
    return [text.completion(engine, tokenizer) for text in texts.values()]


class _Text:
    """One text on its way."""

    def __init__(self, seq: Any, prompt: list[int]) -> None:
        self.seq, self.prompt = seq, prompt
        self.written: list[int] = []
        self.seconds = 0.0
        self.stopped = False  # by a criterion of the caller

    def take(self, tokens: Sequence[int], criteria: Sequence[Hook], seconds: float) -> list[int]:
        """Add the tokens of a round, up to the one at which a criterion stops; those that were added."""
        count = tokens_until_stop(criteria, [*self.prompt, *self.written], tokens) if criteria else None
        self.stopped = count is not None
        fresh = list(tokens[:count])
        self.written += fresh
        self.seconds += seconds
        return fresh

    def completion(self, engine: Engine, tokenizer: Decodes | None) -> Completion:
        exact = engine.verifiers.get(self.seq.verifier).exact
        text = "" if tokenizer is None else tokenizer.decode(self.written)
        done = completion_of(self.seq, text, self.seconds, [], exact)
        return replace(done, token_ids=self.written, finish_reason="stop") if self.stopped else done
