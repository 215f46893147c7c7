"""What a round may draft: the controller's budgets, requests' own, and for how long they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from forerun.core.offer import RoundPlan
from forerun.core.request import ALWAYS
from forerun.core.types import Budget, TreeBatch
from forerun.engine.sequence import SequenceState


def cut_budgets(
    seqs: Sequence[SequenceState], planned: Sequence[Budget], reaches: Sequence[int] | None = None
) -> list[Budget]:
    """The controller's budgets, or a request's own: no sequence drafts more than it can still take.

    `reaches`: the target's (`Target.reaches`).
    """
    budgets = []
    for b, (seq, plan) in enumerate(zip(seqs, planned, strict=True)):
        own = seq.request.budget
        allowed = plan if own is None else _always(own)
        if not allowed.nodes:
            budgets.append(allowed)
            continue
        depth = min(allowed.depth, seq.room - 1)
        if reaches is not None:
            depth = min(depth, reaches[b] - len(seq.tokens))
        nodes = allowed.nodes if depth > 0 else 0
        fits = (nodes, depth) == (allowed.nodes, allowed.depth)  # the usual case
        budgets.append(allowed if fits else replace(allowed, nodes=nodes, depth=depth))
    return budgets


@lru_cache(maxsize=64)
def _always(budget: Budget) -> Budget:
    """A request's own budget holds for all of its rounds."""
    return replace(budget, repeats=ALWAYS)


def plan_of(budgets: Sequence[Budget], trees: TreeBatch) -> RoundPlan:
    """The plan of a round with these budgets: for how many further rounds they hold, and who drafts."""
    first, repeats = budgets[0], budgets[0].repeats
    drafts = first.nodes > 0
    if len(budgets) > 1 and not all([budget is first for budget in budgets]):  # noqa: C419 - the usual cases
        repeats = min([budget.repeats for budget in budgets])
        drafts = any([budget.nodes for budget in budgets])  # noqa: C419
    return RoundPlan("trees" if trees.form is not None else "lookup" if drafts else "plain", repeats)
