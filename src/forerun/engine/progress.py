"""How much of the prompts that an engine is reading has been read."""

from __future__ import annotations

from forerun.engine.engine import Engine


def prompt_progress(engine: Engine) -> tuple[int, int]:
    """Of the prompts being read now: tokens that are cached, and tokens to cache in all. Any thread may ask."""
    reading = [seq for seq in engine.running.copy() if not seq.stats.rounds]
    cached = sum(engine.target.cached_tokens(seq) for seq in reading)
    return cached, sum(seq.prompt_length - 1 for seq in reading)
