"""NgramDrafter (prompt lookup): drafts what followed the last few tokens earlier in the same sequence.

The longest recent match wins; where nothing matches, nothing is drafted. The hit rate of matches is learnt at no
cost: whether or not a guess was proposed, the committed token shows whether it would have been accepted. There is one
rate per match length; the i-th token of a guess uses the rate i lengths up, because each right token makes the match
one longer. A target that runs plain passes ahead stops where a match is worth drafting (`MatchNeeds`).

A look-up takes hardly longer in a text of 128,000 tokens than in a short one (`Text`): beyond the last few thousand
tokens it looks at the most recent places of the last four tokens, and at the match of the look-up before, which may go
on. Of an encoder-decoder the source comes first, behind a start token of its own: so
drafting begins with the source's first tokens, and goes on wherever the output agrees with the source (aggressive
decoding, Ge et al. 2022).

`Text` has the tokens of a sequence. The last few thousand are also kept as a string with a character per token: to
search it takes less time than to keep an index of it, above all where look-ups are rare. Of all that lies before, every
run of FAR tokens is sorted, now and then: a search there takes a few steps more in a text of 128,000 tokens than in one
of 10,000.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.core.request import best_count, least_step
from forerun.core.tree import committed_tokens
from forerun.core.types import FREE, Budget, Needs, Offer, Scores, Seq, TreeBatch, Verdict, lone_roots
from forerun.drafters.base import AT_HAND, NEGLIGIBLE, LookupDrafter, Parts
from forerun.drafters.heads.growth import TreeBuilder

TAIL = 4096  # tokens of the string at least; at twice as many the rest is sorted
FAR = 4  # tokens of a run that is found before them
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # runs that only look alike are told apart by whoever asks


class Text:
    """Grows at its end."""

    __slots__ = ("_ends", "_runs", "_start", "tail", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list[int]()
        self.tail, self._start = "", 0  # of the tokens from `_start` on
        self._runs, self._ends = np.empty(0, np.uint64), np.empty(0, np.int32)  # sorted; equal runs by their ends
        self.extend(tokens)

    def extend(self, fresh: Sequence[int]) -> None:
        self.tokens += fresh
        if len(self.tokens) - self._start > 2 * TAIL:
            self._sort()
        else:
            self.tail += "".join(map(chr, fresh))

    def cut(self, length: int) -> None:
        """Forget all but the first tokens."""
        if length < self._start + TAIL // 2 and self._start:
            kept = self.tokens[:length]
            self.tokens.clear()
            self.tail, self._start = "", 0
            self.extend(kept)
        else:
            del self.tokens[length:]
            self.tail = self.tail[: length - self._start]

    @property
    def is_long(self) -> bool:
        """Is there more than the string?"""
        return self._start > 0

    def last_before(self, n: int, end: int) -> int:
        """The end of the last n tokens where they came last before `end`, of the string; -1 = nowhere."""
        until = end - self._start
        at = self.tail.rfind(self.tail[-n:], 0, until) if n <= until else -1
        return -1 if at < 0 else at + n + self._start

    def far_ends(self, most: int) -> list[int]:
        """Where a run like the last one has ended among those that are sorted, the most recent first."""
        if not self._start:
            return []
        run = 0
        for token in self.tokens[-FAR:]:
            run = (run * _MIX + token) & _MASK
        wanted = np.uint64(run)
        first, behind = (int(self._runs.searchsorted(wanted, side)) for side in ("left", "right"))
        found: list[int] = self._ends[max(first, behind - most) : behind][::-1].tolist()
        return [end for end in found if end < len(self.tokens)]

    def _sort(self) -> None:
        tokens, count = np.array(self.tokens, np.uint64), len(self.tokens) - FAR + 1
        runs = tokens[:count]
        for i in range(1, FAR):
            runs = runs * np.uint64(_MIX) + tokens[i : i + count]
        order = np.argsort(runs, kind="stable")
        self._runs, self._ends = runs[order], (order + FAR).astype(np.int32)
        self._start = len(self.tokens) - TAIL
        self.tail = "".join(map(chr, self.tokens[self._start :]))


WEAK = 4  # tokens: longer matches that were not worth drafting once may be so the next time
# tokens that a native call writes at most: a match that is refused grows with each that it says right
GOES_ON = 8


class MatchNeeds:
    """Of all sequences together."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._wanted = tuple(Needs(match_length=length) for length in range(longest + 2))
        self._least, self._longest = max(1, shortest), longest  # shorter ones were not worth drafting of late
        self.needs = self._wanted[self._least]

    def refuse(self, match: int) -> None:
        """A match so long was not worth drafting (0 = there was none): passes run past others as weak, and past a long
        one, which grows token by token.
        """
        match = min(match, self._longest)
        if match <= WEAK:
            self._least = max(self._least, match + 1)
            self.needs = self._wanted[self._least]
        else:
            # 0 = all
            self.needs = self._wanted[match + GOES_ON if match + GOES_ON < len(self._wanted) else 0]

    def take(self, match: int) -> None:
        """A match so long is drafted: it is worth it after all."""
        if match > 0:
            self._least = min(self._least, match)
        self.rest()

    def rest(self) -> None:
        """Nothing was refused."""
        self.needs = self._wanted[self._least]


KEYS = (4, 2, 1)  # n-gram lengths that are searched for, one after the other; matches may be longer
CANDIDATES = 32  # earlier places that branches are taken from: the most recent ones
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
    rates: HitRates
    source: int = 0  # tokens in front of the sequence's own: a start token, and what the encoder reads
    text: Text = field(default_factory=Text)  # these and its own
    looked: int = -1  # length of the sequence when matches were last looked up
    found: list[tuple[int, int]] = field(default_factory=list)  # then: length and end of each, the best first
    is_wide: bool = False  # are there several?
    guess: list[int] = field(default_factory=list)  # what follows the best


class NgramDrafter(LookupDrafter):
    """Longest recent match of the sequence's end within the sequence itself, and within its source."""

    def __init__(self, longest: int = 16, shortest: int = 1) -> None:
        self.longest, self.shortest = longest, shortest
        self._matches_needed = MatchNeeds(longest, shortest)
        self._sequences: dict[int, _Sequence] = {}
        self._looked_up: set[int] = set()  # sequences with a guess of the coming round
        self._all = HitRates.prior(longest)

    @classmethod
    def build(cls, parts: Parts) -> NgramDrafter:
        return cls(parts.speculative.prompt_lookup_max, parts.speculative.prompt_lookup_min)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self._matches_needed.needs

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """Where nothing may be drafted, nothing is looked up."""
        for budget in budgets:
            if budget.nodes:
                break
        else:
            self._matches_needed.rest()
            if self._looked_up and len(seqs) == 1 and budgets[0].source == "free":
                self._run_past(seqs[0])
            return lone_roots(seqs)
        return TreeBatch.trees([self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def _run_past(self, seq: Seq) -> None:
        """A match was refused: passes may run past it."""
        state = self._sequences.get(seq.id)
        if state is not None and state.guess and state.looked == state.source + len(seq.tokens):
            self._matches_needed.refuse(state.found[0][0])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Score the guesses that were looked up against the committed tokens, proposed or not."""
        if not self._looked_up:
            return
        for seq, committed in zip(seqs, committed_tokens(trees, verdict), strict=True):
            state = self._sequences.get(seq.id)
            if state is None or not state.guess or state.looked != state.source + len(seq.tokens):
                continue
            match = state.found[0][0]
            for i, (guess, token) in enumerate(zip(state.guess, committed, strict=False)):
                state.rates.count(match + i, guess == token, memory=0.97)
                self._all.count(match + i, guess == token, memory=0.998)
                if guess != token:
                    break
        self._looked_up.clear()

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)
        self._looked_up.discard(seq.id)

    def rewind(self, seq: Seq, length: int) -> None:
        state = self._sequences.get(seq.id)
        if state is not None:
            length += state.source
            state.text.cut(length)
            state.looked, state.found, state.guess = -1, [], []

    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        """What follows the longest match: tokens, and how likely each is accepted if those before it are."""
        state = self._look_up(seq)
        for i, token in enumerate(state.guess[:length]):
            yield token, state.rates.rate(state.found[0][0] + i, self._all)

    def offer(self, seq: Seq) -> Offer:
        """As LookupDrafter's, from the counts: every round asks for it."""
        state = self._look_up(seq)
        if not state.guess:
            return FREE
        survivals = state.rates.survivals(state.found[0][0], len(state.guess), self._all, NEGLIGIBLE)
        return Offer(free=tuple(survivals))

    def _look_up(self, seq: Seq, wide: bool = False) -> _Sequence:
        """What is kept for a sequence, with the matches of its end as it is now; `wide`: several of them."""
        state = self._sequences.get(seq.id)
        if state is None:
            before = [seq.tokens[0], *seq.source] if seq.source else []
            state = _Sequence(HitRates.empty(self.longest), len(before), Text(before))
            self._sequences[seq.id] = state
        if state.looked != state.source + len(seq.tokens) or (wide and not state.is_wide):
            tokens = state.text.tokens
            state.text.extend(seq.tokens[len(tokens) - state.source :])
            state.found, state.is_wide = self._matches(state, wide), wide
            state.guess = _copy(tokens, state.found[0][1], AT_HAND, seq.stop_ids) if state.found else []
            state.looked = len(tokens)
            if state.guess:
                self._looked_up.add(seq.id)
        return state

    def _tree(self, seq: Seq, budget: Budget) -> tuple[list[int], Sequence[int]]:
        if not budget.nodes:
            return seq.tokens[-1:], _ROOT
        state = self._look_up(seq)
        if not state.found:
            return seq.tokens[-1:], _ROOT
        self._matches_needed.take(state.found[0][0])
        least = 0.0 if budget.price is None else max(NEGLIGIBLE / 4, least_step(budget.price))
        # a second branch is right only where the first is not: often that is too seldom to look for one
        if budget.width > 1 and 1.0 - state.rates.rate(state.found[0][0], self._all) >= least:
            state = self._look_up(seq, wide=True)
            if len(state.found) > 1:
                return self._branches(state, budget, seq.stop_ids, least)
        depth, guess = min(budget.nodes, budget.depth), state.guess
        if depth > AT_HAND:
            guess = _copy(state.text.tokens, state.found[0][1], depth, seq.stop_ids)
        if depth and budget.price is not None:
            survivals = state.rates.survivals(state.found[0][0], min(depth, len(guess)), self._all)
            depth = best_count(survivals, budget.price)
        tokens = [seq.tokens[-1], *guess[:depth]]
        return tokens, range(-1, len(tokens) - 1)

    def _branches(
        self, state: _Sequence, budget: Budget, stop_ids: frozenset[int], least: float
    ) -> tuple[list[int], Sequence[int]]:
        """A tree of several continuations; nodes of lower survivals than `least` would be cut off again."""
        builder = TreeBuilder(state.text.tokens[-1])
        left = 1.0  # probability at the root that the better branches leave
        for match, end in state.found[: budget.width]:
            if left < least:
                break
            node = 0
            for i, token in enumerate(_copy(state.text.tokens, end, budget.depth, stop_ids)):
                rate = state.rates.rate(match + i, self._all) * (left if i == 0 else 1.0)
                node = builder.add(node, token, rate)
                if builder.survivals[node] < least:
                    break
            left *= 1.0 - state.rates.rate(match, self._all)
        return builder.cut(budget.nodes, budget.price)

    def _matches(self, state: _Sequence, wide: bool) -> list[tuple[int, int]]:
        """(length, end) of the longest match, of equal ones the most recent; `wide`: and of others, as long or shorter.

        Those have other next tokens; the best come first.
        """
        text, tokens = state.text, state.text.tokens
        if wide:
            return self._several(text)
        length, end = self._near(text)
        if length < self.longest and text.is_long:
            goes_on = state.found[0][1] + len(tokens) - state.looked if state.found else 0
            for place in (*text.far_ends(CANDIDATES), goes_on if goes_on < len(tokens) else 0):
                found = self._length(tokens, place, 0)
                if found > max(length, FAR - 1):
                    length, end = found, place
                if length >= self.longest:
                    break
        return [(length, end)] if length >= max(1, self.shortest) else []

    def _near(self, text: Text) -> tuple[int, int]:
        """The longest match among the last tokens; (0, 0) = none."""
        tokens, last = text.tokens, len(text.tokens) - 1  # a match ends before the last token: else it is the end
        for n in KEYS:
            if (end := text.last_before(n, last)) < 0:
                continue
            length = self._length(tokens, end, n)
            while length < self.longest and (at := text.last_before(length + 1, end - 1)) >= 0:
                end = at
                length = self._length(tokens, end, length + 1)
            return length, end
        return 0, 0

    def _several(self, text: Text) -> list[tuple[int, int]]:
        """The same, of the last places where the last n tokens came before."""
        tokens, found = text.tokens, dict[int, int]()  # lengths by end
        for n in KEYS:
            last = len(tokens) - 1
            while len(found) < CANDIDATES and (end := text.last_before(n, last)) >= 0:
                found[end], last = self._length(tokens, end, n), end - 1
            if n == FAR and len(found) < CANDIDATES:
                found |= {end: self._length(tokens, end, 0) for end in text.far_ends(CANDIDATES)}
            if found:
                break
        nexts: dict[int, tuple[int, int]] = {}
        for match, end in sorted([(match, end) for end, match in found.items()], reverse=True):
            if match >= max(1, self.shortest):
                nexts.setdefault(tokens[end], (match, end))
        return list(nexts.values())

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
