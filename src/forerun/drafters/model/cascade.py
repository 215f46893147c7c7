"""CascadeDrafter, the composition `a>b`: the draft model b decodes with a as its own drafter.

Each level is lossless for the one above: b verifies what a drafts exactly as the target verifies what b drafts, so
what b hands on has b's own law, and that law goes with the tree. The number of tokens is fixed beforehand: what b
writes beyond it is dropped whatever it is. `a>b>c` has three levels: a drafts for b, both for c, and c for the target
(staged speculation, Spector and Re 2023; cascade drafting, Chen et al. 2023, has the models in such a row too).

Random numbers of a level are keyed by its round as well: a position that is drafted again sees others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.noise import Noise, derived_seed
from forerun.core.types import Budget, Laws, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import BaseDrafter, Drafter
from forerun.drafters.heads.growth import lay_out
from forerun.drafters.model.draft_model import CATCH_UP, Branch, Growth, ModelDrafter, fit
from forerun.verify.coupled import walk_coupled
from forerun.verify.exact import walk_exactly
from forerun.verify.walk import decide
from forerun.verify.warp import warp

WORTH_A_ROW = 0.35  # probability of being accepted below which a token is not put to the draft model
UNKNOWN = 4  # tokens of a lower drafter that does not say how far it can be trusted
_ROUNDS = 1 << 40  # seeds of rounds are derived far from those of a prompt's several completions


class CascadeDrafter(ModelDrafter):
    """A draft model that decodes with a drafter of its own; it drafts chains."""

    def __init__(self, lower: Drafter, upper: ModelDrafter) -> None:
        super().__init__(upper.draft, upper.vocab_size)
        self.lower, self.upper = lower, upper

    @classmethod
    def compose(cls, first: Drafter, second: Drafter) -> Drafter:
        """`first>second`; of `a>b>c`, a drafts for b."""
        if isinstance(second, CascadeDrafter):
            return cls(cls.compose(first, second.lower), second.upper)
        if not isinstance(second, ModelDrafter):
            raise InvalidInput("what stands right of '>' must be a draft model; write a>draft_model, or a>layer_skip")
        if first.needs.hidden_layers:
            raise InvalidInput("a head drafts for the target it was trained on; left of '>' it cannot draft")
        if isinstance(first, ModelDrafter) and first.draft is second.draft:
            raise InvalidInput("a draft model cannot draft for itself; name two: draft_model=SMALL,MEDIUM")
        return cls(first, second)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        laws: list[Tensor] = []
        trees = [Growth([seq.tokens[-1]], [-1], [-1]) for seq in seqs]
        left = {b: self._depth(seq, budgets[b]) for b, seq in enumerate(seqs)}
        branches = {b: self._follow(seqs[b]) for b, depth in left.items() if depth > 0}
        branches = {b: branch for b, branch in branches.items() if not branch.foreign}
        read = branches.values()
        self._catch_up([one for one in read if one.cached < 0 or len(one.tokens) - one.cached > CATCH_UP])
        self._meter.start()
        while live := [b for b in branches if left[b] > 0]:
            self._round(live, branches, left, trees, laws)
        self._meter.stop(max(len(tree.tokens) for tree in trees) - 1)
        return lay_out([(tree.tokens, tree.parents) for tree in trees], [tree.rows for tree in trees], laws)

    def forget(self, seq: Seq) -> None:
        super().forget(seq)
        self.lower.forget(seq)

    def _catch_up(self, behind: list[Branch]) -> tuple[TreeBatch, Scores] | None:
        """As one draft model does; the lower drafter observes it."""
        if (read := super()._catch_up(behind)) is not None:
            self.lower.observe(behind, *read, Verdict.whole_chain(read[0], [one.tokens[-1] for one in behind]))
        return read

    def _follow(self, seq: Seq) -> Branch:
        """The branch of the committed sequence; the lower drafter is rewound to what is left of it."""
        held = self._branches.get(seq.id)
        shown, agreed = (held.tokens, held.committed) if held is not None else ([], 0)
        while agreed < min(len(shown), len(seq.tokens)) and shown[agreed] == seq.tokens[agreed]:
            agreed += 1
        branch = super()._follow(seq)
        if not branch.shares_noise:
            branch.seed = derived_seed(seq.seed, _ROUNDS + len(seq.tokens))
        if agreed < len(shown):
            if isinstance(self.lower, BaseDrafter | ModelDrafter):
                self.lower.rewind(branch, agreed)
            else:
                self.lower.forget(branch)
        return branch

    def _round(
        self,
        live: list[int],
        branches: dict[int, Branch],
        left: dict[int, int],
        trees: list[Growth],
        laws: list[Tensor],
    ) -> None:
        """One pass of the draft model over what the lower drafter drafts."""
        some = [branches[b] for b in live]
        drafted = self._drafted(some, [left[b] for b in live])
        unread = [branch.tokens[branch.cached :] for branch in some]  # most often one token: the root
        seen = [replace(branch, tokens=branch.tokens[: branch.cached + 1]) for branch in some]
        whole, rows = _below_chains(unread, drafted, self.draft.device)
        scores = self.draft.score(seen, whole, self.needs)
        logits = fit(scores.required_logits[rows], self.vocab_size)
        law = warp(logits, some, drafted)
        walks = [_walk(branch, drafted, law, i) for i, branch in enumerate(some)]
        verdict = Verdict.of([path for path, _, _ in walks], [bonus for _, bonus, _ in walks], drafted.device)
        self.lower.observe(some, drafted, Scores(logits), verdict)
        depths = [len(chain) - 1 for chain in unread]
        paths = [
            [*range(1, depth + 1), *(depth + node for node in path)]
            for depth, (path, _, _) in zip(depths, walks, strict=True)
        ]
        self.draft.commit(seen, whole, Verdict.of(paths, [0] * len(paths), whole.device))
        tokens = drafted.to_host()[0]
        for i, (b, (path, bonus, possible)) in enumerate(zip(live, walks, strict=True)):
            start, branch = drafted.starts[i], some[i]
            branch.cached += len(unread[i]) + len(path)
            written = [*(tokens[start + node] for node in path), bonus][: left[b]] if possible else []
            sampled = not (law.greedy[i] or branch.shares_noise)
            for token, node in zip(written, [0, *path], strict=False):
                if sampled:
                    laws.append(law.probs(start + node))
                trees[b].add(len(trees[b].tokens) - 1, token, len(laws) - 1 if sampled else -1)
            branch.tokens += written
            left[b] = left[b] - len(written) if possible else 0

    def _drafted(self, some: Sequence[Branch], left: Sequence[int]) -> TreeBatch:
        """What the lower drafter drafts; nothing where the draft model does not know a token of it."""
        budgets = []
        for branch, most in zip(some, left, strict=True):
            free = self.lower.offer(branch).free
            depth = min(most - 1, sum(share >= WORTH_A_ROW for share in free) if free else UNKNOWN)
            budgets.append(Budget(depth, depth) if depth > 0 else Budget(0, 0))
        trees = self.lower.propose(some, budgets)
        if max(trees.to_host()[0]) < self.draft.vocab_size:
            return trees
        return TreeBatch.chains([branch.tokens[-1:] for branch in some])


def _below_chains(
    chains: Sequence[Sequence[int]], drafted: TreeBatch, device: torch.device
) -> tuple[TreeBatch, list[int]]:
    """Trees hung below chains, at whose last tokens their roots are; and where each of their nodes is."""
    tokens, parents = drafted.to_host()
    made, rows, done = [], list[int](), 0
    for i, chain in enumerate(chains):
        span, depth = slice(drafted.starts[i], drafted.starts[i + 1]), len(chain) - 1
        below = [parent + depth for parent in parents[span][1:]]
        made.append(([*chain, *tokens[span][1:]], [*range(-1, depth), *below]))
        rows += range(done + depth, done + len(made[-1][0]))
        done += len(made[-1][0])
    return TreeBatch.trees(made, device=device), rows


def _walk(branch: Branch, drafted: TreeBatch, law: Laws, i: int) -> tuple[list[int], int, bool]:
    """What the draft model accepts of tree i, its own token after that, and whether any token was possible."""
    start, end = drafted.starts[i], drafted.starts[i + 1]
    if start in law.impossible:
        return [], 0, False
    tree = drafted.select([i])
    if any(node in law.impossible for node in range(start, end)):
        tree, end = TreeBatch.chains([branch.tokens[-1:]]), start + 1
    noise = Noise([branch.seed], [len(branch.tokens)])
    walk = walk_coupled if branch.shares_noise else walk_exactly
    paths, bonus = decide(tree, Laws(law.log_weights[start:end], (law.greedy[i],)), noise, walk).to_host()
    return paths[0], bonus[0], True
