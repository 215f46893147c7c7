"""Replay a drafter over texts that are already written, without the target: which rounds it would have had.

Verification is exact, so a text does not depend on its drafter. Once the plain loop has written it, any drafter
that costs nothing and needs nothing from the target can be replayed on it, under any price list.
So a speed-up can be predicted for batch sizes that were not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from forerun.core.types import Budget, PlainSeq, Scores, TreeBatch, Verdict
from forerun.drafters.base import Drafter, LookupDrafter
from forerun.measure.bench.alternate import Drafts
from forerun.verify.greedy import follow


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, what was written on it, and what the pass over the prompt took."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    prompt_seconds: float = 0.0
    most: int | None = None  # tokens that were allowed; None = as many as were written
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Replay:
    """Rounds per sequence, and the seconds a proposal took on average."""

    rounds: tuple[Drafts, ...]
    seconds_per_round: float


def can_replay(drafter: Drafter) -> bool:
    """Does it know its own confidence, cost nothing, and read nothing of the target?"""
    return isinstance(drafter, LookupDrafter) and not drafter.needs.hidden_layers


def replay(drafter: Drafter, texts: Sequence[Text], budget: Budget) -> Replay:
    """Write the texts again, one after the other, with the drafter learning as it would."""
    found, spent, count = [], 0.0, 0
    for number, text in enumerate(texts):
        whole = [*text.prompt, *text.tokens]
        end = len(text.prompt) + (text.most or len(text.tokens))
        seq = PlainSeq(-1 - number, list(text.prompt), max_length=end, stop_ids=text.stop_ids)
        rounds: list[tuple[int, int, int]] = []
        while len(seq.tokens) < len(whole):
            depth = min(budget.depth, end - len(seq.tokens) - 1)
            nodes = budget.nodes if depth > 0 else 0
            allowed = replace(budget, nodes=nodes, depth=max(0, depth))
            started = perf_counter()
            trees = drafter.propose([seq], [allowed])
            path = _walk(trees, whole[len(seq.tokens) :])
            ahead = whole[len(seq.tokens) + len(path) :]
            bonus = ahead[0] if ahead else 0  # a drafted token that ends the text has none after it
            drafter.observe([seq], trees, Scores(None), Verdict.of([path], [bonus], trees.tokens.device))
            spent += perf_counter() - started
            rounds.append((len(trees.tokens) - 1, int(trees.depths().max()), len(path)))
            seq.tokens = whole[: len(seq.tokens) + len(path) + 1]
        drafter.forget(seq)
        found.append(tuple(rounds))
        count += len(rounds)
    return Replay(tuple(found), spent / max(1, count))


def _walk(trees: TreeBatch, ahead: Sequence[int]) -> list[int]:
    """The nodes below the root that agree with the text."""
    (tokens, _), (shape,) = trees.to_host(), trees.topology()
    return follow(tokens, shape.children, lambda node, depth: ahead[depth] if depth < len(ahead) else -1)[0]
