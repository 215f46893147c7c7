"""SuffixDrafter: drafts what followed the longest match of the sequence's end, with probabilities from counts.

Three texts are searched: the request itself (a suffix automaton), where it is allowed the past outputs of the same
tenant, and a corpus that was indexed beforehand. Whichever promises the longest accepted chain drafts; where more
nodes are cheap, other continuations and other texts become branches. Where nothing matches, nothing is drafted on a
CPU; on a GPU, where more nodes cost next to nothing, trees are filled up with the successors that the target finds
likeliest after single tokens (successors.py), and something is drafted in every round that allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import itemgetter, mul
from pathlib import Path
from typing import NamedTuple

from forerun.drafters.base import AT_HAND, NEGLIGIBLE, LookupDrafter, Parts, committed_tokens, lone_roots
from forerun.drafters.best_first import Candidates, Grown, Ways, grow
from forerun.drafters.suffix.automaton import SuffixAutomaton
from forerun.drafters.suffix.corpus import Corpus
from forerun.drafters.suffix.fill import Fill, least_of
from forerun.drafters.suffix.history import History, Reader
from forerun.drafters.suffix.rates import ALIKE, ONCE, OWN_MEMORY, SECOND, SHARED_MEMORY, HitRates, kind_of
from forerun.drafters.suffix.sources import AutomatonPlace, Place
from forerun.drafters.suffix.successors import Successors
from forerun.drafters.tenants import tenant_of
from forerun.drafters.tree_builder import best_count
from forerun.offers import Offer
from forerun.types import Budget, Scores, Seq, TreeBatch, Verdict

REQUEST, PAST, CORPUS = range(3)  # the texts that are searched
SHORTER = 3  # places of one text that a tree branches from: of the longest match and of shorter ones
RANKS = 8  # continuations of one match that become branches
ELSEWHERE = 0.5  # of the rate of a match, where longer ones, or other texts, have said something else
ALWAYS = 8  # tokens of a chain that are looked up however unlikely: a fixed budget drafts them all

Size = tuple[int, int, int]  # of a budget: nodes, depth, width
Match = tuple[float, int, int, Place]  # probability, token, the text, where the node above matches


class Step(NamedTuple):
    """A drafted token with what is known of it."""

    token: int
    rate: float  # probability that it is accepted if those before it are
    kind: int
    match: int
    second: int | None  # the next best continuation


@dataclass(slots=True)
class _Sequence:
    """What is kept per sequence."""

    rates: list[HitRates]
    reader: Reader | None
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    looked: int = -1  # length of the sequence when continuations were last looked up
    source: int = REQUEST  # where the best chain comes from
    chain: list[Step] = field(default_factory=list)
    grown: tuple[tuple[Size, float], Grown] | None = None  # the tree of the coming round, for which budget
    matched: list[int] = field(default_factory=list)  # continuations of matches below its root
    offered: int = -1  # length of the sequence when a tree was last offered
    nexts: set[int] = field(default_factory=set)  # the tokens below its root
    missed: bool = False  # the token behind that was none of these


class SuffixDrafter(LookupDrafter):
    """The longest match of the sequence's end, in several texts."""

    def __init__(
        self,
        longest: int = 16,
        shortest: int = 1,
        history: History | None = None,
        corpus: Corpus | None = None,
        successors: Successors | None = None,
    ) -> None:
        self.longest, self.shortest = longest, shortest
        self.history, self.corpus = history, corpus
        self._sequences: dict[int, _Sequence] = {}
        self._met: set[int] = set()  # sequences that were observed: their outputs go into the history
        self._looked_up: set[int] = set()  # sequences with a chain for the coming round
        self._all = [HitRates(longest, with_prior=True) for _ in range(3)]
        self._fill = None if successors is None else Fill(successors)

    @classmethod
    def build(cls, parts: Parts) -> SuffixDrafter:
        given = parts.speculative
        history = corpus = None
        if given.shared:
            history = History(parts.target.vocab_size, file=Path(given.history) if given.history else None)
        if given.corpus is not None:
            corpus = Corpus.open(Path(given.corpus), parts.target.vocab_size)
        successors = Successors.of(parts.target, parts.opening) if parts.opening else None
        return cls(given.prompt_lookup_max, given.prompt_lookup_min, history, corpus, successors)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """Where nothing may be drafted, nothing is looked up."""
        if self._fill is not None:
            self._fill.note_budgets(budgets)
        if not any([budget.nodes for budget in budgets]):  # noqa: C419 - twice as fast
            return lone_roots(seqs)
        return TreeBatch.trees([self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Score the chains that were looked up against the committed tokens, proposed or not."""
        self._met.update([seq.id for seq in seqs])
        if not self._looked_up:
            return
        for seq, committed in zip(seqs, committed_tokens(trees, verdict), strict=True):
            state = self._sequences.get(seq.id)
            if state is None or state.looked != len(seq.tokens):
                continue
            if self._fill is not None and state.grown is not None:
                self._fill.count(seq.tokens[-1], state.matched, committed[0])
            own, shared = state.rates[state.source], self._all[state.source]
            for step, token in zip(state.chain, committed, strict=False):
                hit = step.token == token
                own.count(step.kind, step.match, hit, OWN_MEMORY)
                shared.count(step.kind, step.match, hit, SHARED_MEMORY)
                if not hit:
                    if step.second is not None:
                        own.count(SECOND, step.match, step.second == token, OWN_MEMORY)
                        shared.count(SECOND, step.match, step.second == token, SHARED_MEMORY)
                    break
        self._looked_up.clear()

    def forget(self, seq: Seq) -> None:
        tenant, met = tenant_of(seq), seq.id in self._met or seq.id in self._sequences
        self._sequences.pop(seq.id, None)
        self._looked_up.discard(seq.id)
        self._met.discard(seq.id)
        if met and self.history is not None and tenant is not None:
            self.history.add(tenant, seq.tokens[seq.prompt_length :])

    def rewind(self, seq: Seq, length: int) -> None:
        """Read the sequence anew; what a draft model wrote is no output."""
        self._sequences.pop(seq.id, None)

    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        for step in self._state(seq).chain[:length]:
            yield step.token, step.rate

    def offer(self, seq: Seq) -> Offer:
        """A chain that matches; with the table of successors the tree that it would draft, as budgets are now."""
        state = self._state(seq)
        if self._fill is not None:
            asked = self._fill.asked
            grown = self._grown(seq, state, asked)
            count = best_count(grown.survivals, asked.price)
            free = tuple(takewhile(lambda survival: survival >= NEGLIGIBLE, grown.by_depth(count)))
            if state.offered != state.looked:
                self._fill.note_offer(sum(free), state.missed)
                state.offered, state.nexts = state.looked, grown.nexts(count)
            return Offer(free=free, otherwise=self._fill.after_miss)
        return super().offer(seq)

    def _state(self, seq: Seq) -> _Sequence:
        """What is kept for a sequence, updated to its last token."""
        state = self._sequences.get(seq.id)
        if state is None:
            rates = [HitRates(self.longest) for _ in range(3)]
            tenant, reader = tenant_of(seq), None
            if self.history is not None and tenant is not None:
                reader = self.history.reader(tenant)
            state = self._sequences[seq.id] = _Sequence(rates, reader)
        size = len(seq.tokens)
        if state.looked != size:
            fresh = seq.tokens[state.text.size :]
            state.text.extend(fresh)
            if state.reader is not None:
                state.reader.read(fresh)
            self._look_up(seq, state)
            state.missed = 0 <= state.offered < size and seq.tokens[state.offered] not in state.nexts
            state.looked, state.grown = size, None
            self._looked_up.add(seq.id)
        return state

    def _places(self, seq: Seq, state: _Sequence) -> list[tuple[int, Place]]:
        """Where the end of the sequence matches, in every text that it does."""
        places: list[tuple[int, Place]] = [(REQUEST, AutomatonPlace(state.text, *state.text.earlier()))]
        if state.reader is not None:
            places += [(PAST, place) for place in state.reader.places()]
        if self.corpus is not None:
            places.append((CORPUS, self.corpus.find(seq.tokens)))
        return [(source, place) for source, place in places if place.length >= self.shortest]

    def _look_up(self, seq: Seq, state: _Sequence) -> None:
        """The chain with the most expected accepted tokens."""
        state.chain, best = [], 0.0
        for source, place in self._places(seq, state):
            steps = self._steps(place, state.rates[source], self._all[source], seq.stop_ids)
            worth, survival = 0.0, 1.0
            for step in steps:
                survival *= step.rate
                worth += survival
            if worth > best:
                state.chain, state.source, best = steps, source, worth

    def _steps(self, place: Place, own: HitRates, shared: HitRates, stop_ids: frozenset[int]) -> list[Step]:
        """The likeliest chain from a place on, as long as it is worth drafting; the first few tokens always."""
        steps: list[Step] = []
        survival = 1.0
        most = AT_HAND if self._fill is None else ALWAYS  # trees are looked up besides
        while len(steps) < most and (survival >= NEGLIGIBLE or len(steps) < ALWAYS):
            found = place.continuations()
            if not found:
                break
            (count, token), match = found[0], place.length
            kind = kind_of(count, sum(times for times, _ in found))
            rate = own.rate(kind, match, shared)
            steps.append(Step(token, rate, kind, match, found[1][1] if len(found) > 1 else None))
            if token in stop_ids:
                break
            survival *= rate
            place = place.after(token)
        return steps

    def _tree(self, seq: Seq, budget: Budget) -> tuple[list[int], Sequence[int]]:
        if not budget.nodes:
            return seq.tokens[-1:], [-1]
        state = self._state(seq)
        if self._fill is None and (budget.width <= 1 or budget.nodes == 1):
            chain = state.chain[: min(budget.nodes, budget.depth)]
            rates = accumulate([step.rate for step in chain], mul)
            chain = chain[: best_count([*rates], budget.price)]
            return [seq.tokens[-1], *[step.token for step in chain]], range(-1, len(chain))
        grown = self._grown(seq, state, budget)
        count = best_count(grown.survivals[: budget.nodes], budget.price)
        return grown.tokens[: count + 1], grown.parents[: count + 1]

    def _grown(self, seq: Seq, state: _Sequence, budget: Budget) -> Grown:
        """The tree of the coming round before it is cut to what pays."""
        size, least = (budget.nodes, budget.depth, budget.width), least_of(budget)
        if state.grown is None or state.grown[0] != (size, least):
            first, ways = self._first(seq, state), self._ways(state, seq.stop_ids)
            state.grown = (size, least), grow(seq.tokens[-1], first, ways, self._fill, size, least)
        return state.grown[1]

    def _first(self, seq: Seq, state: _Sequence) -> Candidates:
        """What may follow the root: continuations of the longest match in every text, and of shorter ones there."""
        places = self._places(seq, state)
        places.sort(key=lambda pair: pair[0] != state.source)  # the chain's own text first
        found, left = list[Match](), 1.0
        for source, place in places:
            for _ in range(SHORTER):
                if place.length < self.shortest:
                    break
                left = self._add_matches(state, source, place, found, left)
                place = place.shorter()
        state.matched = [match[1] for match in found]
        return found, left

    def _ways(self, state: _Sequence, stop_ids: frozenset[int]) -> Ways:
        """What matches after a node, as a function of what it is."""
        single = state.text.nexts[0] if self.shortest == 1 else {}

        def ways(node: Match | tuple[float, int]) -> Candidates | None:
            token = node[1]
            if token in stop_ids:
                return None
            if len(node) == 4:
                source, place = node[2], node[3].after(token)
            elif token in single:
                source, place = REQUEST, AutomatonPlace(state.text, single[token], 1)
            else:
                return [], 1.0
            found = list[Match]()
            return found, self._add_matches(state, source, place, found, 1.0)

        return ways

    def _add_matches(
        self, state: _Sequence, source: int, place: Place, found: list[Match], left: float
    ) -> float:
        """Add the continuations of a match to others; returns what probability all of them leave."""
        own, shared, length = state.rates[source], self._all[source], place.length
        following = place.continuations()
        if len(following) == 1 and not found:
            ((count, token),) = following
            rate = own.rate(ONCE if count == 1 else ALIKE, length, shared)
            found.append((rate, token, source, place))
            return 1.0 - rate
        known, first = {match[1] for match in found}, 1.0 if not found else ELSEWHERE
        total = sum([times for times, _ in following])
        for rank, (count, token) in enumerate(following[:RANKS]):
            if token not in known:
                kind, doubt = (SECOND, 1.0) if rank else (kind_of(count, total), first)
                rate = left * doubt * own.rate(kind, length, shared)
                left -= rate
                found.append((rate, token, source, place))
        found.sort(key=itemgetter(0), reverse=True)
        return left
