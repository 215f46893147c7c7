"""Per-request drafters and verifiers: several parts behind the seam of one.

A batch may mix requests that want different drafters or verifiers. These pools split it, let each part do
its share, and put the results back in order; a batch that agrees pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from forerun.errors import RequestFailed
from forerun.noise import Noise
from forerun.types import Budget, Greedy, Laws, Needs, Scores, TreeBatch, Verdict
from forerun.verify.greedy import greedy_verdict

if TYPE_CHECKING:
    from forerun.drafters.base import Drafter
    from forerun.engine.sequence import SequenceState
    from forerun.verify.base import Verifier


def _groups(names: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(name, []).append(i)
    return groups


class DrafterPool:
    """Drafters by name, made when first asked for."""

    def __init__(self, make: Callable[[str], Drafter]) -> None:
        self._make = make
        self._made: dict[str, Drafter] = {}

    def get(self, name: str) -> Drafter:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def add(self, name: str, drafter: Drafter) -> None:
        """Put a drafter behind a name of its own, such as a second head of one kind."""
        self._made[name] = drafter

    def needs(self, seqs: Sequence[SequenceState]) -> Needs:
        needs = Needs()
        for name in {seq.drafter for seq in seqs}:
            needs = needs | self.get(name).needs
        return needs

    def propose(self, seqs: Sequence[SequenceState], budgets: Sequence[Budget]) -> TreeBatch:
        groups = _groups([seq.drafter for seq in seqs])
        if len(groups) == 1:
            return self.get(seqs[0].drafter).propose(seqs, budgets)
        parts = [
            self.get(name).propose([seqs[b] for b in which], [budgets[b] for b in which])
            for name, which in groups.items()
        ]
        return TreeBatch.join(parts, [b for which in groups.values() for b in which])

    def observe(
        self, seqs: Sequence[SequenceState], trees: TreeBatch, scores: Scores, verdict: Verdict
    ) -> None:
        groups = _groups([seq.drafter for seq in seqs])
        for name, which in groups.items():
            if len(groups) == 1:
                self.get(name).observe(seqs, trees, scores, verdict)
                continue
            nodes, rows = trees.nodes_of(which), torch.tensor(which, device=verdict.paths.device)
            hidden = {layer: rows_[nodes] for layer, rows_ in scores.hidden.items()}
            part = Scores(None if scores.logits is None else scores.logits[nodes], hidden)
            chosen = Verdict(verdict.paths[rows], verdict.accepted[rows], verdict.bonus[rows])
            self.get(name).observe([seqs[b] for b in which], trees.select(which), part, chosen)

    def forget(self, seq: SequenceState) -> None:
        self.get(seq.drafter).forget(seq)


class VerifierPool:
    """Verifiers by name, made when first asked for."""

    def __init__(self, make: Callable[[str], Verifier]) -> None:
        self._make = make
        self._made: dict[str, Verifier] = {}

    def get(self, name: str) -> Verifier:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def verify(
        self,
        seqs: Sequence[SequenceState],
        trees: TreeBatch,
        laws: Laws,
        noise: Noise,
        known: Greedy | None = None,
    ) -> Verdict:
        """By each sequence's own rule; where all are greedy, every exact rule comes to what is known already."""
        groups = _groups([seq.verifier for seq in seqs])
        if known is not None and laws.plain_greedy and all(self.get(name).exact for name in groups):
            return greedy_verdict(trees, known)
        if len(groups) == 1:
            return self.get(seqs[0].verifier).verify(trees, laws, noise)
        paths: list[list[int]] = [[] for _ in seqs]
        bonus = [0] * len(seqs)
        for name, which in groups.items():
            part = laws.select(trees.nodes_of(which), which)
            try:
                verdict = self.get(name).verify(trees.select(which), part, noise.select(which))
            except RequestFailed as failed:  # it names places in its part of the batch
                failed.rows = tuple(which[row] for row in failed.rows)
                raise
            for b, path, token in zip(which, *verdict.to_host(), strict=True):
                paths[b], bonus[b] = path, token
        return Verdict.of(paths, bonus, trees.device)
