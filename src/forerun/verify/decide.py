"""VerifierPool: from scores to laws and verdict, by the verifier of each sequence; a batch may mix verifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from forerun.core.noise import Noise
from forerun.core.params import SamplingParams
from forerun.core.request import LawRules
from forerun.core.types import Greedy, Laws, Scores, Seq, TokenLogprob, TreeBatch, Verdict
from forerun.verify.base import DecidedSeq, Traits, Verifier, traits_of
from forerun.verify.greedy import greedy_verdict
from forerun.verify.sampled import decides_alike, kinds_of
from forerun.verify.warp import keeps_argmax, reads_largest_only, token_logprobs, warp


class VerifierPool:
    """Implements forerun.verify.base.Verifiers: verifiers by name, made on first use."""

    def __init__(self, make: Callable[[str], Verifier]) -> None:
        self._make = make
        self._made: dict[str, Verifier] = {}

    def get(self, name: str) -> Verifier:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def decide(self, seqs: Sequence[DecidedSeq], trees: TreeBatch, scores: Scores) -> tuple[Laws, Verdict]:
        """Laws and verdict of a round; where the device has decided about samples, laws are made for logprobs only."""
        known = scores.greedy
        if known is not None and known.sampled and trees.drawn_from is None and self.decide_alike(seqs):
            greedy = tuple(seq.params.is_greedy for seq in seqs)
            wanted = any(seq.params.logprobs is not None for seq in seqs)
            laws = warp(scores.required_logits, seqs, trees) if wanted else Laws(scores.required_logits, greedy)
            return laws, greedy_verdict(trees, known)
        if known is not None:
            for one in traits_of(seqs):  # a loop, and no list: every round asks
                if not (one.is_plain_greedy and self.is_exact(one.verifier)):
                    break
            else:
                laws = Laws(scores.required_logits, (True,) * len(seqs), plain_greedy=True)
                return laws, greedy_verdict(trees, known)
        laws = warp(scores.required_logits, seqs, trees)
        return laws, self.verify(seqs, trees, laws, known)

    def decide_alike(self, seqs: Sequence[DecidedSeq]) -> bool:
        """Do the verifiers of these sequences come to the device's verdict on samples?"""
        return all(decides_alike(self.get(name)) for name in {seq.verifier for seq in seqs})

    def device_decides(self, seqs: Sequence[DecidedSeq]) -> bool:
        """Does a device that samples decide about all of these, some of which are sampled?"""
        return kinds_of(seqs) is not None and self.decide_alike(seqs)

    def is_exact(self, name: str) -> bool:
        """Is this verifier exact? All that are come to one verdict where laws are point masses."""
        return (self._made.get(name) or self.get(name)).exact

    def verify(self, seqs: Sequence[DecidedSeq], trees: TreeBatch, laws: Laws, known: Greedy | None = None) -> Verdict:
        """By each sequence's own verifier; where all are greedy and exact, from what the pass already knows."""
        if known is not None and laws.plain_greedy and all(self.is_exact(seq.verifier) for seq in seqs):
            return greedy_verdict(trees, known)
        noise = Noise([seq.seed for seq in seqs], [len(seq.tokens) for seq in seqs])
        groups: dict[str, list[int]] = {}
        for b, seq in enumerate(seqs):
            groups.setdefault(seq.verifier, []).append(b)
        if len(groups) == 1:
            return self.get(seqs[0].verifier).verify(trees, laws, noise)
        paths: list[list[int]] = [[] for _ in seqs]
        bonus = [0] * len(seqs)
        for name, which in groups.items():
            part = laws.select(trees.nodes_of(which), which)
            verdict = self.get(name).verify(trees.select(which), part, noise.select(which))
            for b, path, token in zip(which, *verdict.to_host(), strict=True):
                paths[b], bonus[b] = path, token
        return Verdict.of(paths, bonus, trees.device)

    def traits(self, params: SamplingParams, rules: LawRules | None, verifier: str, has_budget: bool) -> Traits:
        return _traits(verifier, keeps_argmax(params, rules), params.logprobs is not None, has_budget)

    def reads_largest_only(self, seqs: Sequence[Seq]) -> bool:
        return all(map(reads_largest_only, seqs))

    def logprobs(self, laws: Laws, nodes: Sequence[int], tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
        return token_logprobs(laws, nodes, tokens, top)


_traits = lru_cache(maxsize=1024)(Traits)
