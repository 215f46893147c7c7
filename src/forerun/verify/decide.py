"""VerifierPool: from scores to laws and verdict, by the verifier of each sequence; a batch may mix verifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from forerun.core.noise import Noise
from forerun.core.params import SamplingParams
from forerun.core.request import LawRules
from forerun.core.types import Greedy, Laws, Scores, Seq, TreeBatch, Verdict
from forerun.verify.base import DecidedSeq, Logprobs, Traits, Verifier, traits_of
from forerun.verify.choices import choosers_of, chosen
from forerun.verify.greedy import greedy_verdict
from forerun.verify.logprobs import row_logprobs, send, token_logprobs
from forerun.verify.sampled import decides_alike, kinds_of
from forerun.verify.warp import keeps_argmax, reads_largest_only, warp


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
        """Laws and verdict of a round; where the device has decided about samples, no laws are made."""
        known = scores.greedy
        if known is not None and known.sampled and trees.drawn_from is None and self.decide_alike(seqs):
            greedy = tuple(seq.params.is_greedy for seq in seqs)
            return Laws(scores.required_logits, greedy, known=scores.logprobs), greedy_verdict(trees, known)
        if known is not None and self._all_greedy(seqs):
            laws = Laws(scores.required_logits, (True,) * len(seqs), plain_greedy=True, known=scores.logprobs)
            return laws, greedy_verdict(trees, known)
        choosers = choosers_of(seqs)
        if choosers is not None and any(choosers) and all(self.is_exact(seq.verifier) for seq in seqs):
            return chosen(seqs, trees, scores, choosers)
        laws = warp(scores.required_logits, seqs, trees)
        return laws, self.verify(seqs, trees, laws, known)

    def _all_greedy(self, seqs: Sequence[DecidedSeq]) -> bool:
        """Is the law of all of these the argmax, and every verifier exact?"""
        # a list is quicker than a generator: every round asks
        return all([one.is_plain_greedy and self.is_exact(one.verifier) for one in traits_of(seqs)])  # noqa: C419

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

    def send_logprobs(self, seqs: Sequence[DecidedSeq], trees: TreeBatch, scores: Scores) -> Scores:
        known = scores.greedy
        if known is None or known.tokens is None or not any([one.wants_logprobs for one in traits_of(seqs)]):  # noqa: C419
            return scores
        if not (known.sampled and trees.drawn_from is None and self.decide_alike(seqs)) and not self._all_greedy(seqs):
            return scores  # the host decides, before another pass is launched
        return replace(scores, logprobs=send(seqs, trees, scores.required_logits, known.tokens()))

    def logprobs(self, laws: Laws, seq: Seq, first: int, nodes: Sequence[int], tokens: Sequence[int]) -> Logprobs:
        if laws.known is not None:
            return laws.known.of(seq.id, nodes, tokens)
        return token_logprobs(laws, [first + node for node in nodes], tokens, seq.params.logprobs or 0)

    def prompt_logprobs(self, scores: Scores, seq: Seq, tokens: Sequence[int]) -> Logprobs:
        return row_logprobs(scores.required_logits, tokens, seq.params.prompt_logprobs or 0)


_traits = lru_cache(maxsize=1024)(Traits)
