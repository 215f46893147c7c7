"""NgramDrafter (prompt lookup): drafts what followed the last few tokens earlier in the same sequence.

The longest recent match wins; where nothing matches, nothing is drafted. The hit rate of matches is learnt at no
cost: whether or not a guess was proposed, the committed token shows whether it would have been accepted. There is one
rate per match length; the i-th token of a guess uses the rate i lengths up, because each right token makes the match
one longer.

Of an encoder-decoder the source comes first: it is looked up as if it had been written before the output, behind a
start token of its own. So drafting begins with the source's first tokens, and wherever the output agrees with the
source it goes on there: aggressive decoding (Ge et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forerun.drafters.base import AT_HAND, NEGLIGIBLE, LookupDrafter, Parts, committed_tokens
from forerun.drafters.tree_builder import TreeBuilder, best_count
from forerun.offers import FREE, Offer
from forerun.types import Budget, Scores, Seq, TreeBatch, Verdict

KEYS = (
    4,
    2,
    1,
)  # n-gram lengths that are indexed; longer matches are found by comparing backwards from these
CANDIDATES = 32  # earlier places looked at per key: the most recent ones
_ROOT = (-1,)  # the parents of a tree where nothing is drafted
_PRIOR = (0.2, 0.3, 0.45, 0.55, 0.62, 0.68, 0.72, 0.76, 0.8, 0.82, 0.84, 0.86, 0.87, 0.88, 0.89, 0.9)


@dataclass(slots=True)
class HitRates:
    """How often the token after a match of length m was right; recent counts weigh more."""

    hits: list[float]
    tries: list[float]

    @classmethod
    def prior(cls, longest: int) -> HitRates:
        rates = [_PRIOR[min(m, len(_PRIOR) - 1)] for m in range(longest)]
        return cls([8.0 * rate for rate in rates], [8.0] * longest)

    @classmethod
    def empty(cls, longest: int) -> HitRates:
        return cls([0.0] * longest, [0.0] * longest)

    def count(self, match: int, hit: bool, memory: float) -> None:
        i = min(match, len(self.tries)) - 1
        self.hits[i] = self.hits[i] * memory + hit
        self.tries[i] = self.tries[i] * memory + 1.0

    def rate(self, match: int, prior: HitRates) -> float:
        """The estimate for this sequence, with all sequences as a prior worth four tries."""
        i = min(match, len(self.tries)) - 1
        return (self.hits[i] + 4.0 * prior.hits[i] / prior.tries[i]) / (self.tries[i] + 4.0)

    def survivals(self, match: int, length: int, prior: HitRates, least: float = 0.0) -> list[float]:
        """How likely the first 1, 2, ... tokens after a match are all right, while that is `least` or more."""
        survival, rate, last = 1.0, 0.0, len(self.tries)
        found: list[float] = []
        for i in range(match, match + length):
            if i <= last or not found:  # beyond the longest match the rate stays the same
                rate = self.rate(i, prior)
            survival *= rate
            if survival < least:
                break
            found.append(survival)
        return found


@dataclass(slots=True)
class _Sequence:
    """What is kept per sequence."""

    rates: HitRates
    source: int = 0  # tokens in front of the sequence's own: a start token, and what the encoder reads
    tokens: list[int] = field(default_factory=list)  # these and its own, in a list that is quick to read
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> ends, oldest first
    indexed: int = 0  # tokens in the index
    guess: list[int] = field(default_factory=list)  # best continuation at the last proposal
    match: int = 0  # and the length of its match
    looked: int = -1  # length of the sequence when matches were last looked up
    found: list[tuple[int, int]] = field(default_factory=list)


class NgramDrafter(LookupDrafter):
    """Longest recent match of the sequence's end within the sequence itself, and within its source."""

    def __init__(self, longest: int = 16, shortest: int = 1) -> None:
        self.longest, self.shortest = longest, shortest
        self._sequences: dict[int, _Sequence] = {}
        self._all = HitRates.prior(longest)

    @classmethod
    def build(cls, parts: Parts) -> NgramDrafter:
        return cls(parts.speculative.prompt_lookup_max, parts.speculative.prompt_lookup_min)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.trees([self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Score the last guesses against the committed tokens, proposed or not."""
        for seq, committed in zip(seqs, committed_tokens(trees, verdict), strict=True):
            state = self._sequences.get(seq.id)
            if state is None or not state.guess:
                continue
            for i, (guess, token) in enumerate(zip(state.guess, committed, strict=False)):
                state.rates.count(state.match + i, guess == token, memory=0.97)
                self._all.count(state.match + i, guess == token, memory=0.998)
                if guess != token:
                    break

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)

    def rewind(self, seq: Seq, length: int) -> None:
        """Take what comes after the first `length` tokens out of the index."""
        state = self._sequences.get(seq.id)
        if state is None:
            return
        length += state.source
        for end in range(state.indexed, max(0, length - 1), -1):
            for n in KEYS:
                if end >= n:
                    state.places[tuple(state.tokens[end - n : end])].pop()
        state.indexed = min(state.indexed, max(0, length - 1))
        state.tokens, state.guess, state.looked = state.tokens[:length], [], -1

    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        """What follows the longest match: tokens, and how likely each is accepted if those before it are."""
        state = self._state(seq)
        for match, end in self._matches(state, state.tokens, 1):
            for i, token in enumerate(_copy(state.tokens, end, length, seq.stop_ids)):
                yield token, state.rates.rate(match + i, self._all)

    def offer(self, seq: Seq) -> Offer:
        """As LookupDrafter's, from the counts: every round asks for it."""
        state = self._state(seq)
        for match, end in self._matches(state, state.tokens, 1):
            length = len(_copy(state.tokens, end, AT_HAND, seq.stop_ids))
            return Offer(free=tuple(state.rates.survivals(match, length, self._all, NEGLIGIBLE)))
        return FREE

    def _state(self, seq: Seq) -> _Sequence:
        """What is kept for a sequence, updated to its last token."""
        state = self._sequences.get(seq.id)
        if state is None:
            before = [seq.tokens[0], *seq.source] if seq.source else []
            state = _Sequence(HitRates.empty(self.longest), len(before), before)
            self._sequences[seq.id] = state
        state.tokens += seq.tokens[len(state.tokens) - state.source :]
        self._index(state, state.tokens)
        return state

    def _tree(self, seq: Seq, budget: Budget) -> tuple[list[int], Sequence[int]]:
        state = self._state(seq)
        matches = self._matches(state, state.tokens, max(1, budget.width))
        state.guess, state.match = [], 0
        if not matches:
            return state.tokens[-1:], _ROOT
        follows = [_copy(state.tokens, end, max(1, budget.depth), seq.stop_ids) for _, end in matches]
        state.guess, state.match = follows[0], matches[0][0]
        if len(matches) > 1:
            return self._branches(state, budget, matches, follows)
        depth = min(budget.nodes, budget.depth)
        if depth and budget.price is not None:
            survivals = state.rates.survivals(state.match, min(depth, len(state.guess)), self._all)
            depth = best_count(survivals, budget.price)
        tokens = [state.tokens[-1], *state.guess[:depth]]
        return tokens, range(-1, len(tokens) - 1)

    def _branches(
        self, state: _Sequence, budget: Budget, matches: list[tuple[int, int]], follows: list[list[int]]
    ) -> tuple[list[int], Sequence[int]]:
        """A tree of several continuations."""
        builder = TreeBuilder(state.tokens[-1])
        left = 1.0  # probability at the root that the better branches leave
        for (match, _), follow in zip(matches, follows, strict=True):
            node = 0
            for i, token in enumerate(follow[: budget.depth]):
                rate = state.rates.rate(match + i, self._all) * (left if i == 0 else 1.0)
                node = builder.add(node, token, rate)
            left *= 1.0 - state.rates.rate(match, self._all)
        return builder.cut(budget.nodes, budget.price)

    def _index(self, state: _Sequence, tokens: list[int]) -> None:
        """Note where every n-gram ends, but for those that end at the last token: they would match themselves."""
        for end in range(max(1, state.indexed + 1), len(tokens)):
            for n in KEYS:
                if end >= n:
                    state.places.setdefault(tuple(tokens[end - n : end]), []).append(end)
        state.indexed = max(state.indexed, len(tokens) - 1)

    def _matches(self, state: _Sequence, tokens: list[int], width: int) -> list[tuple[int, int]]:
        """(length, end) of the longest matches, recent ones first among equals, with different next tokens."""
        if state.looked != len(tokens):
            state.looked, state.found = len(tokens), self._look_up(state, tokens)
        return state.found[:width]

    def _look_up(self, state: _Sequence, tokens: list[int]) -> list[tuple[int, int]]:
        for n in KEYS:
            places = state.places.get(tuple(tokens[-n:]), ()) if n <= len(tokens) else ()
            if not places:
                continue
            found = [(self._length(tokens, end, n), end) for end in places[-CANDIDATES:]]
            found.sort(reverse=True)
            nexts: dict[int, tuple[int, int]] = {}
            for match, end in found:
                if match >= self.shortest:
                    nexts.setdefault(tokens[end], (match, end))
            if nexts:
                return list(nexts.values())
        return []

    def _length(self, tokens: list[int], end: int, known: int) -> int:
        """How many tokens before `end` equal those at the end of the sequence."""
        length, most = known, min(self.longest, end)
        while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


def _copy(tokens: list[int], start: int, length: int, stop_ids: frozenset[int]) -> list[int]:
    """What follows `start`, up to a token that would end the sequence; past the sequence's end it repeats itself."""
    found = tokens[start : start + length]
    while len(found) < length:
        found += found[: length - len(found)]
    if not stop_ids.isdisjoint(found):
        found = found[: next(i for i, token in enumerate(found, start=1) if token in stop_ids)]
    return found
