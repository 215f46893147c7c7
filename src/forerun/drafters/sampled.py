"""Chains drawn from a head's own law: what the verifier can test with p/q."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.flavour import Flavour, likeliest
from forerun.drafters.growth import Steps, Tree
from forerun.drafters.vocab import DraftVocabulary
from forerun.noise import DRAFT, draw, uniform
from forerun.types import Budget, Seq
from forerun.verify.warp import warp_rows


def sample_chains(
    steps: Steps, seqs: Sequence[Seq], budgets: Sequence[Budget], vocabulary: DraftVocabulary
) -> tuple[list[Tree], list[list[int]], list[Tensor]]:
    """One chain per sequence drawn from the head's own law: trees, the law that each node came from, the laws.

    Greedy texts, and those whose verifier couples by noise, have theirs chosen (law -1). How long a chain is was
    fixed before anything was drawn.
    """
    logits = steps.first()[:, None]
    flavour = Flavour(seqs, vocabulary, logits.device)
    trees: list[Tree] = [([seq.tokens[-1]], [-1]) for seq in seqs]
    rows, laws = [[-1] for _ in seqs], list[Tensor]()
    depth = max(min(budget.depth, budget.nodes) for budget in budgets)
    parents = torch.zeros(len(seqs), 1, dtype=torch.long, device=logits.device)
    for level in range(depth):
        chosen = vocabulary.ids[likeliest(flavour.flavoured(logits, level), 1)[1][:, 0, 0]].tolist()
        weights = warp_rows(vocabulary.spread(logits[:, 0].float()), seqs, [tree[0][1:] for tree in trees])
        for b, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            if level >= min(budget.depth, budget.nodes) or len(trees[b][0]) <= level:
                continue
            row = -1
            if not seq.params.is_greedy and not seq.shares_noise:
                law = weights[b].softmax(-1).cpu()
                if not bool(law.isfinite().all()):
                    continue  # all that the head can draft is ruled out here
                # keyed by the round too: a position drafted again must not see the same number again
                u = uniform(seq.seed, len(seq.tokens) + level, DRAFT, len(seq.tokens) * 64)
                chosen[b], row = draw(law, u), len(laws)
                laws.append(law)
            trees[b][0].append(chosen[b])
            trees[b][1].append(level)
            rows[b].append(row)
        if level + 1 < depth:
            logits = steps.after(parents, torch.tensor(chosen, device=logits.device)[:, None])
    return trees, rows, laws
