"""Sample outputs: the prompts that gained most and least, token by token, drafted tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.bench.figures import Figures
from forerun.bench.measure import Drafts
from forerun.bench.settings import PLAIN
from forerun.engine.detokenize import Decodes, Detokenizer


def samples(figures: Figures, drafter: str, tokenizer: Decodes, each: int = 2) -> list[dict[str, Any]]:
    """The texts that gained most, best first, then those that gained least, worst last."""
    gains = sorted(figures.by_prompt(drafter, PLAIN).items(), key=lambda pair: -pair[1])
    chosen = gains if len(gains) <= 2 * each else [*gains[:each], *gains[-each:]]
    found = []
    for prompt, gain in chosen:
        run = next(run for run in figures.of(drafter) if run.prompt == prompt)
        rounds = len(run.drafts[0]) if run.drafts else 0
        found.append(
            {
                "prompt": prompt,
                "task": run.task,
                "drafter": drafter,
                "speedup": round(gain, 4),
                "tokens_per_round": round(len(run.texts[0]) / rounds, 3) if rounds else None,
                "pieces": pieces(run.texts[0], run.drafts[0] if run.drafts else (), tokenizer),
            }
        )
    return found


def pieces(tokens: Sequence[int], rounds: Drafts, tokenizer: Decodes) -> list[list[Any]]:
    """[text, was it drafted?] of every token; a character that spans tokens belongs to the last of them."""
    drafted = [flag for _, _, accepted in rounds for flag in [*[True] * accepted, False]]
    drafted += [False] * (len(tokens) - len(drafted))
    detokenizer, shown, found = Detokenizer(tokenizer), 0, []
    for token, flag in zip(tokens, drafted, strict=False):
        detokenizer.push(token)
        found.append([detokenizer.text[shown:], flag])
        shown = len(detokenizer.text)
    return [piece for piece in found if piece[0]]
