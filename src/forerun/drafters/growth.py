"""How a tree grows from a head's logits, level by level, for a whole batch at once.

A head says how likely each token of its vocabulary is after every node of the frontier. Growing a tree from
that is the same for all heads (EAGLE-2): every frontier node puts forward its likeliest children, the best of
these by cumulative confidence are the next frontier, and of all that were put forward the best n are kept,
connected because confidence never grows with depth; ties go to the smaller depth. The nodes are chosen, so the
tree may be cut where the head's own confidence says that more would not pay.

Where the verifier couples by noise, the noise is added to the logits and the likeliest token is the one that
the target would say if its law were the head's. Elsewhere a temperature only rescales the confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.drafters.heads import Calibration
from forerun.drafters.trees import best_count
from forerun.drafters.vocab import DraftVocabulary
from forerun.noise import DRAFT, draw, exponential, uniform
from forerun.types import Budget, Draws, Seq, TreeBatch
from forerun.verify.warp import warp_rows

Tree = tuple[list[int], list[int]]  # tokens and parents, the root first


class Steps(Protocol):
    """A head at work on one batch: logits after the roots, then after one frontier per level."""

    def first(self) -> Tensor:
        """[B, Vd] after the roots."""
        ...

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """[B, W, Vd] after W new nodes each: their tokens [B, W], and their parents' places in the last frontier."""
        ...


@dataclass(frozen=True, slots=True)
class Pool:
    """Everything that was put forward, level by level, so that parents precede children."""

    scores: Tensor  # [B, N] log of the survival
    tokens: Tensor  # [B, N] the target's ids
    parents: Tensor  # [B, N] index into the pool; -1 = the root


class Flavour:
    """How the logits of one batch are read: by each sequence's temperature, and under its noise if it shares it."""

    def __init__(self, seqs: Sequence[Seq], vocabulary: DraftVocabulary, device: torch.device) -> None:
        self.seqs, self.vocabulary, self.device = seqs, vocabulary, device
        hot = [seq.params.temperature for seq in seqs]
        self._cool: Tensor | None = None
        if any(t not in (0.0, 1.0) for t in hot):
            self._cool = torch.tensor([1.0 / t if t else 1.0 for t in hot], device=device)[:, None, None]
        self._noisy = [seq.shares_noise and not seq.params.is_greedy for seq in seqs]

    def flavoured(self, logits: Tensor, level: int) -> Tensor:
        """Logits [B, W, Vd] of what follows a node at depth `level`."""
        if self._cool is not None:
            logits = logits * self._cool
        if any(self._noisy):
            logits = logits - self._log_noise(logits, level)
        return logits

    def _log_noise(self, logits: Tensor, level: int) -> Tensor:
        rows = []
        for seq, noisy in zip(self.seqs, self._noisy, strict=True):
            if noisy:
                whole = exponential(
                    seq.seed, len(seq.tokens) + level, self.vocabulary.vocab_size, self.device
                )
                rows.append(self.vocabulary.rows_of(whole).log_())
            else:
                rows.append(logits.new_zeros(len(self.vocabulary)))
        return torch.stack(rows)[:, None]


def grow_trees(
    steps: Steps,
    seqs: Sequence[Seq],
    budgets: Sequence[Budget],
    vocabulary: DraftVocabulary,
    calibration: Calibration,
    rates: Tensor | None = None,
) -> list[Tree]:
    """One tree of chosen tokens per sequence; `rates` [levels, ranks] in place of confidences fixes its shape."""
    depth = max(budget.depth for budget in budgets)
    if rates is not None:
        depth = min(depth, len(rates))
    pool = _grow_pool(steps, seqs, budgets, vocabulary, calibration, rates, depth)
    return cut_pool(pool, seqs, budgets)


def _grow_pool(
    steps: Steps,
    seqs: Sequence[Seq],
    budgets: Sequence[Budget],
    vocabulary: DraftVocabulary,
    calibration: Calibration,
    rates: Tensor | None,
    depth: int,
) -> Pool:
    logits = steps.first()[:, None]  # [B, 1, Vd]
    flavour = Flavour(seqs, vocabulary, logits.device)
    width = max(min(budget.width, budget.nodes) for budget in budgets)
    branch = min(width, len(vocabulary) if rates is None else min(len(vocabulary), rates.shape[1]))
    priced = len(seqs) == 1 and logits.device.type == "cpu"
    standing = logits.new_zeros(len(seqs), 1)  # [B, W] log survivals of the frontier
    places = torch.full((len(seqs), 1), -1, device=logits.device)  # [B, W] where the frontier is in the pool
    pools: list[tuple[Tensor, Tensor, Tensor]] = []
    size = 0
    for level in range(depth):
        values, rows = likeliest(flavour.flavoured(logits, level), branch)  # [B, W, k]
        if rates is not None:
            values = rates[level, :branch].log().expand_as(values)
        else:
            values = calibration.log_confidence(values)
        scores = (standing[:, :, None] + values).flatten(1)  # [B, W k]
        tokens = vocabulary.ids[rows].flatten(1)
        pools.append((scores, tokens, places.repeat_interleave(branch, 1)))
        if level + 1 == depth or (priced and not _pays(float(scores.max()), level, budgets[0])):
            break
        standing, best = scores.topk(min(width, scores.shape[1]))
        logits = steps.after(best // branch, tokens.gather(1, best))
        places = best + size
        size += scores.shape[1]
    return Pool(*(torch.cat(parts, 1) for parts in zip(*pools, strict=True)))


def _pays(log_survival: float, level: int, budget: Budget) -> bool:
    """Could a node one level deeper still be worth its place in the pass?"""
    price, count = budget.price, level + 1
    if price is None or count + 1 >= len(price):
        return True
    return bool(torch.tensor(log_survival).exp() > price[count + 1] - price[count])


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and rows of the likeliest tokens [B, W, k], best first."""
    totals = logits.logsumexp(-1, keepdim=True)
    if count == 1 and logits.device.type == "cpu":  # numpy's argmax is ten times faster there
        rows = torch.from_numpy(logits.numpy().argmax(-1)).unsqueeze(-1)
        values = logits.gather(-1, rows)
    else:
        values, rows = logits.topk(count)
    return (values - totals).clamp_(max=0.0), rows


def cut_pool(pool: Pool, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
    """Of everything put forward, each sequence's best nodes: within its budget, and only while they pay."""
    order = pool.scores.sort(stable=True, dim=1, descending=True).indices  # ties: the one made first
    most = min(max(budget.nodes for budget in budgets), pool.scores.shape[1])
    if any(budget.width < budgets[0].width or budget.depth < budgets[0].depth for budget in budgets):
        most = pool.scores.shape[1]  # some of the best are not for everybody
    order = order[:, :most]
    picked = [part.gather(1, order).tolist() for part in (pool.scores.exp(), pool.tokens, pool.parents)]
    places = order.tolist()
    return [
        _cut(seq.tokens[-1], budget, *rows)
        for seq, budget, *rows in zip(seqs, budgets, places, *picked, strict=True)
    ]


def _cut(
    root: int,
    budget: Budget,
    places: list[int],
    survivals: list[float],
    tokens: list[int],
    parents: list[int],
) -> Tree:
    depths, children = {-1: 0}, dict.fromkeys((-1, *places), 0)
    allowed: list[tuple[int, float, int, int]] = []
    for place, survival, token, parent in zip(places, survivals, tokens, parents, strict=True):
        if len(allowed) == budget.nodes:
            break
        depth = depths.get(parent, budget.depth) + 1  # a parent that was not taken has no depth
        if depth <= budget.depth and children[parent] < budget.width:
            children[parent] += 1
            depths[place] = depth
            allowed.append((place, survival, token, parent))
    allowed = allowed[: best_count([survival for _, survival, _, _ in allowed], budget.price)]
    allowed.sort()  # parents were put forward before their children
    index = {-1: 0} | {place: i for i, (place, *_) in enumerate(allowed, start=1)}
    kept_parents = [index[parent] for *_, parent in allowed]
    return [root, *(token for _, _, token, _ in allowed)], [-1, *kept_parents]


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


def lay_out(
    trees: Sequence[Tree], rows: Sequence[Sequence[int]] = (), laws: Sequence[Tensor] = ()
) -> TreeBatch:
    """The batch that a proposal is; with laws where nodes were drawn."""
    drawn = None
    if laws:
        flat = torch.tensor([row for tree in rows for row in tree])
        drawn = Draws(torch.stack(list(laws)), flat, replace=False)
    return TreeBatch.trees(trees, drawn)
