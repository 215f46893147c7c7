"""Prefill progress: how many prompt tokens of an engine are cached so far."""

from __future__ import annotations

from forerun.engine.engine import Engine


def prompt_progress(engine: Engine) -> tuple[int, int]:
    """Of the prompts being prefilled now: cached tokens, and tokens to cache in all. Any thread may ask."""
    reading = [*engine.reading, *(seq for seq in engine.running.copy() if not seq.rounds)]
    cached = sum(engine.target.cached_tokens(seq) for seq in reading)
    return cached, sum(len(seq.tokens) - 1 for seq in reading)
