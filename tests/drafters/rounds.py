"""Rounds without an engine: a drafter that observes random verdicts, or a text as one prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

from forerun.core.types import Budget, TreeBatch, Verdict
from forerun.drafters.base import Drafter
from forerun.testing import FakeSeq, TableLM
from forerun.testing.doubles import extend, random_verdict


def observe_prompts(drafter: Drafter, target: TableLM, seqs: Sequence[FakeSeq]) -> None:
    trees, scores = target.prefill(seqs, drafter.needs)
    drafter.observe(seqs, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in seqs]))


def play(
    drafter: Drafter, target: TableLM, seqs: Sequence[FakeSeq], budgets: Sequence[Budget], rounds: int, seed: int
) -> None:
    """Rounds in which any path may be accepted."""
    rng = random.Random(seed)
    for _ in range(rounds):
        trees = drafter.propose(seqs, budgets)
        scores = target.score(seqs, trees, drafter.needs)
        verdict = random_verdict(rng, trees, target.vocab_size)
        target.commit(seqs, trees, verdict)
        drafter.observe(seqs, trees, scores, verdict)
        extend(seqs, trees, verdict)


def as_lists(trees: TreeBatch) -> list[tuple[list[int], list[int]]]:
    spans = zip(trees.starts, trees.starts[1:], strict=False)
    return [(trees.tokens[a:b].tolist(), trees.parents[a:b].tolist()) for a, b in spans]
