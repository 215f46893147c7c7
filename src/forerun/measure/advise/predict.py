"""Predict the speed-up of a drafter from its rounds, for any batch size.

A round of B sequences costs t(nodes) for the target, a level of drafting times the depth, and the host's share.
How many nodes and how many tokens it has comes from recorded or replayed rounds; t(n) from this machine. Verification
is exact, so a text does not depend on its drafter: once the plain loop has written it, any drafter that costs nothing
and needs nothing from the target can be replayed on it, under any price list.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from forerun.control.cost import CostModel
from forerun.core.types import Budget, PlainSeq, Scores, TreeBatch, Verdict
from forerun.drafters.base import Drafter, LookupDrafter
from forerun.measure.bench.alternate import Drafts
from forerun.measure.bench.figures import Accepted, Pair, acceptance_by_depth, ratio_of
from forerun.verify.greedy import follow

DRAWS = 200  # rounds of a batch that are put together at random


@dataclass(frozen=True, slots=True)
class Costs:
    target: CostModel  # scaled to real rounds
    host: float  # per sequence of a plain round: planning, sampling, bookkeeping

    def plain_round(self, batch: int) -> float:
        return self.target.pass_seconds(batch) + self.host * batch


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a drafter did on every sequence, and what that cost beyond the target's passes."""

    rounds: tuple[Drafts, ...]  # per sequence: of all texts, or of the first few
    level: float = 0.0  # seconds per drafted level
    host: float = 0.0  # seconds per sequence and round beyond a plain round's
    passes: float = 1.0  # what its own passes took, over t(n): they also hand hidden rows to a head

    def cut(self, depth: int) -> Drafting:
        """The same with drafts cut at a depth, trees with their share of nodes: no token depends on later ones."""
        rounds = tuple(
            tuple((_share(n, deep, depth), min(deep, depth), min(kept, depth)) for n, deep, kept in text)
            for text in self.rounds
        )
        return replace(self, rounds=rounds)

    def without(self, text: int) -> Drafting:
        """The same rounds but for those of one text, at the same costs."""
        return replace(self, rounds=(*self.rounds[:text], *self.rounds[text + 1 :]))

    def tokens_per_round(self) -> float:
        kept = [accepted for text in self.rounds for _, _, accepted in text]
        return 1.0 + sum(kept) / max(1, len(kept))

    def accepted(self) -> list[Accepted]:
        return acceptance_by_depth(self.rounds)


def _share(nodes: int, deep: int, depth: int) -> int:
    return nodes if deep <= depth else round(nodes * depth / deep)


def worst_prompt(drafting: Drafting, texts: Sequence[Text], costs: Costs, batch: int) -> float:
    """The speed-up on the prompt that gains least, or loses most."""
    return min(ratio_of([pair]) for pair in _pairs(drafting, texts, costs, batch))


def estimate(drafting: Drafting, texts: Sequence[Text], costs: Costs, batch: int) -> float:
    """Speed-up over plain decoding of whole calls, prompts included, with so many sequences at once."""
    return ratio_of(_pairs(drafting, texts, costs, batch))


def _pairs(drafting: Drafting, texts: Sequence[Text], costs: Costs, batch: int) -> list[Pair]:
    round_seconds = _round_seconds(drafting, costs, batch)
    pairs = []
    assert len(drafting.rounds) <= len(texts), "texts that were not written"
    for text, rounds in zip(texts, drafting.rounds, strict=False):  # it may have written the first few only
        tokens = len(text.tokens)
        plain = text.prompt_seconds + tokens * costs.plain_round(batch) / batch
        drafted = text.prompt_seconds + _text_seconds(rounds, tokens, drafting, costs, batch, round_seconds)
        pairs.append(Pair(tokens, drafted, tokens, plain))
    return pairs


def _text_seconds(rounds: Drafts, tokens: int, drafting: Drafting, costs: Costs, batch: int, shared: float) -> float:
    """A sequence's share of the time of its rounds."""
    needed = tokens / (1.0 + sum(kept for _, _, kept in rounds) / max(1, len(rounds)))
    if batch > 1:  # its rounds are shared with random others, so all take the mean time
        return needed * shared / batch
    own = sum(
        drafting.passes * costs.target.pass_seconds(1 + nodes) + depth * drafting.level + costs.host + drafting.host
        for nodes, depth, _ in rounds
    )
    return own * needed / max(1, len(rounds))


def _round_seconds(drafting: Drafting, costs: Costs, batch: int) -> float:
    """The mean time of a round of several sequences, each at some round of its own."""
    flat = [one for text in drafting.rounds for one in text]
    if batch == 1 or not flat:
        return costs.plain_round(batch)
    rng, spent = random.Random(0), 0.0
    level = drafting.level * costs.target.pass_seconds(batch) / costs.target.pass_seconds(1)
    for _ in range(DRAWS):
        drawn = rng.choices(flat, k=batch)
        nodes, depth = sum(one[0] for one in drawn), max(one[1] for one in drawn)
        spent += drafting.passes * costs.target.pass_seconds(batch + nodes) + depth * level
    return spent / DRAWS + batch * (costs.host + drafting.host)


def at_acceptance(acceptance: float, level: float, costs: Costs, batch: int, most: int) -> tuple[float, int]:
    """The best speed-up of a chain whose every node is accepted with this probability, and its length.

    `level` is what drafting one level costs, as a share of a plain pass: for drafters that do not exist yet.
    """
    plain = costs.plain_round(batch)
    best, length, tokens, survival = 1.0, 0, 1.0, 1.0
    for depth in range(1, most + 1):
        survival *= acceptance
        tokens += survival
        drafting = depth * level * costs.target.pass_seconds(batch)
        whole = costs.target.pass_seconds(batch * (1 + depth)) + drafting + costs.host * batch
        if tokens * plain / whole > best:
            best, length = tokens * plain / whole, depth
    return best, length


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
