"""A drafter of your own: it remembers which token followed which, in all texts it has seen, and bets on that.

It knows nothing of sampling or exactness; the verifier takes care of both. docs/write-a-drafter.md goes
through it line by line.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from forerun import LLM, SamplingParams
from forerun.core.registry import drafters
from forerun.core.types import Budget, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import BaseDrafter
from forerun.testing import check_drafter


class FollowerDrafter(BaseDrafter):
    """The likeliest successor of the last token, then its successor, and so on: a chain of chosen tokens."""

    def __init__(self) -> None:
        self.followers: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.chains([self._chain(s.tokens[-1], b) for s, b in zip(seqs, budgets, strict=True)])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        tokens, bonus = trees.tokens.tolist(), verdict.bonus.tolist()
        for b in range(len(seqs)):
            first = trees.starts[b]
            root = tokens[first : trees.starts[b + 1]][:1]  # none after a prompt of one token
            came = [*root, *(tokens[first + node] for node in verdict.path(b)), bonus[b]]
            for token, follower in pairwise(came):
                self.followers[token][follower] += 1

    def _chain(self, root: int, budget: Budget) -> list[int]:
        chain = [root]
        while len(chain) <= min(budget.nodes, budget.depth) and self.followers[chain[-1]]:
            chain.append(self.followers[chain[-1]].most_common(1)[0][0])
        return chain


if __name__ == "__main__":
    check_drafter(FollowerDrafter, vocab_size=32)  # raises if it breaks the contract
    drafters.register("follower", f"{__name__}:FollowerDrafter")

    llm, params = LLM.load("smollm2"), SamplingParams(max_tokens=32)
    for name in ("none", "follower"):
        answer = llm.chat("Count from 1 to 9, twice.", params, drafter=name, budget=3)
        print(f"{name}: {answer.tokens_per_round:.2f} tokens per round, {answer.text!r}")
